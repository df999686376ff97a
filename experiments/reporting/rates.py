"""Do the grids of learning rates end too early? Which ends were chosen, and what lies beyond them in one cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from reporting.page import Section, cost, difference, of_arms, plain, signed, table
from study.files import Row
from study.intervals import Estimate

KINDS = ("sparse", "dense")


def section(rows: Sequence[Row], map_rows: Sequence[Row], decisive: Sequence[Row]) -> Section:
    """
    Args:
      rows: the map's arms in the cell of the showdown, at rates beyond its grid.
      map_rows: of the map, the pilot included. decisive: reported rows of that cell.
    """
    grid = sorted({row["learning_rate"] for row in map_rows if row["pilot"]})
    names = [f"{rate:g}" for rate in grid]
    lines, leads = [], {kind: list[str]() for kind in KINDS}
    by_rate = [decisive] + [[row for row in rows if row["learning_rate"] == rate] for rate in rates_of(rows)]
    for arm, of_arm in of_arms([row for row in rows if row["arm"] != "untrained"]).items():
        for rate, found in sorted(of_rates([*of_arm, *of_arms(decisive)[arm]]).items()):
            gains = [signed(gain(found, kind)) for kind in KINDS]
            lines.append([f"`{arm}`", f"{rate:g}" + ("" if rate in grid else ", beyond"), str(len(found)), *gains])
    for part in by_rate:
        arms = of_arms(part)
        rate = "the rates of the map" if part is decisive else f"{part[0]['learning_rate']:g}"
        for kind in KINDS:
            leads[kind].append(f"{plain(difference(arms['shadow'], arms['tis'], kind))} at {rate}")
    return Section(
        "Learning rates beyond the grid",
        f"Rates were chosen from {', '.join(names[:-1])} and {names[-1]}, and often the least or the largest. Would "
        "smaller or larger ones turn the answer?",
        f"In the showdown's cell, shadow masks less TIS, with the budget: {', '.join(leads['sparse'])}; with the full "
        f"cache: {', '.join(leads['dense'])}.",
        f"{ends(map_rows, grid)}\n\nGains over the start, paired by seed: rates of the grid as they were chosen there, "
        "and one beyond either end.\n\n" + table(["arm", "rate", "seeds", *(f"gain, {kind}" for kind in KINDS)], lines),
        "for rate in 1e-5 1e-3; do python experiments/map.py --tasks sorting-12 --samplers tova-heads:11+2 --arms "
        "untrained naive tis shadow shadow-anchor --learning-rates $rate --results experiments/results/map_rates.json; "
        "done",
        cost(rows),
        ("map_rates.json", "map.json"),
    )


def rates_of(rows: Sequence[Row]) -> list[float]:
    return sorted(of_rates([row for row in rows if row["arm"] != "untrained"]))


def of_rates(rows: Sequence[Row]) -> dict[float, list[Row]]:
    found: dict[float, list[Row]] = {}
    for row in rows:
        found.setdefault(row["learning_rate"], []).append(row)
    return found


def gain(rows: Sequence[Row], kind: str) -> Estimate:
    """Over each run's own start, which differs in its last bits between machines."""
    starts = [{**row, kind: row[f"{kind}_before"]} for row in rows]
    return difference(rows, starts, kind)


def ends(map_rows: Sequence[Row], grid: Sequence[float]) -> str:
    """How often an arm of a task has the least and the largest rate of its grid."""
    chosen = {
        (row["task"], row["arm"]): row["learning_rate"]
        for row in map_rows
        if not row["pilot"] and any(other["pilot"] and other["arm"] == row["arm"] for other in map_rows)
    }
    counts = Counter(chosen.values())
    return (
        f"Of the {len(chosen)} choices of the map (a task and an arm each) {counts[grid[0]]} are {grid[0]:g}, "
        + ", ".join(f"{counts[rate]} {rate:g}" for rate in grid[1:])
        + "."
    )
