"""A run of experiments/faults.py in separate processes, which the tests kill.

    python experiments/fault_runs.py DIRECTORY ROLLOUTS
            [--coordinator HOST:PORT --index 1]     the second of two processes
            [--ahead]                               a rollout ahead
            [--mesh 2 2 2]                          on eight fake devices

Starts or resumes the run of experiments/breaking/trained.py, with smd-train's exit status. Prints when a rollout or a
save begins.
"""

from __future__ import annotations

import dataclasses
import math
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import tyro

from breaking.left import start
from breaking.trained import AHEAD, CONFIG, RealLoop, real_loop, real_state
from smd_jax.commands.compilation_cache import cache_programs
from smd_jax.devices import processes
from smd_jax.learner.state import TrainState
from smd_jax.runs import run
from smd_jax.runs.checkpoint.writing import Writer
from smd_jax.runs.stop import RunStoppedError


class Saying(RealLoop):
    """Prints when a rollout begins; the test waits for this line."""

    def step(
        self, state: TrainState, follows: Callable[[], bool] = lambda: True
    ) -> tuple[TrainState, dict[str, float]]:
        print(f"rollout {int(state.step) // self.config.steps_per_rollout}", flush=True)
        return super().step(state, follows)


class SayingWriter(Writer):
    """Prints when a save begins."""

    def save(self, step: int, state: Any, **what: Any) -> None:
        print(f"saving {step}", flush=True)
        super().save(step, state, **what)


@dataclass(frozen=True)
class Args:
    """One process of a run."""

    directory: tyro.conf.Positional[Path]
    rollouts: tyro.conf.Positional[int]
    coordinator: str | None = None  # of two processes
    index: int = 0  # of this one
    ahead: bool = False  # samples the next rollout during the update
    mesh: tuple[int, int, int] | None = None  # data, fsdp and tensor, of fake devices; None: a device of every process


def main(args: Args) -> None:
    cache_programs()
    config = AHEAD if args.ahead else CONFIG
    if args.mesh is not None:
        jax.config.update("jax_num_cpu_devices", math.prod(args.mesh))
        # Rows lie on data and fsdp, four devices at most.
        config = replace(config, prefill_rows=4)
    if args.coordinator is not None:
        processes.join(args.coordinator, 2, args.index)
    loop = real_loop(config, args.mesh)
    loop = Saying(**{field.name: getattr(loop, field.name) for field in dataclasses.fields(loop)})
    try:
        # Refused where `train` takes it from elsewhere: a process that says nothing is never killed.
        with mock.patch.object(run, "Writer", SayingWriter):
            start(loop, real_state(config), args.directory, args.rollouts)
    except RunStoppedError as stopped:
        print(stopped, flush=True)
        raise SystemExit(stopped.exit_code) from stopped
    print("done", flush=True)


if __name__ == "__main__":
    # A script in the background starts its processes with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(tyro.cli(Args))
