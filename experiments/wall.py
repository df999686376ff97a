"""The memory wall: equal bytes of KV cache, equal computing time. Which way of training ends higher?

Question   A user has bytes for a cache and hours on a machine. What earns the most reward: full caches of few rows in
           turns, full caches in few bits, or many rows under a budget?
Plan       experiments/PLAN.md, section "The wall": arms, primary contrast, what would refute it.
Task       Walks of 512 and 1,024 steps (experiments/lib/problems.py); the budget is H2O with 120 + 8 keys.
Bytes      Those of four rows with a full cache in bfloat16. Each way decodes as many rows at once as fit into them.
Time       `--seconds` of CPU time on one core for rollouts, rewards and updates, without compilation and evaluations.
Ways       full-turns: 32 completions a rollout, decoded in turns and trained in microbatches. full-updates: rollouts of
           as many completions as fit at once, so more optimizer steps. full-4-bit: as full-turns, a cache of 4 bits.
           tis, shadow, mixed-50: 32 completions under the budget.
Start      Supervised with the full cache until half of the steps are right greedily, as in experiments/room.py.
Rates      1e-4, 3e-4, 1e-3, wider while the best one is at the edge: the best one for the reward with the way's own
           cache on pilot seed 100 and validation rows.
Rewards    On 64 held-out rows at the half and the end of the time: with the full cache and under the budget, at
           temperature 1 and greedy. `own` is the mean of both samplings with the cache that the way trained with.
Command    python experiments/wall.py [--lengths 512] [--ways shadow …] [--seeds 10 11 …] [--seconds 240]
           In a clean clone, with nothing else running on its core. Finished runs are kept under runs/wall.
Result     experiments/results/wall.json, a row a run, pilots included
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path

os.environ |= {"JAX_PLATFORMS": "cpu", "NPROC": "1"}
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import smd_jax as smd
from lib.arms import Arm, arms_of
from lib.command import QUICK, as_written, exit_on_value_error
from lib.files import (
    RESULTS,
    ROOT,
    Row,
    fingerprint,
    merged,
    number,
    read_kept,
    read_rows,
    settings_text,
    write_kept,
    write_rows,
)
from lib.grid import RATES, searched_rate
from lib.problems import Walk
from lib.provenance import clean_commit, provenance
from lib.runs import DECODINGS, Job, Sizes, evaluated, make_evaluator, make_loop
from lib.samplers import FULL_CACHE, sampler_of
from lib.starts import StartLevel, start, start_hash
from smd_jax.sampler.config import cache_bytes

SAMPLER = sampler_of("h2o:120+8")
QUANT_GROUP = 32  # tokens that share the range of a key channel in few bits
FULL_ROWS = 4  # rows with a full cache that fit
GROUP = 8
PROMPTS = 4
LENGTHS = (512, 1024)
PILOT_SEED = 100
SEEDS = tuple(range(10, 16))
FIRST_RATES = (1e-4, 3e-4, 1e-3)
# 64 rows: an evaluation of 512 walks of 1,024 steps takes about two minutes.
START = StartLevel(0.5, greedy=True, every=10, rows=64)


@dataclass(frozen=True)
class Way:
    """One way to spend the bytes and the time.

    Attributes:
      prompts, group: of one rollout.
    """

    name: str
    arm: Arm
    prompts: int = PROMPTS
    group: int = GROUP

    @property
    def decodings(self) -> tuple[str, str]:
        """The evaluations with the cache that this way trains with."""
        return ("dense", "dense_greedy") if self.arm.full_cache else ("sparse", "sparse_greedy")


FULL, FOUR_BITS, *BUDGETED = (
    arms_of((name,))[0] for name in ("full-cache", "quantised-cache", "tis", "shadow", "mixed-50")
)
WAYS = (
    Way("full-turns", FULL),
    Way("full-updates", FULL, prompts=1, group=FULL_ROWS),
    Way("full-4-bit", FOUR_BITS),
    *(Way(arm.name, arm) for arm in BUDGETED),
)


@dataclass(frozen=True)
class Args:
    """Runs the study or a part of it."""

    lengths: tuple[int, ...] = LENGTHS  # steps of a walk
    ways: tuple[str, ...] = tuple(way.name for way in WAYS)
    seeds: tuple[int, ...] = SEEDS
    seconds: float = 240.0  # CPU time of a run
    runs: Path = ROOT / "runs"
    results: Path = RESULTS / "wall.json"
    rows_from: Path | None = None  # run nothing; add the rows of this file, made in a clean clone
    quick: bool = False  # a smoke test: a start without skill, from changed files too; rows are not to be reported


@dataclass(frozen=True)
class Run:
    """One run: a way, a length, a rate, a seed, a time."""

    way: Way
    length: int
    rate: float
    seed: int
    seconds: float
    level: StartLevel = START

    @property
    def pilot(self) -> bool:
        return self.seed == PILOT_SEED

    @property
    def job(self) -> Job:
        sizes = Sizes(prompts=self.way.prompts, group=self.way.group, evaluation_rows=64, warmup=2, start=self.level)
        return Job(Walk(self.length), SAMPLER, self.way.arm, self.rate, self.seed, self.pilot, sizes)

    @property
    def settings(self) -> str:
        return settings_text(self)

    def file(self, runs: Path) -> Path:
        return runs / "wall" / f"{self.way.name}-{self.length}-{self.rate:g}-{self.seed}-{self.seconds:g}.json"


def rows_that_fit(loop: smd.GRPOLoop) -> tuple[int, int]:
    """Rows of this loop's cache that fit into the bytes of `FULL_ROWS` full caches, and bytes of a row, in bfloat16."""
    shape = replace(loop.model.shape, dtype="bfloat16")
    config, width = loop.config.rollout, loop.config.prompt_width
    full = cache_bytes(shape, FULL_CACHE, replace(config, quant=None), width, rows=1)
    own = cache_bytes(shape, loop.config.policy, config, width, rows=1)
    return FULL_ROWS * full // own, own


def timed_loop(job: Job) -> tuple[smd.GRPOLoop, int, int]:
    """The loop that decodes and trains no more rows at once than fit, with this number and the bytes of a row.

    Raises:
      ValueError: a walk so short that no row under the budget fits.
    """
    loop = make_loop(job, QUANT_GROUP)
    fit, own = rows_that_fit(loop)
    if fit < 1:
        raise ValueError(
            f"expected walks whose {FULL_ROWS} full caches hold a row of {SAMPLER.label}; got {job.problem.label}"
        )
    rows = min(fit, loop.config.completions_per_step)
    micro = max(size for size in range(1, rows + 1) if loop.config.completions_per_step % size == 0)
    update = replace(loop.config.update, microbatch_size=micro)
    return replace(loop, config=replace(loop.config, decode_rows=rows, update=update)), rows, own


def execute(run: Run, runs: Path) -> Row:
    """Trains for the time of the run. The clock stops during evaluations."""
    job = run.job
    params = start(job.problem, job.seed, run.level, runs / "starts")
    found = start_hash(params)
    loop, rows, own = timed_loop(job)
    evaluator = make_evaluator(make_loop(job), job.problem, job.sampler, job.split, job.sizes.evaluation_rows)
    key = jax.random.key(job.seed)
    curve = [{"seconds": 0.0} | evaluated(evaluator, params)]
    # Compiles, on a copy: an update donates its state.
    loop.step(smd.init_state(jax.tree.map(jnp.copy, params), loop.optimizer, key))
    state, spent, tokens, rollouts = smd.init_state(params, loop.optimizer, key), 0.0, 0.0, 0
    for share in (0.5, 1.0):
        while spent < share * run.seconds:
            began = time.process_time()
            state, metrics = loop.step(state)
            spent += time.process_time() - began
            tokens += metrics["completions/mean_length"] * loop.config.completions_per_step
            rollouts += 1
        curve.append({"seconds": spent} | evaluated(evaluator, state.params))
    end = curve[-1]
    row = {"way": run.way.name, "length": run.length, "learning_rate": run.rate, "seed": run.seed, "pilot": run.pilot}
    row |= {"seconds": run.seconds, "rows_at_once": rows, "bytes_of_a_row": own, "rollouts": rollouts}
    row |= {"tokens": number(tokens), "completions": loop.config.completions_per_step, "start": found}
    row |= {kind: number(end[kind]) for kind in DECODINGS}
    row["own"] = number(float(np.mean([end[kind] for kind in run.way.decodings])))
    row["curve"] = [{name: number(value) for name, value in point.items()} for point in curve]
    origin = provenance()
    row |= {name: origin[name] for name in ("date", "commit", "cpu", "versions")}
    return row | {"command": command(run), "settings": fingerprint(run.settings)}


def command(run: Run) -> str:
    """The command that makes the row of this run, after its pilots."""
    words = f"--lengths {run.length} --ways {run.way.name} --seeds {run.seed} --seconds {run.seconds:g}"
    return f"python experiments/wall.py {words} --runs runs/again --results runs/again/wall.json"


def finished(run: Run, args: Args) -> Row:
    """The kept row, or a new one.

    Raises:
      RuntimeError: if tracked files differ from the commit.
    """
    kept = read_kept(run.file(args.runs), run.settings)
    if kept is not None:
        return kept
    if not args.quick:
        clean_commit()
    row = execute(run, args.runs)
    write_kept(run.file(args.runs), run.settings, row)
    merge(args.results, [row])
    print(
        f"{run.way.name} {run.length} {run.rate:g} seed {run.seed}: own {row['own']}, {row['rollouts']} rollouts",
        flush=True,
    )
    return row


def pilot_reward(way: Way, length: int, level: StartLevel, args: Args, rate: float) -> float:
    """The reward of the pilot at this rate, with the way's own cache."""
    return finished(Run(way, length, rate, PILOT_SEED, args.seconds, level), args)["own"]


def merge(results: Path, rows: list[Row]) -> None:
    """Adds rows to the file of results and replaces those of the same runs."""
    key = itemgetter("length", "way", "pilot", "learning_rate", "seed", "seconds")
    write_rows(results, merged(results, rows, key))


def main(args: Args) -> None:
    with exit_on_value_error():
        if unknown := set(args.ways) - {way.name for way in WAYS}:
            raise ValueError(f"expected ways of {[way.name for way in WAYS]}; got {sorted(unknown)}")
    if args.rows_from is not None:
        merge(args.results, read_rows(args.rows_from))
        return
    ways = [way for way in WAYS if way.name in args.ways]
    level = QUICK.start if args.quick else START
    for length in args.lengths:
        best = {way: searched_rate(partial(pilot_reward, way, length, level, args), RATES, FIRST_RATES) for way in ways}
        for seed in args.seeds:
            for way in ways:
                finished(Run(way, length, best[way], seed, args.seconds, level), args)


if __name__ == "__main__":
    main(tyro.cli(Args, description=as_written(__doc__)))
