"""Evictions of TensorRT-LLM's TriAttention, from the engine's rounds and kept ordinals.

Facts of `tensorrt_llm/_torch/kv_cache_compression/triattention/{triattention,compaction}.py` at 1.2 (PR #16957):

* Every `beta` generated tokens the cache of a request is compacted in place to the prompt and `top_B` keys of what
  follows. Kept keys keep their RoPE positions.
* Ordinals are indices in the current cache, not positions in the text; after the first round they differ.
* Under the overlap scheduler the next forward pass is already enqueued when a round runs. Its query still sees every
  key, and its own key follows the kept ones (`protected_tail`).

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
from smd_jax.message.foreign import Ints
from smd_jax.message.masks import NEVER

EvictionMode = Literal["union", "per_head", "per_layer_perhead"]


@dataclass(frozen=True)
class Round:
    """One round of a request.

    Attributes:
      cached: keys in the cache before it, of tokens that the engine has confirmed (`seq_len`).
      kept: rising ordinals of the kept keys after the prompt (`keep_set_selector.keep` of the request): `[keep]` in
        mode "union", `[kv_heads, keep]` in "per_head", `[layers * kv_heads, keep]` in "per_layer_perhead".
      in_flight: queries after the confirmed ones that still saw every key (`protected_tail`): 1 under the overlap
        scheduler, otherwise 0. Speculative decoding, whose tail has places without queries, is not supported.
    """

    cached: int
    kept: Ints | Sequence[Ints]
    in_flight: int = 0


def tensorrt_llm_evictions(
    prompts: Sequence[Ints],
    responses: Sequence[Ints],
    rounds: Sequence[Sequence[Round]],
    *,
    mode: EvictionMode,
    layers: int,
    kv_heads: int,
    full_layers: Sequence[int] = (),
) -> list[np.ndarray]:
    """`evicted_at [layers, kv_heads, tokens]` of every row, for `Trajectory.from_records(evicted_at=...)`.

    Args:
      prompts, responses: token ids.
      rounds: of each row, in time order.
      mode: the engine's `eviction_mode`.
      layers, kv_heads: of the model.
      full_layers: layers that the engine does not compact by these ordinals: those with a sliding window.

    Raises:
      ValueError: a round whose cache is smaller than the one before left it, or larger than the row; ordinals of the
        prompt, beyond the cache, not rising, or of another shape than the mode's. A key that was evicted has no
        ordinal, so none can come back. The message names row and round.
    """
    check_choice("mode", mode, get_args(EvictionMode))
    if not len(rounds) == len(prompts) == len(responses):
        raise ValueError(f"expected rounds of {len(prompts)} prompts and {len(responses)} responses; got {len(rounds)}")
    if not all(0 <= layer < layers for layer in full_layers):
        raise ValueError(f"expected full_layers from 0 to {layers - 1}; got {tuple(full_layers)}")
    compacted = [layer for layer in range(layers) if layer not in full_layers]
    shape = {"union": (1, 1), "per_head": (1, kv_heads), "per_layer_perhead": (len(compacted), kv_heads)}[mode]
    found = []
    for row, of_row in enumerate(rounds):
        prompt, tokens = len(prompts[row]), len(prompts[row]) + len(responses[row])
        evicted_at = np.full((layers, kv_heads, tokens), NEVER, np.int64)
        evicted_at[compacted] = _evicted_at(of_row, prompt, tokens, shape[0] * shape[1], row).reshape(*shape, tokens)
        found.append(evicted_at)
    return found


def _evicted_at(rounds: Sequence[Round], prompt: int, tokens: int, selections: int, row: int) -> np.ndarray:
    """`[selections, tokens]` of one row."""
    evicted_at = np.full((selections, tokens), NEVER, np.int64)
    cache = np.tile(np.arange(prompt), (selections, 1))  # positions in their stored order
    read = prompt  # tokens that have been in the cache
    for number, one in enumerate(rounds):
        where = f"row {row}, round {number}"
        if one.in_flight < 0:
            raise ValueError(f"expected in_flight >= 0; got {one.in_flight} ({where})")
        left = cache.shape[1]
        if not left <= one.cached <= left + tokens - read:
            raise ValueError(
                f"expected cached from {left}, the keys that the round before left, to {left + tokens - read}, those "
                f"of the whole row; got {one.cached} ({where})"
            )
        kept = _ordinals(one, prompt, selections, where)
        new = np.arange(read, read + one.cached - left)
        read += len(new)
        cache = np.concatenate([cache, np.tile(new, (selections, 1))], axis=1)
        stays = np.zeros(cache.shape, bool)
        stays[:, :prompt] = True
        np.put_along_axis(stays, kept, True, axis=1)
        selection, place = np.nonzero(~stays)
        # Queries in flight after the end of the row have no token.
        evicted_at[selection, cache[selection, place]] = min(read + one.in_flight, tokens)
        cache = cache[stays].reshape(selections, -1)
    return evicted_at


def _ordinals(one: Round, prompt: int, selections: int, where: str) -> np.ndarray:
    """The kept ordinals `[selections, keep]`, checked."""
    kept = np.asarray(one.kept)
    shape = (1, *kept.shape) if selections == 1 and kept.ndim == 1 else kept.shape
    if len(shape) != 2 or shape[0] != selections or not np.issubdtype(kept.dtype, np.integer):
        expected = "[keep]" if selections == 1 else f"[{selections}, keep]"
        raise ValueError(f"expected whole numbers {expected} in kept; got {kept.shape} {kept.dtype} ({where})")
    kept = kept.reshape(shape).astype(np.int64)
    outside = (kept < prompt) | (kept >= one.cached)
    if outside.any() or (np.diff(kept, axis=1) <= 0).any():
        raise ValueError(
            f"expected rising kept ordinals from {prompt}, after the prompt, to {one.cached - 1}, the end of the "
            f"cache; got {np.array2string(kept, threshold=8)} ({where})"
        )
    return kept
