"""Files of a run of arithmetic that are damaged, torn or without room, and directories where no run may continue.

A refusal says what was expected and what came, and leaves the directory as it was.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax.numpy as jnp
import orbax.checkpoint as ocp

from breaking.plain import PlainLoop, plain_result, plain_state, run_captured, unbroken_result
from breaking.run_result import Fault, Outcome, refusal, rollouts_done, same
from smd_jax.runs.checkpoint import OtherConfigError, OtherFormatError, OtherStateError
from smd_jax.runs.checkpoint.files import FORMAT
from smd_jax.runs.run_folder import CHECKPOINTS


def damaged(damage: Callable[[Path, random.Random], None], lost: int, says: str, times: int) -> Fault:
    """`damage` changes a run's files after six rollouts; the run resumes from the others."""

    def fault(folder: Path, rng: random.Random) -> Iterator[Outcome]:
        whole = unbroken_result(folder)
        for number in range(times):
            directory = folder / str(number)
            run_captured(directory, 6)
            damage(directory, rng)
            said = run_captured(directory)
            left = plain_result(directory)
            yield Outcome(says in said and same(left, whole) and left.unreadable == 0, lost, left.unreadable)

    return fault


def some_file(directory: Path, rng: random.Random, step: int = 6) -> Path:
    """One of the files of a checkpoint whose content counts."""
    folder = directory / CHECKPOINTS / str(step)
    return rng.choice(sorted(x for item in ("state", "meta") for x in (folder / item).rglob("*") if x.is_file()))


def cut_off(directory: Path, rng: random.Random) -> None:
    file = some_file(directory, rng)
    file.write_bytes(file.read_bytes()[: rng.randrange(file.stat().st_size)])


def flip_a_bit(directory: Path, rng: random.Random) -> None:
    file = some_file(directory, rng)
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def delete_a_file(directory: Path, rng: random.Random) -> None:
    some_file(directory, rng).unlink()


def empty(directory: Path, rng: random.Random) -> None:
    """As left by a process killed during a deletion: an empty folder, or only orbax's own file."""
    left = rng.choice([(), ("_CHECKPOINT_METADATA",)])
    for path in (directory / CHECKPOINTS / "6").iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in left:
            path.unlink()


def cut_off_without_checksums(directory: Path, rng: random.Random) -> None:
    """As after a power cut: the newest files never came to the disk."""
    folder = directory / CHECKPOINTS / "6"
    (folder / "checksums.json").unlink()
    largest = max((x for x in (folder / "state").rglob("*") if x.is_file()), key=lambda x: x.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])


def leave_half_a_save(directory: Path, rng: random.Random) -> None:
    folder = directory / CHECKPOINTS
    shutil.copytree(folder / "6", folder / "8.orbax-checkpoint-tmp")
    for file in (folder / "8.orbax-checkpoint-tmp").rglob("*"):
        if file.is_file() and rng.random() < 0.5:
            file.unlink()


def tear_the_last_row(directory: Path, rng: random.Random) -> None:
    with (directory / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 6, "reward": 6.0, "metr')


def both(folder: Path, rng: random.Random) -> None:
    """Damages one of the two checkpoints, so that the other can be resumed, and leaves half a save."""
    flip_a_bit(folder, rng)
    leave_half_a_save(folder, rng)


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size` bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full_disk(size: int, says: str) -> Fault:
    """The disk fills up in the middle of the run, has room again, and the run goes on."""

    def fault(folder: Path, rng: random.Random) -> Iterator[Outcome]:
        whole = unbroken_result(folder)
        for number in range(2):
            directory = folder / str(number)
            run_captured(directory, 4)
            with files_end_at(size + rng.randrange(100)):
                message = refusal(lambda directory=directory: run_captured(directory), OSError)
            left = plain_result(directory)
            lost = rollouts_done(directory) - max(left.steps)
            run_captured(directory)
            fine = says in message and "free on the disk" in message and left.steps[-1] == 4
            yield Outcome(fine and same(plain_result(directory), whole), lost, left.unreadable)

    return fault


def refused(kind: type[Exception], says: tuple[str, ...], *attempts: Callable[[Path], Any]) -> Fault:
    """Attempts at a directory with a run that must all be refused, and must leave it as it was."""

    def fault(folder: Path, rng: random.Random) -> Iterator[Outcome]:
        whole = unbroken_result(folder)
        for number, attempt in enumerate(attempts):
            directory = folder / str(number)
            run_captured(directory, 4)
            before = files_of(directory)
            message = refusal(lambda directory=directory, attempt=attempt: attempt(directory), kind)
            unchanged = files_of(directory) == before
            run_captured(directory)
            left = plain_result(directory)
            fine = all(word in message for word in says) and unchanged and same(left, whole)
            yield Outcome(fine, 0, left.unreadable)

    return fault


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def with_state(size: int) -> Callable[[Path], Any]:
    return lambda directory: run_captured(directory, state=plain_state(size))


def with_config(**changed: Any) -> Callable[[Path], Any]:
    loop = PlainLoop(config=replace(PlainLoop().config, **changed))
    return lambda directory: run_captured(directory, loop=loop)


def somewhere_else(where: Callable[[Path], Path]) -> Callable[[Path], Any]:
    return lambda directory: run_captured(where(directory), resume=False)


def without_room(directory: Path) -> None:
    usage = shutil.disk_usage(directory)._replace(free=1000)
    with mock.patch("shutil.disk_usage", lambda path: usage):
        run_captured(directory)


def foreign(write: Callable[[Path], None]) -> Fault:
    """A directory whose checkpoints are not ours."""

    def fault(folder: Path, rng: random.Random) -> Iterator[Outcome]:
        directory = folder / "run"
        run_captured(directory, 4)
        write(directory / CHECKPOINTS)
        before = files_of(directory)
        message = refusal(lambda: run_captured(directory), OtherFormatError)
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


KINDS: dict[str, Fault] = {
    "newest checkpoint cut off": damaged(cut_off, 2, "continues from step 4", 3),
    "bit flipped in the newest checkpoint": damaged(flip_a_bit, 2, "continues from step 4", 3),
    "file missing in the newest checkpoint": damaged(delete_a_file, 2, "continues from step 4", 3),
    "newest checkpoint emptied": damaged(empty, 2, "continues from step 4", 4),
    "newest checkpoint cut off before its checksums": damaged(cut_off_without_checksums, 2, "continues from step 4", 1),
    "half a save left behind": damaged(leave_half_a_save, 0, "", 2),
    "half a save beside a damaged checkpoint": damaged(both, 2, "continues from step 4", 2),
    "last row of the metrics torn": damaged(tear_the_last_row, 0, "", 1),
    "disk full in a save": full_disk(20_000, "checkpoint 6"),
    "disk full while metrics are written": full_disk(3_000, "metrics.jsonl"),
    "no room on the disk": refused(OSError, ("expected", "got 1000 B"), without_room),
    "directory that cannot be written": refused(
        OSError,
        ("expected a directory", "got"),
        somewhere_else(lambda directory: directory / "metrics.jsonl" / "run"),
        somewhere_else(lambda directory: Path("/proc/run")),
    ),
    "a new run in the directory of another": refused(
        FileExistsError, ("expected no earlier run", "got one"), somewhere_else(lambda directory: directory)
    ),
    "checkpoint of another model": refused(
        OtherStateError,
        ('expected "float32[50000]", got "float32[', "params/w"),
        with_state(10),
        with_state(60_000),
    ),
    "resume directory of another run": refused(
        OtherConfigError, ("expected", "got"), with_config(seed=1), with_config(group_size=4)
    ),
    "checkpoint of another program": foreign(of_another_program),
    "checkpoint of a later format": foreign(of_a_later_format),
}
