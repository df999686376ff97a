"""Which way to learn from a sampler with a small KV cache is best? Twelve of them, side by side.

Task       Running sums modulo 10 of 12 digits: "382…=" -> "313…". The reward is the share of right sums. A decoder of
           75,000 parameters; a head of the sampler keeps 14 keys (TOVA, + 2 of buffer) of up to 26.
Start      One policy per seed for all arms: supervised, dense, until 70 % of its sums are right with the full cache;
           under the budget it then has about 50 % (10 % is chance), so that neither way of decoding starts at an end.
Arms       `ARMS` below: three policies are in play, see `smd_jax/corrections`. What an arm is made of stands there;
           everything else is the same for all: GRPO, 4 optimizer steps per rollout, so that there is staleness too.
           Distillation has one coefficient for all directions, 0.1, which was not tuned.
Rates      Every arm has the same grid of learning rates (`RATES`). Fixed before anything was run: the rate of an arm
           is the one with the highest mean of final sparse and dense reward over `PILOT_SEEDS`, the lower one of two
           equals. Seeds of the pilot are not reported; all its runs are in showdown_grid.json.
           They, and the end of the supervised start, are judged on 512 validation rows, which nothing else looks at.
           Task, budget and length were chosen by the rewards at the start and by cost, on a few runs of seed 100.
           "dense_first" in the rows is the dense reward after the first rollout: in those runs within two points of the
           start at 3e-4, and 16 to 22 points below it at 1e-3.
Rewards    On 512 other held-out prompts, decoded at the sampler's temperature under the budget ("sparse") and with the
           full cache ("dense"). Intervals: 95 % t intervals of the mean over seeds, and of differences within seeds.
Command    make study NAME=showdown    or    python experiments/showdown/main.py [--quick] [--arms …] [--seeds …]
           A run that has ended is kept under --runs, and not run again when the study is continued after a stop.
           --tables runs nothing, and makes tables and picture again from the committed rows.
Cost       45 minutes on two CPU cores on which other programs ran too: 132 runs, a process and a core each
Result     experiments/results/showdown.md, .png, .json (the reported runs, each with a command that makes it alone),
           showdown_grid.json (the pilot), showdown_curves.json (of the reported runs). Made on 2026-11-21 by commit
           5fe08d1 with Python 3.11, jax 0.10.2, on a CPU that was not recorded; the tables by later code from the same
           runs. Since commit 603eaf4 tokens are drawn by inverse CDF, from the same keys other tokens: with later code
           the same commands give other rewards, from the start on.
Says       TIS, IcePop and Sparse-RL's correction end above naive and above shadow masks alone, in both ways of decoding
           (TIS - shadow: 0.014 ± 0.013 sparse, 0.060 ± 0.034 dense). Shadow masks alone are level with naive in sparse
           decoding (+0.004 ± 0.016), and above it in dense (+0.028 ± 0.018).
           A frozen dense teacher ("anchor") has the highest mean in sparse decoding, but two seeds of five make it:
           neither its lead over naive (0.142 ± 0.179) nor that over TIS (0.124 ± 0.186) is established.
           With a live teacher dense decoding ends behind naive (reverse -0.176 ± 0.149, published -0.116 ± 0.108;
           forward -0.161 ± 0.183, not established). That it ends below its start is not established: all intervals hold
           0. `forward` loses in the first rollout what four seeds of five do not make good, `reverse` over the first
           hundred; why was not measured.
           At 1e-3 every arm of the pilot loses 14 to 33 points of dense decoding in the first rollout, distillation
           alone more than 45. Sparse-RL, bypass and `published` are those that have not come back at the end.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

# Runs share the machine, one core each, and are so small that a second core would only wait. To be set before JAX is
# imported, here and in the processes that come from this one. Rows can be made again bitwise on CPU alone.
os.environ |= {"JAX_PLATFORMS": "cpu", "NPROC": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()

import jax
import numpy as np
import optax
import tyro

sys.path.append(str(Path(__file__).resolve().parents[1]))  # of what the studies share

import smd_jax as smd
from provenance import provenance
from showdown import report
from showdown.plot import draw
from showdown.task import DIGITS, EVALUATION_ROWS, PROMPT, RESPONSE, RunningSums, Split, model_config, tokenizer
from smd_jax.commands.compilation_cache import keep_programs
from smd_jax.losses.distillation import Direction
from smd_jax.monitor.metrics_log import MetricsWriter, read_metrics
from smd_jax.tasks.task import batch_indices
from smd_jax.testing import random_params
from smd_jax.text.prompts import eos_token_id, pad_token_id
from smd_jax.train import checkpoint
from smd_jax.train.supervised import encode_examples, make_supervised_update

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "experiments" / "results"

SAMPLER = smd.eviction.TOVA()
BUDGET = 14
BUFFER = 2
WARM_START_STEPS = 1_000  # at most
DISTILL_COEF = 0.1
RATES = (1e-4, 3e-4, 1e-3)
PILOT_SEEDS = (100, 101)
SEEDS = (0, 1, 2, 3, 4)
MAX_MISMATCH_KL = 1e-6  # of every rollout, where learner and sampler are one policy; float32


@dataclass(frozen=True)
class Arm:
    """One row of the table: whom the learner takes for the sampler, and what it does about the difference."""

    name: str
    visibility: Literal["shadow", "dense"]
    correction: smd.corrections.Correction
    direction: Direction | None = None
    policy_coef: float = 1.0
    sampler: smd.eviction.EvictionPolicy = SAMPLER

    @property
    def update(self) -> smd.UpdateConfig:
        distill = None if self.direction is None else smd.DistillConfig(self.direction, DISTILL_COEF)
        return smd.UpdateConfig(
            self.visibility, policy_coef=self.policy_coef, correction=self.correction, distill=distill
        )


ARMS = (
    Arm(
        "dense", "shadow", smd.corrections.Shadow(), sampler=smd.eviction.Dense()
    ),  # an unlimited cache: nothing is evicted while sampling
    Arm("naive", "dense", smd.corrections.Naive()),
    Arm("bypass", "dense", smd.corrections.Bypass()),
    Arm("tis", "dense", smd.corrections.TIS()),
    Arm("icepop", "dense", smd.corrections.IcePop()),
    Arm(
        "sparse-rl", "dense", smd.corrections.SparseRL()
    ),  # the correction as released, without its KL of 1e-4 to a reference
    Arm("shadow", "shadow", smd.corrections.Shadow()),
    Arm("shadow-forward", "shadow", smd.corrections.Shadow(), "forward"),
    Arm("shadow-reverse", "shadow", smd.corrections.Shadow(), "reverse"),
    Arm("shadow-published", "shadow", smd.corrections.Shadow(), "published"),
    Arm("shadow-anchor", "shadow", smd.corrections.Shadow(), "anchor"),
    Arm(
        "forward-only", "shadow", smd.corrections.Shadow(), "forward", policy_coef=0.0
    ),  # a control: distillation alone
)


@dataclass(frozen=True)
class Sizes:
    """What a run costs, in rollouts, prompts and rows."""

    rollouts: int = 200
    prompts: int = 32
    group: int = 8
    minibatches: int = 4
    evaluate_every: int = 50
    evaluation_rows: int = EVALUATION_ROWS
    dense_start: float = 0.70  # dense reward at which the supervised start ends


QUICK = Sizes(rollouts=4, prompts=8, group=4, evaluate_every=2, evaluation_rows=32, dense_start=0.08)


@dataclass(frozen=True)
class Args:
    """Runs the study, or the part of it that is asked for, and writes its tables and its picture."""

    arms: tuple[str, ...] | None = None  # by name; default: all
    seeds: tuple[int, ...] | None = None  # reported; default: 0 to 4
    learning_rates: tuple[float, ...] | None = None  # to choose from; a single one is taken without a pilot
    quick: bool = False  # a few rollouts, and smaller defaults, to see that all of it works
    runs: Path | None = None  # folder of the single runs; default: runs/showdown, with --quick runs/showdown-quick
    results: Path | None = None  # of the tables; default: experiments/results for the whole study, else as --runs
    workers: int = 2  # processes, one core each
    tables: bool = False  # run nothing: make tables and picture again from the rows under --results


@dataclass(frozen=True)
class Plan:
    """`Args` with everything decided."""

    arms: tuple[Arm, ...]
    pilot_seeds: tuple[int, ...]
    seeds: tuple[int, ...]
    rates: tuple[float, ...]
    sizes: Sizes
    runs: Path
    results: Path


@dataclass(frozen=True)
class Job:
    """One run."""

    arm: Arm
    learning_rate: float
    seed: int
    sizes: Sizes
    runs: Path

    @property
    def folder(self) -> Path:
        return self.runs / self.arm.name / f"lr-{self.learning_rate}" / f"seed-{self.seed}"

    @property
    def split(self) -> Split:
        """The rows that it is evaluated on: nothing is ever chosen on those of the reported runs."""
        return "validation" if self.seed in PILOT_SEEDS else "evaluation"

    @property
    def settings(self) -> str:
        """Everything that the numbers of the run depend on, but for the code."""
        return repr((replace(self, runs=Path()), model_config(), DIGITS, BUDGET, BUFFER))

    @property
    def command(self) -> str:
        """Makes this run alone, whatever has been run before."""
        words = ["--arms", self.arm.name, "--seeds", str(self.seed), "--learning-rates", str(self.learning_rate)]
        words += [*(["--quick"] if self.sizes == QUICK else []), "--runs", "runs/showdown-again"]
        return "python experiments/showdown/main.py " + shlex.join(words)


def main(args: Args) -> None:
    if args.tables:
        make_tables(args.results or RESULTS)
        return
    plan = make_plan(args)
    began = time.monotonic()
    keep_programs()  # before the workers do, so that one process says where
    context = multiprocessing.get_context("spawn")  # JAX must not be forked
    with context.Pool(min(args.workers, len(plan.arms)), keep_programs) as pool:
        starts = [(seed, plan.sizes, plan.runs) for seed in (*plan.pilot_seeds, *plan.seeds)]
        pool.starmap(warm_start, starts, chunksize=1)
        by_arm = dict(pool.imap_unordered(functools.partial(study_arm, plan), plan.arms))
    pilot = [run for arm in plan.arms for run in by_arm[arm.name][0]]
    reported = [run for arm in plan.arms for run in by_arm[arm.name][1]]
    report.write(plan.results, pilot, reported)
    draw(report.by_arm(reported), plan.results / "showdown.png")
    report.show(pilot, reported)
    print(f"{len(pilot) + len(reported)} runs, {time.monotonic() - began:.0f} s; tables and picture: {plan.results}")


def make_tables(folder: Path) -> None:
    """showdown.md and showdown.png from the rows beside them."""
    pilot, reported = report.read(folder)
    report.write_tables(folder, pilot, reported)
    draw(report.by_arm(reported), folder / "showdown.png")
    report.show(pilot, reported)


def make_plan(args: Args) -> Plan:
    """What to run. `--quick` has smaller defaults; a single learning rate needs no pilot."""
    whole = (args.arms, args.seeds, args.learning_rates, args.quick) == (None, None, None, False)
    names = args.arms or (("naive", "shadow") if args.quick else tuple(arm.name for arm in ARMS))
    rates = args.learning_rates or (RATES[:2] if args.quick else RATES)
    seeds, pilot_seeds = (SEEDS[:1], PILOT_SEEDS[:1]) if args.quick else (SEEDS, PILOT_SEEDS)
    runs = args.runs or ROOT / "runs" / ("showdown-quick" if args.quick else "showdown")
    plan = Plan(
        arms=tuple(arm for arm in ARMS if arm.name in names),
        pilot_seeds=pilot_seeds if len(rates) > 1 else (),
        seeds=args.seeds or seeds,
        rates=rates,
        sizes=QUICK if args.quick else Sizes(),
        runs=runs,
        results=args.results or (RESULTS if whole else runs),
    )
    if unknown := sorted(set(names) - {arm.name for arm in ARMS}):
        raise SystemExit(f"expected arms from {[arm.name for arm in ARMS]}; got {unknown}")
    if set(plan.seeds) & set(plan.pilot_seeds):
        raise SystemExit(f"expected seeds other than those of the pilot, {plan.pilot_seeds}; got {plan.seeds}")
    return plan


def study_arm(plan: Plan, arm: Arm) -> tuple[str, tuple[list[report.Run], list[report.Run]]]:
    """The arm's name, the runs of its pilot, and the reported ones at the rate that the pilot speaks for."""

    def runs(rates: Iterable[float], seeds: Iterable[int]) -> list[report.Run]:
        return [finished(Job(arm, rate, seed, plan.sizes, plan.runs)) for rate in rates for seed in seeds]

    pilot = runs(plan.rates, plan.pilot_seeds)
    rate = best_rate(pilot) if pilot else plan.rates[0]
    return arm.name, (pilot, runs([rate], plan.seeds))


def best_rate(pilot: Sequence[report.Run]) -> float:
    """The learning rate with the highest mean of final sparse and dense reward; the lower one of two equals."""
    rates = sorted({run.row["learning_rate"] for run in pilot})
    return max(rates, key=lambda rate: np.mean([final(run.row) for run in pilot if run.row["learning_rate"] == rate]))


def final(row: dict[str, Any]) -> float:
    return (row["sparse"] + row["dense"]) / 2


def finished(job: Job) -> report.Run:
    """The run as it was kept, or else run now."""
    kept = job.folder / "run.json"
    if kept.exists():
        stored = json.loads(kept.read_text())
        if stored["settings"] != job.settings:
            raise ValueError(
                f"expected in {kept} a run of the present settings {job.settings}; got {stored['settings']}. Remove "
                "the folder, or name another one with --runs"
            )
        state = "kept"
    else:
        run = execute(job)
        stored = {"settings": job.settings, "row": run.row, "curve": run.curve}
        report.write_text(kept, json.dumps(stored, allow_nan=False))
        state = f"{run.row['seconds']:.0f} s"
    row = stored["row"]
    rewards = ", ".join(f"{kind} {row[f'{kind}_before']:.3f} -> {row[kind]:.3f}" for kind in ("sparse", "dense"))
    print(f"{job.arm.name} {job.learning_rate:g} seed {job.seed}: {rewards} ({state})", flush=True)
    return report.Run(row, stored["curve"])


def execute(job: Job) -> report.Run:
    """Trains from the seed's start, and evaluates on the way.

    Raises:
      RuntimeError: learner and sampler are to be one policy, and a rollout shows that they are not.
    """
    began = time.perf_counter()
    cpu_began = time.process_time()
    loop = make_loop(job)
    sizes = job.sizes
    params = warm_start(job.seed, sizes, job.runs)
    reference = params if loop.config.update.needs_reference else None
    state = smd.init_state(params, make_optimizer(job), jax.random.key(job.seed), reference)
    path = job.folder / "metrics.jsonl"
    with MetricsWriter(path, next_step=0) as writer:  # a run that was stopped begins anew
        before = evaluate(loop, state.params, job.split, sizes.evaluation_rows)
        for done in range(1, sizes.rollouts + 1):
            state, metrics = loop.step(state)
            if job.arm.visibility == "shadow" and not metrics["mismatch_kl"] <= MAX_MISMATCH_KL:
                raise RuntimeError(
                    f"expected mismatch_kl <= {MAX_MISMATCH_KL} in rollout {done} of {job.arm.name}, whose learner "
                    f"replays what its sampler saw; got {metrics['mismatch_kl']}"
                )
            if done in (1, sizes.rollouts) or done % sizes.evaluate_every == 0:
                metrics |= evaluate(loop, state.params, job.split, sizes.evaluation_rows)
            writer.write(done, metrics)
    history = [{"step": 0} | before, *read_metrics(path)]
    identity = {"arm": job.arm.name, "seed": job.seed, "command": job.command, "learning_rate": job.learning_rate}
    row = identity | {"steps": sizes.rollouts} | report.summary(history)
    row |= {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu_began}
    origin = provenance()
    row |= {name: origin[name] for name in ("date", "commit", "cpu", "versions")}  # a row has a command of its own
    return report.Run(row, report.thin_curve(history))


def make_loop(job: Job) -> smd.GRPOLoop:
    sizes = job.sizes
    config = smd.GRPOConfig(
        prompts_per_step=sizes.prompts,
        group_size=sizes.group,
        prompt_width=PROMPT,
        policy=job.arm.sampler,
        rollout=smd.RolloutConfig(RESPONSE, BUDGET, BUFFER, eos_token_id(tokenizer()), pad_token_id(tokenizer())),
        update=job.arm.update,
        minibatches=sizes.minibatches,
        seed=job.seed,
    )
    return smd.GRPOLoop(smd.Decoder(model_config()), RunningSums("train"), tokenizer(), make_optimizer(job), config)


def make_optimizer(job: Job) -> optax.GradientTransformation:
    """Adam at a constant rate. It lies in the state, not in the program, which is compiled once for all rates."""
    adam = optax.inject_hyperparams(optax.adam)(learning_rate=job.learning_rate)
    return optax.chain(optax.clip_by_global_norm(1.0), adam)


def evaluate(loop: smd.GRPOLoop, params: Any, split: Split, rows: int) -> dict[str, float]:
    """Mean reward on rows of a split under the budget and with the full cache, at the sampler's temperature."""

    def reward(policy: smd.eviction.EvictionPolicy) -> float:
        return loop.evaluate(params, held_out, jax.random.key(7), policy=policy, config=loop.config.rollout)

    held_out = RunningSums(split, rows)
    return {"eval/sparse": reward(SAMPLER), "eval/dense": reward(smd.eviction.Dense())}


def warm_start(seed: int, sizes: Sizes, runs: Path) -> Any:
    """Parameters of a policy whose dense reward has just reached `dense_start`; kept, so that all arms start there."""
    folder = runs / "start" / f"seed-{seed}"
    config = (model_config(), DIGITS, sizes.dense_start, sizes.evaluation_rows)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.linear_schedule(0.0, 1e-3, 30)))
    state = smd.init_state(random_params(model_config(), seed), optimizer, jax.random.key(seed))
    if checkpoint.latest_step(folder) is not None:
        return checkpoint.restore(folder, state, config=config).state.params
    loop = make_loop(Job(ARMS[0], RATES[0], seed, sizes, runs))
    rows = RunningSums("train")
    update = make_supervised_update(loop.model, optimizer)
    for step in range(WARM_START_STEPS):
        # Other rows than those of the rollouts' first steps, which go by the seed itself.
        batch = [rows[int(i)] for i in batch_indices(len(rows), 128, step, 10_000 + seed)]
        pairs = [row["prompt"] for row in batch], [row["answer"] for row in batch]
        state, _ = update(state, encode_examples(tokenizer(), *pairs, width=PROMPT + RESPONSE))
        if step % 10 != 9:
            continue
        if evaluate(loop, state.params, "validation", sizes.evaluation_rows)["eval/dense"] >= sizes.dense_start:
            checkpoint.save(folder, step + 1, state, data_position={}, config=config)
            return state.params
    raise RuntimeError(f"expected a dense reward of {sizes.dense_start} within {WARM_START_STEPS} steps of the start")


if __name__ == "__main__":
    main(tyro.cli(Args))
