"""Tasks of loaded rows: by number, or as a stream.

    task = DatasetTask(load_rows(source), reward, RowFormat(prompt_column="question"))

A stream's rows have no numbers, so the task gives the rows of a step, and shuffles every epoch anew as `batch_indices`
does. They depend on seed and step only. A resumed run reads the stream again and skips the rows before its step.
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
        self[0]  # raises the errors that most often concern every row

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"expected a row from 0 to {len(self) - 1}; got {index}")
        try:
            raw = self.rows[index]
        except (ValueError, OSError) as error:  # text that is no UTF-8, or a truncated table
            said = one_line(f"{type(error).__name__}: {error}", 200)
            raise ValueError(f"row {index}: expected a row that can be read; got {said}") from error
        return self.format.row(raw, f"row {index}")

    def reward(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]) -> Any:
        """Calls the reward function; an async one returns an awaitable."""
        return _call(self.reward_function, {**columns, "prompts": prompts, "completions": completions})


@dataclass(frozen=True, eq=False)
class StreamTask:
    """Rows of a stream, in batches by step.

    Attributes:
      stream: the rows of the data set.
      reward_function: see DatasetTask.
      limit: longest prompt; None: any length.
      buffer: number of rows in memory, from which rows are drawn at random.
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
        """The rows of a step, a function of the arguments only. Steps in ascending order read the stream once.

        Args:
          size: rows of a step. step: counted from 0. seed: from 0 to 2**32 - 1.

        Raises:
          ValueError: arguments out of range; a stream without a prompt that is short enough.
        """
        if size < 1 or step < 0:
            raise ValueError(f"expected size >= 1 and step >= 0; got {size} and {step}")
        check_seed("seed", seed)
        return self.reader.rows(size * step, size, seed)

    def head(self, count: int) -> list[Row]:
        """The first `count` kept rows in the order of the data set, or all if there are fewer."""
        return list(itertools.islice(self.read(self.stream, PromptCounts()), count))

    @property
    def counts(self) -> PromptCounts:
        """Kept and dropped prompts of the current epoch so far."""
        return self.reader.counts

    def reward(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]) -> Any:
        """Calls the reward function; an async one returns an awaitable."""
        return _call(self.reward_function, {**columns, "prompts": prompts, "completions": completions})

    def epoch(self, seed: int, epoch: int, counts: PromptCounts) -> Iterator[Row]:
        """The shuffled rows of one epoch, which are counted in `counts`."""
        # Not the sum of both: seed 1 would begin with the second epoch of seed 0.
        generator = np.random.default_rng([seed, epoch])
        # One file at a time: with several, `datasets` starts threads that sleep five seconds at the end of an epoch.
        shuffled = self.stream.shuffle(generator=generator, buffer_size=self.buffer, max_buffer_input_shards=1)
        return self.read(shuffled, counts)

    def read(self, stream: RowStream, counts: PromptCounts) -> Iterator[Row]:
        """The kept rows of a stream, in the task's format."""
        for number, raw in enumerate(stream):
            row = self.format.row(raw, f"row {number} of the stream")
            if self.limit is None:
                counts.kept += 1
                yield row
            elif self.limit.takes(row, counts, f"row {number} of the stream"):
                yield row


def first_rows(task: Task | StreamTask, count: int) -> Task:
    """The task of the first `count` rows, or of all if there are fewer, to show or to evaluate on."""
    if count < 1:
        raise ValueError(f"expected at least one row; got {count}")
    if isinstance(task, StreamTask):
        return DatasetTask(task.head(count), task.reward_function)
    return task if count >= len(task) else SelectedRows(task, np.arange(count))


def own_reward(task: Task | SteppedTask) -> RewardFunction:
    """The reward function of a task, without its rows.

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
    """Position in a stream, so that the next step need not read it from the start."""

    def __init__(self, task: StreamTask) -> None:
        self.task = task
        self.length: int | None = None  # rows of an epoch, known after the first one
        self.begin(seed=0, epoch=0)

    def begin(self, seed: int, epoch: int) -> None:
        self.seed = seed
        self.epoch = epoch
        self.counts = PromptCounts()
        self.iterator = self.task.epoch(seed, epoch, self.counts)
        # Number of the next row, counted over all epochs.
        self.position = epoch * (self.length or 0)

    def rows(self, start: int, size: int, seed: int) -> list[Row]:
        """Rows `start` to `start + size - 1`, counted over all epochs of this seed."""
        if seed != self.seed or start < self.position:
            self.begin(seed, epoch=0)
        while self.position < start:
            if self.length is not None and start // self.length > self.epoch:
                self.begin(seed, start // self.length)  # skips earlier epochs
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
