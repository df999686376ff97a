"""Does the decoder compute what transformers computes, and does transformers open what we save?

Question   For every family of models: how far are our logits from those of transformers on torch, for the same weights
           and tokens? And is a model that we save, that transformers opens and saves again, the same to the last bit?
Command    python experiments/parity.py --torch-python PATH --out experiments/results/parity.json
Cost       about two minutes on two CPU cores
Result     experiments/results/parity.json

Models     random weights, 6 layers of width 128, of each family with what its config.json may ask for
Inputs     rows of 160, 97 and 41 tokens, padded on the left; sliding windows hold 32
Fields     max_abs_dlogit: largest difference of a logit, over all tokens that are no padding. logit_scale: standard
           deviation of the logits there. round_trip: whether parameters and configuration came back unchanged, having
           been written by us, and read and written by transformers.
           torch_float32_dlogit: how far transformers' logits in this dtype are from its own in float32, of the same
           weights: what of max_abs_dlogit may be rounding.
           against: whose logits.

The interpreter with torch needs no smd_jax:

    python3.11 -m venv torch && torch/bin/pip install torch==2.13.0 transformers==5.23.0 numpy
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import smd_jax as smd
from provenance import provenance
from smd_jax.commands.compilation_cache import keep_programs
from smd_jax.config import FloatName, LinearRope, Llama3Rope, ModelConfig, YarnRope
from smd_jax.message.masks import dense_mask, positions
from smd_jax.model.families import FAMILIES
from smd_jax.monitor.progress import summary_table
from smd_jax.testing import random_params

TORCH_SIDE = Path(__file__).parent / "bench" / "engines" / "hf_logits.py"
LENGTHS = (160, 97, 41)
WINDOW = 32
BASE = ModelConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_layers=6,
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    max_positions=1024,
)
BIASES = {"qkv_bias": True, "o_bias": True}
FIVE_OF_SIX = (*(WINDOW,) * 5, None)
MODELS: dict[str, ModelConfig] = {
    "Llama 3.1": replace(BASE, rope_scaling=Llama3Rope(8.0, 1.0, 4.0, 64)),
    "Llama, biases in attention and MLP": replace(BASE, **BIASES, mlp_bias=True),
    "Mistral, sliding windows": replace(BASE, sliding_windows=(WINDOW,) * 6),
    "Qwen2.5, YaRN": replace(BASE, qkv_bias=True, tie_embeddings=True, rope_scaling=YarnRope(4.0, 256)),
    "Qwen2, sliding windows in the last two layers": replace(
        BASE, qkv_bias=True, sliding_windows=(None, None, None, None, WINDOW, WINDOW)
    ),
    "Qwen3": replace(BASE, qk_norm=True, head_dim=32, rope_theta=1e6),
    "Qwen3, biases and sliding windows in every other layer": replace(
        BASE, **BIASES, qk_norm=True, sliding_windows=(WINDOW, None) * 3
    ),
    "Gemma 3": replace(
        BASE,
        **FAMILIES["gemma3_text"].always,
        tie_embeddings=True,
        head_dim=32,
        query_pre_attn_scalar=24.0,
        rope_theta=1e6,
        rope_scaling=LinearRope(8.0),
        local_rope_theta=1e4,
        sliding_windows=FIVE_OF_SIX,
    ),
}


@dataclass(frozen=True)
class Args:
    """Compares logits with those of transformers on torch, family by family."""

    torch_python: str  # interpreter with torch and transformers
    dtype: tuple[FloatName, ...] = ("float32", "bfloat16")  # in which weights are stored and both compute
    seed: int = 0  # of parameters and tokens
    out: Path | None = None  # where the rows are written
    json: bool = False  # print one JSON object a line in place of a table


@dataclass(frozen=True)
class Row:
    """One family in one dtype; see the module's docstring."""

    family: str
    dtype: FloatName
    max_abs_dlogit: float
    logit_scale: float
    torch_float32_dlogit: float
    round_trip: bool
    against: str


def random_model(config: ModelConfig, seed: int) -> Any:
    """Fresh parameters, moved, so that biases are not zero, scales not one, and logits of a scale of about 1."""
    rng = np.random.default_rng(seed)
    moved = jax.tree.map(lambda x: x + 0.05 * rng.normal(size=x.shape), random_params(config, seed))
    return jax.tree.map(lambda x: x.astype(np.float32), moved)


def inputs(seed: int) -> dict[str, np.ndarray]:
    """Tokens, what of them is no padding, and their positions."""
    columns = max(LENGTHS)
    valid = np.arange(columns)[None] >= columns - np.array(LENGTHS)[:, None]
    tokens = np.random.default_rng(seed).integers(0, BASE.vocab_size, valid.shape, dtype=np.int32)
    places = np.asarray(positions(jnp.asarray(valid)))
    return {"tokens": np.where(valid, tokens, 0).astype(np.int32), "valid": valid, "positions": places}


@jax.jit
def _same(one: Any, other: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.all(a == b), one, other)


def our_logits(config: ModelConfig, params: Any, given: dict[str, np.ndarray]) -> np.ndarray:
    apply = jax.jit(smd.Decoder(config).apply)
    mask = dense_mask(jnp.asarray(given["valid"]))
    return np.asarray(apply({"params": params}, given["tokens"], given["positions"], mask))


def compare(family: str, dtype: FloatName, folder: Path, against: str, given: dict[str, np.ndarray]) -> Row:
    """Of what the torch side left in the folder."""
    config, params = smd.load_checkpoint(folder / "checkpoint", dtype=dtype)
    theirs = np.load(folder / "logits.npz")
    there = given["valid"]
    again_config, again = smd.load_checkpoint(folder / "again", dtype=dtype)
    same = config == again_config and all(bool(x) for x in jax.tree.leaves(_same(params, again)))
    return Row(
        family=family,
        dtype=dtype,
        max_abs_dlogit=float(np.abs(our_logits(config, params, given) - theirs["logits"])[there].max()),
        logit_scale=float(theirs["logits"][there].std()),
        torch_float32_dlogit=float(np.abs(theirs["logits"] - theirs["float32_logits"])[there].max()),
        round_trip=same,
        against=against,
    )


def main(args: Args) -> None:
    keep_programs()
    given = inputs(args.seed)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        cases: list[tuple[str, FloatName]] = [(family, dtype) for family in MODELS for dtype in args.dtype]
        folders = [Path(temporary) / str(index) for index in range(len(cases))]
        for folder, (family, dtype) in zip(folders, cases, strict=True):
            params = random_model(MODELS[family], args.seed)
            smd.save_checkpoint(folder / "checkpoint", params, MODELS[family], dtype=dtype)
            np.savez(folder / "inputs.npz", allow_pickle=False, **given)
        command = [args.torch_python, str(TORCH_SIDE), *map(str, folders)]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        against = said.strip().splitlines()[-1]
        for folder, (family, dtype) in zip(folders, cases, strict=True):
            rows.append(compare(family, dtype, folder, against, given))
            if args.json:
                print(json.dumps(asdict(rows[-1])), flush=True)
    if not args.json:
        columns = ("family", "dtype", "max |Δ logit|", "of std", "torch's own rounding", "round trip")
        cells = [
            (r.family, r.dtype, r.max_abs_dlogit, r.logit_scale, r.torch_float32_dlogit, r.round_trip) for r in rows
        ]
        summary_table(f"Against {against}", columns, cells)
    if args.out is not None:
        packages = ("jax", "jaxlib", "flax", "safetensors")
        content = provenance(packages) | {"rows": [asdict(row) for row in rows]}
        args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args))
