"""The outcome of an injected fault, and what a run leaves in its directory."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from smd_jax.learner.state import TrainState
from smd_jax.monitor.metrics_log import read_metrics
from smd_jax.runs import checkpoint
from smd_jax.runs.frozen_base import without_base
from smd_jax.runs.run import train
from smd_jax.runs.run_config import RunConfig
from smd_jax.runs.run_folder import CHECKPOINTS
from smd_jax.runs.settings import split_settings
from smd_jax.train.loop import Loop

EVERY = 2  # rollouts between two checkpoints
KEEP = 2


class Outcome(NamedTuple):
    """The outcome of one fault."""

    survived: bool  # the run ended like an unbroken one, or was refused as expected
    lost: int = 0  # finished rollouts that must be repeated
    unreadable: int = 0  # checkpoints that do not load after the fault


# Injects faults of one kind into runs in the given folder.
Fault = Callable[[Path, random.Random], Iterator[Outcome]]


def refusal(action: Callable[[], Any], kind: type[Exception]) -> str:
    """Runs `action` and returns the message of the `kind` that it raises; empty if it raises nothing."""
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            action()
    except kind as error:
        return str(error)
    return ""


def start(
    loop: Loop, state: TrainState, directory: Path, steps: int, resume: bool = True, **options: Any
) -> TrainState:
    """`train` with the settings that all runs here share."""
    run = RunConfig(steps=steps, checkpoint_every=EVERY, keep=KEEP)
    config = options.pop("config", split_settings(loop.config)[0])
    return train(loop, state, run, directory, config=config, resume=resume, **options)


@dataclass(frozen=True)
class RunResult:
    """What a run left in its directory."""

    rows: list[dict[str, Any]]  # metrics, but for times and memory
    newest: list[bytes]  # state of the newest checkpoint
    steps: list[int]  # of all checkpoints
    unreadable: int  # checkpoints that do not load


def result_in(directory: Path, like: TrainState, config: object) -> RunResult:
    """Reads everything that a run has left; each checkpoint must load by itself."""
    folder = directory / CHECKPOINTS
    steps = checkpoint.all_steps(folder)
    newest, unreadable = list[bytes](), 0
    for step in steps:
        try:
            state = checkpoint.restore(folder, without_base(like), config=config, step=step).state
            newest = [as_bytes(leaf) for leaf in jax.tree.leaves(state)]
        except checkpoint.DamagedCheckpointError:
            newest = []
            unreadable += 1
    metrics = directory / "metrics.jsonl"
    rows = read_metrics(metrics) if metrics.exists() else []
    return RunResult([{k: v for k, v in row.items() if is_repeatable(k)} for row in rows], newest, steps, unreadable)


def is_repeatable(metric: str) -> bool:
    """Whether a resumed run repeats this metric bitwise; times and memory differ."""
    return not (metric.startswith(("step_time", "time/", "memory/")) or metric.endswith("/tokens_per_second"))


def as_bytes(leaf: jax.Array) -> bytes:
    """Of an array, random keys included."""
    data = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return np.asarray(data).tobytes()


def same(left: RunResult, right: RunResult) -> bool:
    """Whether two runs ended alike, to the last bit."""
    return left.rows == right.rows and left.newest == right.newest and bool(left.newest)


def rollouts_done(directory: Path) -> int:
    """By the rows that are whole."""
    metrics = directory / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0
