"""A real model under a budget: what do shadow masks, naive training and TIS do to SmolLM2-135M-Instruct?

Question   The learner of SmolLM2, whose sampler forgets a third of its keys, either ignores it (naive), weights tokens
           (TIS), or replays what the sampler saw (shadow; with a frozen dense teacher: shadow-anchor). What is gained,
           with the budget and with the full cache, beside a sampler that forgets nothing (full-cache)?
Found      Under SnapKV, which loses much, three seeds establish that shadow masks end above TIS with the budget, and
           at temperature 1 with the full cache; above naive they are in the mean, which is not established. Under
           TOVA of each head, which loses little, two seeds establish nothing.
Command    make smollm2                                               the model, once
           python experiments/real_model.py                           everything; the same line goes on after a stop
           python experiments/real_model.py --minutes 90              a part: ends in order, after a few rollouts
           python experiments/real_model.py --arms shadow --seeds 0   one arm: its pilot, and one run
           python experiments/real_model.py --rule tova-heads         under another sampler
           python experiments/real_model.py --arms naive tis shadow shadow-anchor --seeds 2      a third seed
Cost       a run 13 to 14 minutes on one core of an AMD EPYC (family 25, model 17): a rollout and its update 42 s; on
           one of family 25, model 1, 51 s, of family 26, model 2, 24 s. SnapKV has ten runs of the pilot, one untrained
           and fourteen that are reported, TOVA eight, one and eight. Two processes with other --arms and the same
           --runs do not disturb each other; --collect then writes the rows of both.
Result     experiments/results/real_model.json, a row a run; of runs that are not finished, the curve so far.

Task       three numbers up to ten added step by step, `experiments/real/task.py`: exact rewards, sums to evaluate on
           that are never trained on. Prompts of some 161 tokens, responses of up to 64, temperature 1.
Sampler    SnapKV with four sinks, as `smd-train` has it, 128 keys and a buffer of 16; with --rule tova-heads TOVA of
           each head, which before training had most right answers of the rules that were tried on validation rows.
           `evicted_share` of a row is measured: of the tokens of a whole sequence, the share whose keys are gone when
           its last query looks.
Chosen     by looking, before any training, on 24 sums of which none is evaluated on, at temperature 1. These prompts
           are right of 0.42 with the full cache, 0.08 with 128 keys, none with 64; their responses have 43 tokens.
           Others, with the full cache: one worked example 0.04; terser steps 0.21, and 0.00 of four numbers; sums in
           words (32 sums) 0.03.
Learner    GRPO, 4 prompts x 8 completions, one step a rollout, a prompt read once for its completions; adapters (LoRA,
           rank 16, all projections) and not all weights, for memory and for checkpoints that are small; AdamW, constant
           rate after 5 steps.
Rate       of `RATES`, for every arm, the best mean of final sparse and dense greedy reward on a pilot seed, judged on
           validation rows. (The first plan was one rate for all arms, the best of the full-cache arm, and 24 rollouts.
           With that rate, 1e-3, shadow masks learnt fast and then lost it all.)
Order      pilot, the untrained model, all arms of seed 0, all arms of seed 1. Every 4 rollouts a checkpoint. Seed 2 of
           the four arms with a budget came later, under SnapKV, when the report of two seeds was there.
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
from smd_jax.commands.compilation_cache import keep_programs
from smd_jax.commands.model_source import load_tokenizer
from smd_jax.runs.stop import RunStoppedError

ARMS = arms_of(("untrained", "full-cache", "naive", "tis", "shadow", "shadow-anchor"))
SEEDS = (0, 1)
PILOT_SEED = 100
RATES = (3e-4, 1e-3)


@dataclass(frozen=True)
class Args:
    """Runs the study, or the part of it that is asked for. What is kept under --runs is not made again."""

    arms: tuple[str, ...] | None = None  # by name; default: all
    seeds: tuple[int, ...] = SEEDS  # reported ones
    rule: Rule = "snapkv"  # by which the sampler forgets
    learning_rates: tuple[float, ...] = RATES  # to choose from; a single one is taken without a pilot
    model: Path = ROOT / "runs" / "smollm2"  # SmolLM2-135M-Instruct in Hugging Face's format
    runs: Path = ROOT / "runs" / "real_model"  # checkpoints, metrics and rows
    results: Path = RESULTS / "real_model.json"  # file that rows are merged into
    minutes: float | None = None  # stop in order after so many; the same command goes on
    collect: bool = False  # run nothing: write the rows that are kept


@dataclass(frozen=True)
class Study:
    """The jobs that were asked for, in their order, and where they are kept."""

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
        """None where there is nothing to choose."""
        if len(self.rates) == 1:
            return []
        return [job for arm in self.arms if arm.trains for job in self.pilot_of(arm)]

    def pilot_of(self, arm: Arm) -> list[Job]:
        return [Job(arm, rate, PILOT_SEED, True, self.sizes, self.rule) for rate in self.rates]

    def reported(self) -> list[Job]:
        """Seed by seed, without training first; only the arms whose pilot is complete."""
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
        """The learning rate that the arm's pilot speaks for."""
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
        """All that is missing. The file of results is written again after every run."""
        until = None if minutes is None else time.monotonic() + 60 * minutes
        origin = provenance()

        def late() -> bool:
            return until is not None and time.monotonic() > until

        for stage in (self.pilot, self.reported):  # what is reported waits for the rate
            self._keep_results(stage())
            for job in stage():
                if is_finished(job, self.base, self.runs):
                    continue
                finished = execute(job, self.base, self.runs, origin | {"command": command(job)}, late)
                self.collect()
                if not finished:
                    print("time is up: the same command goes on", flush=True)
                    return

    def _keep_results(self, jobs: Sequence[Job]) -> None:
        """Finished rows of these jobs in the file of results count as kept: the study goes on on another machine."""
        finished = {row.get("settings"): row for row in read_rows(self.results) if row["finished"]}
        for job in jobs:
            row = finished.get(fingerprint(job.settings(self.base)))
            if row is not None and kept(job, self.base, self.runs) is None:
                keep_row(job, self.base, self.runs, row)

    def collect(self) -> list[Row]:
        """The rows that are there, written beside those of other arms and seeds."""
        rows = [row for job in [*self.pilot(), *self.reported()] if (row := kept(job, self.base, self.runs))]
        new = {key_of(row) for row in rows}
        merged = [row for row in read_rows(self.results) if key_of(row) not in new] + rows
        write_rows(self.results, sorted(merged, key=key_of))
        return rows


def command(job: Job) -> str:
    """Makes the row of this job alone."""
    words = ["--rule", job.rule, "--arms", job.arm.name, "--runs", "runs/again"]
    if not job.pilot:  # that runs first, whatever seeds are asked for
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
    keep_programs()
    with stopping():
        arms = arms_asked_for(args.arms)
        if not (args.model / "config.json").exists():
            raise ValueError(f"expected a checkpoint in {args.model}, which `make smollm2` makes; got none")
        base = load_base(args.model)
        study = Study(arms, args.seeds, args.learning_rates, base, args.runs, args.results, rule=args.rule)
        study.collect()  # refuses kept runs of other settings before anything is run
    if args.collect:
        return
    try:
        study.run(args.minutes)
    except RunStoppedError as stopped:
        print(f"{stopped}: with the same command", file=sys.stderr)
        raise SystemExit(stopped.exit_code) from None


if __name__ == "__main__":
    main(tyro.cli(Args))
