"""SmolLM2-135M-Instruct: mismatch before training, and trained rewards seed by seed."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from lib.arms import ARMS
from lib.files import Row
from lib.intervals import Estimate, paired
from reporting.page import by_seed, of_arms, plain, rate_of, table

KINDS = {"sparse": "budget", "sparse_greedy": "budget, greedy", "dense": "full", "dense_greedy": "full, greedy"}


def runs_of(rows: Sequence[Row], policy: str) -> dict[str, list[Row]]:
    """Finished runs of a policy by arm: the reported ones, and the pilot's at the reported learning rate."""
    finished = [row for row in rows if row["policy"] == policy and row["finished"]]
    found = {}
    for name, runs in of_arms(finished).items():
        rates = {row["learning_rate"] for row in runs if not row["pilot"]}
        found[name] = [row for row in runs if row["learning_rate"] in rates]
    return {arm.name: found[arm.name] for arm in ARMS if arm.name in found}


def trained_table(rows: Sequence[Row], policy: str) -> str:
    """Rewards of every seed; the pilot seed in brackets."""
    lines = []
    for name, runs in runs_of(rows, policy).items():
        cells = [f"{' '.join(_reward(row, kind) for row in sorted(runs, key=_pilot_last))}" for kind in KINDS]
        lines.append([f"`{name}`", rate_of(runs), *cells])
    return table(["arm", "rate", *KINDS.values()], lines)


def _pilot_last(row: Row) -> tuple[bool, int]:
    return row["pilot"], row["seed"]


def _reward(row: Row, kind: str) -> str:
    return f"({row[kind]:.2f})" if row["pilot"] else f"{row[kind]:.2f}"


def lead(rows: Sequence[Row], policy: str, other: str, kind: str, pilot: bool) -> Estimate:
    """Shadow masks over another arm, paired by seed, with or without the pilot seed."""
    runs = runs_of(rows, policy)
    ours, theirs = ([row for row in runs[name] if pilot or not row["pilot"]] for name in ("shadow", other))
    return paired(by_seed(ours, kind), by_seed(theirs, kind))


def leads_sentence(rows: Sequence[Row]) -> str:
    """The leads under SnapKV over all four seeds."""
    found = {
        (other, kind): plain(lead(rows, "snapkv", other, kind, pilot=True), 2)
        for other in ("tis", "naive")
        for kind in ("sparse", "sparse_greedy")
    }
    return (
        f"Over the four seeds, the pilot seed included, shadow masks lead TIS by {found['tis', 'sparse_greedy']} "
        f"greedily and {found['tis', 'sparse']} at temperature 1, and naive by {found['naive', 'sparse_greedy']} and "
        f"{found['naive', 'sparse']}. No lead is established."
    )


def mismatch_kl(rows: Sequence[Row], policy: str) -> float:
    """Mean over the reported TIS runs, nats per token."""
    return mean(row["mismatch_kl"] for row in runs_of(rows, policy)["tis"] if not row["pilot"])


def training_hours(rows: Sequence[Row]) -> float:
    return sum(point.get("step_time", 0.0) for row in rows for point in row.get("curve", ())) / 3600


def before_table(rows: Sequence[Row]) -> str:
    """Mismatch of a dense learner on GSM8K before training, for the appendix."""
    off = [row for row in rows if row["kind"] == "mismatch"]
    lengths = sorted({part["tokens"] for row in off for part in row["by_length"]})
    lines = []
    for row in off:
        by_length = {part["tokens"]: part["response_ess"] for part in row["by_length"]}
        sampler = f"{row['policy']}, {row['budget']} keys" + (", with examples" if row["examples"] else "")
        numbers = [f"{row['evicted_share']:.2f}", f"{row['mean_abs_dlogp']:.3f}", f"{row['p999_abs_dlogp']:.2f}"]
        numbers += [f"{row['shadow_max_abs_dlogp']:.1e}", f"{row['token_ess']:.2f}"]
        numbers += [f"{by_length[length]:.2f}" if length in by_length else "–" for length in lengths]
        lines.append([sampler, *numbers])
    columns = ["sampler", "evicted", "mean abs Δ log p, dense learner", "99.9th percentile", "largest, shadow masks"]
    return table([*columns, "ESS of tokens", *(f"of responses, {length}" for length in lengths)], lines)


def before_sentence(rows: Sequence[Row]) -> str:
    off = [row for row in rows if row["kind"] == "mismatch"]
    worst = max(off, key=lambda row: row["mean_abs_dlogp"])
    tokens = min(row["token_ess"] for row in off)
    exact = max(row["shadow_max_abs_dlogp"] for row in off)
    return (
        f"On GSM8K a dense learner is off by up to {worst['mean_abs_dlogp']:.2f} nats per token in the mean "
        f"({worst['policy']}, {worst['budget']} keys); one that replays the masks by at most {exact:.1e} anywhere. "
        f"Token weights keep an effective sample size of {tokens:.2f} or more. The rows also have accuracies under a "
        "budget; with so few right answers they separate nothing."
    )
