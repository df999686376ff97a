"""What must not go on: it is refused with what was expected and what came, and its directory is left as it was."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax.numpy as jnp
import orbax.checkpoint as ocp

from breaking.left import same
from breaking.outcome import Fault, Outcome, refusal
from breaking.plain import PlainLoop, plain_left, plain_state, plain_whole, quietly
from smd_jax.runs.checkpoint import OtherFormatError
from smd_jax.runs.checkpoint.files import FORMAT
from smd_jax.runs.run_folder import CHECKPOINTS


def refused(kind: type[Exception], says: tuple[str, ...], *attempts: Callable[[Path], Any]) -> Fault:
    """Attempts at a directory with a run that must all be refused, and must leave it as it was."""

    def fault(folder: Path, rng: random.Random) -> Iterator[Outcome]:
        whole = plain_whole(folder)
        for number, attempt in enumerate(attempts):
            directory = folder / str(number)
            quietly(directory, 4)
            before = files_of(directory)
            message = refusal(lambda directory=directory, attempt=attempt: attempt(directory), kind)
            unchanged = files_of(directory) == before
            quietly(directory)
            left = plain_left(directory)
            fine = all(word in message for word in says) and unchanged and same(left, whole)
            yield Outcome(fine, 0, left.unreadable)

    return fault


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def with_state(size: int) -> Callable[[Path], Any]:
    return lambda directory: quietly(directory, state=plain_state(size))


def with_config(**changed: Any) -> Callable[[Path], Any]:
    loop = PlainLoop(config=replace(PlainLoop().config, **changed))
    return lambda directory: quietly(directory, loop=loop)


def somewhere_else(where: Callable[[Path], Path]) -> Callable[[Path], Any]:
    return lambda directory: quietly(where(directory), resume=False)


def without_room(directory: Path) -> None:
    usage = shutil.disk_usage(directory)._replace(free=1000)
    with mock.patch("shutil.disk_usage", lambda path: usage):
        quietly(directory)


def foreign(write: Callable[[Path], None]) -> Fault:
    """A directory whose checkpoints are not ours."""

    def fault(folder: Path, rng: random.Random) -> Iterator[Outcome]:
        directory = folder / "run"
        quietly(directory, 4)
        write(directory / CHECKPOINTS)
        before = files_of(directory)
        message = refusal(lambda: quietly(directory), OtherFormatError)
        yield Outcome("expected a checkpoint of" in message and "got" in message and files_of(directory) == before)

    return fault


def of_another_program(folder: Path) -> None:
    shutil.rmtree(folder)
    with ocp.CheckpointManager(folder) as manager:
        manager.save(4, args=ocp.args.StandardSave({"w": jnp.zeros(3)}))


def of_a_later_format(folder: Path) -> None:
    meta = folder / "4" / "meta" / "metadata"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"format": FORMAT + 1}))
    (folder / "4" / "checksums.json").unlink()
