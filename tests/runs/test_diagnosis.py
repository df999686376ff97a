"""Warnings from the rows of a run."""

from __future__ import annotations

import pytest

from smd_jax.runs.diagnosis import ROLLOUTS, warnings

GOOD = {
    "reward": 0.5,
    "reward_std": 0.3,
    "frac_reward_zero_std": 0.25,
    "grad_norm": 1.0,
    "loss": 0.1,
    "completions/clipped_ratio": 0.1,
}
FLAT = GOOD | {"frac_reward_zero_std": 1.0, "reward": 0.0}
STILL = GOOD | {"grad_norm": 0.0}
CLIPPED = {"completions/clipped_ratio": 0.9}
CRITIC = {"critic/values/mean": 0.0, "reward_std": 0.2}


@pytest.mark.parametrize(
    ("row", "names"),
    [
        (GOOD, set()),
        (FLAT, {"signal"}),
        (STILL, {"signal"}),
        (GOOD | CLIPPED, {"clipped"}),
        (FLAT | CLIPPED, {"signal", "clipped"}),
        (GOOD | {"completions/clipped_ratio": 0.89}, set()),
        (GOOD | {"rollout/entropy": 0.009}, {"entropy"}),
        (GOOD | {"rollout/entropy": 0.011}, set()),
        (GOOD | {"loss": None}, {"not finite"}),
        (GOOD | {"grad_norm": float("nan")}, {"not finite"}),
        # Groups of one never differ inside.
        (FLAT | CRITIC, set()),
        (FLAT | CRITIC | {"reward_std": 0.0}, {"signal"}),
    ],
)
def test_symptoms(row, names):
    reported = set[str]()
    assert len(warnings([row] * ROLLOUTS, reported)) == len(names) and reported == names


def test_warnings_come_once_each():
    said = set[str]()
    assert warnings([FLAT] * (ROLLOUTS - 1), said) == []
    assert warnings([GOOD] + [FLAT] * (ROLLOUTS - 1), said) == []
    (line,) = warnings([FLAT] * ROLLOUTS, said)
    assert line.startswith("warning: in each of the last 5 rollouts nothing could be learned from the rewards")
    assert "group_size" in line
    assert warnings([FLAT] * ROLLOUTS, said) == []
    assert len(warnings([FLAT | CLIPPED] * ROLLOUTS, said)) == 1
    assert said == {"signal", "clipped"}
