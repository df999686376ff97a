"""Other places that a run's metrics go to, beside metrics.jsonl: TensorBoard, Weights & Biases, your own.

    train(loop, state, run, directory, config=config, loggers=[TensorBoardLogger(directory)])

metrics.jsonl is the record, and a run that cannot write it stops. Loggers are copies of it: each one writes on a thread
of its own, so that a slow network costs no step, and one that raises is left out from then on, with one line that says
so. What it missed is in metrics.jsonl.
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
    """Whoever takes metrics.

    A run that resumes writes the steps behind its checkpoint once more, and says nothing else about it: a logger sees
    from the first step that it is given where the run goes on.
    """

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes one row of numbers on the host, with NaN where there is no number.

        Args:
          step: finished rollouts: 1 for the first rollout's row, 0 for the evaluation before training. Ascends from
            call to call.
        """
        ...

    def close(self) -> None:
        """Nothing follows. Called once, also for a logger that has raised."""
        ...


def dashboard_name(name: str) -> str:
    """`train/reward` for `reward`, and `eval/sparse` as it is: what transformers' Trainer, and so TRL, calls a metric
    on TensorBoard and Weights & Biases. Runs of both then share their charts."""
    return name if name.startswith("eval/") else f"train/{name}"


def check_installed(package: str, extra: str, what: str) -> None:
    """Raises MissingExtraError where a logger's package is not installed, without importing it.

    Args:
      extra: that brings the package.
      what: needs it.
    """
    spec = find_spec(package)
    # A plain folder of that name in the working directory, such as the one that wandb makes, has no origin.
    if spec is None or spec.origin is None:
        raise MissingExtraError(f"{what} {package}, which is not installed: pip install -e '.[{extra}]'")


class Loggers:
    """Several loggers, none of which can stop or delay the run."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        # One thread a logger: it keeps the order of its rows, and waits for no other logger.
        self._working = [(logger, ThreadPoolExecutor(1)) for logger in loggers]
        self._waiting: dict[int, list[Future[None]]] = {index: [] for index in range(len(loggers))}
        self._failed: set[int] = set()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hands one row to every logger that still works; returns at once."""
        row = dict(metrics)  # the caller's own may change while a thread reads it
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
        """Forgets rows that are written; at the first one that failed says so, and drops those behind it."""
        waiting = self._waiting[index]
        while waiting and (wait or waiting[0].done()):
            # `exception` waits, and gives what the logger raised without raising it here.
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
