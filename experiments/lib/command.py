"""Command line shared by the studies: which part of a study runs, where rows are kept, and when it stops."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from lib.files import RESULTS, ROOT, Row, read_rows
from lib.grid import BOTH_GREEDY, RATES, Cell, Criterion, Grid, merge_rows
from lib.provenance import is_clean
from lib.runs import Sizes
from lib.starts import StartLevel

QUICK = Sizes(
    rollouts=2, prompts=4, group=4, warmup=1, evaluate_every=1, evaluation_rows=16, start=StartLevel(0.02, rows=16)
)


@dataclass(frozen=True)
class StudyArgs:
    """Runs the study or a part of it. Rows saved under --runs are reused."""

    tasks: tuple[str, ...] | None = None  # such as sorting-12; default: the study's
    samplers: tuple[str, ...] | None = None  # such as tova:14+2; default: the study's
    arms: tuple[str, ...] | None = None  # by name; default: the study's
    seeds: tuple[int, ...] | None = None  # reported ones; default: the study's
    learning_rates: tuple[float, ...] | None = None  # to choose from; a single one needs no pilot
    runs: Path | None = None  # folder of all studies' runs; default: runs
    results: Path | None = None  # file of the rows; default: experiments/results for the study's own cells and rates
    workers: int = 2  # processes, one core each
    minutes: float | None = None  # start no run after this time; the next call resumes
    quick: bool = False  # a few small rollouts, under runs/NAME-quick
    collect: bool = False  # run nothing; write the kept rows
    rows_from: Path | None = None  # run nothing; add the rows of this file, made in a clean clone


def grid_of(
    args: StudyArgs, name: str, cells: Sequence[Cell], rates: tuple[float, ...], sizes: Sizes, by_task: bool = False
) -> Grid:
    """The selected part of a study.

    Args:
      name: of the script in experiments/, without its ending.
      by_task: whether the results are a folder with a file per task.

    Raises:
      ValueError: for a task, sampler or arm that no cell has.
    """
    whole = (args.learning_rates, args.seeds, args.tasks, args.samplers, args.quick) == (None, None, None, None, False)
    folder = f"{name}-quick" if args.quick else name
    runs = (ROOT / "runs" if args.runs is None else args.runs) / folder
    results = args.results or (RESULTS if whole else runs) / (name if by_task else f"{name}.json")
    return Grid(
        script=f"experiments/{name}.py",
        cells=tuple(narrowed(args, cells)),
        rates=args.learning_rates or rates,
        sizes=QUICK if args.quick else sizes,
        runs=runs.absolute(),
        results=results,
        workers=args.workers,
        minutes=args.minutes,
        clean=not args.quick,
    )


def narrowed(args: StudyArgs, cells: Sequence[Cell]) -> list[Cell]:
    """The selected cells with the selected arms and seeds. Seeds may differ from those of the study."""
    tasks = selected("tasks", args.tasks, {cell.problem.label for cell in cells})
    samplers = selected("samplers", args.samplers, {cell.sampler.label for cell in cells})
    arms = selected("arms", args.arms, {arm.name for cell in cells for arm in cell.arms})
    found = [
        replace(cell, arms=kept, seeds=args.seeds or cell.seeds)
        for cell in cells
        if cell.problem.label in tasks and cell.sampler.label in samplers
        if (kept := tuple(arm for arm in cell.arms if arm.name in arms))
    ]
    if not found:
        there = [f"{cell.problem.label} under {cell.sampler.label}" for cell in cells]
        raise ValueError(
            f"expected a cell of {there}; got tasks {args.tasks} with samplers {args.samplers} and arms {args.arms}"
        )
    return found


def selected(kind: str, given: Sequence[str] | None, known: set[str]) -> set[str]:
    """The given names, or all. Raises ValueError for one that no cell has."""
    if unknown := sorted(set(given or ()) - known):
        raise ValueError(f"expected {kind} of {sorted(known)}; got {unknown}")
    return known if given is None else set(given)


def run_study(
    header: str | None,
    name: str,
    cells: Sequence[Cell],
    sizes: Sizes,
    rates: tuple[float, ...] = RATES,
    first_rates: tuple[float, ...] | None = None,
    criteria: tuple[Criterion, ...] = BOTH_GREEDY,
    pilots_from: Path | None = None,
    by_task: bool = False,
) -> None:
    """Reads the command line and runs the study; with `--collect` or `--rows-from` it only reads rows.

    Args:
      header: of the script, the text of --help.
      first_rates, criteria, pilots_from: see `Grid`. Given --learning-rates, a pilot begins with all of them.
    """
    args = tyro.cli(StudyArgs, description=as_written(header))
    with exit_on_value_error():
        grid = grid_of(args, name, cells, rates, sizes, by_task)
        first = None if args.learning_rates else first_rates
        grid = replace(grid, first_rates=first, criteria=criteria, pilots_from=pilots_from)
        if args.rows_from is not None:
            add_rows(grid.results, args.rows_from)
        elif args.collect:
            grid.collect()
        else:
            grid.run()


def add_rows(results: Path, source: Path) -> list[Row]:
    """Adds the rows of `source` to `results`.

    Raises:
      ValueError: for rows without a clean commit or a start, or with another start than the rows of their cell and
        seed. `results` stays as it is.
    """
    rows = read_rows(source)
    if bad := [row["commit"] for row in rows if not is_clean(row["commit"]) or "start" not in row]:
        raise ValueError(
            f"expected rows of clean commits with the hash of their start; got {len(bad)} others, {bad[:3]}"
        )
    merge_rows(results, rows)
    return rows


def as_written(header: str | None) -> str:
    """Indents a script's header for --help: tyro joins lines that begin with a letter."""
    assert header is not None, "every script has one"
    return textwrap.indent(header, " ")


@contextmanager
def exit_on_value_error() -> Iterator[None]:
    """Turns a ValueError into one message and exit status 2."""
    try:
        yield
    except ValueError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error
