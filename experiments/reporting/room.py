"""The study of room and time: starts that lack skill, and for each arm one learning rate for either way of decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from lib.arms import ARMS
from lib.files import Row
from lib.grid import best_rate
from lib.intervals import Estimate
from reporting.cells import DESCRIPTIONS
from reporting.page import difference, mean_of, p_value, plain, rate_words, signed, table

FIRST = ("sorting-12", "tova-heads", 11)  # task, policy, budget of the primary contrast
COPY = ("copy-8", "tova-heads", 10)
SEEDS = range(10, 18)
COLUMNS = {"budget": ("sparse", "sparse_greedy"), "full cache": ("dense", "dense_greedy")}
KINDS = tuple(kind for kinds in COLUMNS.values() for kind in kinds)
# The dense learners of the primary contrast, see experiments/PLAN.md.
RIVALS = ("naive", "tis-1.5", "tis", "tis-5", "icepop", "geometric", "sparse-rl-paper", "gspo")
OURS = "mixed-50"
FRONT = ("untrained", "full-cache", "naive", "tis-1.5", "tis-5", "shadow", OURS, "anchor-then-shadow")


@dataclass(frozen=True)
class RoomCell:
    """One task under one sampler.

    Attributes:
      pilots, reported: arm -> learning rate -> rows.
    """

    pilots: Mapping[str, Mapping[float, Sequence[Row]]]
    reported: Mapping[str, Mapping[float, Sequence[Row]]]

    def rate(self, arm: str, column: str) -> float:
        """The learning rate with the best pilot reward of this column, the mean of temperature 1 and greedy."""
        if arm == "untrained":
            return next(iter(self.reported[arm]))
        return best_rate({rate: self.pilot(arm, rate, column) for rate in self.pilots[arm]})

    def pilot(self, arm: str, rate: float, column: str) -> float:
        return mean(row[kind] for row in self.pilots[arm][rate] for kind in COLUMNS[column])

    def rows(self, arm: str, column: str) -> Sequence[Row]:
        """The reported rows at the rate of this column."""
        return self.reported[arm][self.rate(arm, column)]

    def best_rival(self, column: str) -> str:
        """The dense learner with the best pilot reward of this column."""
        ran = [arm for arm in RIVALS if arm in self.pilots]
        return max(ran, key=lambda arm: self.pilot(arm, self.rate(arm, column), column))

    def contrast(self, ours: str, theirs: str, kind: str) -> Estimate:
        column = column_of(kind)
        return difference(self.rows(ours, column), self.rows(theirs, column), kind)

    def p(self, ours: str, theirs: str, kind: str) -> float:
        column = column_of(kind)
        return p_value(self.rows(ours, column), self.rows(theirs, column), kind)

    @property
    def complete(self) -> list[str]:
        """Arms with all seeds at every chosen rate, in the order of `lib.arms`."""
        done = [arm for arm in self.reported if all(self._seeds(arm, column) == set(SEEDS) for column in COLUMNS)]
        order = [arm.name for arm in ARMS]
        return sorted(done, key=order.index)

    def _seeds(self, arm: str, column: str) -> set[int]:
        if arm != "untrained" and arm not in self.pilots:
            return set()
        return {row["seed"] for row in self.reported[arm].get(self.rate(arm, column), ())}


def column_of(kind: str) -> str:
    """The column whose rate belongs to this kind of reward."""
    return next(column for column, kinds in COLUMNS.items() if kind in kinds)


def first_cell(rows: Sequence[Row]) -> RoomCell:
    """The cell of the primary contrast; errors as `cell_of`."""
    return cell_of(rows, FIRST, {*FRONT, *RIVALS})


def copy_cell(rows: Sequence[Row]) -> RoomCell:
    """The first cell of copied sums; errors as `cell_of`."""
    return cell_of(rows, COPY, {"untrained", "full-cache", "naive", "tis", "shadow", OURS})


def cell_of(rows: Sequence[Row], which: tuple[str, str, int], arms: set[str]) -> RoomCell:
    """The cell of a task, policy and budget.

    Raises:
      ValueError: if one of these arms lacks a seed: nothing is reported before all are in.
    """
    parts: dict[bool, dict[str, dict[float, list[Row]]]] = {True: {}, False: {}}
    for row in rows:
        if (row["task"], row["policy"], row["budget"]) == which:
            parts[row["pilot"]].setdefault(row["arm"], {}).setdefault(row["learning_rate"], []).append(row)
    cell = RoomCell(parts[True], parts[False])
    if missing := sorted(arms - set(cell.complete)):
        raise ValueError(f"expected all seeds of {which[0]} in room.json; got too few of {', '.join(missing)}")
    return cell


def front_table(cell: RoomCell) -> str:
    return _table(cell, FRONT)


def full_table(cell: RoomCell) -> str:
    """Every arm whose seeds are all in."""
    return _table(cell, cell.complete)


def _table(cell: RoomCell, arms: Sequence[str]) -> str:
    def line(arm: str) -> list[str]:
        rates = [rate_words(cell.rate(arm, column)) for column in COLUMNS]
        means = [f"{mean_of(cell.rows(arm, column_of(kind)), kind).mean:.2f}" for kind in KINDS]
        leads = ["" if arm == OURS else signed(cell.contrast(OURS, arm, kind)) for kind in KINDS[1::2]]
        trained = "" if arm == "untrained" else " / ".join(dict.fromkeys(rates))
        return [f"{arm}: {DESCRIPTIONS[arm]}", trained, *means, *leads]

    columns = ["arm", "rates", "budget", "greedy", "full cache", "greedy"]
    return table([*columns, f"{OURS} minus it: budget, greedy", "full cache, greedy"], [line(arm) for arm in arms])


def against_all(cell: RoomCell, kind: str) -> str:
    """The smallest and the largest lead of the mixture over a dense learner."""
    leads = {arm: cell.contrast(OURS, arm, kind) for arm in RIVALS}
    least, most = (choose(RIVALS, key=lambda arm: leads[arm].mean) for choose in (min, max))
    return f"{plain(leads[least])} ({least}) to {plain(leads[most])} ({most})"


def seconds(cell: RoomCell) -> str:
    """CPU seconds of a run, mean; of rows from several CPUs."""
    found = {arm: mean(row["cpu_seconds"] for row in cell.rows(arm, "budget")) for arm in ("tis-5", "shadow", OURS)}
    return ", ".join(f"{arm} {value:.0f}" for arm, value in found.items())


def level(cell: RoomCell, arm: str, kind: str) -> str:
    return f"{mean_of(cell.rows(arm, column_of(kind)), kind).mean:.2f}"
