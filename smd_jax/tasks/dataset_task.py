"""Tasks of loaded rows.

task = DatasetTask(load_rows(source), reward, RowFormat(prompt_column="question"))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from smd_jax.tasks.lengths import SelectedRows
from smd_jax.tasks.rewards import RewardFunction, accepted_names, function_name
from smd_jax.tasks.row_format import RowFormat
from smd_jax.tasks.sources import Rows
from smd_jax.tasks.task import Row, Task


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
        return self.format.row(self.rows[index], f"row {index}")

    def reward(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]) -> Any:
        """Calls the reward function; an async one returns an awaitable."""
        arguments = {**columns, "prompts": prompts, "completions": completions}
        function = given_reward(self)
        accepted = accepted_names(function_name(function), function, arguments)
        return function(**{name: arguments[name] for name in accepted})


def first_rows(task: Task, count: int) -> Task:
    """The task of the first `count` rows, or of all if there are fewer, to show or to evaluate on."""
    if count < 1:
        raise ValueError(f"expected at least one row; got {count}")
    return task if count >= len(task) else SelectedRows(task, np.arange(count))


def given_reward(task: DatasetTask) -> RewardFunction:
    """`task.reward_function`.

    Raises:
      ValueError: it is None.
    """
    if task.reward_function is None:
        raise ValueError("expected a reward function, because this data defines none; got None")
    return task.reward_function


def own_reward(task: Task) -> RewardFunction:
    """The reward function of a task, without its rows.

    Raises:
      ValueError: a task of data that has none.
    """
    match task:
        case SelectedRows():
            return own_reward(task.task)
        case DatasetTask() if type(task).reward is DatasetTask.reward:  # not of a subclass that grades by itself
            return given_reward(task)
        case _:
            return task.reward
