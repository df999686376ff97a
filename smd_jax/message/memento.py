"""Evictions of Memento (arXiv:2604.09852), from the tokens of a rollout and the ids of its four special tokens.

Facts of microsoft/memento `vllm/v1/core/block_masking/{tracker,processor}.py` and `scheduler.py`:

* A block is evicted when its summary's last token has been sampled, before that token's query is computed.
* `block_end` ends the innermost open block; a summary belongs to the newest closed block that has none yet.
* With `keep_last_n_blocks` N, a summary's end evicts the oldest of the remaining blocks if there are more than N.
* With `keep_last_block_for_answer`, a block is evicted when the next one begins.
* Keys are evicted in all layers and heads.

Not supported, because one mask cannot express it: `restart_mode`, which recomputes the keys of a summary, and blocks
that end within the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from smd_jax.message.foreign import Ints, whole_numbers
from smd_jax.message.masks import NEVER
from smd_jax.typed_fields import check_types


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
      ValueError: other numbers of prompts and responses, or a prompt that begins a block.
    """
    if len(prompts) != len(responses):
        raise ValueError(f"expected as many prompts as responses; got {len(prompts)} and {len(responses)}")
    found = []
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        asked = whole_numbers(prompt, f"prompt of row {row}")
        for place in np.flatnonzero(asked == blocks.block_start)[:1]:
            raise ValueError(
                f"expected blocks in the response only; got block_start {blocks.block_start} in the prompt (row {row}, "
                f"token {place})"
            )
        answer = whole_numbers(response, f"response of row {row}")
        evicted_at = _evicted_at(answer.tolist(), len(asked), blocks)
        found.append(np.where(evicted_at < NEVER, evicted_at + in_flight, NEVER)[None, None])
    return found


def _evicted_at(response: list[int], prompt: int, config: MementoBlocks) -> np.ndarray:
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
