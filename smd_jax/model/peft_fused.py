"""Adapters of matrices that a checkpoint stores as one (Phi's `qkv_proj` and `gate_up_proj`), in PEFT's format.

Here q, k and v have an adapter each, of rank r. PEFT has one for the stored matrix. Written, it has rank 3 r:

    A = [A_q A_k A_v]        B = diag(B_q, B_k, B_v)        alpha such that the scale stays the same

An adapter that PEFT trained has rank r, and one A: then q, k and v start with the same A.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from smd_jax.model.lora import LoraConfig, Target
from smd_jax.model.short_text import shown

FUSED: dict[str, tuple[Target, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
PATTERNS = ("rank_pattern", "alpha_pattern")


def fused_targets(lora: LoraConfig, names: Sequence[str] = tuple(FUSED)) -> dict[str, tuple[Target, ...]]:
    """The fused matrices that have adapters.

    Args:
      names: the fused matrices of the checkpoint.

    Raises:
      ValueError: if only some parts of one have adapters, which PEFT cannot say.
    """
    found = {}
    for name in names:
        parts = FUSED[name]
        chosen = [part for part in parts if part in lora.targets]
        if chosen and len(chosen) < len(parts):
            raise ValueError(
                f"expected adapters on all of {', '.join(parts)} or on none, because the checkpoint stores them as "
                f"{name}; got {', '.join(chosen)}"
            )
        if chosen:
            found[name] = parts
    return found


def patterns(lora: LoraConfig, names: Sequence[str] = tuple(FUSED)) -> dict[str, dict[str, Any]]:
    """PEFT's `rank_pattern` and `alpha_pattern` of the fused matrices; `names` as above."""
    parts = {name: len(of) for name, of in fused_targets(lora, names).items()}
    scales = {name: count**0.5 if lora.rank_stabilised else count for name, count in parts.items()}
    return {
        "rank_pattern": {name: lora.rank * count for name, count in parts.items()},
        "alpha_pattern": {name: lora.alpha * scale for name, scale in scales.items()},
    }


def check_patterns(content: Mapping[str, Any], lora: LoraConfig, names: Sequence[str] = tuple(FUSED)) -> None:
    """Raises ValueError if adapter_config.json has ranks or alphas of single matrices, and others than `patterns`."""
    if all(not content.get(key) for key in PATTERNS):
        return
    for key, expected in patterns(lora, names).items():
        got = content.get(key)
        if isinstance(got, dict):  # PEFT turns names into expressions when it opens a file of transformers 4
            got = {name.removeprefix(r".*\."): value for name, value in got.items()}
        known = isinstance(got, dict) and got.keys() == expected.keys()
        if not known or not all(_close(value, expected[name]) for name, value in (got or {}).items()):
            raise ValueError(f"expected {key} to be {expected} or empty; got {shown(got)}")


def _close(got: object, expected: int | float) -> bool:
    return isinstance(got, int | float) and abs(got - expected) <= 1e-6 * expected


def join(pairs: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """The adapter of the fused matrix, from those of its parts: `lora_A` `[in, rank]`, `lora_B` `[rank, out]`."""
    below = [np.asarray(pair["lora_B"]) for pair in pairs]
    joined = np.zeros(tuple(sum(sizes) for sizes in zip(*(b.shape for b in below), strict=True)), below[0].dtype)
    row = column = 0
    for b in below:
        joined[row : row + b.shape[0], column : column + b.shape[1]] = b
        row, column = row + b.shape[0], column + b.shape[1]
    return {"lora_A": np.concatenate([np.asarray(pair["lora_A"]) for pair in pairs], axis=1), "lora_B": joined}


def split(a: np.ndarray, b: np.ndarray, widths: Sequence[int], rank: int, name: str) -> list[dict[str, np.ndarray]]:
    """The adapters of the parts, of these output widths and this rank, from that of the fused matrix.

    Raises:
      ValueError: an adapter of the joined rank whose parts are not apart.
    """
    ends = np.cumsum([0, *widths])
    columns = [b[:, begin:end] for begin, end in zip(ends, ends[1:], strict=False)]
    if a.shape[1] == rank:
        return [{"lora_A": a, "lora_B": part} for part in columns]
    rows = [slice(i * rank, (i + 1) * rank) for i in range(len(widths))]
    parts = [{"lora_A": a[:, place], "lora_B": part[place]} for place, part in zip(rows, columns, strict=True)]
    if not np.array_equal(join(parts)["lora_B"], b):
        raise ValueError(f"expected lora_B of {name} in blocks, one for each of its {len(widths)} parts; got others")
    return parts
