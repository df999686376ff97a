"""Evictions of other engines from their own records, in positions, for `Trajectory.from_records(evicted_at=...)`.

TensorRT-LLM's TriAttention, from the rounds and kept ordinals. Facts of
`tensorrt_llm/_torch/kv_cache_compression/{compaction,triattention/triattention}.py` at ccfe61bb (1.3.0 candidates):

* Every `beta` generated tokens the cache of a request is compacted in place to the prompt and `top_B` keys of the
  response. Kept keys keep their RoPE positions.
* Ordinals are indices in the current cache, not positions in the text; after the first round they differ.
* Under the overlap scheduler the next forward pass is already enqueued when a round runs. Its query still sees every
  key, and its own key follows the kept ones (`target_tail_length`).

One KV head with a prompt of 2, two rounds:

    cache      p0 p1 r2 r3 r4 r5                 Round(cached=6, kept=[3, 4])          keeps r3 and r4
               p0 p1 r3 r4 r6 r7                 Round(cached=6, kept=[2, 5])          keeps r3 and r7
    evicted_at of r2 and r5 is 6, of r4 and r6 it is 8; with `in_flight=1` it is 7 and 9

Memento (arXiv:2604.09852), from the tokens and the ids of its four special tokens. Facts of microsoft/memento
`vllm/v1/core/block_masking/{tracker,processor}.py` and `scheduler.py`:

* A block is evicted when its summary's last token has been sampled, before that token's query is computed.
* `block_end` ends the innermost open block; a summary belongs to the closed block that began last and has none yet.
* With `keep_last_n_blocks` N, a summary's end evicts the oldest of the remaining blocks if there are more than N.
* With `keep_last_block_for_answer`, a block is evicted when the next one begins.
* Keys are evicted in all layers and heads.

Not supported, because one mask cannot express it: `restart_mode`, which recomputes the keys of a summary, and blocks
that end within the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from smd_jax.config import check_choice
from smd_jax.message.foreign import Ints, whole_numbers
from smd_jax.message.masks import NEVER
from smd_jax.typed_fields import check_types

EvictionMode = Literal["union", "per_head", "per_layer_perhead"]


@dataclass(frozen=True)
class Round:
    """One round of a request.

    Attributes:
      cached: keys in the cache before it, of tokens that the engine has confirmed (`source_length`).
      kept: rising ordinals of the kept keys after the prompt (`_kept_ordinal_rows` of the request): `[keep]` in
        mode "union", `[kv_heads, keep]` in "per_head", `[layers * kv_heads, keep]` in "per_layer_perhead".
      in_flight: queries after the confirmed ones that still saw every key (`target_tail_length`): 1 under the overlap
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
    """`evicted_at [layers, kv_heads, tokens]` of every row, for `Trajectory.from_records(evicted_at=...)`. Layers or KV
    heads that share their evictions have an axis of 1.

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
        evicted_at = _after_rounds(of_row, prompt, tokens, shape[0] * shape[1], row).reshape(*shape, tokens)
        if full_layers:
            whole = np.full((layers, shape[1], tokens), NEVER, np.int64)
            whole[compacted] = evicted_at
            evicted_at = whole
        found.append(evicted_at)
    return found


def _after_rounds(rounds: Sequence[Round], prompt: int, tokens: int, selections: int, row: int) -> np.ndarray:
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
    if len(shape) != 2 or shape[0] != selections or (kept.size and not np.issubdtype(kept.dtype, np.integer)):
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


@dataclass(frozen=True, kw_only=True)
class MementoBlocks:
    """The engine's `BlockMaskingConfig`, with ids instead of texts.

    Attributes:
      block_start, block_end, summary_start, summary_end: ids of the special tokens.
      mask_delimiters: whether `block_start` and `block_end` are evicted with the block.
      keep_last_n_blocks: completed blocks that stay; -1: all.
      keep_last_block_for_answer: whether a block stays until the next one begins.

    Raises:
      TypeError, ValueError: a value that its field does not allow, or ids that are not different.
    """

    block_start: int
    block_end: int
    summary_start: int
    summary_end: int
    mask_delimiters: bool
    keep_last_n_blocks: int = 0
    keep_last_block_for_answer: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        ids = (self.block_start, self.block_end, self.summary_start, self.summary_end)
        if min(ids) < 0 or len(set(ids)) < 4:
            raise ValueError(f"expected four different token ids >= 0; got {ids}")
        if self.keep_last_n_blocks < -1:
            raise ValueError(f"expected keep_last_n_blocks >= -1; got {self.keep_last_n_blocks}")


def memento_evictions(
    prompts: Sequence[Ints], responses: Sequence[Ints], blocks: MementoBlocks, *, in_flight: int = 0
) -> list[np.ndarray]:
    """`evicted_at [1, 1, tokens]` of every row, in positions, for `Trajectory.from_records(evicted_at=...)`.

    Args:
      prompts, responses: token ids.
      in_flight: number of queries, from the triggering token's, that still see a block: 1 with vLLM's asynchronous
        scheduling, which schedules the next step before the token is known; otherwise 0.

    Raises:
      ValueError: other numbers of prompts and responses, a negative in_flight, or a prompt that begins a block.
    """
    if len(prompts) != len(responses):
        raise ValueError(f"expected as many prompts as responses; got {len(prompts)} and {len(responses)}")
    if in_flight < 0:
        raise ValueError(f"expected in_flight >= 0; got {in_flight}")
    found = []
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        asked = whole_numbers(prompt, f"prompt of row {row}")
        for place in np.flatnonzero(asked == blocks.block_start)[:1]:
            raise ValueError(
                f"expected blocks in the response only; got block_start {blocks.block_start} in the prompt (row {row}, "
                f"token {place})"
            )
        answer = whole_numbers(response, f"response of row {row}")
        evicted_at = _after_blocks(answer.tolist(), len(asked), blocks)
        found.append(np.where(evicted_at < NEVER, evicted_at + in_flight, NEVER)[None, None])
    return found


def _after_blocks(response: list[int], prompt: int, config: MementoBlocks) -> np.ndarray:
    """`[tokens]` of one row. A block is a pair of positions, of its start and of its end."""
    evicted_at = np.full(prompt + len(response), NEVER, np.int64)
    keep = config.keep_last_n_blocks
    deferred = config.keep_last_block_for_answer and keep == 0
    inside = 0 if config.mask_delimiters else 1
    opened: list[int] = []  # starts of blocks without an end
    closed: list[tuple[int, int]] = []  # blocks whose summary has not begun
    summarised: tuple[int, int] | None = None  # whose summary is being written
    complete: list[tuple[int, int]] = []  # still seen

    for position, token in enumerate(response, prompt):
        if token == config.block_start:
            opened.append(position)
        elif token == config.block_end and opened:
            closed.append((opened.pop(), position))
        elif token == config.summary_start and closed:
            summarised = max(closed)
            closed.remove(summarised)
        elif token == config.summary_end and summarised is not None:
            complete.append(summarised)
            summarised = None
        else:
            continue
        if token == (config.block_start if deferred else config.summary_end) and 0 <= keep < len(complete):
            start, end = complete.pop(0)
            # An inner block may have been evicted before.
            span = evicted_at[start + inside : end + 1 - inside]
            np.minimum(span, position, out=span)
    return evicted_at
