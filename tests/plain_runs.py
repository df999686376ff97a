"""Helpers for runs of the plain loop: starts, evaluations, loggers, kills, and reading their files."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from smd_jax.monitor.metrics_log import read_metrics
from smd_jax.runs import checkpoint
from smd_jax.runs.run import train
from smd_jax.runs.run_config import RunConfig
from tests.documented_metrics import MACHINE_METRICS
from tests.plain_loop import CONFIG, PlainLoop, new_state

DENSE = "eval/dense/reward"


def start(directory: Path, steps: int, loop: PlainLoop | None = None, state: Any = None, **options: Any):
    """`train` on the plain loop; `options` are RunConfig's and train's."""
    names = ("checkpoint_every", "evaluate_every", "keep", "objective")
    run = RunConfig(steps=steps, **{name: options.pop(name) for name in names if name in options})
    state = new_state() if state is None else state
    return train(loop or PlainLoop(), state, run, directory, **{"config": CONFIG, **options})


def never(number: int) -> None:
    pytest.fail(f"rollout {number} begins")


def rows(directory: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Logged metrics, without those that depend on the machine."""
    logged = read_metrics(directory / name)
    return [{name: value for name, value in row.items() if name not in MACHINE_METRICS} for row in logged]


def saved(directory: Path) -> list[int]:
    return checkpoint.all_steps(directory / "checkpoints")


class Evaluations:
    """An evaluation that returns given values by step, and records its calls."""

    def __init__(self, values: dict[int, float]):
        self.values = values
        self.asked = list[int]()

    def __call__(self, state: Any) -> dict[str, float]:
        self.asked.append(int(state.step))
        return {DENSE: self.values[int(state.step)]}


class Recorder:
    """A logger that keeps its rows, and raises at step `fails_at` and after `close`."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = 0
        self.fails_at = fails_at

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.closed or step == self.fails_at:
            raise RuntimeError("no network\x1b[2J")
        self.rows.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed += 1


class DiedError(BaseException):
    """Ends a run between two rollouts as a kill does: nothing is saved."""


def dies_at(last: int, error: BaseException | None = None) -> Callable[[int], None]:
    """Raises `error`, by default DiedError, when rollout number `last` begins."""

    def begins(number: int) -> None:
        if number == last:
            raise error or DiedError

    return begins


CURVE = {0: 0.4, 2: 0.6, 4: 0.5, 6: 0.6, 7: 0.1, 8: 0.7, 9: 0.2}
