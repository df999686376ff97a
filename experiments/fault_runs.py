"""One process of a run that experiments/faults.py and the tests kill.

    python experiments/fault_runs.py DIRECTORY ROLLOUTS
            [--coordinator HOST:PORT --index 1]     the second of two processes
            [--ahead]                               samples one rollout ahead
            [--mesh 2 2 2]                          on eight fake devices

Starts or resumes the run of experiments/breaking/trained.py and exits with smd-train's status. Prints a line when a
rollout or a save begins.
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

from breaking.run_result import start
from breaking.trained import AHEAD, CONFIG, RealLoop, real_loop, real_state
from smd_jax.commands.compilation_cache import cache_programs
from smd_jax.devices import processes
from smd_jax.learner.state import TrainState
from smd_jax.runs import run
from smd_jax.runs.checkpoint.writing import Writer
from smd_jax.runs.stop import RunStoppedError


class PrintingLoop(RealLoop):
    """Prints when a rollout begins; the test waits for this line."""

    def step(
        self, state: TrainState, follows: Callable[[], bool] = lambda: True
    ) -> tuple[TrainState, dict[str, float]]:
        print(f"rollout {int(state.step) // self.config.steps_per_rollout}", flush=True)
        return super().step(state, follows)


class PrintingWriter(Writer):
    """Prints when a save begins."""

    def save(self, step: int, state: Any, **options: Any) -> None:
        print(f"saving {step}", flush=True)
        super().save(step, state, **options)


@dataclass(frozen=True)
class Args:
    """One process of a run."""

    directory: tyro.conf.Positional[Path]
    rollouts: tyro.conf.Positional[int]
    coordinator: str | None = None  # host:port, for a run of two processes
    index: int = 0  # of this process, 0 or 1
    ahead: bool = False  # samples the next rollout during the update
    mesh: tuple[int, int, int] | None = None  # data, fsdp, tensor; None: one device per process


def main(args: Args) -> None:
    cache_programs()
    config = AHEAD if args.ahead else CONFIG
    if args.mesh is not None:
        jax.config.update("jax_num_cpu_devices", math.prod(args.mesh))
        # Rows are split over data and fsdp, at most four devices.
        config = replace(config, prefill_rows=4)
    if args.coordinator is not None:
        processes.join(args.coordinator, 2, args.index)
    loop = real_loop(config, args.mesh)
    loop = PrintingLoop(**{field.name: getattr(loop, field.name) for field in dataclasses.fields(loop)})
    try:
        # Raises if `run` no longer imports Writer: without its lines the tests would kill no process.
        with mock.patch.object(run, "Writer", PrintingWriter):
            start(loop, real_state(config), args.directory, args.rollouts)
    except RunStoppedError as stopped:
        print(stopped, flush=True)
        raise SystemExit(stopped.exit_code) from stopped
    print("done", flush=True)


if __name__ == "__main__":
    # A shell ignores SIGINT in background jobs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(tyro.cli(Args))
