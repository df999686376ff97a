"""Injects faults into runs and checks that they survive.

Question   Does a run survive preemption, full disks and broken files? `survived`: a run that was broken and resumed
           ends with the same metrics and bitwise the same state as an uninterrupted run (on other devices: up to
           rounding, see experiments/breaking/processes.py). If it must not continue, it is refused with a message of
           the form "expected …; got …", and its directory stays unchanged. Hostile input (configurations, names, data,
           models, chat templates) ends in one error, soon and without a gigabyte of memory. A hostile reward function
           loses only its own completions.
Command    python experiments/faults.py --out experiments/results/faults.json
           python experiments/faults.py --only 'SIGTERM in a rollout'                  one kind, nothing is written
Cost       about thirty minutes on two idle CPU cores; most of it starts processes that are killed
Result     experiments/results/faults.json, a row for each kind of fault.

Runs       Process faults: GRPO with the engine, adapters, minibatches and shuffled rows
           (experiments/breaking/trained.py). Disk faults: a run of plain arithmetic (experiments/breaking/plain.py). A
           checkpoint every two rollouts, two are kept.
Rows       `injected`, `survived`: faults of this kind. `max_steps_lost`: the most finished rollouts that had to be
           repeated. `unreadable_checkpoints`: checkpoints that did not load after a fault, except those that the fault
           damaged.
"""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from breaking import inputs, rewards, surroundings
from breaking.disks import (
    both,
    cut_off,
    cut_off_without_checksums,
    damaged,
    delete_a_file,
    empty,
    flip_a_bit,
    full_disk,
    leave_half_a_save,
    tear_the_last_row,
)
from breaking.outcome import Fault
from breaking.processes import killed, killed_ahead, killed_and_moved, one_of_two_killed, signalled
from breaking.refusals import (
    foreign,
    of_a_later_format,
    of_another_program,
    refused,
    somewhere_else,
    with_config,
    with_state,
    without_room,
)
from breaking.steps import broken_logger, never_finite, not_finite, wrong_mask
from lib.files import read_rows, write_rows
from lib.provenance import provenance
from smd_jax.commands.compilation_cache import cache_programs
from smd_jax.monitor.progress import summary_table
from smd_jax.runs import checkpoint
from smd_jax.runs.checkpoint import OtherStateError


@dataclass(frozen=True)
class Args:
    """Breaks runs."""

    out: Path | None = None  # JSON file of the rows; rows of other kinds stay
    only: tuple[str, ...] = ()  # kinds of faults; all by default
    seed: int = 0  # for the times at which processes are killed


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
        checkpoint.OtherConfigError, ("expected", "got"), with_config(seed=1), with_config(group_size=4)
    ),
    "checkpoint of another program": foreign(of_another_program),
    "checkpoint of a later format": foreign(of_a_later_format),
    **surroundings.KINDS,
    **inputs.KINDS,
    **rewards.KINDS,
    # These start processes or train a model, and take most of the time.
    "logger that raises": broken_logger,
    "loss that is not finite": not_finite,
    "losses that are never finite": never_finite,
    "mask of a head that is wrong": wrong_mask,
    "kill -9 at a random moment": killed("rollout", 20),
    "kill -9 during a save": killed("saving", 8),
    "kill -9 of one of two processes": one_of_two_killed(4),
    "kill -9 with a rollout ahead": killed_ahead(6),
    "kill -9, and on with fewer devices": killed_and_moved,
    "SIGTERM in a rollout": signalled(signal.SIGTERM),
    "Ctrl-C in a rollout": signalled(signal.SIGINT),
    "Ctrl-C twice": signalled(signal.SIGINT, signal.SIGINT),
}


def main(args: Args) -> None:
    cache_programs()
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
