"""The map: every task, budget and policy, and which method is ahead there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from reporting.page import Section, cost, difference, mean_of, of_arms, plain, signed, table
from study.files import Row
from study.intervals import Estimate
from study.samplers import LEARNS_WHAT_TO_FORGET

Kind = Literal["sparse", "dense"]
KINDS: tuple[Kind, ...] = ("sparse", "dense")
METHODS = ("naive", "tis", "shadow", "tis-anchor", "shadow-anchor", "mixed-50")
# Of walks, whose rows are the horizon's.
WALK_METHODS = ("naive", "tis", "shadow", "shadow-anchor")
PICTURE = "map.png"
LEAST_GAIN = 0.02


@dataclass(frozen=True)
class MapCell:
    """The reported rows of one task under one sampler, by arm."""

    task: str
    policy: str
    budget: int
    arms: dict[str, list[Row]]

    def best(self, kind: Kind) -> str:
        """The method with the highest mean."""
        return max((arm for arm in METHODS if arm in self.arms), key=lambda arm: mean_of(self.arms[arm], kind).mean)

    def gain(self, arm: str, kind: Kind) -> Estimate:
        """Over the start."""
        return difference(self.arms[arm], self.arms["untrained"], kind)

    def anybody_gains(self, kind: Kind) -> bool:
        """Whether the best method is ahead of the start by what a reader would call a gain."""
        return self.gain(self.best(kind), kind).mean >= LEAST_GAIN

    def lead(self, kind: Kind) -> Estimate:
        """Of shadow masks over TIS."""
        return difference(self.arms["shadow"], self.arms["tis"], kind)


def cells_of(rows: Sequence[Row], methods: Sequence[str] = METHODS) -> list[MapCell]:
    """Those that have the start and all of the methods, in their order in the file."""
    places = dict.fromkeys((row["task"], row["policy"], row["budget"]) for row in rows if not row["pilot"])
    found = []
    for place in places:
        inside = [row for row in rows if (row["task"], row["policy"], row["budget"]) == place and not row["pilot"]]
        cell = MapCell(*place, of_arms(inside))
        if {"untrained", *methods} <= cell.arms.keys():
            found.append(cell)
    return found


def all_cells(rows: Sequence[Row], walks: Sequence[Row]) -> list[MapCell]:
    """Of the map's rows and of the horizon's."""
    return cells_of(rows) + cells_of(walks, WALK_METHODS)


def section(rows: Sequence[Row], walks: Sequence[Row] = ()) -> Section:
    """
    Args:
      walks: rows of the study of the horizon.
    """
    cells = all_cells(rows, walks)
    lines = []
    for cell in cells:
        seeds = len(cell.arms["shadow"])
        start = " / ".join(f"{mean_of(cell.arms['untrained'], kind).mean:.2f}" for kind in KINDS)
        numbers: list[object] = [f"{cell.task}, {cell.policy}, {cell.budget} keys", seeds, start]
        for kind in KINDS:
            best = cell.best(kind)
            numbers += [f"`{best}` {signed(cell.gain(best, kind))}", signed(cell.lead(kind))]
        lines.append(numbers)
    columns = ["cell", "seeds", "start, sparse / dense"]
    for kind in KINDS:
        columns += [f"best, {kind}, its gain", f"shadow − TIS, {kind}"]
    body = (
        f"![which method is ahead in which cell](experiments/results/{PICTURE})\n\n"
        f"{table(columns, lines)}\n\n"
        f"Gains are over the start of the same seed; a field is grey where nobody gains {LEAST_GAIN:g}, and pale where "
        "the gain is not established. Bold where the 95 % paired t interval is on one side of 0 and of three seeds or "
        "more. Every arm of a task has one learning rate, the best mean of sparse and dense greedy reward on pilot "
        "seeds under TOVA's crueller budget; walks have one for each cell. With two seeds that interval is 12.7 "
        "standard errors wide on either side: cells of two seeds show where to look, the others decide. Walks are the "
        "horizon's, which has no `tis-anchor` and no `mixed-50`. "
        + ", ".join(f"`{name}`" for name in LEARNS_WHAT_TO_FORGET)
        + " choose keys by what the parameters make of them; the others do not."
    )
    return Section(
        "The map",
        "Over tasks, budgets and eviction policies: where does replaying the sampler's masks pay, where does "
        "correcting a dense learner, and where neither?",
        answer(cells),
        body,
        "python experiments/map.py",
        cost(rows),
        ("map.json", "horizon.json") if walks else ("map.json",),
    )


def answer(cells: Sequence[MapCell]) -> str:
    """How often each family is ahead, and by how much."""
    said = []
    for kind in KINDS:
        leads = [cell.lead(kind) for cell in cells]
        ahead = sum(lead.mean > 0 for lead in leads)
        sure = sum(lead.established and lead.mean > 0 for lead in leads)
        behind = sum(lead.established and lead.mean < 0 for lead in leads)
        decided = sum(lead.count > 2 for lead in leads)
        largest = max(leads, key=lambda lead: lead.mean)
        smallest = min(leads, key=lambda lead: lead.mean)
        said.append(
            f"with the {'budget' if kind == 'sparse' else 'full cache'} shadow masks end above TIS in {ahead} of "
            f"{len(leads)} cells (differences from {plain(smallest)} to {plain(largest)}; of the {decided} with three "
            f"seeds or more the interval is above 0 in {sure} and below in {behind})"
        )
    gaining = [cell for cell in cells if cell.anybody_gains("sparse")]
    kept = [cell.best("sparse") for cell in gaining]
    established = sum(cell.gain(best, "sparse").established for cell, best in zip(gaining, kept, strict=True))
    counts = ", ".join(f"`{arm}` {kept.count(arm)}" for arm in METHODS if kept.count(arm))
    dense = sum(cell.anybody_gains("dense") for cell in cells)
    text = (
        f"{said[0]}, and {said[1]}. Somebody gains {LEAST_GAIN:g} or more under the budget in {len(gaining)} cells, "
        f"established in {established}, and with the full cache in {dense or 'none'}; the highest mean under the "
        f"budget has: {counts}."
    )
    return text[0].upper() + text[1:]
