"""Shadow masks, naive training, TIS and shadow with TIS on SmolLM2-135M-Instruct under a budget.

Question   A sampler that evicts a third of its keys trains a learner that ignores it (naive), weights tokens (TIS),
           replays the sampler's masks (shadow), or is half shadow and half TIS (mixed-50). What does each gain, with
           the budget and with the full cache? `experiments/PLAN.md` has prediction and primary contrast.
Command    make smollm2                                               the model, once
           python experiments/real_model.py                           everything; the same command resumes
           python experiments/real_model.py --minutes 90              stops in order after a few rollouts
           python experiments/real_model.py --arms naive shadow       the arms of the primary contrast
           python experiments/real_model.py --rule r-kv               another eviction policy
           python experiments/real_model.py --rows-from FILE          adds the rows that a clean clone made
Cost       nine minutes per run on one core of an AMD EPYC (family 26, model 2), of which the evaluation takes four.
           Processes with other --arms and the same --runs may run together; --collect then writes the rows of all.
Result     runs/real_model/rows.json, a row per run; an unfinished run has its curve so far. The rows of the report are
           in experiments/results/smollm2.json.

Task       Three numbers up to ten added step by step (`experiments/real/task.py`): exact rewards; evaluation sums are
           never trained on. Prompts of about 161 tokens, responses of up to 64, temperature 1. Evaluations of 144 sums,
           the same for all runs; rows hold the reward of every sum.
Sampler    SnapKV (or R-KV) with four sinks, 128 keys and a buffer of 16. `evicted_share`: share of the tokens whose
           keys are evicted when the last query attends.
Chosen     Prompt and budget, before any training, on 24 sums that are not evaluated: right answers at temperature 1
           are 0.42 with the full cache, 0.08 with 128 keys, none with 64.
Learner    GRPO, 4 prompts x 8 completions, one step per rollout; LoRA of rank 16 on all projections; AdamW, constant
           rate of 3e-4 after 5 steps for all arms: an older study with other seeds chose it for naive, TIS and shadow.
Order      The untrained model, all arms of seed 10, then of seed 11, and so on. A checkpoint every 4 rollouts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import tyro

import smd_jax as smd
from lib.arms import Arm, arms_of
from lib.command import exit_on_value_error
from lib.files import RESULTS, ROOT, Row, merged, read_rows, write_rows
from lib.provenance import is_clean, provenance
from real.execute import execute
from real.job import SIZES, Base, Job, Rule, Sizes, is_finished, kept
from smd_jax.commands.compilation_cache import cache_programs
from smd_jax.commands.model_source import load_tokenizer
from smd_jax.runs.stop import RunStoppedError

ARMS = arms_of(("untrained", "naive", "tis", "shadow", "mixed-50"))
SEEDS = tuple(range(10, 18))
REPORTED = RESULTS / "smollm2.json"


@dataclass(frozen=True)
class Args:
    """Runs the study or a part of it. Rows kept under --runs are not made again."""

    arms: tuple[str, ...] | None = None  # by name; default: all
    seeds: tuple[int, ...] = SEEDS
    rule: Rule = "snapkv"  # eviction policy of the sampler
    model: Path = ROOT / "runs" / "smollm2"  # SmolLM2-135M-Instruct in Hugging Face's format
    runs: Path = ROOT / "runs" / "real_model"  # checkpoints, metrics and rows
    minutes: float | None = None  # stop in order after this time; the same command resumes
    collect: bool = False  # run nothing; write the kept rows
    rows_from: Path | None = None  # run nothing; add the finished rows of this file, made in a clean clone


@dataclass(frozen=True)
class Study:
    """The selected jobs in order, and where their rows are kept."""

    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    base: Base
    runs: Path
    sizes: Sizes = SIZES
    rule: Rule = "snapkv"

    @property
    def results(self) -> Path:
        """The merged file of rows."""
        return self.runs / "rows.json"

    def jobs(self) -> list[Job]:
        """Seed by seed. The untrained model comes first, once, because it is the same for every seed."""
        first = self.seeds[0]
        return [
            Job(arm, seed, self.sizes, self.rule)
            for seed in self.seeds
            for arm in self.arms
            if arm.trains or seed == first
        ]

    def run(self, minutes: float | None = None) -> None:
        """Runs all missing jobs; writes the file of results after every run."""
        until = None if minutes is None else time.monotonic() + 60 * minutes
        origin = provenance()

        def late() -> bool:
            return until is not None and time.monotonic() > until

        for job in self.jobs():
            if is_finished(job, self.base, self.runs):
                continue
            finished = execute(job, self.base, self.runs, origin | {"command": command(job)}, late)
            self.collect()
            if not finished:
                print("time is up; the same command resumes", flush=True)
                return

    def collect(self) -> None:
        """Merges the kept rows into the file of results."""
        merge(self.results, [row for job in self.jobs() if (row := kept(job, self.base, self.runs))])


def command(job: Job) -> str:
    """The command that makes the row of this job only."""
    words = ["--rule", job.rule, "--arms", job.arm.name, "--runs", "runs/again", "--seeds", str(job.seed)]
    return " ".join(["python", "experiments/real_model.py", *words])


def merge(path: Path, rows: Sequence[Row]) -> None:
    """Adds rows to a file and replaces those of the same jobs."""
    write_rows(path, merged(path, rows, itemgetter("task", "policy", "budget", "buffer", "seed", "arm")))


def add_rows(source: Path, results: Path = REPORTED) -> None:
    """Adds the finished rows of `source` to `results`.

    Raises:
      ValueError: for a row without a clean commit. `results` stays as it is.
    """
    rows = [row for row in read_rows(source) if row["finished"]]
    if bad := [row["commits"] for row in rows if not all(map(is_clean, row["commits"]))]:
        raise ValueError(f"expected rows of clean commits; got {len(bad)} others, {bad[:3]}")
    merge(results, rows)


def load_base(directory: Path) -> Base:
    """The model of a checkpoint directory, in float32."""
    config = smd.load_checkpoint(directory, dtype="float32")[0]
    return Base(config, load_tokenizer(directory), lambda: smd.load_checkpoint(directory, dtype="float32")[1])


def main(args: Args) -> None:
    cache_programs()
    with exit_on_value_error():
        if args.rows_from is not None:
            return add_rows(args.rows_from)
        arms = ARMS if args.arms is None else arms_of(args.arms, ARMS)
        if not (args.model / "config.json").exists():
            raise ValueError(f"expected a checkpoint in {args.model}, which `make smollm2` makes; got none")
        study = Study(arms, args.seeds, load_base(args.model), args.runs, rule=args.rule)
        study.collect()  # raises for kept runs of other settings before a run
    if args.collect:
        return
    try:
        study.run(args.minutes)
    except RunStoppedError as stopped:
        print(f"{stopped}: with the same command", file=sys.stderr)
        raise SystemExit(stopped.exit_code) from None


if __name__ == "__main__":
    main(tyro.cli(Args))
