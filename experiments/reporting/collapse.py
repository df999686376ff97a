"""The study of collapse: which learners lose the policy in 500 rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import median
from typing import Any

from scipy.stats import fisher_exact

from lib.files import Row
from lib.intervals import Estimate, paired
from reporting.contrasts import Contrast
from reporting.page import (
    by_seed,
    check_complete,
    difference,
    grouped,
    number,
    rate_words,
    reported,
    signed,
    table,
    with_seeds,
)

SEEDS = tuple(range(10, 20))
PRIMARY = ("snapkv", 3e-4)  # policy and rate of the primary contrast
IN_A_ROW = 3  # evaluations below half of the start's reward
FIGURE = "collapse.png"
PAIR = ("shadow", "tis")
POLICIES = ("snapkv", "random")
CACHES = {"sparse_greedy": "budget", "dense_greedy": "full cache"}
THRESHOLD = 0.86  # Sparrow's, of the 5th percentile of the agreement


@dataclass(frozen=True)
class CollapseCell:
    """All seeds of one arm at one rate, a row each; their curves have a point every 20 rollouts."""

    policy: str
    arm: str
    rate: float
    rows: tuple[Row, ...]

    @property
    def times(self) -> list[int | None]:
        """Rollouts until the collapse, of each seed; None without one."""
        return [collapsed_after(row["curve"]) for row in self.rows]

    @property
    def collapsed(self) -> int:
        return sum(time is not None for time in self.times)

    @property
    def below_threshold(self) -> int:
        """Runs whose agreement was below the threshold at some evaluation."""
        return sum(crossed_after(row["curve"]) is not None for row in self.rows)

    @property
    def low_at_the_end(self) -> int:
        """Runs whose last three evaluations have a mean below half of the start's reward."""
        return sum(row["sparse_greedy"] < row["curve"][0]["sparse_greedy"] / 2 for row in self.rows)


def collapsed_after(curve: Sequence[Row]) -> int | None:
    """Rollouts until the first of three evaluations in a row below half of the start; greedy under the budget."""
    low = [point["sparse_greedy"] < curve[0]["sparse_greedy"] / 2 for point in curve]
    for place in range(len(curve) - IN_A_ROW + 1):
        if all(low[place : place + IN_A_ROW]):
            return curve[place]["step"]
    return None


def crossed_after(curve: Sequence[Row]) -> int | None:
    """Rollouts until the agreement is below the threshold, as the mean since the evaluation before."""
    return next((point["step"] for point in curve[1:] if point["agreement_p5"] < THRESHOLD), None)


def cells_of(rows: Sequence[Row]) -> list[CollapseCell]:
    """The cells with all seeds, by policy, arm and rate."""
    parts = with_seeds(grouped(reported(rows), itemgetter("policy", "arm", "learning_rate")), SEEDS)
    return [
        CollapseCell(policy, arm, rate, tuple(sorted(inside, key=itemgetter("seed"))))
        for (policy, arm, rate), inside in sorted(parts.items())
    ]


def primary(rows: Sequence[Row]) -> Contrast:
    """Raises ValueError until both cells of the contrast are complete."""
    arms = {cell.arm: cell for cell in cells_of(rows) if (cell.policy, cell.rate) == PRIMARY}
    check_complete(arms, ("bypass", "shadow"), "collapse.json")
    counts = [arms[arm].collapsed for arm in ("bypass", "shadow")]
    p: Any = fisher_exact([[count, len(SEEDS) - count] for count in counts])[1]  # scipy's stubs do not know the type
    what = f"collapsed runs of bypass and of shadow masks at {rate_words(PRIMARY[1])} under SnapKV"
    found = f"{counts[0]} and {counts[1]} of {len(SEEDS)}"
    return Contrast("[collapse](#collapse)", what, found, float(p))


def section(rows: Sequence[Row]) -> str:
    contrast, cells = primary(rows), cells_of(rows)
    verdict = "No difference is established." if contrast.p > 0.05 else "They differ."
    others = [cell for cell in cells if cell.arm != "shadow"]
    dense, below = [row for cell in others for row in cell.rows], sum(cell.below_threshold for cell in others)
    collapsed, first = sum(cell.collapsed for cell in others), sum(crossed_after(row["curve"]) == 20 for row in dense)
    return f"""## Collapse

Does a learner that ignores the eviction collapse, as the papers report? Their released code trains
[naive](docs/older_studies.md#collapse-of-naive); bypass is the other reading. *naive* takes the ratio to the dense
learner's own old log-probabilities, *bypass* to the sampler's. The task is sorting-12 with 11 + 2 of 26 keys, 500
rollouts, {len(SEEDS)} seeds, starts of the first page. A run has *collapsed* when its greedy reward under the budget is
below half of the start's in three evaluations in a row; it may recover. Last column: rates at which the learner ends
above its start greedily with both caches, established (exploratory). [All cells](docs/report_appendix.md#collapse).

{learners_table(cells)}

![runs that have not collapsed](experiments/results/{FIGURE})

*Primary contrast*: {contrast.what}: {contrast.found}. {verdict} The plan predicted that bypass collapses and that
naive does not at 3e-4 or below. {over_tis(cells)}
*Agreement* is the smaller of a token's probabilities under learner and sampler over the larger. Sparrow
predicts a collapse where its 5th percentile over tokens falls below {THRESHOLD}. {below} of {len(dense)} runs of dense
learners cross it, {first} of them at the first evaluation, and {collapsed} collapse, so it predicts nothing here.
"""


def over_tis(cells: Sequence[CollapseCell]) -> str:
    """Shadow masks minus TIS at equal rates, with both caches."""

    def leads(policy: str, kind: str) -> str:
        arms = [{cell.rate: cell.rows for cell in cells if (cell.policy, cell.arm) == (policy, arm)} for arm in PAIR]
        return ", ".join(number(difference(arms[0][rate], arms[1][rate], kind).mean, 2) for rate in sorted(arms[0]))

    found = [f"{policy}, {cache} {leads(policy, kind)}" for policy in POLICIES for kind, cache in CACHES.items()]
    return f"At equal rates, from 3e-5 to 3e-3, shadow masks minus TIS is greedily {'; '.join(found)} (exploratory)."


def learners_table(cells: Sequence[CollapseCell]) -> str:
    """A line for each policy and learner: collapsed runs at every rate."""
    lines = []
    for name, inside in grouped(cells, lambda cell: f"{cell.policy}, {cell.arm}").items():
        lines.append([name, *(cell.collapsed for cell in inside), sum(map(gains_in_both, inside))])
    rates = dict.fromkeys(rate_words(cell.rate) for cell in cells)
    return table(["policy, learner", *(f"collapsed at {rate}" for rate in rates), "rates above the start"], lines)


def gains_in_both(cell: CollapseCell) -> bool:
    gains = [gained(cell.rows, kind) for kind in ("sparse_greedy", "dense_greedy")]
    return all(gain.established and gain.mean > 0 for gain in gains)


def cells_table(cells: Sequence[CollapseCell]) -> str:
    lines = []
    for cell in cells:
        times = [time for time in cell.times if time is not None]
        after = f"{median(times):.0f}" if times else ""
        ends = [signed(gained(cell.rows, kind)) for kind in ("sparse_greedy", "dense_greedy")]
        counts = [cell.collapsed, cell.low_at_the_end, cell.below_threshold]
        collapsed, low, below = (f"{count} of {len(cell.rows)}" for count in counts)
        lines.append([f"{cell.policy}, {cell.arm}", rate_words(cell.rate), collapsed, after, low, below, *ends])
    columns = ["policy, learner", "rate", "collapsed", "after rollouts, median", "low at the end"]
    return table([*columns, f"agreement below {THRESHOLD}", "budget", "full cache"], lines)


def gained(rows: Sequence[Row], kind: str) -> Estimate:
    """Reward at the end minus that of the start."""
    return paired(by_seed(rows, kind), {row["seed"]: row["curve"][0][kind] for row in rows})
