"""What can go wrong with a run of days, done to it on purpose, and what is left.

Question   Does a run survive what borrowed machines do to it? `survived`: a run that was broken and resumed ends with
           every metric and every byte of its state as the run that nobody touched; or, where it must not go on, it is
           refused with a message that names what was expected and what came, and its directory is left as it was.
Command    python experiments/faults.py --out experiments/results/faults.json
           python experiments/faults.py --only 'SIGTERM in a rollout'                  one kind, nothing is written
Cost       about ten minutes on two idle CPU cores; most of it starts processes that are killed
Result     experiments/results/faults.json, a row for each kind of fault.

Runs       experiments/fault_runs.py: GRPO with the engine, adapters, minibatches and shuffled rows for what hits a
           process; arithmetic for what hits a disk. A checkpoint every two rollouts, two are kept.
Rows       `injected`, `survived`: faults of this kind. `max_steps_lost`: the most rollouts, done before a fault, that
           had to be taken again, the one under way not among them. `unreadable_checkpoints`: those that did not load
           after a fault, but for what the fault itself damaged.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tyro

from fault_runs import (
    EVERY,
    Left,
    PlainLoop,
    left_by,
    plain_state,
    real_loop,
    real_state,
    start,
)
from provenance import provenance
from smd_jax.commands.compilation_cache import keep_programs
from smd_jax.masks import ShadowMask
from smd_jax.monitor.progress import summary_table
from smd_jax.train import checkpoint
from smd_jax.train.refused import RefusedRolloutError
from smd_jax.train.run import CHECKPOINTS
from smd_jax.train.samples import Samples
from smd_jax.train.settings import split_settings
from study.files import read_rows, write_rows

SCRIPT = Path(__file__).with_name("fault_runs.py")
ROLLOUTS = 20  # of the run whose process is killed
PLAIN_ROLLOUTS = 8


@dataclass(frozen=True)
class Args:
    """Breaks runs."""

    out: Path | None = None  # rows as JSON; those of other kinds stay
    only: tuple[str, ...] = ()  # kinds of faults; all by default
    seed: int = 0  # of the moments at which processes are killed


class Outcome(NamedTuple):
    """Of one fault. Attributes: as the columns of the rows, of which `lost` is the steps lost."""

    survived: bool
    lost: int = 0
    unreadable: int = 0


Fault = Callable[[Path, random.Random], Iterator[Outcome]]


# --- a process that is told to stop, or is not asked


@contextmanager
def process(directory: Path, rollouts: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(SCRIPT), str(directory), str(rollouts)]
    with (directory.parent / "log").open("a") as log:
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert running.stdout is not None
        try:
            yield running
        finally:
            running.kill()
            running.wait()
            running.stdout.close()


def lines_until(running: subprocess.Popen[str], begin: str, count: int = 1) -> list[str]:
    """Its output up to the `count`-th line that begins so, or to its end."""
    assert running.stdout is not None
    seen = list[str]()
    for line in running.stdout:
        seen.append(line.strip())
        count -= line.startswith(begin)
        if count == 0:
            break
    return seen


def rollouts_done(directory: Path) -> int:
    """By the rows that are whole."""
    metrics = directory / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def same(left: Left, right: Left) -> bool:
    return left.rows == right.rows and left.newest == right.newest and bool(left.newest)


def real_left(directory: Path) -> Left:
    return left_by(directory, real_state(), split_settings(real_loop().config)[0])


def killed(at: str, times: int) -> Fault:
    """kill -9 of a process after a line that begins with `at`, at a random moment; it is started again until the run is
    over, and so are new runs until there were `times` faults."""

    def fault(folder: Path, rng: random.Random) -> Iterator[Outcome]:
        whole = whole_run(folder)
        run, injected = 0, 0
        outcomes = list[Outcome]()
        while injected < times:
            run += 1
            directory = folder / f"run {run}"
            finished = False
            while not finished:
                with process(directory, ROLLOUTS) as running:
                    if injected < times:
                        seen = lines_until(running, at, rng.randint(1, 5))
                        # A save takes some hundredths of a second, a rollout some tenths.
                        time.sleep(rng.uniform(0, 0.05 if at == "saving" else 0.5))
                        finished = "done" in seen or running.poll() == 0
                        running.send_signal(signal.SIGKILL)
                    else:
                        finished = "done" in lines_until(running, "done")
                    running.wait()
                if finished:
                    break
                injected += 1
                left = real_left(directory)
                # What a process that resumes finds: everything behind the newest checkpoint is taken again.
                lost = rollouts_done(directory) - max(left.steps, default=0)
                outcomes.append(Outcome(lost <= EVERY and left.unreadable == 0, lost, left.unreadable))
            equal = same(real_left(directory), whole)
            yield from (outcome._replace(survived=outcome.survived and equal) for outcome in outcomes)
            outcomes.clear()

    return fault


def whole_run(folder: Path) -> Left:
    """What the run leaves that nobody touches; made once."""
    directory = folder.parent / "whole" / "run"
    if not directory.exists():
        directory.parent.mkdir()
        with process(directory, ROLLOUTS) as running:
            assert "done" in lines_until(running, "done")
            running.wait()
    return real_left(directory)


def told(*signals: signal.Signals) -> Fault:
    """A signal, or two, in the middle of a rollout; the run goes on afterwards."""

    def fault(folder: Path, rng: random.Random) -> Iterator[Outcome]:
        whole = whole_run(folder)
        directory = folder / "run"
        with process(directory, ROLLOUTS) as running:
            lines_until(running, "rollout", 4)
            for number in signals:
                time.sleep(rng.uniform(0, 0.05))
                running.send_signal(number)
            lines_until(running, "done")  # or to the end
            code = running.wait()
        left = real_left(directory)
        lost = rollouts_done(directory) - max(left.steps, default=0)
        with process(directory, ROLLOUTS) as running:
            lines_until(running, "done")
            running.wait()
        orderly = code == 128 + signals[-1] and left.unreadable == 0
        yield Outcome(orderly and same(real_left(directory), whole), lost, left.unreadable)

    return fault


# --- a disk


def plain_left(directory: Path) -> Left:
    return left_by(directory, plain_state(), split_settings(PlainLoop().config)[0])


def quietly(directory: Path, steps: int = PLAIN_ROLLOUTS, **options: Any) -> str:
    """The arithmetic run; what it prints."""
    said = StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        start(options.pop("loop", PlainLoop()), options.pop("state", plain_state()), directory, steps, **options)
    return said.getvalue()


def plain_whole(folder: Path) -> Left:
    directory = folder / "whole"
    quietly(directory)
    return plain_left(directory)


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


# --- what must be refused


def refusal(action: Callable[[], Any], kind: type[Exception]) -> str:
    """The message with which an action is refused; empty where it is not."""
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            action()
    except kind as error:
        return str(error)
    return ""


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
        message = refusal(lambda: quietly(directory), checkpoint.OtherFormatError)
        yield Outcome("expected a checkpoint of" in message and "got" in message and files_of(directory) == before)

    return fault


def of_another_program(folder: Path) -> None:
    shutil.rmtree(folder)
    with ocp.CheckpointManager(folder) as manager:
        manager.save(4, args=ocp.args.StandardSave({"w": jnp.zeros(3)}))


def of_a_later_format(folder: Path) -> None:
    meta = folder / "4" / "meta" / "metadata"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"format": checkpoint.FORMAT + 1}))
    (folder / "4" / "checksums.json").unlink()


# --- what happens inside of a step


def infinite_rewards(first: int, last: int) -> Callable[[int, Samples], Samples]:
    def tamper(index: int, samples: Samples) -> Samples:
        return samples._replace(rewards=samples.rewards + (np.inf if first <= index <= last else 0))

    return tamper


def a_head_sees(change: Callable[[np.ndarray], np.ndarray], layer: int, head: int) -> Callable[[int, Samples], Samples]:
    """From rollout 1 on, the recorded mask of one head is not what the sampler saw."""

    def tamper(index: int, samples: Samples) -> Samples:
        mask = samples.trajectory.mask
        if index == 0 or not isinstance(mask, ShadowMask):
            return samples
        evicted_at = np.array(mask.evicted_at)
        evicted_at[:, layer, head] = change(evicted_at[:, layer, head])
        changed = ShadowMask(jax.device_put(evicted_at, mask.evicted_at.sharding))
        return samples._replace(trajectory=samples.trajectory.replace(mask=changed))

    return tamper


def not_finite(folder: Path, rng: random.Random) -> Iterator[Outcome]:
    """Infinite rewards in one rollout: it is left out, and the run ends as if its update had not been."""
    for number in (1, 2):
        directory = folder / str(number)
        loop = replace(real_loop(), tamper=infinite_rewards(number, number))
        with redirect_stdout(said := StringIO()):
            state = start(loop, real_state(), directory, 4)
        finite = all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(state.params))
        left = real_left(directory)
        skipped = [row["update/skipped"] for row in left.rows]
        told = f"warning: rollout {number}: the update was left out" in said.getvalue()
        yield Outcome(finite and told and skipped == [float(i == number) for i in range(4)], 0, left.unreadable)


def never_finite(folder: Path, rng: random.Random) -> Iterator[Outcome]:
    """Infinite rewards from rollout 2 on: the run ends, and goes on when they are mended."""
    directory = folder / "run"
    loop = replace(real_loop(), tamper=infinite_rewards(2, 99))
    message = refusal(lambda: start(loop, real_state(), directory, 9), RefusedRolloutError)
    left = real_left(directory)
    start(real_loop(), real_state(), directory, 6)
    kept = (directory / "refused_4.safetensors").is_file()
    yield Outcome(
        "in 3 rollouts in a row" in message and kept and real_left(directory).steps[-1] == 6, 1, left.unreadable
    )


def wrong_mask(folder: Path, rng: random.Random) -> Iterator[Outcome]:
    """The run ends before anything is learnt from it, and names layer and head."""
    late: Callable[[np.ndarray], np.ndarray] = lambda own: own + ((own > 0) & (own < 99))  # noqa: E731
    for layer, head in ((0, 1), (1, 0)):
        directory = folder / f"{layer} {head}"
        loop = replace(real_loop(), tamper=a_head_sees(late, layer, head))
        message = refusal(
            lambda loop=loop, directory=directory: start(loop, real_state(), directory, 4), RefusedRolloutError
        )
        named = f"layer {layer}, KV head {head}" in message and "position" in message
        start(real_loop(), real_state(), directory, 2)
        yield Outcome(named and (directory / "refused_1.safetensors").is_file(), 1, real_left(directory).unreadable)


class BrokenLogger:
    """A logger whose network is gone."""

    def write(self, step: int, metrics: Any) -> None:
        raise OSError("no such host")

    def close(self) -> None:
        raise OSError("no such host")


def broken_logger(folder: Path, rng: random.Random) -> Iterator[Outcome]:
    whole = plain_whole(folder)
    for number in (1, 2):
        quietly(folder / str(number), loggers=[BrokenLogger()] * number)
        left = plain_left(folder / str(number))
        yield Outcome(same(left, whole), 0, left.unreadable)


KINDS: dict[str, Fault] = {
    "kill -9 at a random moment": killed("rollout", 12),
    "kill -9 during a save": killed("saving", 8),
    "SIGTERM in a rollout": told(signal.SIGTERM),
    "Ctrl-C in a rollout": told(signal.SIGINT),
    "Ctrl-C twice": told(signal.SIGINT, signal.SIGINT),
    "newest checkpoint cut off": damaged(cut_off, 2, "goes on from step 4", 3),
    "bit flipped in the newest checkpoint": damaged(flip_a_bit, 2, "goes on from step 4", 3),
    "file missing in the newest checkpoint": damaged(delete_a_file, 2, "goes on from step 4", 3),
    "newest checkpoint cut off before its checksums": damaged(cut_off_without_checksums, 2, "goes on from step 4", 1),
    "half a save left behind": damaged(leave_half_a_save, 0, "", 2),
    "half a save beside a damaged checkpoint": damaged(both, 2, "goes on from step 4", 2),
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
        checkpoint.OtherStateError,
        ("expected float32[50000], got float32[", "params/w"),
        with_state(10),
        with_state(60_000),
    ),
    "resume directory of another run": refused(
        checkpoint.OtherConfigError, ("expected", "got"), with_config(seed=1), with_config(group_size=4)
    ),
    "checkpoint of another program": foreign(of_another_program),
    "checkpoint of a later format": foreign(of_a_later_format),
    "logger that raises": broken_logger,
    "loss that is not finite": not_finite,
    "losses that are never finite": never_finite,
    "mask of a head that is wrong": wrong_mask,
}


def main(args: Args) -> None:
    keep_programs()
    rng = random.Random(args.seed)
    found = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as temporary:
        for number, kind in enumerate(args.only or KINDS):
            folder = Path(temporary) / str(number)
            folder.mkdir()
            outcomes = list(KINDS[kind](folder, rng))
            row = {
                "fault": kind,
                "injected": len(outcomes),
                "survived": sum(outcome.survived for outcome in outcomes),
                "max_steps_lost": max(outcome.lost for outcome in outcomes),
                "unreadable_checkpoints": sum(outcome.unreadable for outcome in outcomes),
            }
            found.append(row | provenance())
            print(json.dumps(row), flush=True)
            if args.out is not None:
                others = [old for old in read_rows(args.out) if old["fault"] != kind]
                write_rows(args.out, sorted([*others, found[-1]], key=lambda row: [*KINDS].index(row["fault"])))
    names = ("injected", "survived", "max_steps_lost", "unreadable_checkpoints")
    summary_table("faults", ("fault", *names), [(row["fault"], *(row[name] for name in names)) for row in found])


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main(tyro.cli(Args))
