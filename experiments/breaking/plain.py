"""A run that only adds numbers, for faults of disks and files, which need no sampling."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from breaking.run_result import RunResult, result_in, start
from smd_jax.eviction.policies import Dense
from smd_jax.learner.mismatch_guard import MismatchGuard
from smd_jax.learner.state import TrainState
from smd_jax.runs.settings import split_settings
from smd_jax.sampler.config import RolloutConfig
from smd_jax.train.loop import Loop
from smd_jax.train.loop_config import LoopConfig

PLAIN_ROLLOUTS = 8
PLAIN = LoopConfig(
    prompts_per_step=1,
    group_size=2,
    prompt_width=4,
    policy=Dense(),
    rollout=RolloutConfig(max_new_tokens=4, budget=4, buffer=4),
)


@dataclass(frozen=True)
class PlainLoop(Loop):
    """Adds the number of the rollout to the parameters."""

    model: Any = None
    task: Any = None
    tokenizer: Any = None
    optimizer: Any = None
    config: LoopConfig = PLAIN
    guard: MismatchGuard | None = field(default=None, kw_only=True)  # there is no model

    def __post_init__(self) -> None:
        """Skips the checks of Loop: there is no model and no tokenizer."""

    def step(
        self, state: TrainState, follows: Callable[[], bool] = lambda: True
    ) -> tuple[TrainState, dict[str, float]]:
        number = int(state.step)
        metrics = {"reward": float(number)} | {f"metric {i}": number / 3 for i in range(20)}
        return state.replace(step=state.step + 1, params={"w": state.params["w"] + number}), metrics


def plain_state(size: int = 50_000) -> TrainState:
    """A state of random numbers, which do not compress on disk."""
    weights = jnp.asarray(np.random.default_rng(0).normal(size=size), jnp.float32)
    return TrainState(jnp.zeros((), jnp.int32), {"w": weights}, (), None, jax.random.key(0))


def plain_result(directory: Path) -> RunResult:
    return result_in(directory, plain_state(), split_settings(PlainLoop().config)[0])


def run_captured(directory: Path, steps: int = PLAIN_ROLLOUTS, **options: Any) -> str:
    """Runs the loop and returns what it prints."""
    said = StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        start(options.pop("loop", PlainLoop()), options.pop("state", plain_state()), directory, steps, **options)
    return said.getvalue()


def unbroken_result(folder: Path) -> RunResult:
    """Runs without faults and returns the result, which broken runs must equal."""
    directory = folder / "whole"
    run_captured(directory)
    return plain_result(directory)
