"""What the metrics of a run say about it: runs that look like a success but learnt nothing, and what to try.

    for line in verdict(read_metrics(directory / "metrics.jsonl")):
        print(line)

`train` looks at the newest rollouts after every step, and says each of these once; a command prints them at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from smd_jax.losses.dpo import DPO_METRICS
from smd_jax.losses.value import VALUE_METRICS

Row = Mapping[str, float | int | None]

# Rollouts in a row from which on something is said.
ROLLOUTS = 5

# Nats a token: a distribution with one token at 0.999 has less.
NO_ENTROPY = 0.01

# Of the completions, cut off by the length limit.
MOST = 0.9

# The metric that counts completions on which a reward function failed.
FAILED = "rewards/failed"


class Finding(NamedTuple):
    """One thing that is wrong with a run: a name, by which it is said once, and the message."""

    name: str
    message: str


class _Symptom(NamedTuple):
    """Attributes: of_row: whether one rollout shows it. message: what it is called, and what to try. once: whether a
    single rollout that shows it is worth a word at the end of a run."""

    name: str
    of_row: Callable[[Row], bool]
    message: str
    once: bool = False


def verdict(history: Sequence[Row]) -> list[str]:
    """Messages on what went wrong in a run, none for one that looks well: what at least half of its rollouts show, or
    each of the newest `ROLLOUTS`; of rewards that failed, any.

    Args:
      history: rows of metrics, one a rollout; rows of something else (evaluations alone) are left out.
    """
    return [finding.message for finding in findings(history)]


def findings(history: Sequence[Row]) -> list[Finding]:
    """`verdict`, with names."""
    rows = [row for row in history if "reward" in row or "loss" in row]
    found = []
    for symptom in SYMPTOMS:
        shown = [symptom.of_row(row) for row in rows]
        least = 1 if symptom.once else len(shown) / 2
        if shown and (all(shown[-ROLLOUTS:]) or sum(shown) >= least):
            share = f"in {sum(shown)} of {len(shown)} rollouts" + _numbers(rows, symptom)
            found.append(Finding(symptom.name, symptom.message.format(share=share)))
    return found


def warnings(recent: Sequence[Row], said: set[str]) -> list[str]:
    """What the newest `ROLLOUTS` rows all show and was not said before; adds it to `said`."""
    rows = list(recent)[-ROLLOUTS:]
    if len(rows) < ROLLOUTS:
        return []
    new = [symptom for symptom in SYMPTOMS if symptom.name not in said and all(map(symptom.of_row, rows))]
    said.update(symptom.name for symptom in new)
    share = f"in each of the last {ROLLOUTS} rollouts"
    return ["warning: " + symptom.message.format(share=share + _numbers(rows, symptom)) for symptom in new]


def _numbers(rows: Sequence[Row], symptom: _Symptom) -> str:
    """What says more about the symptom than the number of rollouts: how many completions have failed, or the mean
    reward, as groups without signal are all wrong or all right."""
    if symptom.name == "failed rewards":
        failed = sum(int(_value(row, FAILED)) for row in rows if symptom.of_row(row))
        return f" ({failed:,} completion{'' if failed == 1 else 's'})"
    rewards = [number for row in rows if math.isfinite(number := _value(row, "reward"))]
    if symptom.name != "signal" or not rewards:
        return ""
    return f" (mean reward {sum(rewards) / len(rewards):.3g})"


def _value(row: Row, name: str) -> float:
    """NaN where there is none; None is how a file says NaN."""
    value = row.get(name)
    return math.nan if value is None else float(value)


def _no_signal(row: Row) -> bool:
    if _value(row, "grad_norm") == 0:
        return True
    # Pairs may be those of a judge, which looks at no reward.
    if any(name in row for name in DPO_METRICS):
        return False
    # A critic compares rewards over the batch, and groups of one never differ inside.
    has_critic = any(name in row for name in VALUE_METRICS)
    return _value(row, "reward_std") == 0 if has_critic else _value(row, "frac_reward_zero_std") == 1


def _most_clipped(row: Row) -> bool:
    return _value(row, "completions/clipped_ratio") >= MOST


def _no_entropy(row: Row) -> bool:
    return _value(row, "rollout/entropy") < NO_ENTROPY


def _failed(row: Row) -> bool:
    return _value(row, FAILED) > 0


def _not_finite(row: Row) -> bool:
    return any(name in row and not math.isfinite(_value(row, name)) for name in ("grad_norm", "loss"))


SYMPTOMS = (
    _Symptom(
        "signal",
        _no_signal,
        "{share} nothing could be learnt from the rewards: those of every group were equal, or the gradient was 0. "
        "Look at the completions and what the reward says of them. If all are wrong: easier prompts, partial credit, a "
        "larger group_size, a higher temperature, a warm start. If all are right: harder prompts",
    ),
    _Symptom(
        "clipped",
        _most_clipped,
        "{share} nine of ten completions or more were cut off by the length limit. Raise max_new_tokens; if that does "
        "not help, the model never ends: look for a wrong eos_token_id or chat template, add stop_strings, or take an "
        "instruction-tuned model",
    ),
    _Symptom(
        "entropy",
        _no_entropy,
        "{share} nothing was left to choose from: the entropy of the sampler's tokens was below 0.01 nats, so that all "
        "completions of a prompt are one, and nothing better is found. Resume from a checkpoint before that, with a "
        "lower learning rate, a larger entropy_coef or epsilon_high, a KL to the reference (beta), or a higher "
        "temperature",
    ),
    _Symptom(
        "not finite",
        _not_finite,
        "{share} loss or gradient was NaN or infinite, and the update was left out. Lower the learning rate, clip the "
        "gradient's norm, or compute in float32; and look for rewards that are no numbers",
    ),
    # A few of them change little by themselves, but which ones a function fails on is no chance.
    _Symptom(
        "failed rewards",
        _failed,
        "{share} a reward function failed. These completions were left out of the update, so that nothing is learnt "
        "about what it fails on. The first of each kind was reported as a RewardWarning, with function, line and "
        "prompt. Let the function give a number for every text; if it was too slow, make it faster, or raise the "
        "seconds of Rewards",
        once=True,
    ),
)
