"""The jobs of a study: every arm of every cell gets the same tries.

Each arm of a cell (a problem and a sampler) has the same grid of learning rates. The rate is the one with the highest
mean of final sparse and dense greedy reward over pilot seeds, the lower one of two equals. Pilot seeds are not
reported, and judged on rows of their own.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.pool import Pool
from pathlib import Path

import numpy as np

from smd_jax.commands.compilation_cache import keep_programs
from study.arms import Arm
from study.files import Row, fingerprint, read_rows, write_rows
from study.problems import Problem
from study.runs import Job, Sizes, finished, keep, kept_row, start
from study.samplers import Sampler

PILOT_SEEDS = (100, 101)


@dataclass(frozen=True)
class Cell:
    """Where arms are compared.

    Attributes:
      seeds: that are reported.
      pilot: the sampler under which the learning rates of this problem are chosen, for all cells that name it; None:
        the cell's own.
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
        """A run that helps to choose a rate."""
        return Job(self.problem, self.pilot or self.sampler, arm, rate, seed, True, sizes)


@dataclass(frozen=True)
class Grid:
    """The jobs of a study.

    Attributes:
      script: the study's, as in "experiments/map.py".
      rates: learning rates to choose from; a single one is taken without a pilot.
      minutes: no job is begun later than this after the start; None: all are.
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

    def __post_init__(self) -> None:
        for cell in self.cells:
            if both := sorted(set(cell.seeds) & set(self.pilot_seeds)):
                raise ValueError(f"expected seeds other than those of the pilot, {self.pilot_seeds}; got {both}")

    def command(self, job: Job) -> str:
        """Makes the row of this job alone, whatever has been run before."""
        words = ["--tasks", job.problem.label, "--samplers", job.sampler.label, "--arms", job.arm.name]
        words += ["--seeds", str(job.seed), "--learning-rates", f"{job.learning_rate:g}", "--runs", "runs/again"]
        return shlex.join(["python", self.script, *words])

    def run(self) -> list[Row]:
        """All rows, those of the pilot first. The file of results is written again after every one."""
        began = time.monotonic()
        keep_programs()  # before the workers do, so that one process says where
        with one_core_each(self.workers) as pool:
            self._run_jobs(pool, list(self.pilot_jobs()), began)
            self._run_jobs(pool, list(self.reported_jobs()), began)
        return self.collect()

    def pilot_jobs(self) -> Iterable[Job]:
        """None for an arm that does not train, and where there is nothing to choose."""
        if len(self.rates) == 1:
            return
        choices = itertools.product(self.cells, self.rates, self.pilot_seeds)
        jobs = (
            cell.pilot_job(arm, rate, seed, self.sizes)
            for cell, rate, seed in choices
            for arm in cell.arms
            if arm.trains
        )
        # Cells that share a pilot share its jobs.
        yield from dict.fromkeys(jobs)

    def reported_jobs(self) -> Iterable[Job]:
        """Of the arms whose pilot is complete. Seed by seed: after a stop, all arms have the first seeds."""
        most = max(len(cell.seeds) for cell in self.cells)
        for place in range(most):
            for cell in self.cells:
                for arm in cell.arms if place < len(cell.seeds) else ():
                    rate = self.rate(cell, arm)
                    if rate is not None:
                        yield cell.job(arm, rate, cell.seeds[place], self.sizes)

    def rate(self, cell: Cell, arm: Arm) -> float | None:
        """The learning rate that the pilot speaks for; None while it is not complete."""
        if len(self.rates) == 1 or not arm.trains:
            return self.rates[0]
        rewards: dict[float, float] = {}
        for rate in self.rates:
            jobs = (cell.pilot_job(arm, rate, seed, self.sizes) for seed in self.pilot_seeds)
            rows = [kept_row(job, self.runs) for job in jobs]
            if any(row is None for row in rows):
                return None
            rewards[rate] = float(np.mean([_final(row) for row in rows if row is not None]))
        return best_rate(rewards)

    def collect(self) -> list[Row]:
        """The rows that are there, written to the file of results beside those of other cells and seeds."""
        jobs = [*self.pilot_jobs(), *self.reported_jobs()]
        rows = [row for job in jobs if (row := kept_row(job, self.runs)) is not None]
        new = {_key(row) for row in rows}
        merged = [row for row in read_rows(self.results) if _key(row) not in new] + rows
        write_rows(self.results, sorted(merged, key=_key))
        return rows

    def _run_jobs(self, pool: Pool, jobs: Sequence[Job], began: float) -> None:
        self._keep_results(jobs)
        missing = [job for job in jobs if kept_row(job, self.runs) is None]
        # Before the runs that share them, or two of these would make the same one.
        starts = {(job.problem.start_problem, job.seed) for job in missing}
        folder = self.runs.parent / "starts"
        make = [functools.partial(start, *key, self.sizes, folder) for key in sorted(starts, key=repr)]
        list(pool.imap_unordered(_quietly, make))
        until = None if self.minutes is None else time.time() + 60 * self.minutes - (time.monotonic() - began)
        work = [functools.partial(_unless_late, until, job, self.runs, self.command(job)) for job in missing]
        for _ in pool.imap_unordered(_call, work):
            self.collect()

    def _keep_results(self, jobs: Sequence[Job]) -> None:
        """Of the rows in the file of results, those of these jobs count as kept: a study goes on on another machine.

        Rows of other settings are made again, and then replaced.
        """
        there = {(_key(row), row.get("settings")): row for row in read_rows(self.results)}
        for job in jobs:
            row = there.get((_key(job.identity), fingerprint(job.settings)))
            if row is not None and kept_row(job, self.runs) is None:
                keep(job, self.runs, row)


def best_rate(rewards: dict[float, float]) -> float:
    """The learning rate with the highest reward, the lower one of two equals."""
    return max(sorted(rewards), key=lambda rate: rewards[rate])


def one_core_each(workers: int) -> Pool:
    """Processes with a core each: the programs are so small that a second core would only wait.

    Rows can be made again bitwise on CPU alone. JAX must not be forked, and reads this before it is imported.
    """
    os.environ |= {"JAX_PLATFORMS": "cpu", "NPROC": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()
    return multiprocessing.get_context("spawn").Pool(workers, keep_programs)


def _call(work: Callable[[], object]) -> object:
    return work()


def _quietly(work: Callable[[], object]) -> None:
    """Without what it gives: parameters need not travel between processes."""
    work()


def _unless_late(until: float | None, job: Job, runs: Path, command: str) -> None:
    if until is None or time.time() < until:
        finished(job, runs, command)


def _final(row: Row) -> float:
    return (row["sparse_greedy"] + row["dense_greedy"]) / 2


def _key(row: Row) -> tuple[object, ...]:
    fields = ("task", "policy", "budget", "buffer", "arm", "pilot", "learning_rate", "seed", "minibatches", "prompts")
    return tuple(row[name] for name in fields)
