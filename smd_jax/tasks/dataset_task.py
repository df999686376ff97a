"""Tasks of loaded rows, and selections of a task's rows: the first ones, and those whose prompts fit.

task = DatasetTask(load_rows(source), reward, RowFormat(prompt_column="question"))
task, counts = select_prompts(task, usable_lengths(task, tokenizer), most=512)       drops rows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from smd_jax.tasks.rewards import RewardFunction, accepted_names, function_name
from smd_jax.tasks.row_format import RowFormat
from smd_jax.tasks.sources import Rows
from smd_jax.tasks.task import Row, Task, prompt_length, question_of
from smd_jax.tasks.text_files import FileRow
from smd_jax.text.prompts import Tokenizer


# Compared by identity, because rows have no hash.
@dataclass(frozen=True, eq=False)
class DatasetTask:
    """Rows by number.

    Attributes:
      rows: of the data set; `format` is applied on access.
      reward_function: TRL's signature; None if something else grades, such as the loop's `rewards`.
    """

    rows: Rows
    reward_function: RewardFunction | None = None
    format: RowFormat = RowFormat()

    def __post_init__(self) -> None:
        if not len(self.rows):
            raise ValueError("expected at least one row; got none")
        self[0]  # raises errors that usually affect every row

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"expected a row from 0 to {len(self) - 1}; got {index}")
        row = self.rows[index]
        return self.format.row(row, _place(row, index))

    def reward(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]) -> Any:
        """Calls the reward function; an async one returns an awaitable."""
        arguments = {**columns, "prompts": prompts, "completions": completions}
        function = given_reward(self)
        accepted = accepted_names(function_name(function), function, arguments)
        return function(**{name: arguments[name] for name in accepted})


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


def place(task: Task, index: int) -> str:
    """The location of the row at this index, for errors."""
    if isinstance(task, SelectedRows):
        return place(task.task, int(task.numbers[index]))
    return _place(task.rows[index] if isinstance(task, DatasetTask) else {}, index)


def _place(row: Row, index: int) -> str:
    return row.place if isinstance(row, FileRow) else f"row {index}, counted from 0"


def first_rows(task: Task, count: int) -> Task:
    """The task of the first `count` rows, or of all if there are fewer."""
    if count < 1:
        raise ValueError(f"expected at least one row; got {count}")
    return task if count >= len(task) else SelectedRows(task, np.arange(count))


def given_reward(task: DatasetTask) -> RewardFunction:
    """`task.reward_function`. Raises ValueError if it is None."""
    if task.reward_function is None:
        raise ValueError("expected a reward function, because this data defines none; got None")
    return task.reward_function


def own_reward(task: Task) -> RewardFunction:
    """The reward function of a task, without its rows. Raises ValueError for a task of data that has none."""
    match task:
        case SelectedRows():
            return own_reward(task.task)
        case DatasetTask() if type(task).reward is DatasetTask.reward:  # not of a subclass that grades by itself
            return given_reward(task)
        case _:
            return task.reward


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


def usable_lengths(task: Task, tokenizer: Tokenizer) -> Int[np.ndarray, " rows"]:
    """Lengths of all prompts in tokens as the model sees them, int64 `[rows]`; 0 for those without text.

    Raises:
      ValueError: a prompt without a text for this tokenizer, naming its row.
    """
    lengths = np.zeros(len(task), np.int64)
    for index in range(len(task)):
        row = task[index]
        try:
            if question_of(row["prompt"]).strip():  # a chat template makes tokens of an empty one, too
                lengths[index] = prompt_length(row, tokenizer)
        except ValueError as error:
            raise ValueError(f"{place(task, index)}: {error}") from error
    return lengths


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
