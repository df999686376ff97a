"""Cells of the map and of the walks: one task under one eviction policy and budget, with the rows of every arm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

from lib.arms import ARMS
from lib.files import Row
from lib.intervals import Estimate
from reporting.page import (
    compared,
    difference,
    each,
    holm,
    mean_of,
    number,
    of_arms,
    p_value,
    rate_of,
    reported,
    signed,
    table,
)

SHOWDOWN = ("sorting-12", "tova-heads", 11)  # task, policy, budget of the cell with all arms
NEEDED = {"untrained", "naive", "tis", "shadow"}
APART = "sampling/sampling_logp_difference/max"
DESCRIPTIONS = {
    "untrained": "the start",
    "full-cache": "the sampler evicts nothing",
    "naive": "ignores the eviction",
    "bypass": "PPO's ratio is taken to the sampler",
    "tis": "token weights, cut at 2",
    "tis-1.5": "token weights, cut at 1.5",
    "tis-5": "token weights, cut at 5",
    "tis-sequence": "weights of whole responses",
    "mis-sequence": "accepts or rejects whole responses",
    "icepop": "accepts or rejects tokens",
    "geometric": "rejects responses by the mean log ratio",
    "gspo": "one ratio per response",
    "sparse-rl-paper": "Sparse-RL as in its paper",
    "sparse-rl": "the correction that Sparse-RL released",
    "shadow": "replays the sampler's masks",
    "naive-anchor": "naive with the frozen teacher",
    "tis-anchor": "TIS with the frozen teacher",
    "shadow-anchor": "shadow masks with the frozen teacher",
    "shadow-forward": "shadow masks and forward KL to itself with the full cache",
    "shadow-reverse": "the same with reverse KL",
    "shadow-published": "the paper's loss",
    "mixed-20": "shadow masks and one fifth TIS",
    "mixed-50": "shadow masks and TIS, half and half",
    "mixed-80": "shadow masks and four fifths TIS",
    "anchor-alone": "the frozen teacher without reward",
    "anchor-then-shadow": "a quarter of the rollouts imitates, the rest has rewards",
    "forward-alone": "the live teacher without reward",
}


@dataclass(frozen=True)
class MapCell:
    """The reported rows of one task under one sampler, by arm."""

    task: str
    policy: str
    budget: int
    arms: dict[str, list[Row]]

    @property
    def label(self) -> str:
        return f"{self.task}, {self.policy}, {self.budget} keys"

    @property
    def seeds(self) -> int:
        return len(self.arms["shadow"])

    @property
    def is_decided(self) -> bool:
        """Whether there are enough seeds for an interval."""
        return self.seeds > 2

    @property
    def mismatch(self) -> float:
        """KL of the dense learner to the sampler, nats per token, mean over the TIS runs."""
        return mean(row["mismatch_kl"] for row in self.arms["tis"])

    def lead(self, kind: str, other: str = "tis") -> Estimate:
        """Of shadow masks over another arm."""
        return difference(self.arms["shadow"], self.arms[other], kind)


def cells_of(rows: Sequence[Row]) -> list[MapCell]:
    """The cells with the start, naive, TIS and shadow masks, in file order."""
    found = []
    for place in dict.fromkeys((row["task"], row["policy"], row["budget"]) for row in reported(rows)):
        inside = [row for row in reported(rows) if (row["task"], row["policy"], row["budget"]) == place]
        cell = MapCell(*place, of_arms(inside))
        if cell.arms.keys() >= NEEDED:
            found.append(cell)
    return found


def showdown_of(rows: Sequence[Row]) -> MapCell:
    """The cell with all arms."""
    return next(cell for cell in cells_of(rows) if (cell.task, cell.policy, cell.budget) == SHOWDOWN)


CACHES = ("sparse", "dense")
IN_ORDER = ("sparse", "sparse_greedy", "dense", "dense_greedy")


def all_arms(cell: MapCell) -> str:
    """Every arm of the showdown, for the appendix."""
    lines = []
    for arm in ARMS:
        if arm.name not in cell.arms:
            continue
        rows = cell.arms[arm.name]
        rewards = [f"{mean_of(rows, kind).mean:.3f}" for kind in IN_ORDER]
        apart = [row[APART] for row in rows if APART in row]
        against = [
            "" if arm.name == "tis" else signed(difference(rows, cell.arms["tis"], kind)) for kind in IN_ORDER[:3]
        ]
        says = f"`{arm.name}`: {DESCRIPTIONS[arm.name]}"
        lines.append([says, rate_of(rows), *rewards, f"{mean(apart):.1e}" if apart else "", *against])
    columns = ["arm", "rate", "budget", "budget, greedy", "full", "full, greedy", "largest Δ log p"]
    return table([*columns, "− TIS, budget", "− TIS, budget, greedy", "− TIS, full"], lines)


def decided(cells: Sequence[MapCell]) -> list[MapCell]:
    return [cell for cell in cells if cell.is_decided]


def holm_of(cells: Sequence[MapCell], kind: str) -> list[float]:
    """Holm's adjusted p of shadow masks against TIS, over the decided cells."""
    return holm([p_value(cell.arms["shadow"], cell.arms["tis"], kind) for cell in decided(cells)])


def decided_table(cells: Sequence[MapCell]) -> str:
    """Shadow masks against TIS in the cells with three seeds or more."""
    adjusted = {kind: holm_of(cells, kind) for kind in ("sparse", "sparse_greedy")}
    lines = []
    for place, cell in enumerate(decided(cells)):
        start = " / ".join(f"{mean_of(cell.arms['untrained'], kind).mean:.2f}" for kind in CACHES)
        leads = [f"{signed(cell.lead(kind))} ({adjusted[kind][place]:.2g})" for kind in ("sparse", "sparse_greedy")]
        rates = " / ".join(rate_of(cell.arms[arm]) for arm in ("shadow", "tis"))
        numbers = [cell.seeds, start, f"{cell.mismatch:.2g}", rates, *leads, signed(cell.lead("dense"))]
        lines.append([cell.label, *numbers])
    columns = ["cell", "seeds", "start: budget / full", "mismatch KL", "rates: shadow / TIS"]
    return table([*columns, "budget (p)", "budget, greedy (p)", "full cache"], lines)


def every_table(cells: Sequence[MapCell]) -> str:
    """All cells, for the appendix: intervals of three seeds or more, else the differences of the seeds."""
    lines = []
    for cell in cells:
        start = " / ".join(f"{mean_of(cell.arms['untrained'], kind).mean:.2f}" for kind in CACHES)
        shadow, tis, naive = (cell.arms[name] for name in ("shadow", "tis", "naive"))
        numbers = [compared(shadow, tis, kind) for kind in ("sparse", "sparse_greedy", "dense")]
        numbers += [compared(shadow, naive, kind) for kind in CACHES]
        lines.append([cell.label, cell.seeds, start, f"{cell.mismatch:.2g}", *numbers])
    columns = ["cell", "seeds", "start: budget / full", "mismatch KL"]
    columns += ["shadow − TIS, budget", "shadow − TIS, budget, greedy", "shadow − TIS, full"]
    return table([*columns, "shadow − naive, budget", "shadow − naive, full"], lines)


def median_lead(cells: Sequence[MapCell], kind: str, other: str = "tis") -> str:
    return number(median(cell.lead(kind, other).mean for cell in cells))


def extreme_leads(cells: Sequence[MapCell], kind: str) -> str:
    """ "−0.015 to +0.114"."""
    leads = [cell.lead(kind).mean for cell in cells]
    return f"{number(min(leads))} to {number(max(leads))}"


def teacher_at_one_rate(rows: Sequence[Row], rates_rows: Sequence[Row]) -> str:
    """What the frozen teacher adds to shadow masks where both ran at the same learning rate, under the budget."""

    def of(arm: str, rate: float, source: Sequence[Row], pilot: bool) -> list[Row]:
        place = {"arm": arm, "learning_rate": rate, "pilot": pilot, "budget": SHOWDOWN[2], "policy": SHOWDOWN[1]}
        return [row for row in source if row["task"] == SHOWDOWN[0] and place.items() <= row.items()]

    parts = []
    for rate in (1e-5, 3e-5, 1e-4, 3e-4, 1e-3):
        pilot = rate not in (1e-5, 1e-3)
        anchor, shadow = (of(arm, rate, rows if pilot else rates_rows, pilot) for arm in ("shadow-anchor", "shadow"))
        value = each(anchor, shadow, "sparse") if pilot else signed(difference(anchor, shadow, "sparse"))
        parts.append([rate_of(shadow), f"{len(shadow)} {'pilot seeds' if pilot else 'seeds'}", value])
    return table(["learning rate of both", "runs", "shadow-anchor − shadow, budget"], parts)
