"""The study of several turns with a tool."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from lib.files import Row
from lib.grid import best_rate
from reporting import page
from reporting.contrasts import Contrast, paired_contrast
from reporting.page import difference, mean_words, of_arms, of_pilot, p_value, plain, rate_words, rewards_by_rate, table
from reporting.room import KINDS

CHOICE = ("sparse_greedy", "dense_greedy")  # their mean on the pilot seeds chooses a rate
FOUND = dict[str, list[Row]]


def chosen(rows: Sequence[Row]) -> FOUND:
    """Arm -> reported rows at its chosen rate; for the start at any one rate.

    Raises:
      ValueError: if arms differ in their seeds: nothing is reported before all are in.
    """
    pilots = of_arms(of_pilot(rows))
    found = {}
    for arm, of_arm in of_arms(page.reported(rows)).items():
        rate = best_rate(rewards_by_rate(pilots[arm], CHOICE)) if arm in pilots else of_arm[0]["learning_rate"]
        found[arm] = [row for row in of_arm if row["learning_rate"] == rate]
    seeds = {arm: sorted(row["seed"] for row in of_arm) for arm, of_arm in found.items()}
    if len({*map(tuple, seeds.values())}) > 1:
        raise ValueError(f"expected the same seeds for every arm of agents.json; got {seeds}")
    return found


def rivals(rows: Sequence[Row]) -> list[str]:
    """naive and TIS, the better one of the pilot first."""
    pilots = of_arms(of_pilot(rows))
    return sorted(("naive", "tis"), key=lambda arm: -max(rewards_by_rate(pilots[arm], CHOICE).values()))


def primary(rows: Sequence[Row]) -> Contrast:
    arms, rival = chosen(rows), rivals(rows)[0]
    what = f"shadow minus {rival}, the better rival of the pilot, under the budget at temperature 1"
    link = "[several turns with a tool](#several-turns-with-a-tool)"
    return paired_contrast(link, what, arms["shadow"], arms[rival], "sparse")


def section(rows: Sequence[Row]) -> str:
    arms, pilots = chosen(rows), of_arms(of_pilot(rows))
    contrast, (rival, other) = primary(rows), rivals(rows)
    lead = plain(difference(arms["shadow"], arms[other], "sparse"))
    rival_gain = plain(difference(arms[rival], arms["untrained"], "sparse"))
    mixed, above_shadow = (plain(difference(arms["mixed-50"], arms[name], "sparse")) for name in (other, "shadow"))
    full = plain(difference(arms["shadow"], arms["untrained"], "dense_greedy"))
    early = [row for row in page.reported(rows) if row["arm"] == rival and row["learning_rate"] == 1e-4]
    seeds = [row["seed"] for row in early]
    compared = early, arms[rival], arms["shadow"]
    again = [mean(row["sparse"] for row in found if row["seed"] in seeds) for found in compared]
    p_other = p_value(arms["shadow"], arms[other], "sparse")
    own = max((rival, other), key=lambda arm: rewards_by_rate(pilots[arm], ("sparse",))[arms[arm][0]["learning_rate"]])
    fast = {arm: rewards_by_rate(pilots[arm], ("sparse",))[1e-3] for arm in ("shadow", "tis")}
    return f"""## Several turns with a tool

The policy looks up the values of four letters with a tool, one per turn, and states all of them in the last turn; the
reward is the share of right values. The dialogue has 60 tokens, H2O keeps 32 + 4. Starts were trained with the
full cache. 120 rollouts, {len(arms["shadow"])} seeds, one rate per arm: the best mean greedy reward of both caches on
two pilot seeds.

{arms_table(arms)}

*Primary contrast*: {contrast.what}: {contrast.found}. That rival hardly trained: it ends {rival_gain} relative to its
start. The rule for rates favours an arm that changes little. It gave naive the smallest rate of the grid, and shadow
masks a smaller one than TIS and `mixed-50`. By the pilots of the contrast's own column the rival is {own}. Shadow masks
minus {other}: {lead}, p {p_other:.2g} before Holm's correction. `mixed-50` minus {other}: {mixed},
minus shadow masks: {above_shadow}, at ten times their rate. At 1e-3 the pilots reach {fast["shadow"]:.2f} under the
budget with shadow masks and {fast["tis"]:.2f} with TIS. *What lost*: with the full cache, greedily, shadow masks end
{full} relative to their start. Seeds {seeds[0]} to {seeds[-1]} of some arms ran at 1e-4 before the pilots had reached
the edge of the grid. At 1e-4 {rival} has {again[0]:.2f} under the budget at temperature 1; on the same seeds it has
{again[1]:.2f} at its chosen rate, and shadow masks {again[2]:.2f} at theirs.
"""


def arms_table(arms: FOUND) -> str:
    lines = []
    for arm in ("untrained", "full-cache", "naive", "tis", "shadow", "mixed-50"):
        rate = "" if arm == "untrained" else rate_words(arms[arm][0]["learning_rate"])
        lines.append([arm, rate, *mean_words(arms[arm], KINDS, 2)])
    return table(["arm", "rate", "budget", "greedy", "full cache", "greedy"], lines)
