"""Several processes of one command: how they connect, and checks that all have the same options."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax

from smd_jax.commands.arguments import Common, LaunchArgs
from smd_jax.commands.errors import UserError
from smd_jax.devices import processes
from smd_jax.devices.processes import OtherProcessError
from smd_jax.runs.settings import to_jsonable
from smd_jax.train.evaluation import Evaluator
from smd_jax.train.loop_config import LoopConfig

AUTO = "auto"


def join(launch: LaunchArgs) -> None:
    """Connects the processes that the flags describe. Must be called before JAX looks for devices.

    Raises:
      UserError: flags that exclude each other, or no coordinator.
    """
    given = (launch.coordinator, launch.num_processes, launch.process_id)
    if all(x is None for x in given):
        return
    automatic = launch.coordinator == AUTO
    if automatic and (launch.num_processes is not None or launch.process_id is not None):
        raise UserError(
            f"expected --coordinator auto without other flags; got --num-processes "
            f"{launch.num_processes} and --process-id {launch.process_id}"
        )
    try:
        processes.join(None if automatic else launch.coordinator, launch.num_processes, launch.process_id)
    except (ValueError, RuntimeError) as error:
        raise UserError(str(error)) from error


def check_same_command(algorithm: str, args: Common) -> None:
    """Refuses processes with different options, versions or numbers of devices, before any collective.

    Raises:
      UserError: names every difference.
    """
    if jax.process_count() == 1:
        return
    with together():
        processes.check_same(
            {
                "algorithm": algorithm,
                "arguments": to_jsonable(replace(args, launch=LaunchArgs()), "arguments"),
                "devices of a process": jax.local_device_count(),
            }
        )


def check_same_plan(config: LoopConfig, evaluator: Evaluator | None) -> None:
    """Refuses processes that derived different sizes from the same flags, for example from less memory.

    Args:
      evaluator: evaluates during the run; None: no evaluation.

    Raises:
      UserError: names every difference.
    """
    if jax.process_count() == 1:
        return
    with together():
        # These give the number of batches, and processes wait for each other in every batch.
        evaluates = None if evaluator is None else to_jsonable(evaluator.config, "evaluator")
        held_out = 0 if evaluator is None else len(evaluator.task)
        processes.check_same(
            {"loop": to_jsonable(config, "loop"), "evaluator": evaluates, "held-out prompts": held_out}
        )


def check_shared(file: Path) -> None:
    """Refuses an output directory that the processes do not share.

    Args:
      file: a file that the first process has just written.

    Raises:
      UserError: this process does not see the file.
    """
    with together(), processes.all_or_none():
        if not file.is_file():
            raise UserError(
                f"expected --output-dir on a file system that all processes share; got no {file} in process "
                f"{jax.process_index()}, which process 0 has written"
            )


@contextmanager
def together() -> Iterator[None]:
    """Turns the failure of another process into UserError."""
    try:
        yield
    except OtherProcessError as error:
        raise UserError(str(error)) from error
