"""Prompts that are too long for a run: dropped and counted.

lengths = usable_lengths(task, tokenizer)                    tokenizes every prompt once
task, counts = select_prompts(task, lengths, most=512)       drops rows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from smd_jax.tasks.task import Row, Task, prompt_length, says_nothing
from smd_jax.text.prompts import Tokenizer


class PromptCounts(NamedTuple):
    """Counts of kept and dropped prompts.

    Attributes:
      kept, too_long, empty: number of prompts; an empty one has no text.
      longest: tokens of the longest prompt, dropped ones included.
    """

    kept: int
    too_long: int
    empty: int
    longest: int

    def __str__(self) -> str:
        return (
            f"{self.kept} prompts kept, {self.too_long} dropped as too long and {self.empty} as empty; "
            f"the longest has {self.longest} tokens"
        )


@dataclass(frozen=True, eq=False)
class SelectedRows:
    """Some rows of another task.

    Attributes:
      numbers: int `[rows]`, their indices in `task`.
    """

    task: Task
    numbers: Int[np.ndarray, " rows"]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"expected a row from 0 to {len(self) - 1}; got {index}")
        return self.task[int(self.numbers[index])]

    def reward(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]) -> Sequence[Any]:
        return self.task.reward(prompts, completions, **columns)


def usable_lengths(task: Task, tokenizer: Tokenizer) -> Int[np.ndarray, " rows"]:
    """Lengths of all prompts in tokens as the model sees them, int64 `[rows]`; 0 for those without text."""
    rows = (task[index] for index in range(len(task)))
    return np.array([0 if says_nothing(row["prompt"]) else prompt_length(row, tokenizer) for row in rows])


def select_prompts(task: Task, lengths: Int[np.ndarray, " rows"], most: int) -> tuple[Task, PromptCounts]:
    """Drops empty prompts and those longer than `most` tokens; returns the rest and the counts.

    Args:
      lengths: `[rows]` in tokens, see `usable_lengths`.

    Raises:
      ValueError: no prompt is left.
    """
    kept = np.flatnonzero((lengths > 0) & (lengths <= most))
    counts = PromptCounts(len(kept), int(np.sum(lengths > most)), int(np.sum(lengths == 0)), int(lengths.max()))
    if not len(kept):
        raise ValueError(f"expected a prompt of 1 to {most} tokens; got none: {counts}")
    return (task if len(kept) == len(lengths) else SelectedRows(task, kept)), counts
