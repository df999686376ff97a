"""A loop whose step only adds numbers, for tests of the code around it: it compiles and samples nothing.

As a program it waits in each step, so that a test can send it a signal in the middle of one:

    python -m tests.plain_loop DIRECTORY STEPS      prints "rollout N" at the start of a step, waits for a line of
                                                    standard input, and prints "end of rollout N"
"""

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from smd_jax.eviction.policies import Dense
from smd_jax.learner.mismatch_guard import MismatchGuard
from smd_jax.learner.state import TrainState
from smd_jax.runs.run import train
from smd_jax.runs.run_config import RunConfig
from smd_jax.runs.stop import RunStoppedError
from smd_jax.sampler.config import RolloutConfig
from smd_jax.train.loop import Loop
from smd_jax.train.loop_config import LoopConfig

CONFIG = LoopConfig(
    prompts_per_step=1,
    group_size=2,
    prompt_width=4,
    policy=Dense(),
    rollout=RolloutConfig(max_new_tokens=4, budget=4, buffer=4),
    minibatches=1,
)


@dataclass(frozen=True)
class PlainLoop(Loop):
    """Adds the number of the rollout to the parameters.

    Attributes:
      metrics: returns the metrics of a rollout, by its number from 0.
      begins: called with that number when a rollout starts.
    """

    model: Any = None
    task: Any = None
    tokenizer: Any = None
    optimizer: Any = None
    config: LoopConfig = CONFIG
    guard: MismatchGuard | None = field(default=None, kw_only=True)  # there is no model
    metrics: Callable[[int], dict[str, float]] = field(default=lambda number: {"reward": float(number)}, kw_only=True)
    begins: Callable[[int], None] = field(default=lambda number: None, kw_only=True)

    def __post_init__(self) -> None:
        """Skips the checks of Loop: there is no model and no tokenizer."""

    def step(
        self, state: TrainState, follows: Callable[[], bool] = lambda: True
    ) -> tuple[TrainState, dict[str, float]]:
        number = int(state.step)
        self.begins(number)
        params = {"w": state.params["w"] + number}
        return state.replace(step=state.step + 1, params=params), dict(self.metrics(number))


def new_state(size: int = 4) -> TrainState:
    """A state of random numbers, which do not compress on disk."""
    weights = jnp.asarray(np.random.default_rng(0).normal(size=size), jnp.float32)
    return TrainState(jnp.zeros((), jnp.int32), {"w": weights}, (), None, jax.random.key(0))


def main(directory: str, steps: str) -> None:
    def begins(number: int) -> None:
        print(f"rollout {number}", flush=True)
        sys.stdin.readline()
        print(f"end of rollout {number}", flush=True)

    loop = PlainLoop(begins=begins)
    try:
        train(loop, new_state(), RunConfig(steps=int(steps)), Path(directory), config=CONFIG, resume=True)
    except RunStoppedError as error:
        print(error, flush=True)
        raise SystemExit(error.exit_code) from error


if __name__ == "__main__":
    # Tests may run in the background, where a shell ignores SIGINT, or under nohup, which ignores SIGHUP.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    main(*sys.argv[1:])
