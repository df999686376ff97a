"""What length does: importance weights at the start, and trained rewards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reporting.page import Section, cost, difference, machines, mean_of, of_arms, plain, signed, table
from study.files import Row

KINDS = ("sparse", "dense")


def weights_section(rows: Sequence[Row]) -> Section:
    """Of importance weights, without training."""
    lengths = sorted({row["tokens"] for row in rows})
    lines = []
    for policy, budget in sorted({(row["policy"], row["budget"]) for row in rows}):
        for field, name in (("response_ess", "responses"), ("token_ess", "tokens")):
            means = [mean(rows, policy, budget, length, field) for length in lengths]
            lines.append([f"{policy}, {budget} keys: {name}", *(f"{value:.3f}" for value in means)])
    ends = {length: [row["response_ess"] for row in rows if row["tokens"] == length] for length in lengths}
    tokens = {length: [row["token_ess"] for row in rows if row["tokens"] == length] for length in lengths}
    short, long = lengths[0], lengths[-1]
    exact = max(row["shadow_max_abs_dlogp"] for row in rows)
    return Section(
        "Importance weights against the length",
        "A dense learner weights what a sampler with a small cache drew. How many responses are left, in effect, when "
        "the weights are of whole responses, and how many tokens when they are of single ones?",
        f"Effective sample sizes of whole responses fall from {min(ends[short]):.2f} … {max(ends[short]):.2f} at "
        f"{short} tokens to {min(ends[long]):.2f} … {max(ends[long]):.2f} at {long} (a single one of "
        f"{rows[0]['responses']} would be {1 / rows[0]['responses']:.3f}), and of tokens from "
        f"{min(tokens[short]):.2f} … {max(tokens[short]):.2f} to {min(tokens[long]):.2f} … {max(tokens[long]):.2f}; a "
        f"learner that replays the masks has weights of 1: its log-probabilities are off by at most {exact:.1e}.",
        "Walks along the edges of a graph in the prompt, at the start, mean over the seeds: effective sample size "
        f"(ESS), as a share of all responses, and of all tokens. {seeds_of(rows)}. χ² of weights whose mean is 1 is "
        "1 / ESS − 1; the plain estimate is in the rows, and means nothing once a few responses carry all weight.\n\n"
        + table(["sampler", *(f"{length} tokens" for length in lengths)], lines),
        "python experiments/horizon.py --weights",
        f"minutes, {machines(rows)}",
        ("horizon_weights.json",),
    )


def mean(rows: Sequence[Row], policy: str, budget: int, length: int, field: str) -> float:
    return float(
        np.mean(
            [row[field] for row in rows if (row["policy"], row["budget"], row["tokens"]) == (policy, budget, length)]
        )
    )


def section(rows: Sequence[Row], at_other_rates: Sequence[Row] = ()) -> Section:
    """Of trained rewards: a table for each sampler.

    Args:
      at_other_rates: rows of TIS with the learning rate of shadow masks, where its pilot chose another.
    """
    reported = [row for row in rows if not row["pilot"]]
    parts, said = [], []
    for sampler in dict.fromkeys((row["policy"], row["budget"], row["buffer"]) for row in reported):
        inside = [row for row in reported if (row["policy"], row["budget"], row["buffer"]) == sampler]
        by_length = {
            length_of(task): of_arms([row for row in inside if row["task"] == task])
            for task in sorted({row["task"] for row in inside}, key=length_of)
        }
        # A study that goes on has lengths of which some arms are still missing.
        by_length = {length: arms for length, arms in by_length.items() if arms.keys() >= NEEDED}
        if by_length:
            policy, budget, buffer = sampler
            parts.append(f"{policy}, {budget} + {buffer} keys:\n\n{of_sampler(by_length)}\n\n{chosen_rates(by_length)}")
            said.append(f"under {policy}: {sentence(by_length)}")
    text = "; ".join(said) + "."
    return Section(
        "The horizon",
        "The same task at the same difficulty per token, longer and longer, under the same budget: what do weights of "
        "tokens and of responses cost in reward, and what does replay?",
        f"Shadow masks less TIS, with the budget, {text}",
        f"Walks. {seeds_of(reported)}. The first line is the start; the others are gains over it, paired by seed, with "
        "95 % t intervals, bold where they are on one side of 0. Learning rates were chosen on one pilot seed, for "
        "every arm and length, where differences may be small: the second table has them.\n\n"
        + "\n\n".join(parts + ([of_one_rate(reported, at_other_rates)] if at_other_rates else [])),
        "python experiments/horizon.py",
        cost(rows),
        ("horizon.json", "horizon_rates.json") if at_other_rates else ("horizon.json",),
    )


NEEDED = {"untrained", "tis", "shadow", "shadow-anchor"}


def of_sampler(by_length: dict[int, dict[str, list[Row]]]) -> str:
    """Gains of every arm at every length."""
    names = dict.fromkeys(name for arms in by_length.values() for name in arms)
    lines = []
    for name in sorted(names, key=lambda name: name != "untrained"):
        numbers = []
        for arms in by_length.values():
            for kind in KINDS:
                if name not in arms:
                    numbers.append("–")
                elif name == "untrained":
                    numbers.append(f"{mean_of(arms[name], kind).mean:.3f}")
                else:
                    numbers.append(signed(difference(arms[name], arms["untrained"], kind)))
        lines.append([f"`{name}`", *numbers])
    return table(["arm", *(f"{length} tokens, {kind}" for length in by_length for kind in KINDS)], lines)


def chosen_rates(by_length: dict[int, dict[str, list[Row]]]) -> str:
    """Learning rates of every arm at every length."""
    names = dict.fromkeys(name for arms in by_length.values() for name in arms if name != "untrained")
    lines = [
        [f"`{name}`", *(f"{arms[name][0]['learning_rate']:g}" if name in arms else "–" for arms in by_length.values())]
        for name in names
    ]
    return table(["learning rate", *(f"{length} tokens" for length in by_length)], lines)


def of_one_rate(reported: Sequence[Row], at_other_rates: Sequence[Row]) -> str:
    """Shadow masks less TIS, both with the rate that the pilot of shadow masks chose."""
    said = []
    for task in dict.fromkeys(row["task"] for row in at_other_rates):
        tis = [row for row in at_other_rates if row["task"] == task]
        place = {name: tis[0][name] for name in ("task", "policy", "budget", "buffer", "learning_rate")}
        shadow = [row for row in reported if row["arm"] == "shadow" and place.items() <= row.items()]
        said.append(
            f"With one rate for both, {place['learning_rate']:g}, under {place['policy']} at {length_of(task)} tokens: "
            f"{plain(difference(shadow, tis, 'sparse'))} with the budget."
        )
    return " ".join(said)


def sentence(by_length: dict[int, dict[str, list[Row]]]) -> str:
    """The leads of shadow masks over TIS, and of a frozen teacher over shadow masks alone; and what the full cache's
    reward does where the walks are longest."""
    leads = [
        f"{plain(difference(arms['shadow'], arms['tis'], 'sparse'))} at {length} tokens"
        for length, arms in by_length.items()
    ]
    teacher = [
        f"{plain(difference(arms['shadow-anchor'], arms['shadow'], 'sparse'))} at {length}"
        for length, arms in by_length.items()
    ]
    longest = max(by_length)
    paid = " and ".join(
        f"{plain(difference(by_length[longest][name], by_length[longest]['untrained'], 'dense'))} {who}"
        for name, who in (("shadow", "without that teacher"), ("shadow-anchor", "with it"))
    )
    return (
        f"{', '.join(leads)} (a frozen teacher beside the masks changes their reward by {', '.join(teacher)} tokens; "
        f"with the full cache they end beside the start by {paid} at {longest} tokens)"
    )


def seeds_of(rows: Sequence[Row]) -> str:
    """ "3 seeds"."""
    return f"{len({row['seed'] for row in rows})} seeds"


def length_of(task: str) -> int:
    """ "walk-64" -> 64."""
    return int(task.rpartition("-")[2])
