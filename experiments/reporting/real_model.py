"""SmolLM2-135M-Instruct: its mismatch under budgets, and what training does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reporting.page import Section, apart, difference, machines, mean_of, of_arms, signed, table
from study.files import Row
from study.runs import DECODINGS

ORDER = ("untrained", "full-cache", "naive", "tis", "shadow", "shadow-anchor")  # of the lines of a table


def mismatch_section(rows: Sequence[Row]) -> Section:
    """Before any training."""
    off = [row for row in rows if row["kind"] == "mismatch"]
    lengths = sorted({part["tokens"] for row in off for part in row["by_length"]})
    lines = []
    for row in off:
        by_length = {part["tokens"]: part["response_ess"] for part in row["by_length"]}
        lines.append(
            [
                f"{row['policy']}, {row['budget']} keys" + (", with examples" if row["examples"] else ""),
                f"{row['evicted_share']:.2f}",
                f"{row['mean_abs_dlogp']:.3f}",
                f"{row['p999_abs_dlogp']:.2f}",
                f"{row['shadow_max_abs_dlogp']:.1e}",
                f"{row['token_ess']:.2f}",
                *(f"{by_length[length]:.2f}" if length in by_length else "–" for length in lengths),
            ]
        )
    worst = max(off, key=lambda row: row["mean_abs_dlogp"])
    replayed = max(row["shadow_max_abs_dlogp"] for row in off)
    columns = [
        "sampler",
        "keys gone",
        "mean abs Δ log p, dense learner",
        "99.9th percentile",
        "largest with shadow masks",
    ]
    columns += ["ESS of tokens", *(f"of responses, {length} tokens" for length in lengths)]
    return Section(
        "A real model, before training",
        "SmolLM2-135M-Instruct answers GSM8K's questions under a budget. How far is a dense learner from the sampler, "
        "how far one that replays the masks, and what is left of importance weights?",
        f"A dense learner is off by up to {worst['mean_abs_dlogp']:.2f} nats a token in the mean ({worst['policy']}, "
        f"{worst['budget']} keys); one that replays the masks by at most {replayed:.1e} anywhere.",
        f"{off[0]['prompts']} responses a line, of one seed: a single one is {1 / off[0]['prompts']:.3f} of them.\n\n"
        + table(columns, lines)
        + accuracy(rows),
        "python experiments/mismatch.py --gsm8k test.jsonl",
        f"not recorded, {machines(rows)}",
        ("mismatch_smollm2.json",),
    )


def accuracy(rows: Sequence[Row]) -> str:
    """Right answers, of both tasks."""
    parts = []
    if sums := [row for row in rows if row["kind"] == "accuracy"]:
        parts.append(
            f"Right answers under a budget, of a task that the model half knows: {sums[0]['prompts']} sums of two or "
            "three numbers of one digit, share right and its 95 % interval.\n\n"
            + right_answers(sums)
            + "\n\nSnapKV's window is 16 here: with as many keys it keeps the end of the prompt and nothing else, and "
            "is right far more often than with the full cache. What a budget costs this task does not say, then."
        )
    if solved := [row for row in rows if row["kind"] == "gsm8k"]:
        parts.append(
            f"The same of {solved[0]['prompts']} questions of GSM8K with {solved[0]['examples']} solved ones in front, "
            f"of which this model solves few with any cache: a budget has little to cost here, and sums say more.\n\n"
            + right_answers(solved)
        )
    return "".join(f"\n\n{part}" for part in parts)


def right_answers(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        ways = [
            f"{row[name]:.2f} ({row[f'{name}_low']:.2f} … {row[f'{name}_high']:.2f})" for name in ("sampled", "greedy")
        ]
        budget = "full cache" if row["budget"] is None else f"{row['policy']}, {row['budget']} keys"
        lines.append([budget, *ways])
    return table(["sampler", "temperature 1", "greedy"], lines)


def section(rows: Sequence[Row]) -> Section | None:
    """Trained rewards, of runs that are finished; None before the first one is."""
    finished = [row for row in rows if not row["pilot"] and row["finished"]]
    if not finished:
        return None
    parts, said = [], []
    for policy in dict.fromkeys(row["policy"] for row in finished):
        reported = of_arms([row for row in finished if row["policy"] == policy])
        parts.append(cell(policy, reported))
        if {"shadow", "tis"} <= reported.keys():
            seeds = difference(reported["shadow"], reported["tis"], "sparse").count
            said += [
                f"Under {policy} ({seeds} seeds) shadow masks end {leads(reported, other)}."
                for other in ("tis", "naive")
                if other in reported
            ]
    return Section(
        "A real model, trained",
        "SmolLM2-135M-Instruct learns sums step by step with adapters, under a budget: naive, TIS, shadow masks, with "
        "a teacher, and with an unlimited cache.",
        " ".join(said) or "Not all arms are there yet.",
        "\n\n".join(parts) + "\n\nThe third seed under SnapKV was added when two had been seen: its intervals are not "
        "those of a plan.",
        "python experiments/real_model.py; … --arms naive tis shadow shadow-anchor --seeds 2; … --rule tova-heads",
        f"{training_hours(rows):.1f} hours of rollouts and updates, pilots included, on a core each; evaluations not "
        f"recorded; {machines(rows)}",
        ("real_model.json",),
    )


def leads(reported: dict[str, list[Row]], other: str) -> str:
    """Of shadow masks over another arm, in every way of decoding."""
    found = {kind: difference(reported["shadow"], reported[other], kind) for kind in DECODINGS}
    return (
        f"{apart(found['sparse'], f'`{other}`')} with the budget ({apart(found['sparse_greedy'], 'it')} greedy), and "
        f"{apart(found['dense'], 'it')} with the full cache ({apart(found['dense_greedy'], 'it')} greedy)"
    )


def training_hours(rows: Sequence[Row]) -> float:
    return sum(point.get("step_time", 0.0) for row in rows for point in row.get("curve", ())) / 3600


def cell(policy: str, reported: dict[str, list[Row]]) -> str:
    """What training came to under one sampler."""
    lines = []
    for name, found in sorted(reported.items(), key=lambda item: ORDER.index(item[0])):
        rate = found[0]["learning_rate"]
        cells: list[Any] = [f"`{name}`", len(found), "" if rate is None else f"{rate:g}"]
        for kind in DECODINGS:
            cells.append(of_seeds(found, kind))
        against = "untrained" if "untrained" in reported else name
        cells += [
            signed(gain(found, reported[against], kind)) if name != against else "" for kind in ("sparse", "dense")
        ]
        lines.append(cells)
    columns = ["arm", "seeds", "rate", "sparse", "dense", "sparse greedy", "dense greedy", "sparse gain", "dense gain"]
    some = next(iter(reported.values()))[0]
    samplers = [name for name in reported if name != "full-cache"]
    shares = [row["evicted_share"] for name in samplers for row in reported[name] if row["evicted_share"] is not None]
    gone = (
        f"{shares[0]:.2f} of the keys are gone when the last token looks"
        if shares
        else "the share of evicted keys is not measured"
    )
    return (
        f"{some['task']}, {policy} with sinks, {some['budget']} + {some['buffer']} keys of up to {some['length']}; "
        f"{gone}. {some['evaluation_rows']} held-out sums, of which a share of 0.3 has a standard error of 0.05. "
        "Means, and in brackets the seeds one by one: an interval is 12.7 standard errors wide on either side with two "
        "of them, and 4.3 with three, or of no width where they happen to be alike. Gains are over the one start, "
        "whose own error is in none of the intervals.\n\n" + table(columns, lines)
    )


def of_seeds(rows: Sequence[Row], kind: str) -> str:
    """ "0.266 (0.281, 0.250)": a mean, and what it is of."""
    mean = f"{mean_of(rows, kind).mean:.3f}"
    if len(rows) == 1:
        return mean
    return f"{mean} ({', '.join(f'{row[kind]:.3f}' for row in sorted(rows, key=lambda row: row['seed']))})"


def gain(ours: Sequence[Row], start: Sequence[Row], kind: str) -> Any:
    """The start is one model for all seeds."""
    (before,) = (row[kind] for row in start)
    return difference(ours, [row | {kind: before} for row in ours], kind)
