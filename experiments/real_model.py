"""Shadow masks, naive training and TIS on SmolLM2-135M-Instruct under a budget.

Question   A sampler that evicts a third of its keys trains a learner that ignores it (naive), weights tokens (TIS) or
           replays the sampler's masks (shadow; with a frozen dense teacher: shadow-anchor). What does each gain, with
           the budget and with the full cache, compared with a sampler that evicts nothing (full-cache)?
Command    make smollm2                                               the model, once
           python experiments/real_model.py                           everything; the same command resumes
           python experiments/real_model.py --minutes 90              stops in order after a few rollouts
           python experiments/real_model.py --arms shadow --seeds 0   one arm: its pilot and one run
           python experiments/real_model.py --rule tova-heads         another eviction policy
           python experiments/real_model.py --arms naive tis shadow shadow-anchor --seeds 2      a third seed
Cost       13 to 14 minutes per run on one core of an AMD EPYC (family 25, model 17). Processes with other --arms and
           the same --runs may run together; --collect then writes the rows of all.
Result     experiments/results/real_model.json, a row per run; an unfinished run has its curve so far

Task       Three numbers up to ten added step by step (`experiments/real/task.py`): exact rewards; evaluation sums are
           never trained on. Prompts of about 161 tokens, responses of up to 64, temperature 1.
Sampler    SnapKV with four sinks, 128 keys and a buffer of 16; --rule tova-heads: TOVA of each head.
           `evicted_share`: share of the tokens whose keys are evicted when the last query attends.
Chosen     Prompt and budget, before any training, on 24 sums that are not evaluated: right answers at temperature 1
           are 0.42 with the full cache, 0.08 with 128 keys, none with 64.
Learner    GRPO, 4 prompts x 8 completions, one step per rollout; LoRA of rank 16 on all projections; AdamW, constant
           rate after 5 steps.
Rate       Of `RATES`, for every arm the best mean of final sparse and dense greedy reward on a pilot seed, on
           validation rows. (The first plan was one rate for all arms, the best of the full-cache arm, and 24 rollouts;
           with that rate, 1e-3, shadow masks learned fast and then collapsed.)
Order      Pilot, the untrained model, all arms of seed 0, then of seed 1. A checkpoint every 4 rollouts. Seed 2 of the
           arms with a budget under SnapKV was added after two seeds had been reported.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

import smd_jax as smd
from lib.arms import Arm, arms_of
from lib.command import stopping
from lib.files import RESULTS, ROOT, Row, fingerprint, read_rows, write_rows
from lib.grid import best_rate
from lib.provenance import provenance
from real.execute import execute
from real.job import SIZES, Base, Job, Rule, Sizes, is_finished, keep_row, kept
from smd_jax.commands.compilation_cache import cache_programs
from smd_jax.commands.model_source import load_tokenizer
from smd_jax.runs.stop import RunStoppedError

ARMS = arms_of(("untrained", "full-cache", "naive", "tis", "shadow", "shadow-anchor"))
SEEDS = (0, 1)
PILOT_SEED = 100
RATES = (3e-4, 1e-3)


@dataclass(frozen=True)
class Args:
    """Runs the study or a part of it. Rows kept under --runs are not made again."""

    arms: tuple[str, ...] | None = None  # by name; default: all
    seeds: tuple[int, ...] = SEEDS  # reported ones
    rule: Rule = "snapkv"  # eviction policy of the sampler
    learning_rates: tuple[float, ...] = RATES  # to choose from; a single one needs no pilot
    model: Path = ROOT / "runs" / "smollm2"  # SmolLM2-135M-Instruct in Hugging Face's format
    runs: Path = ROOT / "runs" / "real_model"  # checkpoints, metrics and rows
    results: Path = RESULTS / "real_model.json"  # merged file of rows
    minutes: float | None = None  # stop in order after this time; the same command resumes
    collect: bool = False  # run nothing; write the kept rows


@dataclass(frozen=True)
class Study:
    """The selected jobs in order, and where their rows are kept."""

    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    rates: tuple[float, ...]
    base: Base
    runs: Path
    results: Path
    sizes: Sizes = SIZES
    rule: Rule = "snapkv"

    def __post_init__(self) -> None:
        if PILOT_SEED in self.seeds:
            raise ValueError(f"expected seeds other than that of the pilot, {PILOT_SEED}; got {list(self.seeds)}")

    def pilot(self) -> list[Job]:
        """Pilot jobs; none with a single rate."""
        if len(self.rates) == 1:
            return []
        return [job for arm in self.arms if arm.trains for job in self.pilot_of(arm)]

    def pilot_of(self, arm: Arm) -> list[Job]:
        return [Job(arm, rate, PILOT_SEED, True, self.sizes, self.rule) for rate in self.rates]

    def reported(self) -> list[Job]:
        """Reported jobs, seed by seed, of the arms whose pilot is complete; the untrained model first."""
        rates = {arm.name: self.rate(arm) for arm in self.arms if arm.trains}
        jobs = []
        for seed in self.seeds:
            for arm in self.arms:
                # The untrained model is the same for every seed.
                if not arm.trains and seed == self.seeds[0]:
                    jobs.append(Job(arm, RATES[0], seed, False, self.sizes, self.rule))
                elif arm.trains and (rate := rates[arm.name]) is not None:
                    jobs.append(Job(arm, rate, seed, False, self.sizes, self.rule))
        return jobs

    def rate(self, arm: Arm) -> float | None:
        """The best learning rate of the arm's pilot; None while it is incomplete."""
        if len(self.rates) == 1:
            return self.rates[0]
        rewards: dict[float, float] = {}
        for job in self.pilot_of(arm):
            row = kept(job, self.base, self.runs)
            if row is None or not row["finished"]:
                return None
            rewards[job.learning_rate] = (row["sparse_greedy"] + row["dense_greedy"]) / 2
        return best_rate(rewards)

    def run(self, minutes: float | None = None) -> None:
        """Runs all missing jobs; writes the file of results after every run."""
        until = None if minutes is None else time.monotonic() + 60 * minutes
        origin = provenance()

        def late() -> bool:
            return until is not None and time.monotonic() > until

        for stage in (self.pilot, self.reported):  # reported jobs need the rate
            self._keep_results(stage())
            for job in stage():
                if is_finished(job, self.base, self.runs):
                    continue
                finished = execute(job, self.base, self.runs, origin | {"command": command(job)}, late)
                self.collect()
                if not finished:
                    print("time is up; the same command resumes", flush=True)
                    return

    def _keep_results(self, jobs: Sequence[Job]) -> None:
        """Keeps the finished rows of these jobs from the file of results, so that another machine can resume."""
        finished = {row.get("settings"): row for row in read_rows(self.results) if row["finished"]}
        for job in jobs:
            row = finished.get(fingerprint(job.settings(self.base)))
            if row is not None and kept(job, self.base, self.runs) is None:
                keep_row(job, self.base, self.runs, row)

    def collect(self) -> list[Row]:
        """Merges the kept rows into the file of results."""
        rows = [row for job in [*self.pilot(), *self.reported()] if (row := kept(job, self.base, self.runs))]
        new = {key_of(row) for row in rows}
        merged = [row for row in read_rows(self.results) if key_of(row) not in new] + rows
        write_rows(self.results, sorted(merged, key=key_of))
        return rows


def command(job: Job) -> str:
    """The command that makes the row of this job only."""
    words = ["--rule", job.rule, "--arms", job.arm.name, "--runs", "runs/again"]
    if not job.pilot:  # a pilot runs for any seeds
        words += ["--seeds", str(job.seed), "--learning-rates", f"{job.learning_rate:g}"]
    return " ".join(["python", "experiments/real_model.py", *words])


def key_of(row: Row) -> tuple[object, ...]:
    fields = ("task", "policy", "budget", "buffer", "pilot", "seed", "arm")
    return (*(row[name] for name in fields), row["learning_rate"] or 0.0)


def load_base(directory: Path) -> Base:
    """The model of a checkpoint directory, in float32."""
    config = smd.load_checkpoint(directory, dtype="float32")[0]
    return Base(config, load_tokenizer(directory), lambda: smd.load_checkpoint(directory, dtype="float32")[1])


def arms_asked_for(names: Sequence[str] | None) -> tuple[Arm, ...]:
    return ARMS if names is None else arms_of(names, ARMS)


def main(args: Args) -> None:
    cache_programs()
    with stopping():
        arms = arms_asked_for(args.arms)
        if not (args.model / "config.json").exists():
            raise ValueError(f"expected a checkpoint in {args.model}, which `make smollm2` makes; got none")
        base = load_base(args.model)
        study = Study(arms, args.seeds, args.learning_rates, base, args.runs, args.results, rule=args.rule)
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
