"""Signs in the metrics of a run that it learns nothing. `train` warns of each once, and says what to try."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from smd_jax.losses.value import VALUE_METRICS

Row = Mapping[str, float | int | None]

# Number of rollouts in a row that make a symptom.
ROLLOUTS = 5

# Nats per token; a distribution with one token at 0.999 has less.
NO_ENTROPY = 0.01

# Share of truncated completions.
MOST = 0.9


class _Symptom(NamedTuple):
    """A sign in the metrics of a rollout: whether one rollout shows it, and what to try."""

    name: str
    is_shown: Callable[[Row], bool]
    message: str


def warnings(recent: Sequence[Row], reported: set[str]) -> list[str]:
    """Messages on symptoms that all of the newest `ROLLOUTS` rows show and that are not in `reported`; adds them."""
    rows = list(recent)[-ROLLOUTS:]
    if len(rows) < ROLLOUTS:
        return []
    new = [symptom for symptom in SYMPTOMS if symptom.name not in reported and all(map(symptom.is_shown, rows))]
    reported.update(symptom.name for symptom in new)
    return [f"warning: in each of the last {ROLLOUTS} rollouts {symptom.message}" for symptom in new]


def _value(row: Row, name: str) -> float:
    """The metric, NaN if the row has none; files store NaN as None."""
    value = row.get(name)
    return math.nan if value is None else float(value)


def _no_signal(row: Row) -> bool:
    if _value(row, "grad_norm") == 0:
        return True
    # A critic compares rewards over the whole batch, and its groups may have one completion.
    has_critic = any(name in row for name in VALUE_METRICS)
    return _value(row, "reward_std") == 0 if has_critic else _value(row, "frac_reward_zero_std") == 1


def _most_clipped(row: Row) -> bool:
    return _value(row, "completions/clipped_ratio") >= MOST


def _no_entropy(row: Row) -> bool:
    return _value(row, "rollout/entropy") < NO_ENTROPY


def _not_finite(row: Row) -> bool:
    return any(name in row and not math.isfinite(_value(row, name)) for name in ("grad_norm", "loss"))


SYMPTOMS = (
    _Symptom(
        "signal",
        _no_signal,
        "nothing could be learned from the rewards: those of every group were equal, or the gradient was 0. "
        "Look at the completions and their rewards. If all are wrong: easier prompts, partial credit, a "
        "larger group_size, a higher temperature, a warm start. If all are right: harder prompts",
    ),
    _Symptom(
        "clipped",
        _most_clipped,
        "nine of ten completions or more were cut off by the length limit. Raise max_new_tokens; if that does "
        "not help, the model never stops: look for a wrong eos_token_id or chat template, add stop_strings, or take an "
        "instruction-tuned model",
    ),
    _Symptom(
        "entropy",
        _no_entropy,
        "the entropy of the sampler's tokens was below 0.01 nats: all completions of a prompt are equal, and "
        "nothing better is found. Resume from a checkpoint before that, with a "
        "lower learning rate, a larger entropy_coef or epsilon_high, a KL to the reference (beta), or a higher "
        "temperature",
    ),
    _Symptom(
        "not finite",
        _not_finite,
        "loss or gradient was NaN or infinite, and the update was left out. Lower the learning rate, clip the "
        "gradient's norm, or compute in float32; and look for rewards that are not numbers",
    ),
)
