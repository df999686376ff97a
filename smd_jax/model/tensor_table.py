"""Which tensor of a Hugging Face checkpoint is which parameter of the decoder.

A `kernel` here is [in, out] where a Linear's weight there is [out, in], so kernels are transposed and everything else
is taken as it is; rope uses transformers' half-and-half convention, so no head is permuted. Gemma's norms are stored
less one on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass

from smd_jax.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"


@dataclass(frozen=True)
class Leaf:
    """A parameter: its path in the tree (`layers_0/mlp/up_proj/kernel`) and its shape there."""

    path: str
    shape: tuple[int, ...]

    @property
    def is_transposed(self) -> bool:
        return self.path.endswith("/kernel")

    @property
    def hf_shape(self) -> tuple[int, ...]:
        return self.shape[::-1] if self.is_transposed else self.shape


def tensor_table(config: ModelConfig) -> dict[str, Leaf]:
    """Hugging Face tensor name -> parameter, for every parameter of a decoder of shape `config`."""
    hidden = config.hidden_size
    ffn = config.intermediate_size
    vocab = config.vocab_size
    q = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    # One name, two places: of Gemma it is the norm of what attention gives, of all others that of what the MLP takes.
    norms = {"post_attention_layernorm.weight": Leaf("mlp_norm/scale", (hidden,))}
    if config.post_norms:
        norms = {
            "post_attention_layernorm.weight": Leaf("attention_post_norm/scale", (hidden,)),
            "pre_feedforward_layernorm.weight": Leaf("mlp_norm/scale", (hidden,)),
            "post_feedforward_layernorm.weight": Leaf("mlp_post_norm/scale", (hidden,)),
        }
    layer = {
        "input_layernorm.weight": Leaf("attention_norm/scale", (hidden,)),
        "self_attn.q_proj.weight": Leaf("attention/q_proj/kernel", (hidden, q)),
        "self_attn.k_proj.weight": Leaf("attention/k_proj/kernel", (hidden, kv)),
        "self_attn.v_proj.weight": Leaf("attention/v_proj/kernel", (hidden, kv)),
        "self_attn.o_proj.weight": Leaf("attention/o_proj/kernel", (q, hidden)),
        **norms,
        "mlp.gate_proj.weight": Leaf("mlp/gate_proj/kernel", (hidden, ffn)),
        "mlp.up_proj.weight": Leaf("mlp/up_proj/kernel", (hidden, ffn)),
        "mlp.down_proj.weight": Leaf("mlp/down_proj/kernel", (ffn, hidden)),
    }
    if config.qkv_bias:
        layer["self_attn.q_proj.bias"] = Leaf("attention/q_proj/bias", (q,))
        layer["self_attn.k_proj.bias"] = Leaf("attention/k_proj/bias", (kv,))
        layer["self_attn.v_proj.bias"] = Leaf("attention/v_proj/bias", (kv,))
    if config.o_bias:
        layer["self_attn.o_proj.bias"] = Leaf("attention/o_proj/bias", (hidden,))
    if config.mlp_bias:
        layer["mlp.gate_proj.bias"] = Leaf("mlp/gate_proj/bias", (ffn,))
        layer["mlp.up_proj.bias"] = Leaf("mlp/up_proj/bias", (ffn,))
        layer["mlp.down_proj.bias"] = Leaf("mlp/down_proj/bias", (hidden,))
    if config.qk_norm:
        layer["self_attn.q_norm.weight"] = Leaf("attention/q_norm/scale", (config.head_dim,))
        layer["self_attn.k_norm.weight"] = Leaf("attention/k_norm/scale", (config.head_dim,))
    blocks = [(f"model.layers.{n}", f"layers_{n}") for n in range(config.num_layers)]
    table = {EMBEDDING: Leaf("embed/embedding", (vocab, hidden))}
    for there, here in blocks:
        table |= {f"{there}.{name}": Leaf(f"{here}/{leaf.path}", leaf.shape) for name, leaf in layer.items()}
    table["model.norm.weight"] = Leaf("norm/scale", (hidden,))
    if not config.tie_embeddings:
        table[OUTPUT] = Leaf("lm_head/kernel", (hidden, vocab))
    return table
