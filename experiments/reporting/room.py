"""The study of room and time: starts that lack skill, and for each arm one learning rate for either way of decoding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import mean, median

from lib.arms import ARMS
from lib.files import Row
from lib.grid import best_rate
from lib.intervals import Estimate, paired
from reporting import page
from reporting.contrasts import holm
from reporting.page import (
    by_seed,
    check_complete,
    difference,
    mean_of,
    of_arms,
    p_value,
    plain,
    rate_words,
    signed,
    stopped_at,
    table,
)

Key = tuple[str, str, int]  # task, policy, budget
FIRST: Key = ("sorting-12", "tova-heads", 11)  # the cell of the primary contrast
# Task -> the cell that chose its learning rates.
RATES_FROM = {"sorting-12": FIRST, "copy-8": ("copy-8", "tova-heads", 10), "walk-64": ("walk-64", "tova-heads", 20)}
SEEDS = range(10, 18)
COLUMNS = {"budget": ("sparse", "sparse_greedy"), "full cache": ("dense", "dense_greedy")}
KINDS = tuple(kind for kinds in COLUMNS.values() for kind in kinds)
# The dense learners of the primary contrast, see experiments/PLAN.md.
MAIN = ("untrained", "full-cache", "naive", "tis", "shadow", "mixed-50")  # ran in every cell
RIVALS = ("naive", "tis-1.5", "tis", "tis-5", "icepop", "geometric", "sparse-rl-paper", "gspo")
OURS = "mixed-50"
SHARES = ("mixed-20", "mixed-80", "shadow-published")  # other shares of TIS, and the paper's loss
FRONT = ("untrained", "full-cache", "naive", "tis-1.5", "tis-5", "shadow", OURS, "shadow-anchor")
# Arm -> its name in figures and in README, in plain words.
NAMES = {
    "untrained": "the start",
    "full-cache": "full cache: the sampler evicts nothing",
    "naive": "naive: ignores the eviction",
    "tis": "TIS truncated at 2",
    "tis-1.5": "TIS truncated at 1.5",
    "tis-5": "TIS truncated at 5",
    "icepop": "IcePop: accepts or rejects tokens",
    "geometric": "TIS that rejects responses whose mean ratio is outside 0.5 to 2",
    "gspo": "GSPO: one ratio per response, eviction not corrected",
    "sparse-rl-paper": "Sparse-RL, as in its paper",
    "shadow": "shadow masks",
    "shadow-anchor": "shadow masks and the frozen teacher",
    "shadow-published": "shadow masks with the paper's loss",
    "mixed-20": "shadow masks and one fifth TIS",
    "mixed-50": "shadow masks and TIS, half and half",
    "mixed-80": "shadow masks and four fifths TIS",
    "anchor-alone": "imitates the start, without reward",
    "anchor-then-shadow": "imitates the start, then shadow masks",
}


@dataclass(frozen=True)
class RoomCell:
    """One task under one sampler. Its rows: arm -> learning rate -> rows."""

    label: str
    pilots: Mapping[str, Mapping[float, Sequence[Row]]]  # of the cell that chose the rates of this task
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
        """The dense learner of this cell with the best pilot reward of this column."""
        ran = [arm for arm in RIVALS if arm in self.pilots and arm in self.reported]
        return max(ran, key=lambda arm: self.pilot(arm, self.rate(arm, column), column))

    def contrast(self, ours: str, theirs: str, kind: str) -> Estimate:
        column = column_of(kind)
        return difference(self.rows(ours, column), self.rows(theirs, column), kind)

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
    return cell_of(rows, FIRST, {*FRONT, *RIVALS, *SHARES})


def other_cells(rows: Sequence[Row]) -> list[RoomCell]:
    """The cells after the first that have all seeds of the main arms, those of the first task first."""
    keys = dict.fromkeys(map(key_of, page.reported(rows)))
    keys = sorted(keys, key=lambda key: list(RATES_FROM).index(key[0]))
    cells = [_cell(rows, key) for key in keys if key != FIRST]
    return [cell for cell in cells if set(MAIN) <= set(cell.complete)]


def cell_of(rows: Sequence[Row], key: Key, arms: set[str]) -> RoomCell:
    """The cell of a task, policy and budget.

    Raises:
      ValueError: if one of these arms lacks a seed: nothing is reported before all are in.
    """
    cell = _cell(rows, key)
    check_complete(cell.complete, sorted(arms), f"{cell.label} in results/room")
    return cell


def _cell(rows: Sequence[Row], key: Key) -> RoomCell:
    pilots = by_rate(row for row in page.of_pilot(rows) if key_of(row) == RATES_FROM[key[0]])
    reported = by_rate(row for row in page.reported(rows) if key_of(row) == key)
    task, policy, budget = key
    return RoomCell(f"{task}, {policy}, {budget} keys", pilots, reported)


def by_rate(rows: Iterable[Row]) -> dict[str, dict[float, list[Row]]]:
    """Arm -> learning rate -> rows."""
    return {arm: page.grouped(inside, itemgetter("learning_rate")) for arm, inside in of_arms(rows).items()}


def key_of(row: Row) -> Key:
    return row["task"], row["policy"], row["budget"]


def arms_table(cell: RoomCell, arms: Sequence[str]) -> str:
    def line(arm: str) -> list[str]:
        rates = [rate_words(cell.rate(arm, column)) for column in COLUMNS]
        means = [level(cell, arm, kind) for kind in KINDS]
        leads = ["" if arm == OURS else signed(cell.contrast(OURS, arm, kind)) for kind in KINDS[1::2]]
        trained = "" if arm == "untrained" else " / ".join(dict.fromkeys(rates))
        return [arm, NAMES[arm], trained, *means, *leads]

    columns = ["arm", "learner", "rates", "budget", "greedy", "full cache", "greedy"]
    return table([*columns, f"{OURS} minus it: budget, greedy", "full cache, greedy"], [line(arm) for arm in arms])


def cells_table(cells: Sequence[RoomCell]) -> str:
    """A line per cell: mean rewards of the start, and leads of the mixture and of shadow masks."""
    lines = []
    for cell in cells:
        rival, full_rival = cell.best_rival("budget"), cell.best_rival("full cache")
        start = " / ".join(level(cell, "untrained", kind) for kind in KINDS[1::2])
        leads = [*((OURS, arm) for arm in (rival, "naive", "full-cache", "untrained")), ("shadow", rival)]
        numbers = [signed(cell.contrast(ours, theirs, "sparse_greedy")) for ours, theirs in leads]
        full = signed(cell.contrast(OURS, full_rival, "dense_greedy"))
        lines.append([cell.label, start, f"{rival} / {full_rival}", *numbers, full])
    columns = ["cell", "start, greedy: budget / full", "rival: budget / full", f"{OURS} minus the rival"]
    columns += ["minus naive", "minus full-cache", "minus the start", "shadow minus the rival"]
    return table([*columns, f"full cache: {OURS} minus the rival"], lines)


def spread_of_starts(cells: Sequence[RoomCell]) -> str:
    """The smallest and the largest greedy full-cache reward of the starts, for each task."""
    starts = {cell.label.split(",")[0]: by_seed(cell.rows("untrained", "full cache"), "dense_greedy") for cell in cells}
    high = sum(start > 0.7 for start in starts["walk-64"].values())
    found = ", ".join(f"{task} {min(of.values()):.2f} to {max(of.values()):.2f}" for task, of in starts.items())
    return f"{found} ({high} of {len(SEEDS)} above 0.7)"


def after_holm(cells: Sequence[RoomCell]) -> str:
    """The cells whose lead over the rival Holm's correction over these cells leaves."""
    pairs = [[cell.rows(arm, "budget") for arm in (OURS, cell.best_rival("budget"))] for cell in cells]
    values = holm([p_value(ours, theirs, "sparse_greedy") for ours, theirs in pairs])
    lost = [f"{cell.label} ({p:.2g})" for cell, p in zip(cells, values, strict=True) if p >= 0.05]
    kept = len(cells) - len(lost)
    return (
        f"Of the {len(cells)} leads over the rival Holm's correction leaves {kept}. p of the others: {'; '.join(lost)}."
    )


def against_full_cache(cells: Sequence[RoomCell]) -> str:
    """In how many cells a learner whose sampler evicts nothing ends above and below the mixture."""

    def counts(kind: str) -> str:
        found = [cell.contrast(OURS, "full-cache", kind) for cell in cells]
        below, above = (sum(one.established and sign * one.mean > 0 for one in found) for sign in (1, -1))
        return f"established below {OURS} in {below} and above it in {above} of {len(cells)} cells"

    return f"""*full-cache* was trained with a sampler that evicts nothing. Decoded greedily under the budget it is
{counts("sparse_greedy")}; decoded with the full cache, {counts("dense_greedy")}."""


def at_other_rate(cells: Sequence[RoomCell]) -> str:
    """The smallest and the largest lead over TIS in copy-8 at its other rate, the one chosen for the full cache."""
    copies = [cell for cell in cells if cell.label.startswith("copy-8")]

    def leads(ours: str, kind: str) -> str:
        found = [difference(cell.rows(ours, "budget"), cell.rows("tis", "full cache"), kind) for cell in copies]
        return " to ".join(plain(choose(found, key=lambda lead: lead.mean)) for choose in (min, max))

    rates = [rate_words(copies[0].rate("tis", column)) for column in COLUMNS]
    pilots = ", ".join(
        f"{arm} {mean(row['sparse_greedy'] for row in copies[0].pilots[arm][rate]):.2f} at {rate_words(rate)}"
        for arm in ("tis", "shadow")
        for rate in (min(copies[0].pilots[arm]), copies[0].rate(arm, "budget"))
    )
    return f"""In copy-8 the lead over TIS depends on its rate. {rates[0]} has the best pilots under the budget, the
mean of temperature 1 and greedy; greedily alone the smallest rate is better ({pilots}).
At {rates[1]}, its rate for the full cache, {OURS} minus TIS is {leads(OURS, "sparse_greedy")} greedily and
{leads(OURS, "sparse")} at temperature 1; shadow minus TIS is
{leads("shadow", "sparse_greedy")} greedily."""


def against_all(cell: RoomCell, kind: str) -> str:
    """The smallest and the largest lead of the mixture over a dense learner."""
    leads = {arm: cell.contrast(OURS, arm, kind) for arm in RIVALS}
    least, most = (choose(RIVALS, key=lambda arm: leads[arm].mean) for choose in (min, max))
    return f"{plain(leads[least])} ({least}) to {plain(leads[most])} ({most})"


def seconds(cell: RoomCell) -> str:
    """CPU seconds of a run, mean; of rows from several CPUs."""
    found = {arm: mean(row["cpu_seconds"] for row in cell.rows(arm, "budget")) for arm in ("tis-5", "shadow", OURS)}
    return ", ".join(f"{arm} {value:.0f}" for arm, value in found.items())


def in_equal_time(cell: RoomCell, rival: str, kind: str) -> tuple[int, Estimate]:
    """The lead of the mixture, stopped at the evaluation until which it cost at most the CPU time of the rival's run.

    Returns:
      Its rollouts, and the lead over the rival's whole run. Costs are compared on the same kind of CPU.
    """
    ours, theirs = (cell.rows(arm, column_of(kind)) for arm in (OURS, rival))
    costs = {(row["seed"], row["cpu"]): row["cpu_seconds"] for row in theirs}
    shares = [costs[key] / row["cpu_seconds"] for row in ours if (key := (row["seed"], row["cpu"])) in costs]
    steps = [int(point["step"]) for point in ours[0]["curve"]]
    rollouts = max(step for step in steps if step <= mean(shares) * steps[-1])
    return rollouts, paired(stopped_at(ours, rollouts, kind), by_seed(theirs, kind))


def all_in_equal_time(cells: Sequence[RoomCell], kind: str) -> str:
    """The lead over TIS in equal time: its median, and in how many cells it is established."""
    found = [in_equal_time(cell, "tis", kind)[1] for cell in cells]
    above, below = (sum(lead.established and sign * lead.mean > 0 for lead in found) for sign in (1, -1))
    middle = page.number(median(lead.mean for lead in found))
    return f"median {middle}, established above in {above} and below in {below}"


def level(cell: RoomCell, arm: str, kind: str) -> str:
    return f"{mean_of(cell.rows(arm, column_of(kind)), kind).mean:.2f}"
