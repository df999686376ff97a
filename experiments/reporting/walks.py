"""Walks of 16 to 512 tokens: trained rewards, learning rates, entropies, and importance weights at the start."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from lib.arms import ARMS
from lib.files import Row
from reporting.page import difference, mean_of, plain, rate_of, reported, signed, table

KINDS = ("sparse", "sparse_greedy", "dense")
WORDS = {"sparse": "budget", "sparse_greedy": "budget, greedy", "dense": "full"}
ByLength = dict[int, dict[str, list[Row]]]


def by_sampler(rows: Sequence[Row]) -> dict[str, ByLength]:
    """Sampler -> length -> arm -> reported rows."""
    found: dict[str, ByLength] = {}
    for row in sorted(reported(rows), key=length_of):
        sampler = f"{row['policy']}, {row['budget']} + {row['buffer']} keys"
        found.setdefault(sampler, {}).setdefault(length_of(row), {}).setdefault(row["arm"], []).append(row)
    return found


def length_of(row: Row) -> int:
    """The length of a walk: 64 for task walk-64."""
    return int(row["task"].rpartition("-")[2])


def short_table(rows: Sequence[Row]) -> str:
    """Shadow masks against TIS and naive at every length, at temperature 1 and greedily, with the final entropies."""
    lines = []
    for sampler, lengths in by_sampler(rows).items():
        for length, arms in lengths.items():
            start = arms["untrained"]
            entropies = " / ".join(
                f"{mean(row['entropy/end'] for row in arms[name]):.2f}" for name in ("shadow", "tis")
            )
            rates = " / ".join(rate_of(arms[name]) for name in ("shadow", "tis"))
            cells = [f"{mean_of(start, 'sparse').mean:.2f} / {mean_of(start, 'sparse_greedy').mean:.2f}", rates]
            cells += [signed(difference(arms["shadow"], arms["tis"], kind)) for kind in KINDS[:2]]
            cells += [signed(difference(arms["shadow"], arms["naive"], kind)) for kind in ("sparse", "dense")]
            lines.append([f"{length} tokens, {sampler.split(',')[0]}", *cells, entropies])
    columns = ["walk", "start, budget: T = 1 / greedy", "rates: shadow / TIS", "shadow − TIS, budget"]
    columns += ["greedy", "shadow − naive, budget", "full cache", "end entropy: shadow / TIS"]
    return table(columns, lines)


def one_rate(rows: Sequence[Row], at_other_rates: Sequence[Row]) -> str:
    """Shadow masks against TIS in the cell where TIS also ran at the rate of shadow masks."""
    said = []
    for task in dict.fromkeys(row["task"] for row in at_other_rates):
        tis = [row for row in at_other_rates if row["task"] == task]
        place = {name: tis[0][name] for name in ("task", "policy", "budget", "buffer", "learning_rate")}
        shadow = [row for row in reported(rows) if row["arm"] == "shadow" and place.items() <= row.items()]
        leads = [plain(difference(shadow, tis, kind)) for kind in KINDS[:2]]
        said.append(
            f"At the same rate ({rate_of(tis)}) shadow masks lead TIS in {task} under {place['policy']} by "
            f"{leads[0]} at temperature 1 and {leads[1]} greedily."
        )
    return " ".join(said)


def gains_table(lengths: ByLength) -> str:
    """Gains of every arm over the start, for the appendix."""
    names = dict.fromkeys(name for arms in lengths.values() for name in arms)
    order = [arm.name for arm in ARMS if arm.name in names]
    lines = []
    for name in order:
        cells = []
        for arms in lengths.values():
            if name not in arms:
                cells += ["–"] * (len(KINDS) + 1)
            elif name == "untrained":
                cells += ["", *(f"{mean_of(arms[name], kind).mean:.3f}" for kind in KINDS)]
            else:
                gains = [signed(difference(arms[name], arms["untrained"], kind)) for kind in KINDS]
                cells += [rate_of(arms[name]), *gains]
        lines.append([f"`{name}`", *cells])
    columns = [f"{length}: {word}" for length in lengths for word in ("rate", *WORDS.values())]
    return table(["arm", *columns], lines)


def weights_table(rows: Sequence[Row]) -> str:
    """Effective sample sizes of importance weights at the start, for the appendix."""
    lengths = sorted({row["tokens"] for row in rows})
    lines = []
    for policy, budget in sorted({(row["policy"], row["budget"]) for row in rows}):
        inside = [row for row in rows if (row["policy"], row["budget"]) == (policy, budget)]
        for field, name in (("response_ess", "responses"), ("token_ess", "tokens")):
            means = [mean(row[field] for row in inside if row["tokens"] == length) for length in lengths]
            lines.append([f"{policy}, {budget} keys: {name}", *(f"{value:.3f}" for value in means)])
    return table(["sampler", *(f"{length} tokens" for length in lengths)], lines)


def weights_sentence(rows: Sequence[Row]) -> str:
    ends = sorted({row["tokens"] for row in rows})
    parts = {
        (length, field): [row[field] for row in rows if row["tokens"] == length]
        for length in (ends[0], ends[-1])
        for field in ("response_ess", "token_ess")
    }

    def spread(length: int, field: str) -> str:
        return f"{min(parts[length, field]):.2f}–{max(parts[length, field]):.2f}"

    exact = max(row["shadow_max_abs_dlogp"] for row in rows)
    return (
        f"Effective sample sizes over the samplers, as shares. Whole-response weights: "
        f"{spread(ends[0], 'response_ess')} at {ends[0]} tokens, {spread(ends[-1], 'response_ess')} at {ends[-1]}. "
        f"Token weights: {spread(ends[0], 'token_ess')} and {spread(ends[-1], 'token_ess')}. The replay needs no "
        f"weights: it is off by at most {exact:.1e} nats."
    )
