"""The study of the real model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import mean, stdev
from typing import NamedTuple

import numpy as np
from scipy.stats import t as student_t

from lib.files import Row
from lib.intervals import Estimate, estimate
from reporting import page
from reporting.contrasts import Contrast, holm
from reporting.page import by_seed, mean_of, mean_words, number, of_arms, p_value, plain, table

SEEDS = tuple(range(10, 18))
ARMS = ("untrained", "naive", "tis", "shadow", "mixed-50")
KINDS = {"sparse": "budget", "sparse_greedy": "budget, greedy"}  # kind of reward -> its column
KINDS |= {"dense": "full cache", "dense_greedy": "full cache, greedy"}
LEARNERS = ARMS[1:]
PAIRS = (("shadow", "naive"), ("shadow", "tis"), ("mixed-50", "naive"), ("mixed-50", "tis"), ("mixed-50", "shadow"))
DRAWS = 10_000  # of the bootstrap
NAMES = {"snapkv": "SnapKV", "r-kv": "R-KV"}
Arms = dict[str, list[Row]]


class Lead(NamedTuple):
    """A mean difference with the ends of its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{number(self.mean)} ({number(self.low)} to {number(self.high)})"


def lead(ours: Sequence[Row], theirs: Sequence[Row], kind: str) -> Lead:
    """Mean difference of the rewards with a two-way bootstrap: seeds and questions are drawn again, each with
    replacement. With n seeds the ends are √(n / (n - 1)) · t / 1.96 as far from the mean, because the spread of n drawn
    seeds is too small and n are few: of eight seeds alone the plain percentiles cover 89 %."""
    rewards = [{row["seed"]: np.array(row[f"{kind}_rewards"], float) for row in rows} for rows in (ours, theirs)]
    seeds = sorted(rewards[0].keys() & rewards[1].keys())
    differences = np.stack([rewards[0][seed] - rewards[1][seed] for seed in seeds])  # [seeds, questions]
    generator = np.random.default_rng(0)
    shares = [generator.multinomial(size, np.full(size, 1 / size), DRAWS) / size for size in differences.shape]
    drawn = np.einsum("ds,sq,dq->d", shares[0], differences, shares[1], optimize=True)
    middle, count = float(differences.mean()), len(seeds)
    wider = math.sqrt(count / (count - 1)) * student_t.ppf(0.975, count - 1) / 1.96
    low, high = middle + wider * (np.quantile(drawn, (0.025, 0.975)) - middle)
    return Lead(middle, float(low), float(high))


def of_rules(rows: Sequence[Row]) -> dict[str, Arms]:
    """Rule -> arms; ValueError unless all have all seeds."""
    found = {rule: of_arms(row for row in rows if row["policy"] == rule) for rule in NAMES}
    for rule, arms in found.items():
        page.check_complete(page.with_seeds(arms, SEEDS), LEARNERS, f"{rule} in smollm2.json")
    return {rule: {arm: arms[arm] for arm in ARMS} for rule, arms in found.items()}


def mismatches(rows: Sequence[Row]) -> dict[str, Estimate]:
    """Rule's name -> `mismatch_kl` in nats a token, by the definition of the study of dose: mean over the TIS runs."""
    return {NAMES[rule]: mean_of(arms["tis"], "mismatch_kl") for rule, arms in of_rules(rows).items()}


def first_mismatches(rows: Sequence[Row]) -> str:
    """Those of the first rollouts, before training."""
    first = {rule: mean(row["curve"][0]["mismatch_kl"] for row in arms["tis"]) for rule, arms in of_rules(rows).items()}
    return " and ".join(f"{nats:.3f} under {NAMES[rule]}" for rule, nats in first.items())


def primary(rows: Sequence[Row]) -> Contrast:
    arms = of_rules(rows)["snapkv"]
    what = "shadow minus naive under SnapKV, under the budget at temperature 1"
    found, p = lead(arms["shadow"], arms["naive"], "sparse"), p_value(arms["shadow"], arms["naive"], "sparse")
    return Contrast("[a real model](#a-real-model)", what, str(found), p)


def bullet(rows: Sequence[Row]) -> str:
    """The line of the first page."""
    arms, other = of_rules(rows).values()
    main, again = (lead(of["shadow"], of["naive"], "sparse") for of in (arms, other))
    verdict = "" if main.low > 0 else ": no lead is established"
    before, after = ([mean_of(of[arm], "sparse").mean for of in (arms, other)] for arm in ("untrained", "naive"))
    return f"""* *Real model.* [SmolLM2](#a-real-model), eight seeds, temperature 1, under the budget: the planned
  contrast, shadow masks minus naive under SnapKV, is {main}{verdict}. Under R-KV it is {again}. The eviction policy
  matters more: under SnapKV the model starts at {before[0]:.2f} and naive ends at {after[0]:.2f},
  under R-KV at {before[1]:.2f} and {after[1]:.2f}. {corrected(rows)}"""


def section(rows: Sequence[Row]) -> str:
    one = next(row for row in rows if row["arm"] == "shadow")
    text = "\n\n".join(part(rule, arms, mismatches(rows)[NAMES[rule]]) for rule, arms in of_rules(rows).items())
    return f"""## A real model

SmolLM2-135M-Instruct adds three numbers step by step. The prompt has about 161 tokens, the response up to
{one["length"] - one["prompt_width"]}; the budget is {one["budget"]} + {one["buffer"]} keys.
{one["rollouts"]} rollouts of {one["prompts"]} x {one["group"]} responses, LoRA of rank {one["lora_rank"]}, rate 3e-4
for all arms, {len(SEEDS)} seeds. {one["evaluation_rows"]} questions, the same for all runs, so intervals are from a
two-way bootstrap over seeds and questions. [All leads](docs/report_appendix.md#a-real-model). *Mismatch*
as [above](#lead-by-mismatch): mean over the TIS runs; in their first rollout it is {first_mismatches(rows)}.

{text}

{corrected(rows)} The intervals are those of the bootstrap, widened for {len(SEEDS)} seeds; the plan has plain ones.
"""


def part(rule: str, arms: Arms, mismatch: Estimate) -> str:
    lines = [[arm, *mean_words(found, KINDS)] for arm, found in arms.items()]
    main = lead(arms["shadow"], arms["naive"], "sparse")
    p = p_value(arms["shadow"], arms["naive"], "sparse")
    verdict = "The lead is" if main.low > 0 else "No lead is"
    seconds = ", ".join(f"{arm} {mean_of(arms[arm], 'cpu_seconds').mean:.0f}" for arm in LEARNERS)
    contrast = "Primary contrast" if rule == "snapkv" else "The same contrast"
    return f"""{NAMES[rule]} (mismatch {plain(mismatch).removeprefix("+")} nats per token):

{table(["arm", *KINDS.values()], lines)}

*{contrast}*: shadow masks minus naive under the budget at temperature 1: {main} (p = {p:.1g}, paired t over
seeds). {verdict} established; an upper limit below 0.03 would refute the prediction. {power(arms)} Other leads
are exploratory. CPU seconds of a run with its evaluation: {seconds}."""


def power(arms: Arms) -> str:
    """What the contrast is without its best seed, and which difference these seeds find with a power of 80 %."""
    ours, theirs = (by_seed(arms[arm], "sparse") for arm in ("shadow", "naive"))
    leads = sorted(ours[seed] - theirs[seed] for seed in SEEDS)
    freedom = len(leads) - 1
    visible = (student_t.ppf(0.975, freedom) + student_t.ppf(0.8, freedom)) * stdev(leads) / math.sqrt(len(leads))
    return f"""Without its best seed it is {plain(estimate(leads[:-1]))}; eight seeds find {visible:.2f} with a power of
80 %."""


def by_seeds(rows: Sequence[Row]) -> str:
    """Two tables for each rule: the leads, and those of each seed under the budget at temperature 1."""

    def of_rule(arms: Arms) -> str:
        rewards = {arm: by_seed(found, "sparse") for arm, found in arms.items()}
        lines = [
            [f"{arm} minus {rival}", *(number(rewards[arm][seed] - rewards[rival][seed], 2) for seed in SEEDS)]
            for arm, rival in PAIRS
        ]
        leads = [
            [f"{arm} minus {rival}", *(str(lead(arms[arm], arms[rival], kind)) for kind in KINDS)]
            for arm, rival in PAIRS
        ]
        tables = table(["lead", *KINDS.values()], leads), table(["lead, by seed", *map(str, SEEDS)], lines)
        return "\n\n".join(tables)

    return "\n\n".join(f"{NAMES[rule]}:\n\n{of_rule(arms)}" for rule, arms in of_rules(rows).items())


def corrected(rows: Sequence[Row]) -> str:
    """What Holm's correction over all leads under both rules leaves."""
    rules = of_rules(rows)
    leads = [(rule, *pair, kind) for rule, pair, kind in itertools.product(rules, PAIRS, KINDS)]
    p_values = holm([p_value(rules[rule][arm], rules[rule][rival], kind) for rule, arm, rival, kind in leads])
    kept = []
    for (rule, arm, rival, kind), p in zip(leads, p_values, strict=True):
        if p < 0.05:
            found = lead(rules[rule][arm], rules[rule][rival], kind)
            kept.append(f"{arm} minus {rival} under {NAMES[rule]}, {KINDS[kind]}, {found}, p {p:.1g}")
    named = f": {'; '.join(kept)} after correction (paired t over seeds)" if kept else ""
    verb = "survive" if len(kept) > 1 else "survives"
    return f"{len(kept) or 'None'} of {len(leads)} leads {verb} Holm's correction{named}."
