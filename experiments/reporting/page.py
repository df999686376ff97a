"""Sections of a report, tables, and what a study cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from study.files import Row
from study.intervals import Estimate, estimate, paired


@dataclass(frozen=True)
class Section:
    """One study.

    Attributes:
      answer: in one sentence or two, with the numbers that carry it.
      body: Markdown: a table or a picture, and what they do not say.
      command: makes the rows.
      cost: of all rows, on which machine.
      files: of the rows, names under experiments/results.
    """

    title: str
    question: str
    answer: str
    body: str
    command: str
    cost: str
    files: tuple[str, ...]

    def markdown(self) -> str:
        rows = ", ".join(f"[`{name}`](experiments/results/{name})" for name in self.files)
        return (
            f"## {self.title}\n\n**Question.** {self.question}\n\n**Answer.** {self.answer}\n\n{self.body.strip()}\n\n"
            f"Command: `{self.command}`. Cost: {self.cost}. Rows: {rows}.\n"
        )


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of Markdown; the first column stands at the left, numbers at the right."""
    rule = ["---", *["--:"] * (len(columns) - 1)]
    lines = [_line(columns), _line(rule), *(_line([str(cell) for cell in row]) for row in rows)]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def cost(rows: Sequence[Row]) -> str:
    """Of rows with `cpu_seconds`, and the machines that made them."""
    hours = sum(row["cpu_seconds"] for row in rows) / 3600
    return f"{hours:.1f} CPU hours for {len(rows)} rows, {machines(rows)}"


def machines(rows: Sequence[Row]) -> str:
    """Their CPUs, the days, the commits."""
    cpus = " and ".join(sorted({row["cpu"] for row in rows}))
    days = sorted({row["date"] for row in rows})
    return f"{cpus}, {days[0]}" + ("" if len(days) == 1 else f" to {days[-1]}")


def by_seed(rows: Iterable[Row], kind: str) -> dict[int, float]:
    """A reward of every seed."""
    return {row["seed"]: row[kind] for row in rows}


def mean_of(rows: Sequence[Row], kind: str) -> Estimate:
    return estimate(list(by_seed(rows, kind).values()))


def difference(ours: Sequence[Row], theirs: Sequence[Row], kind: str) -> Estimate:
    """Paired by seed."""
    return paired(by_seed(ours, kind), by_seed(theirs, kind))


def signed(found: Estimate) -> str:
    """ "+0.123 ± 0.045", in bold where the interval is on one side of 0."""
    mean = f"{found.mean:+.3f}".replace("-", "−")
    text = mean + ("" if found.count == 1 else f" ± {found.half:.3f}")
    return f"**{text}**" if found.established else text


def plain(found: Estimate) -> str:
    """ "+0.123 ± 0.045", for a sentence."""
    return signed(found).strip("*")


def apart(found: Estimate, other: str) -> str:
    """ "0.123 ± 0.045 above TIS", or below it."""
    size = plain(found)[1:]
    return f"{size} {'below' if found.mean < 0 else 'above'} {other}"


def of_arms(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by arm, in the order of the first of each."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["arm"], []).append(row)
    return found
