"""Tables, paired differences and links of the report."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from operator import itemgetter
from statistics import mean
from typing import Any, TypeVar

from scipy.stats import ttest_rel

from lib.files import Row
from lib.intervals import Estimate, estimate, paired

T = TypeVar("T")
LAST = 3  # evaluations of a run whose mean is its reward


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table: the first column left-aligned, the others right-aligned. ValueError without a row."""
    rule = ["---", *["--:"] * (len(columns) - 1)]
    if not (cells := list(rows)):
        raise ValueError(f"expected at least one row of the table {columns}; got none")
    return "\n".join([_line(columns), _line(rule), *(_line([str(cell) for cell in row]) for row in cells)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def reflow(text: str) -> str:
    """Wraps the paragraphs and list items of a Markdown page at 120 columns; tables and headings stay as they are."""
    blocks = []
    for block in text.split("\n\n"):
        if block.startswith(("|", "#", "![")):
            blocks.append(block)
            continue
        items = block.strip("\n").replace("\n  ", " ").split("\n* ") if block.startswith("* ") else [block]
        for place, item in enumerate(items):
            indent = "  " if block.startswith("* ") else ""
            words = ("* " if indent and place else "") + item
            items[place] = textwrap.fill(
                words, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
        blocks.append("\n".join(items))
    return "\n\n".join(blocks).rstrip("\n") + "\n"


def rate_words(rate: float) -> str:
    """ "3e-4"."""
    return f"{rate:.0e}".replace("e-0", "e-")


def reported(rows: Iterable[Row]) -> list[Row]:
    """The rows that are not of a pilot."""
    return [row for row in rows if not row["pilot"]]


def of_pilot(rows: Iterable[Row]) -> list[Row]:
    """The rows that only choose a learning rate."""
    return [row for row in rows if row["pilot"]]


def grouped(rows: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """Key -> rows, in file order."""
    found: dict[Any, list[T]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def check_complete(groups: Container[Any], names: Iterable[Any], study: str) -> None:
    """Raises ValueError if a group is missing: nothing is reported before all seeds of a primary contrast are in."""
    if missing := [str(name) for name in names if name not in groups]:
        raise ValueError(f"expected all seeds of {study}; got too few of {', '.join(missing)}")


def with_seeds(groups: Mapping[Any, list[Row]], seeds: Iterable[int]) -> dict[Any, list[Row]]:
    """The groups that have exactly these seeds."""
    return {key: rows for key, rows in groups.items() if {row["seed"] for row in rows} == set(seeds)}


def of_arms(rows: Iterable[Row]) -> dict[str, list[Row]]:
    return grouped(rows, itemgetter("arm"))


def rewards_by_rate(pilots: Sequence[Row], kinds: Sequence[str]) -> dict[float, float]:
    """Learning rate -> mean reward of these decodings over the pilot seeds."""
    rates = grouped(pilots, itemgetter("learning_rate"))
    return {rate: mean(row[kind] for row in rows for kind in kinds) for rate, rows in rates.items()}


def by_seed(rows: Iterable[Row], kind: str) -> dict[int, float]:
    """Seed -> reward."""
    return {row["seed"]: row[kind] for row in rows}


def mean_of(rows: Sequence[Row], kind: str) -> Estimate:
    return estimate(list(by_seed(rows, kind).values()))


def mean_words(rows: Sequence[Row], kinds: Iterable[str], digits: int = 3) -> list[str]:
    """The cells of a table: the mean of each kind of reward."""
    return [f"{mean_of(rows, kind).mean:.{digits}f}" for kind in kinds]


def difference(ours: Sequence[Row], theirs: Sequence[Row], kind: str) -> Estimate:
    """Mean difference with its interval, paired by seed."""
    return paired(by_seed(ours, kind), by_seed(theirs, kind))


def p_value(ours: Sequence[Row], theirs: Sequence[Row], kind: str) -> float:
    """Two-sided p of the paired t test over the common seeds; 1 without a difference in any seed."""
    mine, others = by_seed(ours, kind), by_seed(theirs, kind)
    seeds = sorted(mine.keys() & others.keys())
    found = float(ttest_rel([mine[seed] for seed in seeds], [others[seed] for seed in seeds]).pvalue)
    return 1.0 if math.isnan(found) else found


def stopped_at(rows: Iterable[Row], rollouts: float, kind: str) -> dict[int, float]:
    """Seed -> mean of the three evaluations that end with this number of rollouts."""
    curves = {row["seed"]: [point[kind] for point in row["curve"] if point["step"] <= rollouts] for row in rows}
    return {seed: mean(curve[-LAST:]) for seed, curve in curves.items()}


def number(value: float, digits: int = 3) -> str:
    """ "+0.123", with a proper minus sign."""
    return f"{value:+.{digits}f}".replace("-", "−")


def signed(found: Estimate) -> str:
    """ "+0.123 ± 0.045", bold if the interval excludes 0; without an interval for one seed."""
    return f"**{plain(found)}**" if found.established else plain(found)


def plain(found: Estimate, digits: int = 3) -> str:
    """ "+0.123 ± 0.045"."""
    mean = number(found.mean, digits)
    return mean if found.count == 1 else f"{mean} ± {found.half:.{digits}f}"


def hours(rows: Sequence[Row]) -> str:
    """The CPU time of all runs; of those with a fixed time for training, this time."""
    return f"{sum(row['cpu_seconds' if 'cpu_seconds' in row else 'seconds'] for row in rows) / 3600:.1f} CPU hours"


def machines(rows: Sequence[Row]) -> str:
    """CPUs, days and commits of the rows; a "+" after a commit: tracked files were changed."""
    cpus = " and ".join(sorted({row["cpu"] for row in rows}))
    days = sorted({row["date"] for row in rows})
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    return f"{cpus}; {days[0]}{'' if len(days) == 1 else f' to {days[-1]}'}; commits {commits}"
