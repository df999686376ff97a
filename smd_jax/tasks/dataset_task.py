"""Tasks of rows that come from elsewhere: by number, or as a stream.

    task = DatasetTask(load_rows(source), reward, RowFormat(prompt_column="question"))

A stream's rows have no numbers, so it gives the rows of a step: epoch by epoch, every epoch in an order of its own, as
`batch_indices` does. They depend on seed and step alone. To resume, what lies before is read once more, and skipped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from smd_jax.config import check_seed
from smd_jax.tasks.lengths import PromptCounts, PromptLimit, SelectedRows
from smd_jax.tasks.rewards import RewardFunction, accepted_names, function_name
from smd_jax.tasks.row_format import RowFormat
from smd_jax.tasks.sources import Rows, RowStream
from smd_jax.tasks.task import Row, SteppedTask, Task
from smd_jax.text.visible_text import one_line


# Compared and hashed by identity: rows have no hash, and comparing all of them would serve nobody.
@dataclass(frozen=True, eq=False)
class DatasetTask:
    """Rows by number.

    Attributes:
      rows: as they lie in the data set. A row is made into one of the task when it is asked for.
      reward_function: TRL's signature; None: something else grades, such as the loop's `rewards`.
    """

    rows: Rows
    reward_function: RewardFunction | None = None
    format: RowFormat = RowFormat()

    def __post_init__(self) -> None:
        if not len(self.rows):
            raise ValueError("expected at least one row; got none")
        self[0]  # for its errors, which are mostly every row's

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"expected a row from 0 to {len(self) - 1}; got {index}")
        try:
            raw = self.rows[index]
        except (ValueError, OSError) as error:  # text of a table that is no UTF-8; a table that was cut off
            said = one_line(f"{type(error).__name__}: {error}", 200)
            raise ValueError(f"row {index}: expected a row that can be read; got {said}") from error
        return self.format.row(raw, f"row {index}")

    def reward(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]) -> Any:
        """What the reward function gives, which may be something to await."""
        return _call(self.reward_function, {**columns, "prompts": prompts, "completions": completions})


@dataclass(frozen=True, eq=False)
class StreamTask:
    """Rows of a stream, in batches by step.

    Attributes:
      stream: the rows as they lie in the data set, in one order; it shuffles within `buffer` rows, and its files.
      reward_function: as DatasetTask's.
      limit: prompts that are too long are dropped on the way, or refused; None: none is.
      buffer: rows that are shuffled among each other, and kept in memory.
    """

    stream: RowStream
    reward_function: RewardFunction | None = None
    format: RowFormat = RowFormat()
    limit: PromptLimit | None = None
    buffer: int = 10_000
    reader: _Reader = field(init=False)

    def __post_init__(self) -> None:
        if self.buffer < 1:
            raise ValueError(f"expected buffer >= 1 rows; got {self.buffer}")
        object.__setattr__(self, "reader", _Reader(self))

    def batch(self, size: int, step: int, seed: int) -> list[Row]:
        """The rows of a step, as a function of the arguments alone; steps that come in order are read once.

        Args:
          size: rows of a step. step: counted from 0. seed: from 0 to 2**32 - 1.

        Raises:
          ValueError: arguments below these; a stream without any prompt that is short enough.
        """
        if size < 1 or step < 0:
            raise ValueError(f"expected size >= 1 and step >= 0; got {size} and {step}")
        check_seed("seed", seed)
        return self.reader.rows(size * step, size, seed)

    def head(self, count: int) -> list[Row]:
        """The first rows of the stream as it lies, without those that are dropped; all if there are fewer."""
        return list(itertools.islice(self.read(self.stream, PromptCounts()), count))

    @property
    def counts(self) -> PromptCounts:
        """The prompts that were kept and dropped so far in the epoch that is being read."""
        return self.reader.counts

    def reward(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]) -> Any:
        """What the reward function gives, which may be something to await."""
        return _call(self.reward_function, {**columns, "prompts": prompts, "completions": completions})

    def epoch(self, seed: int, epoch: int, counts: PromptCounts) -> Iterator[Row]:
        """The rows of one epoch, in its order; they are counted in `counts`."""
        # Both numbers and not their sum, or seed 1 would begin where seed 0 is in its second epoch.
        generator = np.random.default_rng([seed, epoch])
        # One file at a time: reading several takes threads, and these five seconds of sleep at the end of every epoch.
        shuffled = self.stream.shuffle(generator=generator, buffer_size=self.buffer, max_buffer_input_shards=1)
        return self.read(shuffled, counts)

    def read(self, stream: RowStream, counts: PromptCounts) -> Iterator[Row]:
        """The task's rows of a stream, without those that are dropped."""
        for number, raw in enumerate(stream):
            row = self.format.row(raw, f"row {number} of the stream")
            if self.limit is None:
                counts.kept += 1
                yield row
            elif self.limit.takes(row, counts, f"row {number} of the stream"):
                yield row


def first_rows(task: Task | StreamTask, count: int) -> Task:
    """The task of the first `count` rows, or all of them if there are fewer: to look at, or to evaluate on."""
    if count < 1:
        raise ValueError(f"expected at least one row; got {count}")
    if isinstance(task, StreamTask):
        return DatasetTask(task.head(count), task.reward_function)
    return task if count >= len(task) else SelectedRows(task, np.arange(count))


def own_reward(task: Task | SteppedTask) -> RewardFunction:
    """The reward function that a task brings along, without the rows of the task.

    Raises:
      ValueError: a task of data that has none.
    """
    match task:
        case SelectedRows():
            return own_reward(task.task)
        case DatasetTask() | StreamTask():
            if task.reward_function is None:
                raise ValueError("expected a reward function, because this data has none of its own; got None")
            return task.reward_function
        case _:
            return task.reward


def _call(function: RewardFunction | None, arguments: dict[str, Any]) -> Any:
    if function is None:
        raise ValueError("expected a reward function, because this data has none of its own; got None")
    accepted = accepted_names(function_name(function), function, arguments)
    return function(**{name: arguments[name] for name in accepted})


class _Reader:
    """Where a stream was read up to, so that the next step need not begin at the first row."""

    def __init__(self, task: StreamTask) -> None:
        self.task = task
        self.length: int | None = None  # rows of an epoch, the same in all of them; known when the first one has ended
        self.begin(seed=0, epoch=0)

    def begin(self, seed: int, epoch: int) -> None:
        self.seed = seed
        self.epoch = epoch
        self.counts = PromptCounts()
        self.iterator = self.task.epoch(seed, epoch, self.counts)
        # Number of the next row, counted through all epochs.
        self.position = epoch * (self.length or 0)

    def rows(self, start: int, size: int, seed: int) -> list[Row]:
        """Rows `start` to `start + size - 1`, counted through all epochs of this seed."""
        if seed != self.seed or start < self.position:
            self.begin(seed, epoch=0)
        while self.position < start:
            if self.length is not None and start // self.length > self.epoch:
                self.begin(seed, start // self.length)  # nothing of the epochs before it needs to be read
            else:
                self.next_row()
        return [self.next_row() for _ in range(size)]

    def next_row(self) -> Row:
        row = next(self.iterator, None)
        if row is None:
            self.length = self.length or self.position
            if not self.length:
                raise ValueError(f"expected at least one prompt in the stream; got none ({self.counts})")
            self.begin(self.seed, self.epoch + 1)
            row = next(self.iterator)
        self.position += 1
        return row
