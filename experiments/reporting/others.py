"""Learned gates, gradients at the start, and choices of the map: sentences for the report, tables for the appendix."""

from __future__ import annotations

from collections.abc import Sequence

from lib.files import Row
from lib.intervals import Estimate, paired
from reporting.page import by_seed, difference, mean_of, of_arms, plain, rate_of, reported, signed, table

KINDS = ("sparse", "sparse_greedy", "dense")

# ---------------------------------------------------------------- gates


def gate_arms(rows: Sequence[Row], task: str) -> dict[str, list[Row]]:
    """Arms of a task; an arm under a rule is named "rule, arm"."""
    found: dict[str, list[Row]] = {}
    for row in reported(rows):
        if row["task"] == task:
            name = row["arm"] if row["policy"] == "gate" else f"{row['policy']}, {row['arm']}"
            found.setdefault(name, []).append(row)
    return dict(sorted(found.items()))


def best(arms: dict[str, list[Row]], ending: str) -> str:
    """The arm with the highest reward under the budget, of those whose name ends so."""
    return max((name for name in arms if name.endswith(ending)), key=lambda name: mean_of(arms[name], "sparse").mean)


def gate_sentence(rows: Sequence[Row]) -> str:
    said = []
    for task in ("sorting-12", "sums-12"):
        arms = gate_arms(rows, task)
        fixed, trained = best(arms, ", untrained"), best(arms, ", shadow")
        leads = [plain(difference(arms["gate-joint"], arms[name], "sparse")) for name in (fixed, trained)]
        names = [name.split(",")[0] for name in (fixed, trained)]
        said.append(
            f"{task}: {leads[0]} over the best untrained rule (`{names[0]}`), {leads[1]} over the best of three rules "
            f"under which tokens were trained (`{names[1]}`)"
        )
    return (
        f"Gate and tokens trained together, under the budget: {'; '.join(said)}. In running sums the three trained "
        "rules were known not to fit, and the rule that fits needs no training. Only sorting shows a gain over every "
        "rule tried; `oldest` was never trained under."
    )


def gate_table(rows: Sequence[Row], task: str) -> str:
    arms = gate_arms(rows, task)
    fixed, trained = best(arms, ", untrained"), best(arms, ", shadow")
    lines = []
    for name, found in arms.items():
        numbers = [f"{mean_of(found, kind).mean:.3f}" for kind in KINDS]
        against = [
            "" if name == other else signed(difference(found, arms[other], "sparse")) for other in (fixed, trained)
        ]
        lines.append([f"`{name}`", len(found), *numbers, *against, signed(_minus_full_cache(found, arms))])
    columns = ["arm", "seeds", "budget", "budget, greedy", "full", f"− {fixed}", f"− {trained}"]
    return table([*columns, "− the start with the full cache"], lines)


def _minus_full_cache(found: Sequence[Row], arms: dict[str, list[Row]]) -> Estimate:
    """Reward under the budget minus that of the start with the full cache, which is the same under every rule."""
    start = next(rows for name, rows in arms.items() if name.endswith(", untrained"))
    return paired(by_seed(found, "sparse"), by_seed(start, "dense"))


# ---------------------------------------------------------------- gradients

COMPARED = ("naive", "tis", "mis-sequence", "icepop", "sparse-rl", "shadow", "mixed-50", "anchor", "shadow-anchor")


def _alignments(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """Cell -> arm -> row of its gradient."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row["kind"] == "gradient":
            label = f"{row['task']}, {row['policy']}, {row['budget']} + {row['buffer']} keys"
            found.setdefault(label, {})[row["arm"]] = row
    return dict(sorted(found.items()))


def gradients_sentence(rows: Sequence[Row]) -> str:
    cells = _alignments(rows)
    at = cells["sorting-12, tova-heads, 11 + 2 keys"]
    values = {arm: f"{at[arm]['alignment_reward']:.2f}" for arm in ("shadow", "naive", "tis")}
    ahead = sum(arms["shadow"]["alignment_reward"] > arms["tis"]["alignment_reward"] for arms in cells.values())
    return (
        f"At one start of the table's cell the gradient of one rollout is aligned with the exact gradient of the "
        f"reward under the budget by {values['shadow']} with shadow masks, {values['naive']} with naive and "
        f"{values['tis']} with TIS; shadow masks are above TIS in {ahead} of {len(cells)} cells. "
        "One start per cell, and nothing along training. Nine variance reductions on top of the masks gained at most "
        "0.03 and were dropped."
    )


def gradients_table(rows: Sequence[Row]) -> str:
    lines = []
    for label, arms in _alignments(rows).items():
        values = [f"{arms[arm]['alignment_reward']:.2f} ± {arms[arm]['alignment_reward_half']:.2f}" for arm in COMPARED]
        lines.append([label, *(value.replace("-", "−") for value in values)])
    return table(["cell", *(f"`{arm}`" for arm in COMPARED)], lines)


# ---------------------------------------------------------------- choices of the map

CHOICES = {
    "tis": {"tis-1-step": "1 step per rollout instead of 4", "tis-16-steps": "16 steps"},
    "shadow": {"shadow-1-step": "1 step per rollout instead of 4", "shadow-16-steps": "16 steps"},
    "shadow-anchor": {
        "shadow-anchor-0.01": "teacher's weight 0.01 instead of 0.1",
        "shadow-anchor-1": "teacher's weight 1",
        "shadow-anchor-quarter": "teacher on a quarter of the rows",
    },
}


def choices_sentence(rows: Sequence[Row], usual: dict[str, list[Row]]) -> str:
    arms = usual | of_arms(reported(rows))
    pairs = {1: ("shadow-1-step", "tis-1-step"), 4: ("shadow", "tis"), 16: ("shadow-16-steps", "tis-16-steps")}
    leads = [f"{plain(difference(arms[ours], arms[tis], 'sparse'))} with {n}" for n, (ours, tis) in pairs.items()]
    return f"Shadow masks minus TIS under the budget, by optimizer steps per rollout: {', '.join(leads)}."


def choices_table(rows: Sequence[Row], usual: dict[str, list[Row]]) -> str:
    found = of_arms(reported(rows))
    lines = []
    for arm, others in CHOICES.items():
        lines.append([f"`{arm}`, as in the map", *_rewards(usual[arm]), "", ""])
        for name, says in others.items():
            gains = [signed(difference(found[name], usual[arm], kind)) for kind in ("sparse", "dense")]
            lines.append([says, *_rewards(found[name]), *gains])
    columns = ["arm", "seeds", "rate", "budget", "full", "budget − map's choice", "full − map's choice"]
    return table(columns, lines)


def _rewards(rows: Sequence[Row]) -> list[str]:
    rewards = [f"{mean_of(rows, kind).mean:.3f}" for kind in ("sparse", "dense")]
    return [str(len(rows)), rate_of(rows), *rewards]


def rates_table(rows: Sequence[Row], usual: dict[str, list[Row]]) -> str:
    """Gains over each run's own start, at the chosen rates and at one beyond either end of the grid."""
    found = of_arms(reported(rows))
    lines = []
    for arm in ("naive", "tis", "shadow", "shadow-anchor"):
        for rate in sorted({row["learning_rate"] for row in found[arm]} | {usual[arm][0]["learning_rate"]}):
            runs = [row for row in [*found[arm], *usual[arm]] if row["learning_rate"] == rate]
            lines.append([f"`{arm}`", rate_of(runs), len(runs), *(signed(_gain(runs, kind)) for kind in KINDS)])
    return table(["arm", "rate", "seeds", "gain, budget", "gain, budget, greedy", "gain, full"], lines)


def _gain(rows: Sequence[Row], kind: str) -> Estimate:
    return difference(rows, [{**row, kind: row[f"{kind}_before"]} for row in rows], kind)


def collapse_sentence(rows: Sequence[Row]) -> str:
    """Runs of naive and bypass that lost more than 30 % of the start's reward under the budget, pilots included."""
    lost, runs = {}, {}
    for arm in ("naive", "bypass"):
        for high in (False, True):
            inside = [row for row in rows if row["arm"] == arm and (row["learning_rate"] > 3e-4) == high]
            runs[arm, high] = len(inside)
            lost[arm, high] = sum(row["sparse"] < 0.7 * row["sparse_before"] for row in inside)
    return (
        f"naive lost more than 30 % of the start's reward under the budget in {lost['naive', False]} of "
        f"{runs['naive', False]} runs at rates up to 3e-4, and in {lost['naive', True]} of {runs['naive', True]} at "
        f"1e-3; bypass in {lost['bypass', False]} of {runs['bypass', False]}, all in one cell"
    )
