"""Maps the tensors of a Hugging Face checkpoint to the parameters of the decoder.

A `kernel` is [in, out] and a Linear's weight [out, in], so kernels are transposed. Phi stores q, k and v as one matrix,
and gate and up as another. Everything else is copied: RoPE rotates the same pairs of channels as transformers', so no
head is permuted, and both store the weights of Gemma's norms minus one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from smd_jax.config import ModelConfig

# "fused": q, k and v are one tensor, and gate and up another. "mixtral": experts have Mixtral's names. "gpt_oss": all
# experts are one tensor, with gate and up interleaved.
Layout = Literal["split", "fused", "mixtral", "gpt_oss"]
EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"


@dataclass(frozen=True)
class Leaf:
    """Path (`layers_0/mlp/up_proj/kernel`) and shape of a parameter."""

    path: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint.

    Attributes:
      leaves: the parameters in it, concatenated along their last axis; usually one.
      transposed: whether the file stores it transposed.
      expert: index of this tensor on the parameters' first axis; None: it holds the parameters as a whole.
      interleaved: whether the parameters are interleaved along their last axis instead of concatenated.
    """

    leaves: tuple[Leaf, ...]
    transposed: bool = False
    expert: int | None = None
    interleaved: bool = False

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Shape in the file."""
        shape = self.leaves[0].shape if self.expert is None else self.leaves[0].shape[1:]
        shape = (*shape[:-1], sum(leaf.shape[-1] for leaf in self.leaves))
        return shape[::-1] if self.transposed else shape

    def begin(self, leaf: Leaf) -> int:
        """Offset of a parameter on the last axis."""
        return sum(other.shape[-1] for other in self.leaves[: self.leaves.index(leaf)])


def tensor_table(config: ModelConfig, layout: Layout = "split") -> dict[str, StoredTensor]:
    """Hugging Face's tensor name -> tensor, for every parameter of the decoder of `config`."""
    hidden = config.hidden_size
    table = {EMBEDDING: _plain("embed/embedding", config.vocab_size, hidden)}
    fused = layout == "fused"
    before = {**_attention(config, fused), **_norms(config)}
    dense, mixture = _mlp(config, fused), _mixture(config, layout)
    for n in range(config.num_layers):
        for name, tensor in {**before, **(mixture if config.is_mixture(n) else dense)}.items():
            leaves = tuple(Leaf(f"layers_{n}/{leaf.path}", leaf.shape) for leaf in tensor.leaves)
            table[f"model.layers.{n}.{name}"] = replace(tensor, leaves=leaves)
    table["model.norm.weight"] = _plain("norm/scale", hidden)
    if not config.tie_embeddings:
        table[OUTPUT] = _kernel({"lm_head/kernel": config.vocab_size}, hidden)
    return table


def _plain(path: str, *shape: int) -> StoredTensor:
    return StoredTensor((Leaf(path, shape),))


def _kernel(widths: Mapping[str, int], width_in: int) -> StoredTensor:
    """A Linear's weight that holds kernels: path -> output width."""
    return StoredTensor(tuple(Leaf(path, (width_in, width)) for path, width in widths.items()), transposed=True)


def _attention(config: ModelConfig, fused: bool) -> dict[str, StoredTensor]:
    hidden = config.hidden_size
    q = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    widths = {"q_proj": q, "k_proj": kv, "v_proj": kv}
    kernels = {f"attention/{name}/kernel": width for name, width in widths.items()}
    if fused:
        tensors = {"self_attn.qkv_proj.weight": _kernel(kernels, hidden)}
    else:
        tensors = {
            f"self_attn.{name}.weight": _kernel({f"attention/{name}/kernel": width}, hidden)
            for name, width in widths.items()
        }
    tensors["self_attn.o_proj.weight"] = _kernel({"attention/o_proj/kernel": hidden}, q)
    if config.qkv_bias:
        tensors |= {f"self_attn.{name}.bias": _plain(f"attention/{name}/bias", width) for name, width in widths.items()}
    if config.o_bias:
        tensors["self_attn.o_proj.bias"] = _plain("attention/o_proj/bias", hidden)
    if config.attention_sinks:
        tensors["self_attn.sinks"] = _plain("attention/sinks", config.num_heads)
    if config.qk_norm:
        over_all = config.qk_norm_over == "all"
        for name, width in (("q_norm", q), ("k_norm", kv)):
            scale = _plain(f"attention/{name}/scale", width if over_all else config.head_dim)
            tensors[f"self_attn.{name}.weight"] = scale
    return tensors


def _norms(config: ModelConfig) -> dict[str, StoredTensor]:
    # With post-norms, post_attention_layernorm is the norm after attention; otherwise it is the norm before the MLP.
    if config.post_norms:
        paths = {"post_attention_layernorm": "attention_post_norm", "post_feedforward_layernorm": "mlp_post_norm"}
        if config.pre_norms:
            paths |= {"input_layernorm": "attention_norm", "pre_feedforward_layernorm": "mlp_norm"}
    else:
        paths = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
    return {f"{name}.weight": _plain(f"{path}/scale", config.hidden_size) for name, path in paths.items()}


def _mlp(config: ModelConfig, fused: bool) -> dict[str, StoredTensor]:
    hidden, ffn = config.hidden_size, config.intermediate_size
    wide = ["gate_proj", "up_proj"] if config.gated_mlp else ["up_proj"]
    if fused:
        tensors = {"mlp.gate_up_proj.weight": _kernel({f"mlp/{name}/kernel": ffn for name in wide}, hidden)}
    else:
        tensors = {f"mlp.{name}.weight": _kernel({f"mlp/{name}/kernel": ffn}, hidden) for name in wide}
    tensors["mlp.down_proj.weight"] = _kernel({"mlp/down_proj/kernel": hidden}, ffn)
    if config.mlp_bias:
        widths = {**dict.fromkeys(wide, ffn), "down_proj": hidden}
        tensors |= {f"mlp.{name}.bias": _plain(f"mlp/{name}/bias", width) for name, width in widths.items()}
    return tensors


# Mixtral's names of an expert's matrices.
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def _mixture(config: ModelConfig, layout: Layout) -> dict[str, StoredTensor]:
    """Tensors of a layer's experts; empty without experts."""
    experts = config.experts
    if experts is None:
        return {}
    hidden, width = config.hidden_size, experts.intermediate_size
    shapes = {"gate_proj": (hidden, width), "up_proj": (hidden, width), "down_proj": (width, hidden)}
    leaves = {name: Leaf(f"mlp/experts/{name}", (experts.count, *shape)) for name, shape in shapes.items()}
    router = _kernel({"mlp/router/kernel": experts.count}, hidden)
    if layout == "gpt_oss":
        biases = {
            name: Leaf(f"mlp/experts/{name.replace('proj', 'bias')}", (experts.count, shape[1]))
            for name, shape in shapes.items()
        }
        return {
            "mlp.router.weight": router,
            "mlp.router.bias": _plain("mlp/router/bias", experts.count),
            "mlp.experts.gate_up_proj": StoredTensor((leaves["gate_proj"], leaves["up_proj"]), interleaved=True),
            "mlp.experts.gate_up_proj_bias": StoredTensor((biases["gate_proj"], biases["up_proj"]), interleaved=True),
            "mlp.experts.down_proj": StoredTensor((leaves["down_proj"],)),
            "mlp.experts.down_proj_bias": StoredTensor((biases["down_proj"],)),
        }
    block = "block_sparse_moe" if layout == "mixtral" else "mlp"
    tensors = {f"{block}.gate.weight": router}
    for expert in range(experts.count):
        for name, leaf in leaves.items():
            there = _MIXTRAL[name] if layout == "mixtral" else name
            tensors[f"{block}.experts.{expert}.{there}.weight"] = StoredTensor((leaf,), True, expert)
    return tensors
