"""A dense learner on the weights of the one with shadow masks: one loss of two, each as it would be alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import smd_jax as smd
from smd_jax.losses.value import ValueConfig
from smd_jax.monitor.metrics_log import METRICS
from smd_jax.tasks.reasoning_gym import ReasoningGymTask
from smd_jax.tasks.task import Completion, Prompt, completion_text
from smd_jax.testing import byte_tokenizer, random_params, tiny_model_config
from smd_jax.text.prompts import eos_token_id, pad_token_id

MODEL = tiny_model_config(num_layers=2)
TIS = smd.corrections.TIS()
SHADOW = smd.UpdateConfig()
DENSE = smd.UpdateConfig(visibility="dense", correction=TIS)


class Lengths(ReasoningGymTask):
    """With a reward that fresh parameters earn."""

    def reward(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], **columns: Sequence[Any]
    ) -> list[float]:
        return [sum(map(ord, completion_text(text))) % 7 / 7 for text in completions]


def make_loop(update: smd.UpdateConfig, minibatches: int) -> smd.GRPOLoop:
    tokenizer = byte_tokenizer(chat=False)
    model = smd.Decoder(MODEL)
    rollout = smd.RolloutConfig(
        max_new_tokens=10,
        budget=6,
        buffer=2,
        eos_token_id=eos_token_id(tokenizer),
        pad_token_id=pad_token_id(tokenizer),
    )
    config = smd.GRPOConfig(
        prompts_per_step=4,
        group_size=4,
        prompt_width=24,
        policy=smd.eviction.H2O(),
        rollout=rollout,
        update=update,
        minibatches=minibatches,
        update_widths=1,
    )
    task = Lengths("distractor_sort", seed=0, size=16, parameters=(("num_digits", 3), ("num_distractors", 4)))
    return smd.GRPOLoop(model, task, tokenizer, optax.sgd(1.0), config)


def stepped(update: smd.UpdateConfig, minibatches: int = 1) -> np.ndarray:
    """What one rollout's steps of plain descent add to the parameters."""
    loop = make_loop(update, minibatches)
    params = random_params(MODEL, 0)
    state = smd.init_state(params, loop.optimizer, jax.random.key(0))
    before, _ = ravel_pytree(params)
    new, metrics = loop.step(state)
    assert metrics["mismatch_kl"] >= 0 and set(metrics) <= set(METRICS)
    return np.asarray(ravel_pytree(new.params)[0] - before)


@pytest.fixture(scope="module")
def alone() -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """What either learner does, by the number of optimizer steps."""
    return {steps: (stepped(SHADOW, steps), stepped(DENSE, steps)) for steps in (1, 2)}


@pytest.mark.slow
def test_one_step_has_both_gradients(alone: dict[int, tuple[np.ndarray, np.ndarray]]):
    ours, theirs = alone[1]
    assert np.abs(ours - theirs).max() > 1e-4, "the two differ"
    for share in (0.2, 0.5):
        found = stepped(replace(SHADOW, dense_learner=smd.learner.DenseLearner(share, TIS)))
        np.testing.assert_allclose(found, (1 - share) * ours + share * theirs, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("share", "which"), [(1e-6, 0), (1 - 1e-6, 1)])
def test_later_steps_know_both_old_policies(alone: dict[int, tuple[np.ndarray, np.ndarray]], share: float, which: int):
    found = stepped(replace(SHADOW, dense_learner=smd.learner.DenseLearner(share, TIS)), 2)
    np.testing.assert_allclose(found, alone[2][which], atol=1e-5)
    assert np.abs(alone[2][0] - alone[2][1]).max() > 1e-3


@pytest.mark.slow
def test_microbatches_change_nothing():
    both = replace(SHADOW, dense_learner=smd.learner.DenseLearner(0.5))
    np.testing.assert_allclose(stepped(replace(both, microbatch_size=4)), stepped(both), atol=1e-6)


def test_what_does_not_go_together():
    both = smd.learner.DenseLearner(0.5)
    with pytest.raises(ValueError, match="expected visibility 'shadow'.*got 'dense'"):
        smd.UpdateConfig(visibility="dense", correction=TIS, dense_learner=both)
    with pytest.raises(ValueError, match="a policy_coef > 0.*got 'shadow', 0.0"):
        smd.UpdateConfig(policy_coef=0.0, distill=smd.DistillConfig(), dense_learner=both)
    with pytest.raises(ValueError, match="no critic with a dense_learner"):
        smd.UpdateConfig(value=ValueConfig(), dense_learner=both)


def test_shares_and_corrections_are_checked():
    for share in (0.0, 1.0, 1.5):
        with pytest.raises(ValueError, match=f"expected a share between 0 and 1.*got {share}"):
            smd.learner.DenseLearner(share)
    with pytest.raises(ValueError, match="got 'dense'. Choose another correction"):
        smd.UpdateConfig(dense_learner=smd.learner.DenseLearner(0.5, smd.corrections.Shadow()))
