"""Files that are damaged, torn, or have no room to grow, under a run of arithmetic."""

from __future__ import annotations

import random
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from breaking.left import rollouts_done, same
from breaking.outcome import Fault, Outcome, refusal
from breaking.plain import plain_left, plain_whole, quietly
from smd_jax.runs.run_folder import CHECKPOINTS


def damaged(damage: Callable[[Path, random.Random], None], lost: int, says: str, times: int) -> Fault:
    """Something happens to the files of a run after six rollouts; it goes on with what is left."""

    def fault(folder: Path, rng: random.Random) -> Iterator[Outcome]:
        whole = plain_whole(folder)
        for number in range(times):
            directory = folder / str(number)
            quietly(directory, 6)
            damage(directory, rng)
            said = quietly(directory)
            left = plain_left(directory)
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
    """As a process leaves it that is killed while it deletes: nothing is left, or only orbax's own file."""
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
    """Of the two checkpoints: only one is damaged, so that there is one to go on from; and half a save beside them."""
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
        whole = plain_whole(folder)
        for number in range(2):
            directory = folder / str(number)
            quietly(directory, 4)
            with files_end_at(size + rng.randrange(100)):
                message = refusal(lambda directory=directory: quietly(directory), OSError)
            left = plain_left(directory)
            lost = rollouts_done(directory) - max(left.steps)
            quietly(directory)
            fine = says in message and "free on the disk" in message and left.steps[-1] == 4
            yield Outcome(fine and same(plain_left(directory), whole), lost, left.unreadable)

    return fault
