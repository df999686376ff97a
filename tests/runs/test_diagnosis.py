"""What the rows of a run say of it."""

from __future__ import annotations

import pytest

from smd_jax.commands.errors import with_flags
from smd_jax.runs.diagnosis import ROLLOUTS, SYMPTOMS, diagnose, warnings

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
CLIPPED = GOOD | {"completions/clipped_ratio": 1.0}
FAILED = GOOD | {"rewards/failed": 3.0}
BROKEN = GOOD | {"grad_norm": float("nan")}
CRITIC = {"critic/values/mean": 0.0, "reward_std": 0.2}
PAIRS = {"rewards/margins": 0.1}


@pytest.mark.parametrize(
    ("history", "names"),
    [
        ([], []),
        ([GOOD] * 20, []),
        ([FLAT] * 20, ["signal"]),
        ([STILL] * 3, ["signal"]),
        ([CLIPPED], ["clipped"]),
        ([FLAT | CLIPPED | {"frac_reward_zero_std": 1.0}] * 2, ["signal", "clipped"]),
        ([GOOD | {"completions/clipped_ratio": 0.9}] * 5, ["clipped"]),
        ([GOOD | {"completions/clipped_ratio": 0.89}] * 5, []),
        ([GOOD | {"rollout/entropy": 0.009}] * 5, ["entropy"]),
        ([GOOD | {"rollout/entropy": 0.011}] * 5, []),
        ([GOOD | {"loss": None}], ["not finite"]),
        ([BROKEN] * 2, ["not finite"]),
        # The newest ones, or at least half of them.
        ([GOOD] * 20 + [FLAT] * ROLLOUTS, ["signal"]),
        ([GOOD] * 20 + [FLAT] * (ROLLOUTS - 1), []),
        ([FLAT] * 10 + [GOOD] * 10, ["signal"]),
        ([FLAT] * 9 + [GOOD] * 11, []),
        # A reward that failed is said of however few there were, and wherever.
        ([FAILED] + [GOOD | {"rewards/failed": 0.0}] * 30, ["failed rewards"]),
        ([GOOD | {"rewards/failed": 0.0}] * 5, []),
        ([FAILED | FLAT | {"reward": None}] * 5, ["signal", "failed rewards"]),
        # Groups of one never differ inside; a judge looks at no reward; an evaluation alone is no rollout.
        ([FLAT | CRITIC] * 5, []),
        ([FLAT | CRITIC | {"reward_std": 0.0}] * 5, ["signal"]),
        ([FLAT | PAIRS] * 5, []),
        ([STILL | PAIRS] * 5, ["signal"]),
        ([GOOD] * 2 + [{"eval/dense/reward": 0.1}] * 9, []),
    ],
)
def test_what_is_found(history, names):
    first_words = {symptom.name: symptom.message.split(".")[0].removeprefix("{share}") for symptom in SYMPTOMS}
    for name, message in zip(names, diagnose(history), strict=True):
        assert first_words[name] in message


def test_the_words():
    (line,) = diagnose([GOOD] * 5 + [FLAT] * 5)
    assert line.startswith("in 5 of 10 rollouts (mean reward 0.25) nothing could be learned from the rewards")
    assert "group_size" in line and "--" not in line
    assert "Raise max_new_tokens" in diagnose([CLIPPED])[0]


def test_the_words_on_rewards_that_failed():
    (line,) = diagnose([GOOD] * 4 + [FAILED] * 8 + [GOOD | {"rewards/failed": 0.0}] * 28)
    assert line.startswith("in 8 of 40 rollouts (24 completions) a reward function failed")
    assert diagnose([GOOD, FAILED | {"rewards/failed": 1.0}, GOOD])[0].startswith("in 1 of 3 rollouts (1 completion) a")
    assert "seconds of Rewards is --reward-timeout" in with_flags(line) and "--" not in line
    (line,) = warnings([FAILED] * ROLLOUTS, set())
    assert line.startswith("warning: in each of the last 5 rollouts (15 completions) a reward function failed")


def test_warnings_come_once_each():
    said = set[str]()
    assert warnings([FLAT] * (ROLLOUTS - 1), said) == []
    assert warnings([GOOD] + [FLAT] * (ROLLOUTS - 1), said) == []
    assert len(warnings([FLAT] * ROLLOUTS, said)) == 1
    assert warnings([FLAT] * ROLLOUTS, said) == []
    assert len(warnings([FLAT | CLIPPED | {"frac_reward_zero_std": 1.0}] * ROLLOUTS, said)) == 1
    assert said == {"signal", "clipped"}
