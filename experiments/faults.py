"""Injects faults into runs and checks that they survive.

Question   Does a run survive preemption, full disks and broken files? `survived`: a run that was broken and resumed
           ends with the same metrics and bitwise the same state as an uninterrupted run (on other devices: up to
           rounding, see experiments/breaking/processes.py). If it must not continue, it is refused with a message of
           the form "expected …; got …", and its directory stays unchanged. Hostile input (configurations, names, data,
           models, chat templates) ends in one error, soon and without a gigabyte of memory. A hostile reward function
           loses only its own completions.
Command    python experiments/faults.py --out experiments/results/faults.json
           python experiments/faults.py --only 'SIGTERM in a rollout'                  one kind, nothing is written
Cost       a quarter of an hour on two idle CPU cores; most of it starts processes that are killed
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
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from breaking import disks, inputs, processes, rewards, steps, surroundings
from lib.files import read_rows, write_rows
from lib.provenance import provenance
from smd_jax.commands.compilation_cache import cache_programs
from smd_jax.monitor.progress import summary_table


@dataclass(frozen=True)
class Args:
    """Breaks runs."""

    out: Path | None = None  # JSON file of the rows; rows of other kinds stay
    only: tuple[str, ...] = ()  # kinds of faults; all by default
    seed: int = 0  # for the times at which processes are killed


KINDS = disks.KINDS | surroundings.KINDS | inputs.KINDS | rewards.KINDS
KINDS |= steps.KINDS | processes.KINDS  # these start processes or train a model, and take most of the time


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
