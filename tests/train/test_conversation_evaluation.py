"""Evaluation of conversations, graded by their environments, under several ways of decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from smd_jax.environments.dialogue import Dialogue
from smd_jax.environments.processes import EnvironmentsHere
from smd_jax.environments.respondent import EnvironmentRespondent
from smd_jax.eviction.policies import Dense, SnapKV
from smd_jax.message.quantization import QuantConfig
from smd_jax.sampler.conversation_loop import ConversationConfig, converse
from smd_jax.tasks.rewards import Rewards, TooManyFailures
from smd_jax.testing import random_params
from smd_jax.train.conversations import EnvironmentConfig, TextCompaction
from smd_jax.train.evaluation import Decode, EvaluationConfig, Evaluator
from tests.train import test_conversations as base

CONVERSATION = ConversationConfig(turns=4)
DECODES = (Decode("dense"), Decode("sampler", SnapKV(window=4)))
PARAMS = random_params(base.MODEL.config)


class ThreeRows(base.Rows):
    def __len__(self) -> int:
        return 3


def new_evaluator(kind: str = "judges", decodes: Any = DECODES, rewards: Any = None, **options: Any) -> Evaluator:
    config = EvaluationConfig(decodes=decodes, rollout=base.ROLLOUT, prompt_width=8, group_size=2, rows=4, seed=3)
    environment = EnvironmentConfig(environments=EnvironmentsHere(base.Judge), conversation=CONVERSATION, **options)
    rows = ThreeRows(kind)
    return Evaluator(base.MODEL, rows, base.TOKENIZER, config, rewards=rewards, environment=environment)


@pytest.mark.slow
@pytest.mark.parametrize("decodes", [DECODES, DECODES[1:]])
def test_evaluation_equals_direct_conversations(decodes: Any):
    """The second batch has padding rows, which do not count."""
    evaluator = new_evaluator(decodes=decodes)
    rows = [ThreeRows()[index] for index in range(3)]
    for decode, result in zip(decodes, evaluator.run(PARAMS), strict=True):
        assert result.rewards.shape == (3, 2) and len(result.completions) == 3
        respondent = EnvironmentRespondent(
            EnvironmentsHere(base.Judge), Dialogue(base.TOKENIZER), base.TOKENIZER, rows, 2, 8
        )
        conversed = converse(
            base.MODEL,
            PARAMS,
            respondent.prompts,
            evaluator._keys(np.arange(3)),
            respondent,
            policy=decode.policy,
            config=decode.rollout(base.ROLLOUT),
            conversation=CONVERSATION,
            group_size=2,
        )
        expected = [each.reward for each in respondent.conversations]
        np.testing.assert_allclose(result.rewards.reshape(-1), expected)
        np.testing.assert_array_equal(result.lengths.reshape(-1), conversed.trajectory.lengths())
        np.testing.assert_array_equal(~result.clipped.reshape(-1), conversed.trajectory.terminated)
        assert result.metrics[f"eval/{decode.name}/reward"] == pytest.approx(np.mean(expected))
        assert any("(1)" in text for texts in result.completions for text in texts)


def test_evaluation_of_several_contexts():
    """Sizes as in the loop's tests, to share their programs."""
    evaluator = new_evaluator(decodes=DECODES[1:], compaction=TextCompaction(contexts=2, after_tokens=3, ask="?!?"))
    sizes: dict[str, Any] = {"rollout": base.WIDER.rollout, "prompt_width": 32, "group_size": 4, "rows": 8}
    (result,) = replace(evaluator, config=replace(evaluator.config, **sizes)).run(PARAMS)
    assert result.rewards.shape == result.lengths.shape == result.clipped.shape == (3, 4)
    assert any("?!?" in text for texts in result.completions for text in texts)


def test_failed_environments():
    with pytest.warns(UserWarning, match="no disk"), pytest.raises(TooManyFailures, match="no disk"):
        new_evaluator("fails", DECODES[:1]).run(PARAMS)
    with pytest.warns(UserWarning, match="no disk"):
        (result,) = new_evaluator("fails", DECODES[:1], max_failed=1.0).run(PARAMS)
    assert np.isnan(result.rewards).all() and np.isnan(result.reward)


def test_incompatible_options():
    with pytest.raises(ValueError, match="expected quant None in a conversation"):
        new_evaluator(decodes=(Decode("small", Dense(), quant=QuantConfig(bits=8, group=4)),))
    with pytest.raises(ValueError, match="expected no rewards with an environment"):
        new_evaluator(rewards=Rewards((base.Rows().reward,), seconds=None))
