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
    short, long = lengths[0], lengths[-1]
    exact = max(row["shadow_max_abs_dlogp"] for row in rows)
    return Section(
        "Importance weights against the length",
        "A dense learner weights what a sampler with a small cache drew. How many responses are left, in effect, when "
        "the weights are of whole responses, and how many tokens when they are of single ones?",
        f"Effective sample sizes of whole responses fall from {min(ends[short]):.2f} … {max(ends[short]):.2f} at "
        f"{short} tokens to {min(ends[long]):.2f} … {max(ends[long]):.2f} at {long} (a single one of "
        f"{rows[0]['responses']} would be {1 / rows[0]['responses']:.3f}); a learner that replays the masks has "
        f"weights of 1: its log-probabilities are off by at most {exact:.1e}.",
        "Walks along the edges of a graph in the prompt, at the start, mean over the seeds: effective sample size as a "
        "share of all responses, and of all tokens.\n\n"
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


def section(rows: Sequence[Row]) -> Section:
    """Of trained rewards."""
    reported = [row for row in rows if not row["pilot"]]
    tasks = sorted({row["task"] for row in reported}, key=length_of)
    by_task = {task: of_arms([row for row in reported if row["task"] == task]) for task in tasks}
    names = [name for name in by_task[tasks[0]] if all(name in arms for arms in by_task.values())]
    lines = []
    for name in sorted(names, key=lambda name: name != "untrained"):
        numbers = []
        for arms in by_task.values():
            for kind in KINDS:
                start = name == "untrained"
                found = mean_of(arms[name], kind) if start else difference(arms[name], arms["untrained"], kind)
                numbers.append(f"{found.mean:.3f}" if start else signed(found))
        lines.append([f"`{name}`", *numbers])
    leads = [plain(difference(arms["shadow"], arms["tis"], "sparse")) for arms in by_task.values()]
    said = ", ".join(f"{lead} at {length_of(task)} tokens" for lead, task in zip(leads, tasks, strict=True))
    columns = ["arm", *(f"{length_of(task)} tokens, {kind}" for task in tasks for kind in KINDS)]
    some = of_arms(reported)["shadow"][0]
    return Section(
        "The horizon",
        "The same task at the same difficulty per token, longer and longer, under the same budget: what do weights of "
        "tokens and of responses cost in reward, and what does replay?",
        f"Under the budget shadow masks end above TIS by {said}.",
        f"Walks; {some['policy']}, {some['budget']} + {some['buffer']} keys. The first line is the start; the others "
        "are gains over it, paired by seed, with 95 % t intervals, bold where they are on one side of 0.\n\n"
        + table(columns, lines),
        "python experiments/horizon.py",
        cost(rows),
        ("horizon.json",),
    )


def length_of(task: str) -> int:
    """ "walk-64" -> 64."""
    return int(task.rpartition("-")[2])
