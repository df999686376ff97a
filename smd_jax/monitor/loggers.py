"""Loggers copy a run's metrics to TensorBoard, Weights & Biases, or your own destination.

    train(loop, state, run, directory, config=config, loggers=[TensorBoardLogger(directory)])

metrics.jsonl is the record, and a run that cannot write it stops. Each logger writes a copy on its own thread, so that
a slow network costs no step. A logger that raises gets no more rows, and one line says so.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from types import TracebackType
from typing import Protocol, runtime_checkable

from smd_jax.tasks.task import MissingExtraError
from smd_jax.text.visible_text import one_line


@runtime_checkable
class Logger(Protocol):
    """Receives metrics.

    A resumed run repeats the steps after its checkpoint; the step of the first row shows where it continues.
    """

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receives one row of numbers on the host; NaN marks missing ones.

        Args:
          step: finished rollouts: 1 for the first rollout's row, 0 for the evaluation before training; never lower than
            before. An evaluation comes after the row of its rollout, with the same step.
        """
        ...

    def close(self) -> None:
        """Ends the log. Called once, also for a logger that has raised."""
        ...


def dashboard_name(name: str) -> str:
    """`train/reward` for `reward`; `eval/sparse` is unchanged.

    These are the names of transformers' Trainer and TRL on dashboards, so that runs of both share their charts.
    """
    return name if name.startswith("eval/") else f"train/{name}"


def is_evaluation(metrics: Mapping[str, float]) -> bool:
    """Whether a row is that of an evaluation, and not of a rollout."""
    return bool(metrics) and all(name.startswith("eval/") for name in metrics)


def check_installed(package: str, extra: str, what: str) -> None:
    """Raises MissingExtraError if a logger's package is not installed, without importing it.

    Args:
      extra: extra with the package.
      what: begin of the message.
    """
    spec = find_spec(package)
    # A folder of that name in the working directory, such as wandb's, has no origin.
    if spec is None or spec.origin is None:
        raise MissingExtraError(f"{what} {package}, which is not installed: pip install -e '.[{extra}]'")


class Loggers:
    """Several loggers, none of which can stop or delay the run."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        # One thread per logger keeps the order of its rows and waits for no other logger.
        self._working = [(logger, ThreadPoolExecutor(1)) for logger in loggers]
        self._waiting: dict[int, list[Future[None]]] = {index: [] for index in range(len(loggers))}
        self._failed: set[int] = set()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends one row to every working logger; returns at once."""
        row = dict(metrics)  # the caller may change its own while a thread reads
        for index, (logger, thread) in enumerate(self._working):
            self._look_at(index, wait=False)
            if index not in self._failed:
                self._waiting[index].append(thread.submit(logger.write, step, row))

    def close(self) -> None:
        """Waits until all rows are written, and closes the loggers."""
        for index, (logger, thread) in enumerate(self._working):
            self._look_at(index, wait=True)
            self._waiting[index] = [thread.submit(logger.close)]
            self._look_at(index, wait=True)
            thread.shutdown()

    def __enter__(self) -> Loggers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _look_at(self, index: int, wait: bool) -> None:
        """Drops written rows; after the first failure prints a line and drops the rest."""
        waiting = self._waiting[index]
        while waiting and (wait or waiting[0].done()):
            # `exception` waits, and returns the error of the logger.
            error = waiting.pop(0).exception()
            if error is not None:
                if index not in self._failed:
                    _say(self._working[index][0], error)
                self._failed.add(index)
                for row in waiting:
                    row.cancel()
                waiting.clear()


def _say(logger: Logger, error: BaseException) -> None:
    what = one_line(f"{type(error).__name__}: {error}")
    print(
        f"{type(logger).__name__} failed and gets no more metrics of this run; metrics.jsonl has all of them. {what}",
        file=sys.stderr,
        flush=True,
    )
