"""All arms side by side, in the cell of the map that decides."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from reporting.page import Section, apart, cost, difference, mean_of, of_arms, plain, signed, table
from study.arms import ARMS
from study.files import Row
from study.runs import DECODINGS

SAYS = {
    "untrained": "the start as it is",
    "full-cache": "nothing is evicted while sampling: what an unlimited cache would give",
    "naive": "a dense learner that takes itself for the sampler",
    "bypass": "PPO's ratio is to the sampler",
    "tis": "dense, token weights cut at 2",
    "tis-sequence": "dense, weights of whole responses",
    "mis-sequence": "dense, whole responses accepted or not (TRL's default)",
    "icepop": "dense, tokens accepted or not",
    "sparse-rl": "dense, Sparse-RL's correction",
    "shadow": "the sampler's masks, replayed",
    "naive-anchor": "naive, beside a frozen dense teacher",
    "tis-anchor": "TIS, beside a frozen dense teacher",
    "shadow-anchor": "shadow, beside a frozen dense teacher",
    "shadow-forward": "shadow, beside itself with the full cache (forward KL)",
    "shadow-reverse": "the same, reverse KL",
    "shadow-published": "the same, as the paper's code has it",
    "mixed-20": "shadow and a fifth of TIS, on the same weights",
    "mixed-50": "shadow and TIS, half and half",
    "mixed-80": "shadow and four fifths of TIS",
    "anchor-alone": "the frozen teacher without any reward",
    "forward-alone": "the live teacher without any reward",
}


def section(rows: Sequence[Row], task: str, policy: str, budget: int) -> Section:
    """Of the rows of the map."""
    inside = [row for row in rows if (row["task"], row["policy"], row["budget"]) == (task, policy, budget)]
    reported = of_arms([row for row in inside if not row["pilot"]])
    order = [arm.name for arm in ARMS if arm.name in reported]
    seeds = sorted({row["seed"] for row in reported["shadow"]})
    lines = []
    for name in order:
        found = reported[name]
        rate = "" if name == "untrained" else f"{found[0]['learning_rate']:g}"
        values = (mean_of(found, kind).mean for kind in DECODINGS)
        differences = [row[APART] for row in found if APART in row]
        values = [*(f"{value:.3f}" for value in values), f"{mean(differences):.1e}" if differences else ""]
        against = [signed(difference(found, reported["tis"], kind)) if name != "tis" else "" for kind in SPARSE_DENSE]
        lines.append([f"`{name}`: {SAYS[name]}", rate, *values, *against])
    columns = ["arm", "rate", "sparse", "dense", "sparse greedy", "dense greedy", "largest Δ log p"]
    columns += [f"{kind} − TIS" for kind in ("sparse", "dense")]
    gain = difference(reported["shadow"], reported["tis"], "sparse")
    loss = difference(reported["shadow"], reported["tis"], "dense")
    teacher = difference(reported["shadow-anchor"], reported["shadow"], "sparse")
    alone = difference(reported["shadow-anchor"], reported["anchor-alone"], "sparse")
    best = max((name for name in order), key=lambda name: mean_of(reported[name], "sparse").mean)
    answer = (
        f"Under the budget `{best}` ends highest ({mean_of(reported[best], 'sparse').mean:.3f}); shadow masks end "
        f"{apart(gain, 'TIS')} with the budget, and {apart(loss, 'it')} with the full cache; the frozen teacher adds "
        f"{plain(teacher)} to shadow masks with the budget{'' if teacher.established else ' (not established)'}, and "
        f"reward adds {plain(alone)} to that teacher."
    )
    body = (
        f"Sorting 12 digits; every head keeps {budget} + 2 of up to 26 keys ({policy}). Seeds {seeds}, rates chosen on "
        "others. Rewards at the end, at temperature 1 unless greedy; differences paired by seed, with 95 % t "
        "intervals, bold where they are on one side of 0. *Largest Δ log p*: of any token of a rollout between sampler "
        "and learner, nats, mean over rollouts and seeds.\n\n" + table(columns, lines)
    )
    return Section(
        "All arms on one task",
        "One start, one sampler with a small cache, and every way to learn from it: which policy is best under the "
        "budget, and which with the full cache?",
        answer,
        body,
        f"python experiments/map.py --tasks {task} --samplers {policy}:{budget}+2",
        cost(inside),
        ("map.json",),
    )


SPARSE_DENSE = ("sparse", "dense")
APART = "sampling/sampling_logp_difference/max"
