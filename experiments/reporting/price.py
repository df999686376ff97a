"""What a budget costs in reward: what is left of the full cache's reward once a learner has done its best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reporting.cells import MapCell, cells_of
from reporting.evictions import arms_of_task
from reporting.page import Section, by_seed, machines, mean_of, of_arms, plain, signed, table
from study.files import Row
from study.intervals import Estimate, paired

FILES = ("map.json", "eviction_action.json", "real_model.json")
GATES = ("gate-alone", "gate-joint")
LEARNERS = ("naive", "tis", "shadow", "shadow-anchor")


@dataclass(frozen=True)
class Price:
    """One task under one budget.

    Attributes:
      share: slots of the cache over the tokens of a whole sequence.
      full: rows of the arm whose reward with the full cache one would have without a budget.
      before, after: rows whose sparse reward one has with it, before training and by the best method.
      how: which that is.
    """

    task: str
    share: float
    full: Sequence[Row]
    before: Sequence[Row]
    after: Sequence[Row]
    how: str

    @property
    def paid(self) -> Estimate:
        """The sparse reward less that of the full cache, paired by seed; of a single start, with that of every seed."""
        whole = by_seed(self.full, "dense")
        if len(whole) == 1:
            (only,) = whole.values()
            whole = dict.fromkeys(by_seed(self.after, "sparse"), only)
        return paired(by_seed(self.after, "sparse"), whole)

    def line(self) -> list[str]:
        full, before = mean_of(self.full, "dense"), mean_of(self.before, "sparse")
        after = mean_of(self.after, "sparse")
        numbers = [f"{found.mean:.3f}" for found in (full, before, after)]
        return [self.task, self.how, f"{self.share:.0%}", *numbers, str(self.paid.count), signed(self.paid)]


def section(map_rows: Sequence[Row], gate_rows: Sequence[Row], real_rows: Sequence[Row]) -> Section | None:
    """None without a map."""
    cells = cells_of(map_rows)
    if not cells:
        return None
    prices = [*of_rules(cells), *of_gates(gate_rows), *of_real_model(real_rows)]
    prices.sort(key=lambda price: (price.task, -price.share))
    used = {name: rows for name, rows in zip(FILES, (map_rows, gate_rows, real_rows), strict=True) if rows}
    return Section(
        "What a budget costs",
        "The memory wall says what a budget buys. What is left of the reward, when the best rule and the best learner "
        "of this report have been chosen?",
        answer(prices),
        table(
            [
                *("task", "best", "slots of tokens", "full cache", "budget, before", "budget, after"),
                *("seeds of both", "after − full cache"),
            ],
            [price.line() for price in prices],
        )
        + "\n\nThe best rule and learner are those with the highest mean of the same rows, which flatters them a "
        "little. *Full cache*: the start, which no learner raised by 0.02 or more; of the real model the learner whose "
        "sampler evicts nothing. Differences are paired by seed, over the seeds that both have, and need not be those "
        "of the columns, which are means over all; with 95 % t intervals, bold where they are on one side of 0.",
        "python experiments/report.py",
        f"that of the studies it is made of, {machines([row for rows in used.values() for row in rows])}",
        tuple(used),
    )


def of_rules(cells: Sequence[MapCell]) -> list[Price]:
    """Of every task and budget of the map, the best method under the best rule."""
    found = []
    for task, budget in dict.fromkeys((cell.task, cell.budget) for cell in cells):
        here = [cell for cell in cells if (cell.task, cell.budget) == (task, budget)]
        best = max(here, key=lambda cell: mean_of(cell.arms[cell.best("sparse")], "sparse").mean)
        method = best.best("sparse")
        start = best.arms["untrained"]
        found.append(Price(task, share_of(start), start, start, best.arms[method], f"{best.policy}, `{method}`"))
    return found


def of_gates(rows: Sequence[Row]) -> list[Price]:
    """Of every task of the study of gates, the best of them, and the best of the rules beside them."""
    found = []
    reported = [row for row in rows if not row["pilot"]]
    for task in dict.fromkeys(row["task"] for row in reported):
        arms = arms_of_task([row for row in reported if row["task"] == task])
        gates = [name for name in GATES if name in arms]
        starts = [name for name in arms if name.endswith(", untrained")]
        if gates and starts:
            best = max(gates, key=lambda name: mean_of(arms[name], "sparse").mean)
            rule = max(
                (name for name in arms if name not in GATES), key=lambda name: mean_of(arms[name], "sparse").mean
            )
            start = arms[starts[0]]  # with the full cache all rules are the same start
            random = arms.get("random, untrained", start)  # which a fresh gate is
            found.append(Price(task, share_of(start), start, random, arms[best], f"a gate, `{best}`"))
            policy, _, arm = rule.partition(", ")
            found.append(
                Price(
                    task,
                    share_of(start),
                    start,
                    arms.get(f"{policy}, untrained", start),
                    arms[rule],
                    f"{policy}, `{arm}`",
                )
            )
    return found


def of_real_model(rows: Sequence[Row]) -> list[Price]:
    """The best arm under every sampler, once the full cache's is there, which no sampler changes."""
    reported = [row for row in rows if not row["pilot"] and row["finished"]]
    full = [row for row in reported if row["arm"] == "full-cache"]
    found = []
    for policy in dict.fromkeys(row["policy"] for row in reported):
        arms = of_arms([row for row in reported if row["policy"] == policy])
        learners = [name for name in LEARNERS if name in arms]
        if full and learners and "untrained" in arms:
            best = max(learners, key=lambda name: mean_of(arms[name], "sparse").mean)
            start = arms["untrained"]
            name = f"SmolLM2-135M, {start[0]['task']}"
            found.append(Price(name, share_of(start), full, start, arms[best], f"{policy}, `{best}`"))
    return found


def share_of(rows: Sequence[Row]) -> float:
    return (rows[0]["budget"] + rows[0]["buffer"]) / rows[0]["length"]


def answer(prices: Sequence[Price]) -> str:
    """The cheapest and the dearest."""
    said = [
        f"{price.task} with {price.share:.0%} of the slots ({price.how}, {price.paid.count} seeds): {plain(price.paid)}"
        for price in sorted(prices, key=lambda price: -price.paid.mean)
    ]
    text = f"Beside the full cache a budget cost least in {said[0]}, most in {said[-1]}."
    return text
