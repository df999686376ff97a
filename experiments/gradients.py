"""What is a gradient worth, before anybody trains: signal, noise and direction of every arm's.

Question   From one policy (dense reward 0.97 at temperature 1) and the same rollouts: how large is the mean gradient of
           every arm, how large its noise, and where does it point, as seen from the gradient of the sparse objective
           (the sampler's policy) and of the dense one (a sampler with its full cache)? By budget, length and eviction
           policy. What does the frozen mask leave out, where the choice of keys depends on the parameters: realised
           change of the sparse reward along a small step, against the predicted one? And what lowers the noise of
           guesses about what is gone?
Found      A rollout's gradient with shadow masks points along the sparse objective's about twice as well as TIS's in
           the showdown's cell. Of nine ways to lower its noise none helps everywhere or by much, so that none became
           an option of the library; a frozen teacher comes to more there. What the frozen mask leaves out of the
           smallest step is less than the noise of measuring it, 0.11 to 0.22 of the slope, whether the choice of keys
           depends on the parameters or not.
Command    python experiments/gradients.py      (rows that are kept under runs/gradients are not made again;
                                                 --tasks, --samplers, --seeds: a part of it, --collect: the table alone)
Cost       2.5 CPU hours for the eleven cells of sorting and sums, on one core of an Intel Xeon (family 6, model 167)
           and of AMD EPYCs (family 25, model 1; family 26, model 2); and the supervised starts, which all studies share
Result     experiments/results/gradients.json, and the tables in REPORT.md

Rows of the kind "gradient", an arm of a cell each:

    signal               squared norm of the mean gradient, without the noise's share (can come out below 0)
    noise, snr           trace of the covariance of one rollout's gradient; signal / noise
    cosine_sparse        of the mean to that of "shadow": GRPO's gradient of the policy that samples
    cosine_dense         to that of "full-cache": the same of the policy with its full cache
    cosine_reward        to that of "exact": the gradient of the mean sparse reward, masks frozen
    alignment_*          mean product of one rollout's gradient, by its root mean square length, with that mean's
                         direction: cosine · √(signal / (signal + noise)). How far a step of given length goes
    noise_of_block_mean  trace of the covariance of the mean over a block: noise / rollouts of a block, if more prompts
                         per step do what they should
    *_half               half the width of the 95 % interval (jackknife over blocks of rollouts)

Rows of the kind "reference" have the same of what the others are compared with, from more rollouts of other prompts;
and those of the kind "step"
`predicted` and `realised` slope of the mean reward along a direction of length 1, and `ratio`; `step` is the length,
such that the reward should change by 0.01, 0.03 and 0.1, or 0.1 at most.
What the arms are: experiments/study/coefficients.py.
"""

from __future__ import annotations

import functools
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from smd_jax.commands.compilation_cache import keep_programs
from study.command import stopping
from study.files import RESULTS, ROOT, Row, fingerprint, read_rows, write_rows
from study.gradient_runs import GradientSizes, Measurement, kept, measured
from study.grid import one_core_each
from study.problems import problem_of
from study.samplers import sampler_of
from study.small_steps import Steps, StepSizes, stepped
from study.starts import StartLevel

# In the order of importance: what is stopped has the first ones.
CELLS = (
    ("sorting-12", "tova-heads:11+2"),  # the showdown's
    ("sums-12", "tova-heads:14+2"),
    ("sorting-12", "streaming:11+2"),
    ("sorting-12", "random:11+2"),
    ("sorting-12", "h2o:11+2"),
    ("sorting-12", "snapkv:11+2"),
    ("sorting-12", "tova:11+2"),
    ("sorting-12", "tova-heads:14+2"),
    ("sorting-12", "tova-heads:17+2"),
    # The same share of the keys stays: half.
    ("sorting-8", "tova-heads:7+2"),
    ("sorting-16", "tova-heads:15+2"),
    # The horizon's, longer and longer.
    ("walk-16", "h2o:12+4"),
    ("walk-64", "h2o:12+4"),
    ("walk-256", "h2o:12+4"),
)
# Budgets and lengths are compared by their gradients alone.
STEPPED = tuple(cell for cell in CELLS if cell[1].endswith("11+2") or cell[0] == "sums-12")
CONTROL = ("tova-heads:14+2", "tova-heads:11+2")  # with their full cache as well
SEEDS = (0,)
SIZES = GradientSizes()
# A quarter of the prompts: a walk is up to twenty times as long. The start is the horizon's.
WALK_SIZES = GradientSizes(reference_rollouts=256, prompts=8, start=StartLevel(rows=256))
STEP_SIZES = StepSizes()
QUICK = GradientSizes(rollouts=4, reference_rollouts=4, prompts=2, blocks=2, start=StartLevel(0.02, rows=16))
QUICK_STEPS = StepSizes(batches=2, prompts=2, changes=(0.01,), isotropic=1)


@dataclass(frozen=True)
class Args:
    """Measures the gradients, or the part of them that is asked for. What is kept under --runs is not made again."""

    tasks: tuple[str, ...] | None = None  # such as sorting-12; default: all
    samplers: tuple[str, ...] | None = None  # such as tova:11+2; default: all
    seeds: tuple[int, ...] | None = None  # default: the study's
    runs: Path | None = None  # folder of all studies' runs; default: runs
    results: Path | None = None  # file of the rows; default: experiments/results/gradients.json for the whole study
    workers: int = 1  # processes, one core each
    minutes: float | None = None  # begin no cell later than this; what is left is for the next call
    quick: bool = False  # small cells, under runs/gradients-quick
    collect: bool = False  # run nothing: write the rows that are kept


@dataclass(frozen=True)
class Study:
    """The cells that are asked for."""

    jobs: tuple[Measurement, ...]
    steps: StepSizes
    runs: Path
    results: Path

    def steps_of(self, job: Measurement) -> list[Steps]:
        if (job.problem.label, job.sampler.label) not in STEPPED:
            return []
        control = [Steps(job, self.steps, evicts=False)] if job.sampler.label in CONTROL else []
        return [Steps(job, self.steps), *control]

    def command(self, job: Measurement) -> str:
        """Makes the rows of this cell alone, whatever has been measured before."""
        words = ["--tasks", job.problem.label, "--samplers", job.sampler.label, "--seeds", str(job.seed)]
        return shlex.join(["python", "experiments/gradients.py", *words, "--runs", "runs/again"])

    def cell(self, job: Measurement) -> None:
        """Gradients first, as steps go along them. A cell whose rows are in the file of results is not measured again:
        a study goes on on another machine."""
        there = {row.get("settings") for row in read_rows(self.results)}
        if {fingerprint(part.settings) for part in (job, *self.steps_of(job))} <= there:
            return
        measured(job, self.runs, self.command(job))
        for steps in self.steps_of(job):
            stepped(steps, self.runs, self.command(job))

    def collect(self) -> list[Row]:
        """The rows that are there, written to the file of results beside those of other cells and seeds."""
        rows: list[Row] = []
        for job in self.jobs:
            folder = job.folder(self.runs)
            rows += kept(folder / "gradients.json", job.settings) or []
            for steps in self.steps_of(job):
                rows += kept(folder / f"steps-{steps.arm}.json", steps.settings) or []
        new = {_cell(row) for row in rows}
        others = [row for row in read_rows(self.results) if _cell(row) not in new]
        write_rows(self.results, sorted(others + rows, key=_cell))  # stable: arms stay in their order
        return rows


def main(args: Args) -> None:
    with stopping():
        study = make_study(args)
    keep_programs()  # before the workers do, so that one process says where
    if not args.collect:
        until = None if args.minutes is None else time.time() + 60 * args.minutes
        with one_core_each(args.workers) as pool:
            for _ in pool.imap_unordered(functools.partial(_unless_late, study, until), study.jobs):
                study.collect()
    show(study.collect())


def make_study(args: Args) -> Study:
    """The cells of the tasks and samplers asked for. Seeds may be others than the study's.

    Raises:
      ValueError: for a task or sampler that no cell has; says which there are.
    """
    tasks, samplers = (tuple(sorted({cell[place] for cell in CELLS})) for place in (0, 1))
    for kind, wanted, there in (("tasks", args.tasks, tasks), ("samplers", args.samplers, samplers)):
        if unknown := sorted(set(wanted or ()) - set(there)):
            raise ValueError(f"expected {kind} of {list(there)}; got {unknown}")
    jobs = tuple(
        Measurement(problem_of(task), sampler_of(sampler), seed, QUICK if args.quick else sizes_of(task))
        for seed in args.seeds or SEEDS
        for task, sampler in CELLS
        if task in (args.tasks or tasks) and sampler in (args.samplers or samplers)
    )
    if not jobs:
        raise ValueError(f"expected a cell of {list(CELLS)}; got tasks {args.tasks} with samplers {args.samplers}")
    whole = (args.tasks, args.samplers, args.seeds, args.quick) == (None, None, None, False)
    runs = (args.runs or ROOT / "runs").absolute() / ("gradients-quick" if args.quick else "gradients")
    results = args.results or (RESULTS / "gradients.json" if whole else runs / "gradients.json")
    return Study(jobs, QUICK_STEPS if args.quick else STEP_SIZES, runs, results)


def sizes_of(task: str) -> GradientSizes:
    return WALK_SIZES if task.startswith("walk") else SIZES


def show(rows: Sequence[Row]) -> None:
    """Tables on the terminal: of gradients by cell, and of steps."""
    for row in rows:
        cell = f"{row['task']} {row['policy']}:{row['budget']}+{row['buffer']} seed {row['seed']} {row['arm']}"
        if row["kind"] != "step":
            numbers = [_with_half(row, name) for name in ("snr", "cosine_sparse", "cosine_dense", "alignment_sparse")]
            print(f"{cell} ({row['kind']}): snr, cosine to sparse and dense, alignment: {'  '.join(numbers)}")
        else:
            numbers = [_with_half(row, name) for name in ("predicted", "realised", "ratio")]
            print(f"{cell} along {row['direction']}, {row['step']:g}: {'  '.join(numbers)}")


def _with_half(row: Row, name: str) -> str:
    value, half = row[name], row[f"{name}_half"]
    return "–" if value is None else f"{value:.4f}" + ("" if half is None else f" ± {half:.4f}")


def _unless_late(study: Study, until: float | None, job: Measurement) -> None:
    if until is None or time.time() < until:
        study.cell(job)


def _cell(row: Row) -> tuple[object, ...]:
    return tuple(row[name] for name in ("task", "policy", "budget", "buffer", "seed"))


if __name__ == "__main__":
    main(tyro.cli(Args))
