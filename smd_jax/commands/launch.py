"""Connects several processes of one command, and checks that all have the same options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax

from smd_jax.commands.arguments import Common, LaunchArgs
from smd_jax.commands.errors import UserError
from smd_jax.devices import processes
from smd_jax.runs.settings import to_jsonable
from smd_jax.train.evaluation import Evaluator
from smd_jax.train.loop_config import LoopConfig

AUTO = "auto"


def join(launch: LaunchArgs) -> None:
    """Connects the processes that the flags describe. Must be called before JAX looks for devices. Raises UserError for
    flags that exclude each other, or no coordinator."""
    if launch == LaunchArgs():
        return
    coordinator = None if launch.coordinator == AUTO else launch.coordinator
    if launch.coordinator == AUTO and launch != LaunchArgs(coordinator=AUTO):
        raise UserError(f"expected --coordinator auto without --num-processes and --process-id; got {launch}")
    try:
        processes.join(coordinator, launch.num_processes, launch.process_id)
    except (ValueError, RuntimeError) as error:
        raise UserError(str(error)) from error


def check_same_command(algorithm: str, args: Common) -> None:
    """Raises OtherProcessError for other options, versions or numbers of devices, before any collective."""
    if jax.process_count() > 1:
        options = to_jsonable(replace(args, launch=LaunchArgs()), "arguments")
        devices = jax.local_device_count()
        processes.check_same({"algorithm": algorithm, "arguments": options, "devices of a process": devices})


def check_same_plan(config: LoopConfig, evaluator: Evaluator | None) -> None:
    """Raises OtherProcessError if processes derived different sizes from the same flags, for example from less memory.

    The sizes give the number of batches, and processes wait for each other in every batch.
    """
    if jax.process_count() > 1:
        evaluates = None if evaluator is None else to_jsonable(evaluator.config, "evaluator")
        held_out = 0 if evaluator is None else len(evaluator.task)
        processes.check_same(
            {"loop": to_jsonable(config, "loop"), "evaluator": evaluates, "held-out prompts": held_out}
        )


def check_shared(file: Path) -> None:
    """Raises UserError if this process does not see a file that the first process has just written."""
    with processes.all_or_none():
        if not file.is_file():
            raise UserError(
                f"expected --output-dir on a file system that all processes share; got no {file} in process "
                f"{jax.process_index()}, which process 0 has written"
            )
