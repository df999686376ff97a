"""The study of dose: the lead of replay by the mismatch between sampler and learner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np
from scipy.stats import ttest_rel

from lib.files import Row
from lib.intervals import Estimate, estimate, paired
from reporting.contrasts import Contrast
from reporting.page import by_seed, difference, grouped, of_arms, plain, rate_words, reported, signed, table

SEEDS = tuple(range(10, 16))
CELLS = 12  # of a task: six budgets of two policies
ARMS = ("untrained", "naive", "tis", "shadow", "mixed-50")
KIND = "sparse_greedy"  # greedy under the budget
AT = 0.15  # nats a token
ROUNDING = 1e-6  # a smaller mismatch is that of a cache that evicts nothing
FIGURE = "dose.png"


@dataclass(frozen=True)
class DoseCell:
    """One task, policy and budget."""

    label: str
    arms: dict[str, list[Row]]
    rewards: dict[str, dict[int, float]]  # arm -> seed -> reward, greedy under the budget
    mismatch: dict[int, float]  # seed -> `mismatch_kl` of the TIS run in nats a token, mean over its rollouts

    @property
    def task(self) -> str:
        return self.label.split(",")[0]

    @property
    def nats(self) -> float:
        """The mismatch, mean over seeds."""
        return mean(self.mismatch.values())

    @property
    def evicts(self) -> bool:
        return self.nats > ROUNDING

    @property
    def rival(self) -> str:
        """The better of naive and TIS by the mean over the seeds. This choice favours the rival."""
        return max(("naive", "tis"), key=lambda arm: mean(self.rewards[arm].values()))

    def lead(self, ours: str) -> Estimate:
        return paired(self.rewards[ours], self.rewards[self.rival])


def cells_of(rows: Sequence[Row]) -> list[DoseCell]:
    """The cells of the tasks whose cells all have all seeds of all arms, by mismatch."""
    parts = grouped(
        (row for row in reported(rows) if row["seed"] in SEEDS),
        lambda row: f"{row['task']}, {row['policy']}, {row['budget']} keys",
    )
    found = []
    for label, inside in parts.items():
        arms = of_arms(inside)
        rewards = {arm: by_seed(arms.get(arm, ()), KIND) for arm in ARMS}
        if all(set(SEEDS) == of_arm.keys() for of_arm in rewards.values()):
            found.append(DoseCell(label, arms, rewards, by_seed(arms["tis"], "mismatch_kl")))
    tasks = [cell.task for cell in found]
    return sorted((cell for cell in found if tasks.count(cell.task) == CELLS), key=lambda cell: cell.nats)


def at_nats(cells: Sequence[DoseCell]) -> list[float]:
    """The lead of the mixture at `AT` nats, for each seed: least squares of the cells' leads on log `mismatch_kl`. All
    seeds have the mismatches and the rivals of their mean."""
    leads = [[cell.rewards["mixed-50"][seed] - cell.rewards[cell.rival][seed] for seed in SEEDS] for cell in cells]
    slopes, offsets = np.polyfit(np.log([cell.nats for cell in cells]), np.array(leads), 1)  # of each seed
    return [float(lead) for lead in offsets + slopes * np.log(AT)]


def neighbours(cells: Sequence[DoseCell]) -> Sequence[DoseCell]:
    """The cells on both sides of `AT`."""
    below = sum(cell.nats <= AT for cell in cells)
    return cells[below - 1 : below + 1]


def by_task(cells: Sequence[DoseCell]) -> str:
    """The lead at `AT` nats in each task: by its own line, and between the two cells on both sides of `AT`, because a
    line through all cells need not pass near them."""
    found = []
    for task, inside in of_tasks(cells).items():
        line, beside = estimate(at_nats(inside)), neighbours(inside)
        above = line.mean > max(cell.lead("mixed-50").mean for cell in beside)
        words = f"{plain(line)} by its own line{', which lies above both cells next to it' if above else ''}"
        found.append(f"{task} {words}, {plain(estimate(at_nats(beside)))} between these cells")
    return "; ".join(found)


def established(cells: Sequence[DoseCell]) -> str:
    """The number of established leads of mixed-50 over the rival in each task."""
    found = []
    for task, inside in of_tasks(cells).items():
        leads = [cell.lead("mixed-50") for cell in inside]
        ahead = sum(lead.established and lead.mean > 0 for lead in leads)
        found.append(f"{task} {ahead} of {len(inside)}, with up to {inside[-1].nats:.2g} nats")
    return "; ".join(found)


def of_tasks(cells: Sequence[DoseCell]) -> dict[str, list[DoseCell]]:
    """Task -> its cells, in alphabetical order of the tasks."""
    return dict(sorted(grouped(cells, lambda cell: cell.task).items()))


def primary(rows: Sequence[Row]) -> Contrast:
    cells = cells_of(rows)
    leads = at_nats(cells)
    what = f"mixed-50 minus the better of naive and TIS at {AT} nats, greedy under the budget"
    p = float(ttest_rel(leads, [0.0] * len(leads)).pvalue)
    return Contrast("[lead by mismatch](#lead-by-mismatch)", what, plain(estimate(leads)), p)


def section(rows: Sequence[Row]) -> str:
    cells = cells_of(rows)
    tasks = " and ".join(of_tasks(cells))
    evicting, small = [cell for cell in cells if cell.evicts], [cell for cell in cells if cell.nats < 0.1]
    early = sum(cell.lead("mixed-50").established for cell in small)
    return f"""## Lead by mismatch

*Mismatch* is `mismatch_kl`, the KL from the sampler to the dense learner in nats per token, mean over all rollouts of
the TIS runs. It depends on the learner; the first rollout gives its value before training, which is not in the table.
Budgets from nearly all keys to a third, {tasks}, {len(SEEDS)} seeds, starts of the studies above. The rival is the
better of naive and TIS in the reported seeds, which favours it. {rates(cells)}
Greedy, under the budget ([all cells](docs/report_appendix.md#lead-by-mismatch)):

![leads and rewards by mismatch](experiments/results/{FIGURE})

*Primary contrast*: by a regression of the leads of mixed-50 in all cells on the logarithm of the mismatch, the lead at
{AT} nats is {plain(estimate(at_nats(cells)))}. The plan did not foresee cells that evict nothing before the last tokens
({len(cells) - len(evicting)} of {len(cells)} cells): their mismatch is rounding, and its logarithm dominates the
regression. Without them, decided after the rows were seen, it is {plain(estimate(at_nats(evicting)))}.
By task (exploratory): {by_task(cells)}. Established leads of mixed-50: {established(cells)}.
Intervals are t over {len(SEEDS)} seeds, wider than the bootstrap of the plan. They lack the error of the line. The plan
predicted no lead below 0.1 nats: of the {len(small)} leads of mixed-50 there, {early} {"is" if early == 1 else "are"}
established. It predicted none where the budget leaves no signal: no such budget was reached.
"""


def rates(cells: Sequence[DoseCell]) -> str:
    """The rates of the arms, and what they do where nothing is evicted."""
    first = {cell.task: cell for cell in reversed(cells)}
    words = "; ".join(
        f"{task}: " + ", ".join(f"{arm} {rate_words(cell.arms[arm][0]['learning_rate'])}" for arm in ARMS[1:])
        for task, cell in sorted(first.items())
    )
    still = [cell for cell in cells if not cell.evicts]
    leads = [
        " and ".join(plain(difference(cell.arms["mixed-50"], cell.arms["tis"], kind)) for cell in still)
        for kind in (KIND, "sparse")
    ]
    return f"""Rates, chosen under the budget in the first page's study: {words}. Where nothing is evicted, mixed-50 and
TIS are one algorithm. There mixed-50 minus TIS is {leads[0]} greedily, and {leads[1]} at temperature 1: this lead comes
from the rate, so only greedy rewards are compared."""


def leads_table(cells: Sequence[DoseCell]) -> str:
    lines = []
    for cell in cells:
        start = f"{mean(cell.rewards['untrained'].values()):.2f}"
        leads = [signed(cell.lead(ours)) for ours in ("mixed-50", "shadow")]
        lines.append([cell.label, f"{cell.nats:.2g}", start, cell.rival, *leads])
    return table(["cell", "mismatch", "start", "rival", "mixed-50 minus the rival", "shadow minus the rival"], lines)
