"""The study of learned eviction: a gate beside the model's own attention."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from statistics import mean

from lib.files import Row
from reporting import page
from reporting.contrasts import Contrast, paired_contrast
from reporting.page import check_complete, difference, mean_of, mean_words, number, plain, rate_words, table

SEEDS = tuple(range(10, 18))
CHOICE = ("sparse", "sparse_greedy")  # their mean on the pilot seeds chooses a rate
DECIDED = "sparse_decided"
KINDS = ("sparse", "sparse_greedy", DECIDED, "dense_greedy")
GATE = ("gate", "gate-joint")
ATTENTION = (("attention", "attention-joint"), ("attention-cold", "attention-joint"))
MEANING = {
    GATE: "gate, trained",
    ATTENTION[0]: "attention, trained",
    ATTENTION[1]: "attention at temperature 0.3, trained",
    ("gate", "gate-frozen"): "uniform draws, tokens trained",
    ("attention", "attention-frozen"): "attention, tokens trained",
    ("tova-heads", "shadow"): "TOVA of each head, tokens trained",
    ("h2o", "shadow"): "H2O, tokens trained",
}
Way = tuple[str, str]  # policy and arm


def decided(row: Row) -> float:
    """Reward of greedy tokens with evictions without chance; a rule has no chance anyway."""
    kind = DECIDED if DECIDED in row["curve"][0] else "sparse_greedy"
    return mean(point[kind] for point in row["curve"][-page.LAST :])


def ways_of(rows: Sequence[Row]) -> dict[Way, list[Row]]:
    """Way -> rows, with the metric of the primary contrast."""
    return page.grouped((row | {DECIDED: decided(row)} for row in rows), itemgetter("policy", "arm"))


def best_attention(rows: Sequence[Row]) -> Way:
    """The attention arm with the higher pilot reward, at its best rate."""
    pilots = ways_of(page.of_pilot(rows))
    return max(ATTENTION, key=lambda way: max(page.rewards_by_rate(pilots[way], CHOICE).values()))


def complete(rows: Sequence[Row]) -> dict[Way, list[Row]]:
    """The ways with all seeds; ValueError without a trained one."""
    ways = page.with_seeds(ways_of(page.reported(rows)), SEEDS)
    check_complete(ways, MEANING, "learned_eviction.json")
    return ways


def primary(rows: Sequence[Row]) -> Contrast:
    ways, rival = complete(rows), best_attention(rows)
    what = f"the gate minus {MEANING[rival]}, the better attention arm of the pilot, decided"
    link = "[learned eviction](#learned-eviction-beside-the-models-own-attention)"
    return paired_contrast(link, what, ways[GATE], ways[rival], DECIDED)


def section(rows: Sequence[Row]) -> str:
    contrast, ways = primary(rows), complete(rows)
    gate, other = ways[GATE], ways[best_attention(rows)]
    lead = difference(gate, other, DECIDED)
    low, high = number(lead.mean - lead.half), number(lead.mean + lead.half)
    drawn = plain(difference(gate, other, "sparse"))
    start = mean(row["dense_greedy_before"] for row in gate)
    lines = [
        [name, rate_words(ways[way][0]["learning_rate"]), *mean_words(ways[way], KINDS)]
        for way, name in MEANING.items()
    ]
    rules = {way[0]: mean_of(found, "sparse_greedy").mean for way, found in ways.items() if way[1] == "untrained"}
    worst, *_, best = sorted(rules, key=lambda rule: rules[rule])
    return f"""## Learned eviction beside the model's own attention

Neural Garbage Collection (arXiv:2604.18002) draws evictions from the model's own attention and trains them by the
reward. `LinearGate` has separate parameters for this. Sorting 12 digits, 13 + 2 of 26 keys, starts at 97 % with the
full cache ({start:.3f} greedily), 240 rollouts, {len(SEEDS)} seeds, one rate per arm, chosen on two pilot seeds.
*Decided*: greedy tokens, and the keys of the lowest logits are evicted without chance.

{table(["evictions by", "rate", "budget", "greedy", "decided", "full cache, greedy"], lines)}

*Primary contrast*: {contrast.what}: {contrast.found}. The plan predicted more than 0.03; an upper limit below that
would refute it. The interval is {low} to {high}. The lower temperature is better, and still lower ones
were not tried; the gate's rate, 30 times that of the tokens, comes from an older study. With sampled evictions, at
temperature 1: {drawn}. Without training, {len(rules)} rules have {rules[worst]:.3f} ({worst}) to {rules[best]:.3f}
({best}) greedily. H2O and seven of these rules ran later, on starts of the same level that were trained again on
another CPU; those of the contrast share their starts. The best untrained rule of the [older
study](docs/older_studies.md#learned-eviction) with 14 + 2 keys, which keeps the prompt and evicts the oldest response
token, did not run here. The paper draws the kept keys and trains models of other sizes on other tasks; here evicted
keys are drawn.
"""
