"""A run of experiments/faults.py in processes of its own, for those who kill them.

    python experiments/fault_runs.py DIRECTORY ROLLOUTS                         one process
    python experiments/fault_runs.py DIRECTORY ROLLOUTS COORDINATOR INDEX       of two

Begins the run of experiments/breaking/trained.py, or goes on with it; exit status as smd-train's. Says when a rollout
begins and when a save does.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from breaking.left import start
from breaking.trained import RealLoop, real_loop, real_state
from smd_jax import processes
from smd_jax.commands.compilation_cache import keep_programs
from smd_jax.learner.state import TrainState
from smd_jax.train import checkpoint
from smd_jax.train.stop import RunStoppedError


class Saying(RealLoop):
    """Prints when a rollout begins: whoever breaks it listens."""

    def step(
        self, state: TrainState, follows: Callable[[], bool] = lambda: True
    ) -> tuple[TrainState, dict[str, float]]:
        print(f"rollout {int(state.step) // self.config.steps_per_rollout}", flush=True)
        return super().step(state, follows)


class SayingWriter(checkpoint.Writer):
    """Prints when a save begins."""

    def save(self, step: int, state: Any, **what: Any) -> None:
        print(f"saving {step}", flush=True)
        super().save(step, state, **what)


def main(directory: str, rollouts: str, coordinator: str | None = None, index: str = "0") -> None:
    keep_programs()
    if coordinator is not None:
        processes.join(coordinator, 2, int(index))
    loop = real_loop()
    loop = Saying(**{field.name: getattr(loop, field.name) for field in dataclasses.fields(loop)})
    checkpoint.Writer = SayingWriter
    try:
        start(loop, real_state(), Path(directory), int(rollouts))
    except RunStoppedError as stopped:
        print(stopped, flush=True)
        raise SystemExit(stopped.exit_code) from stopped
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
