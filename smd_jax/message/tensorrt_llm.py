"""Evictions of TensorRT-LLM's TriAttention, from what the engine has at hand: rounds and kept ordinals.

Facts of `tensorrt_llm/_torch/kv_cache_compression/triattention/{triattention,compaction}.py` at 1.2 (PR #16957):

* Every `beta` generated tokens the cache of a request is compacted in place to the prompt and `top_B` keys of what
  follows. Kept keys keep their RoPE positions.
* Ordinals count places in the cache as it is at that moment, not tokens of the text: after the first round they differ.
* Under the overlap scheduler the next forward has been enqueued when a round runs. Its query still sees every key, and
  its own key moves along behind the kept ones (`protected_tail`).

One KV head with a prompt of 2, two rounds:

    cache      p0 p1 r2 r3 r4 r5                 Round(cached=6, kept=[3, 4])          keeps r3 and r4
               p0 p1 r3 r4 r6 r7                 Round(cached=6, kept=[2, 5])          keeps r3 and r7
    evicted_at of r2 and r5 is 6, of r4 and r6 it is 8; with `in_flight=1` it is 7 and 9
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from smd_jax.config import check_choice
from smd_jax.message.foreign_tokens import Ints
from smd_jax.message.masks import NEVER

EvictionMode = Literal["union", "per_head", "per_layer_perhead"]


@dataclass(frozen=True)
class Round:
    """One round of a request.

    Attributes:
      cached: keys in the cache before it, of tokens that the engine has confirmed (`seq_len`).
      kept: rising ordinals of the keys that stay behind the prompt (`keep_set_selector.keep` of the request): `[keep]`
        in mode "union", `[kv_heads, keep]` in "per_head", `[layers * kv_heads, keep]` in "per_layer_perhead".
      in_flight: queries behind the confirmed ones that still saw every key (`protected_tail`): 1 under the overlap
        scheduler, otherwise 0. Speculative decoding reserves places in that tail, which are no queries: not covered.
    """

    cached: int
    kept: Ints | Sequence[Ints]
    in_flight: int = 0


def evicted_by_rounds(
    rounds: Sequence[Sequence[Round]],
    prompt_lengths: Sequence[int],
    lengths: Sequence[int],
    *,
    mode: EvictionMode,
    layers: int,
    kv_heads: int,
    full_layers: Sequence[int] = (),
) -> list[np.ndarray]:
    """`evicted_at [layers, kv_heads, tokens]` of every row, in positions, for `Trajectory.from_records`.

    Args:
      rounds: of each row, in the order of time. prompt_lengths, lengths: tokens of each row's prompt, and of the row.
      full_layers: layers that the engine does not compact by these ordinals: those with a sliding window.

    Raises:
      ValueError: see `Trajectory.from_tensorrt_llm`.
    """
    check_choice("mode", mode, get_args(EvictionMode))
    if len(rounds) != len(lengths):
        raise ValueError(f"expected rounds of {len(lengths)} rows; got {len(rounds)}")
    if full_layers and not all(0 <= layer < layers for layer in full_layers):
        raise ValueError(f"expected full_layers from 0 to {layers - 1}; got {tuple(full_layers)}")
    compacted = [layer for layer in range(layers) if layer not in full_layers]
    shape = {"union": (1, 1), "per_head": (1, kv_heads), "per_layer_perhead": (len(compacted), kv_heads)}[mode]
    found = []
    for row, of_row in enumerate(rounds):
        caches = _Caches(row, int(prompt_lengths[row]), int(lengths[row]), shape[0] * shape[1])
        for number, one in enumerate(of_row):
            caches.compact(one, number)
        evicted_at = np.full((layers, kv_heads, caches.tokens), NEVER, np.int64)
        evicted_at[compacted] = caches.evicted_at.reshape(*shape, -1)
        found.append(evicted_at)
    return found


class _Caches:
    """The caches of one row, `[selections, keys]` positions in their stored order, and the evictions so far.

    Attributes:
      tokens: of the row. evicted_at: `[selections, tokens]`.
    """

    def __init__(self, row: int, prompt: int, tokens: int, selections: int) -> None:
        self.row = row
        self.prompt = prompt
        self.tokens = tokens
        self.evicted_at = np.full((selections, tokens), NEVER, np.int64)
        self.positions = np.tile(np.arange(prompt), (selections, 1))
        self.read = prompt  # tokens that have been in the cache

    def compact(self, one: Round, number: int) -> None:
        where = f"row {self.row}, round {number}"
        cached, in_flight = int(one.cached), int(one.in_flight)
        if in_flight < 0:
            raise ValueError(f"expected in_flight >= 0; got {in_flight} ({where})")
        before = self.positions.shape[1]
        read = self.read + cached - before
        if cached < before or read > self.tokens:
            raise ValueError(
                f"expected cached from {before}, the keys that the round before left, to "
                f"{before + self.tokens - self.read}, those of the whole row; got {cached} ({where})"
            )
        kept = self._ordinals(one, cached, where)
        new = np.tile(np.arange(self.read, read), (len(self.positions), 1))
        positions = np.concatenate([self.positions, new], axis=1)
        there = np.zeros(positions.shape, bool)
        there[:, : self.prompt] = True
        np.put_along_axis(there, kept, True, axis=1)
        # Queries in flight behind the end of the row belong to no token of it.
        gone_at = min(read + in_flight, self.tokens)
        selection, place = np.nonzero(~there)
        self.evicted_at[selection, positions[selection, place]] = gone_at
        self.positions = positions[there].reshape(len(positions), -1)
        self.read = read

    def _ordinals(self, one: Round, cached: int, where: str) -> np.ndarray:
        """`[selections, keep]`, checked."""
        selections = len(self.positions)
        kept = np.asarray(one.kept)
        shape = kept.shape if selections > 1 or kept.ndim != 1 else (1, *kept.shape)
        if len(shape) != 2 or shape[0] != selections or not np.issubdtype(kept.dtype, np.integer):
            expected = "[keep]" if selections == 1 else f"[{selections}, keep]"
            raise ValueError(f"expected whole numbers {expected} in kept; got {kept.shape} {kept.dtype} ({where})")
        kept = kept.reshape(shape).astype(np.int64)
        for selection, place in np.argwhere((kept < self.prompt) | (kept >= cached))[:1]:
            raise ValueError(
                f"expected kept ordinals from {self.prompt}, behind the prompt, to {cached - 1}, the end of the cache; "
                f"got {kept[selection, place]} ({where}, selection {selection})"
            )
        for selection, place in np.argwhere(np.diff(kept, axis=1) <= 0)[:1]:
            raise ValueError(
                f"expected rising kept ordinals; got {kept[selection, place]} and then {kept[selection, place + 1]} "
                f"({where}, selection {selection})"
            )
        return kept
