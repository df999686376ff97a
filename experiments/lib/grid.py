"""The jobs of a study.

Each arm of a cell (a problem and a sampler) has the same grid of learning rates. A criterion is a set of decodings. It
chooses the rate with the highest mean reward of these decodings over the pilot seeds; of two equals the lower one.
Pilot seeds are not reported and are evaluated on validation rows.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.pool import Pool
from operator import itemgetter
from pathlib import Path

import numpy as np

from lib.arms import Arm
from lib.files import Row, fingerprint, merged, read_rows, write_rows
from lib.problems import Problem
from lib.runs import Job, Sizes, finished, keep, kept_row
from lib.samplers import Sampler
from lib.starts import check_one_start
from smd_jax.commands.compilation_cache import cache_programs

PILOT_SEEDS = (100, 101)
RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)  # of a search that widens
Criterion = tuple[str, ...]  # decodings whose mean reward chooses a rate
BOTH_GREEDY: tuple[Criterion, ...] = (("sparse_greedy", "dense_greedy"),)
BY_CACHE: tuple[Criterion, ...] = (("sparse", "sparse_greedy"), ("dense", "dense_greedy"))


@dataclass(frozen=True)
class Cell:
    """A problem and a sampler under which arms are compared.

    Attributes:
      seeds: the reported ones.
      pilot: the sampler under which the learning rates are chosen; None: the cell's own.
    """

    problem: Problem
    sampler: Sampler
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    pilot: Sampler | None = None

    def job(self, arm: Arm, rate: float, seed: int, sizes: Sizes) -> Job:
        """A reported run."""
        return Job(self.problem, self.sampler, arm, rate, seed, False, sizes)

    def pilot_job(self, arm: Arm, rate: float, seed: int, sizes: Sizes) -> Job:
        """A run of a pilot."""
        return Job(self.problem, self.pilot or self.sampler, arm, rate, seed, True, sizes)


@dataclass(frozen=True)
class Grid:
    """The jobs of a study.

    Attributes:
      script: of the study, such as "experiments/room.py".
      rates: learning rates to choose from; a single one needs no pilot.
      criteria: each chooses one rate; an arm is reported at all chosen rates. None at all: no pilot, every rate is
        reported.
      first_rates: the rates that every pilot begins with. While the best one is the smallest or largest that ran, the
        next one of `rates` runs too. None: all of `rates`.
      pilots_from: results of another study whose pilot rows count here, too.
      minutes: of `run` after which no job starts; None: no limit.
      clean: refuse to run while tracked files differ from the commit.
    """

    script: str
    cells: tuple[Cell, ...]
    rates: tuple[float, ...]
    sizes: Sizes
    runs: Path
    results: Path
    pilot_seeds: tuple[int, ...] = PILOT_SEEDS
    workers: int = 2
    minutes: float | None = None
    criteria: tuple[Criterion, ...] = BOTH_GREEDY
    first_rates: tuple[float, ...] | None = None
    pilots_from: Path | None = None
    clean: bool = True

    def __post_init__(self) -> None:
        for cell in self.cells:
            if both := sorted(set(cell.seeds) & set(self.pilot_seeds)):
                raise ValueError(f"expected seeds other than those of the pilot, {self.pilot_seeds}; got {both}")

    def command(self, job: Job) -> str:
        """The command that makes the row of this job only."""
        words = ["--tasks", job.problem.label, "--samplers", job.sampler.label, "--arms", job.arm.name]
        words += ["--seeds", str(job.seed), "--learning-rates", f"{job.learning_rate:g}", "--runs", "runs/again"]
        return shlex.join(["python", self.script, *words])

    def run(self) -> list[Row]:
        """Makes all rows, cell by cell, pilots first. Writes the file of results after every row."""
        began = time.monotonic()
        cache_programs()  # before the workers do, so that only one process prints it
        with one_core_each(self.workers) as pool:
            for cell in self.cells:
                pilots: list[Job] = []
                # A new row, also from another machine, may require the next rate beyond the best.
                while pilots != (pilots := list(self.pilot_jobs(cell))):
                    self._run_jobs(pool, pilots, began)
                self._run_jobs(pool, list(self.reported_jobs(cell)), began)
        return self.collect()

    def pilot_jobs(self, cell: Cell) -> Iterable[Job]:
        """The pilot jobs that the kept rows require; none for an arm without training or without a choice of rates."""
        if len(self.rates) == 1 or not self.criteria:
            return
        for arm in cell.arms:
            if arm.trains:
                for rate in self._wanted_rates(cell, arm):
                    for seed in self.pilot_seeds:
                        yield cell.pilot_job(arm, rate, seed, self.sizes)

    def reported_jobs(self, cell: Cell) -> Iterable[Job]:
        """Jobs of the arms whose pilot is complete, seed by seed: after a stop all arms have the same seeds."""
        chosen = {arm: sorted(set(self.chosen_rates(cell, arm))) for arm in cell.arms}
        for seed in cell.seeds:
            for arm, rates in chosen.items():
                for rate in rates:
                    yield cell.job(arm, rate, seed, self.sizes)

    def chosen_rates(self, cell: Cell, arm: Arm) -> list[float]:
        """The learning rate of every criterion; none while the pilot is incomplete."""
        if len(self.rates) == 1 or not arm.trains:
            return [self.rates[0]]
        if not self.criteria:
            return list(self.rates)
        return self._best_rates(cell, arm, self._wanted_rates(cell, arm)) or []

    def _wanted_rates(self, cell: Cell, arm: Arm) -> Sequence[float]:
        """The first rates, and the rates beyond a best one at the edge, as far as rows exist."""
        every = sorted(self.rates)
        return widened(every, sorted(self.first_rates or every), functools.partial(self._best_rates, cell, arm))

    def _best_rates(self, cell: Cell, arm: Arm, rates: Sequence[float]) -> list[float] | None:
        """The best rate of every criterion; None while a row is missing."""
        rewards = [self._pilot_rewards(cell, arm, rate) for rate in rates]
        found = [reward for reward in rewards if reward is not None]
        if len(found) < len(rates):
            return None
        return [best_rate(dict(zip(rates, of_criterion, strict=True))) for of_criterion in zip(*found, strict=True)]

    def _pilot_rewards(self, cell: Cell, arm: Arm, rate: float) -> tuple[float, ...] | None:
        """The mean reward of every criterion over the pilot seeds; None while a row is missing."""
        rows = [kept_row(cell.pilot_job(arm, rate, seed, self.sizes), self.runs) for seed in self.pilot_seeds]
        found = [row for row in rows if row is not None]
        if len(found) < len(rows):
            return None
        return tuple(float(np.mean([row[kind] for row in found for kind in kinds])) for kinds in self.criteria)

    def collect(self) -> list[Row]:
        """Merges the kept rows into the file of results."""
        jobs = [job for cell in self.cells for job in (*self.pilot_jobs(cell), *self.reported_jobs(cell))]
        rows = [row for job in dict.fromkeys(jobs) if (row := kept_row(job, self.runs)) is not None]
        merge_rows(self.results, rows)
        return rows

    def _run_jobs(self, pool: Pool, jobs: Sequence[Job], began: float) -> None:
        """Runs the missing jobs."""
        self._keep_results(jobs)
        missing = [job for job in dict.fromkeys(jobs) if kept_row(job, self.runs) is None]
        until = None if self.minutes is None else time.time() + 60 * self.minutes - (time.monotonic() - began)
        work = [(job, self.command(job)) for job in missing]
        for _ in pool.imap_unordered(functools.partial(_unless_late, until, self.runs, self.clean), work):
            self.collect()

    def _keep_results(self, jobs: Sequence[Job]) -> None:
        """Copies these jobs' rows from the results files to `runs`, so that another machine can resume.

        Rows with other settings are rerun and replaced.
        """
        shared = [] if self.pilots_from is None else [row for row in read_rows(self.pilots_from) if row["pilot"]]
        there = {(_key(row), row.get("settings")): row for row in (*shared, *read_rows(self.results))}
        for job in jobs:
            row = there.get((_key(job.identity), fingerprint(job.settings)))
            if row is not None and kept_row(job, self.runs) is None:
                keep(job, self.runs, row)


def best_rate(rewards: dict[float, float]) -> float:
    """The learning rate with the highest reward; of two equals the lower one."""
    return max(sorted(rewards), key=lambda rate: rewards[rate])


def searched_rate(reward: Callable[[float], float], rates: Sequence[float], first: Sequence[float]) -> float:
    """The best of the first rates; tries one more on a side while the best is at its edge.

    Args:
      reward: of a rate; called again for the same rates. rates: all that may be tried, ascending.
    """

    def best(ran: Sequence[float]) -> list[float]:
        return [best_rate({rate: reward(rate) for rate in ran})]

    return best(widened(rates, first, best))[0]


def widened(
    rates: Sequence[float], first: Sequence[float], best: Callable[[Sequence[float]], Sequence[float] | None]
) -> Sequence[float]:
    """The rates to run: the first ones, and one more on a side while its outermost rate is a best one.

    Args:
      best: the best rates among those that ran; None while rows are missing.
    """
    low, high = rates.index(first[0]), rates.index(first[-1])
    while found := best(rates[low : high + 1]):
        ends = max(low - (rates[low] in found), 0), min(high + (rates[high] in found), len(rates) - 1)
        if ends == (low, high):
            break
        low, high = ends
    return rates[low : high + 1]


def one_core_each(workers: int) -> Pool:
    """Processes with one core each: the programs are too small for a second one.

    Rows repeat bitwise on CPUs only. JAX must not be forked, and reads the environment at its import.
    """
    os.environ |= {"JAX_PLATFORMS": "cpu", "NPROC": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()
    return multiprocessing.get_context("spawn").Pool(workers, cache_programs)


def _unless_late(until: float | None, runs: Path, clean: bool, work: tuple[Job, str]) -> None:
    job, command = work
    if until is None or time.time() < until:
        finished(job, runs, command, clean)


def merge_rows(results: Path, rows: Sequence[Row]) -> None:
    """Adds rows to a file of results and replaces those of the same jobs.

    Raises:
      ValueError: if arms of one cell and seed began from different starts. The file is not changed.
    """
    all_rows = merged(results, rows, _key)
    check_one_start(all_rows)
    write_rows(results, all_rows)


_key = itemgetter(
    *("task", "policy", "budget", "buffer", "arm", "pilot", "learning_rate", "seed", "minibatches", "prompts")
)
