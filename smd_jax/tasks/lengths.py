"""Prompts that are too long for a run: dropped and counted, or refused before the run.

lengths = usable_lengths(task, tokenizer)                    tokenizes every prompt once
task, counts = select_prompts(task, lengths, most=512)       drops rows; refuse=True raises instead
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from smd_jax.tasks.task import Row, Task, prompt_length, says_nothing
from smd_jax.text.prompts import Tokenizer


@dataclass
class PromptCounts:
    """Counts of kept and dropped prompts.

    Attributes:
      kept, too_long, empty: number of prompts; an empty one has no text.
      longest, median: tokens of the longest and the median prompt, dropped ones included, empty ones not.
    """

    kept: int = 0
    too_long: int = 0
    empty: int = 0
    longest: int = 0
    median: int | None = None

    @property
    def dropped(self) -> int:
        return self.too_long + self.empty

    def __str__(self) -> str:
        median = "" if self.median is None else f", the median {self.median}"
        return (
            f"{self.kept} prompts kept, {self.too_long} dropped as too long and {self.empty} as empty; "
            f"the longest has {self.longest} tokens{median}"
        )


@dataclass(frozen=True, eq=False)
class SelectedRows:
    """Some rows of another task.

    Attributes:
      numbers: int `[rows]`, their indices in `task`.
    """

    task: Task
    numbers: Int[np.ndarray, " rows"]

    def __post_init__(self) -> None:
        if not len(self.numbers):
            raise ValueError("expected at least one row; got none")

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"expected a row from 0 to {len(self) - 1}; got {index}")
        return self.task[int(self.numbers[index])]

    def reward(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]) -> Sequence[Any]:
        return self.task.reward(prompts, completions, **columns)


def usable_length(row: Row, tokenizer: Tokenizer) -> int:
    """Tokens of the row's prompt as the model sees it; 0 for an empty one."""
    return 0 if says_nothing(row["prompt"]) else prompt_length(row, tokenizer)


def usable_lengths(task: Task, tokenizer: Tokenizer) -> Int[np.ndarray, " rows"]:
    """Lengths of all prompts in tokens, int64 `[rows]`, 0 for empty ones."""
    return np.array([usable_length(task[index], tokenizer) for index in range(len(task))])


def select_prompts(
    task: Task, lengths: Int[np.ndarray, " rows"], most: int, *, refuse: bool = False
) -> tuple[Task, PromptCounts]:
    """Drops empty prompts and those longer than `most` tokens; returns the rest and the counts.

    Args:
      lengths: `[rows]` in tokens, see `usable_lengths`.
      refuse: raise for longer prompts instead of dropping them. Empty ones are always dropped.

    Raises:
      ValueError: `refuse`, and there are longer prompts; no prompt is left.
    """
    _check_most(most)
    longer = np.flatnonzero(lengths > most)
    counts = PromptCounts(
        kept=int(np.sum((lengths > 0) & (lengths <= most))),
        too_long=len(longer),
        empty=int(np.sum(lengths == 0)),
        longest=int(lengths.max()),
        median=int(np.median(lengths[lengths > 0])) if (lengths > 0).any() else None,
    )
    if refuse and len(longer):
        raise ValueError(
            f"expected prompts of at most {most} tokens; got {len(longer)} of {len(lengths)} that are longer: "
            f"the first is row {longer[0]} with {lengths[longer[0]]} tokens, the longest has {counts.longest}"
        )
    if not counts.kept:
        raise ValueError(f"expected a prompt of 1 to {most} tokens; got none: {counts}")
    if not counts.dropped:
        return task, counts
    return SelectedRows(task, np.flatnonzero((lengths > 0) & (lengths <= most))), counts


def _check_most(most: int) -> None:
    if most < 1:
        raise ValueError(f"expected a longest prompt of at least one token; got {most}")
