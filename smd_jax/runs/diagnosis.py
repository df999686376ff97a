"""Reads the metrics of a run for signs that it learned nothing, and says what to try.

    for line in diagnose(read_metrics(directory / "metrics.jsonl")):
        print(line)

`train` checks the newest rollouts after every step and reports each symptom once; a command prints all at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from smd_jax.losses.dpo import DPO_METRICS
from smd_jax.losses.value import VALUE_METRICS

Row = Mapping[str, float | int | None]

# Number of rollouts in a row that make a symptom.
ROLLOUTS = 5

# Nats per token; a distribution with one token at 0.999 has less.
NO_ENTROPY = 0.01

# Share of truncated completions.
MOST = 0.9

# The metric that counts completions on which a reward function failed.
FAILED = "rewards/failed"


class _Symptom(NamedTuple):
    """A sign in the metrics of a rollout.

    Attributes:
      is_shown: whether one rollout shows it.
      message: names it and says what to try; `{share}` says in which rollouts.
      once: whether a single rollout of a run is enough to report it at the end.
    """

    name: str
    is_shown: Callable[[Row], bool]
    message: str
    once: bool = False


def diagnose(history: Sequence[Row]) -> list[str]:
    """Messages about a run, none if it looks well.

    A symptom counts if at least half of the rollouts show it, or all of the newest `ROLLOUTS`; failed rewards always.

    Args:
      history: rows of metrics, one per rollout; other rows, such as evaluations, are ignored.
    """
    rows = [row for row in history if "reward" in row or "loss" in row]
    messages = []
    for symptom in SYMPTOMS:
        shown = [symptom.is_shown(row) for row in rows]
        least = 1 if symptom.once else len(shown) / 2
        if shown and (all(shown[-ROLLOUTS:]) or sum(shown) >= least):
            share = f"in {sum(shown)} of {len(shown)} rollouts" + _numbers(rows, symptom)
            messages.append(symptom.message.format(share=share))
    return messages


def warnings(recent: Sequence[Row], reported: set[str]) -> list[str]:
    """Messages on symptoms that all of the newest `ROLLOUTS` rows show and that are not in `reported`; adds them."""
    rows = list(recent)[-ROLLOUTS:]
    if len(rows) < ROLLOUTS:
        return []
    new = [symptom for symptom in SYMPTOMS if symptom.name not in reported and all(map(symptom.is_shown, rows))]
    reported.update(symptom.name for symptom in new)
    share = f"in each of the last {ROLLOUTS} rollouts"
    return ["warning: " + symptom.message.format(share=share + _numbers(rows, symptom)) for symptom in new]


def _numbers(rows: Sequence[Row], symptom: _Symptom) -> str:
    """A second number: of failed completions, or the mean reward, which tells groups that are all
    wrong from groups that are all right."""
    if symptom.name == "failed rewards":
        failed = sum(int(_value(row, FAILED)) for row in rows if symptom.is_shown(row))
        return f" ({failed:,} completion{'' if failed == 1 else 's'})"
    rewards = [number for row in rows if math.isfinite(number := _value(row, "reward"))]
    if symptom.name != "signal" or not rewards:
        return ""
    return f" (mean reward {sum(rewards) / len(rewards):.3g})"


def _value(row: Row, name: str) -> float:
    """The metric, NaN if the row has none; files store NaN as None."""
    value = row.get(name)
    return math.nan if value is None else float(value)


def _no_signal(row: Row) -> bool:
    if _value(row, "grad_norm") == 0:
        return True
    # Pairs may come from a judge, which reads no rewards.
    if any(name in row for name in DPO_METRICS):
        return False
    # A critic compares rewards over the whole batch, and its groups may have one completion.
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
        "{share} nothing could be learned from the rewards: those of every group were equal, or the gradient was 0. "
        "Look at the completions and their rewards. If all are wrong: easier prompts, partial credit, a "
        "larger group_size, a higher temperature, a warm start. If all are right: harder prompts",
    ),
    _Symptom(
        "clipped",
        _most_clipped,
        "{share} nine of ten completions or more were cut off by the length limit. Raise max_new_tokens; if that does "
        "not help, the model never stops: look for a wrong eos_token_id or chat template, add stop_strings, or take an "
        "instruction-tuned model",
    ),
    _Symptom(
        "entropy",
        _no_entropy,
        "{share} the entropy of the sampler's tokens was below 0.01 nats: all completions of a prompt are equal, and "
        "nothing better is found. Resume from a checkpoint before that, with a "
        "lower learning rate, a larger entropy_coef or epsilon_high, a KL to the reference (beta), or a higher "
        "temperature",
    ),
    _Symptom(
        "not finite",
        _not_finite,
        "{share} loss or gradient was NaN or infinite, and the update was left out. Lower the learning rate, clip the "
        "gradient's norm, or compute in float32; and look for rewards that are not numbers",
    ),
    # A few failures change little, but they are not random: the function fails on certain texts.
    _Symptom(
        "failed rewards",
        _failed,
        "{share} a reward function failed. These completions were left out of the update, so that nothing is learned "
        "from them. The first of each kind was reported as a RewardWarning, with function, line and "
        "prompt. Let the function give a number for every text; if it was too slow, make it faster, or raise the "
        "seconds of Rewards",
        once=True,
    ),
)
