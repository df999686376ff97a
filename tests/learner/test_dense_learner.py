"""A dense and a shadow-mask learner on the same weights: the update mixes both losses."""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import smd_jax as smd
from smd_jax.losses.value import ValueConfig
from tests import toy_loop
from tests.documented_metrics import METRICS

TIS = smd.corrections.TIS()
SHADOW = smd.UpdateConfig()
DENSE = smd.UpdateConfig(visibility="dense", correction=TIS)


def parameter_change(update: smd.UpdateConfig, minibatches: int = 1) -> np.ndarray:
    """Change of all parameters after the SGD steps of one rollout."""
    config = replace(toy_loop.CONFIG, update=update, minibatches=minibatches, update_widths=1)
    loop = smd.GRPOLoop(toy_loop.MODEL, toy_loop.TASK, toy_loop.TOKENIZER, optax.sgd(1.0), config)
    before, _ = ravel_pytree(toy_loop.warm_params())
    params = jax.tree.map(jax.numpy.copy, toy_loop.warm_params())
    new, metrics = loop.step(smd.init_state(params, loop.optimizer, jax.random.key(0)))
    assert metrics["mismatch_kl"] >= 0 and metrics.keys() <= METRICS
    return np.asarray(ravel_pytree(new.params)[0] - before)


@pytest.fixture(scope="module")
def changes() -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Parameter changes under the shadow and the dense learner, by number of optimizer steps."""
    return {steps: (parameter_change(SHADOW, steps), parameter_change(DENSE, steps)) for steps in (1, 2)}


@pytest.mark.slow
def test_step_mixes_both_gradients(changes: dict[int, tuple[np.ndarray, np.ndarray]]):
    shadow, dense = changes[1]
    assert np.abs(shadow - dense).max() > 1e-4, "the learners must differ"
    change = parameter_change(replace(SHADOW, dense_learner=smd.learner.DenseLearner(0.2, TIS)))
    np.testing.assert_allclose(change, 0.8 * shadow + 0.2 * dense, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("share", "index"), [(1e-6, 0), (1 - 1e-6, 1)])
def test_later_steps_use_both_old_policies(changes: dict[int, tuple[np.ndarray, np.ndarray]], share: float, index: int):
    change = parameter_change(replace(SHADOW, dense_learner=smd.learner.DenseLearner(share, TIS)), 2)
    np.testing.assert_allclose(change, changes[2][index], atol=1e-5)
    assert np.abs(changes[2][0] - changes[2][1]).max() > 1e-3


@pytest.mark.slow
def test_microbatches_change_nothing():
    both = replace(SHADOW, dense_learner=smd.learner.DenseLearner(0.5))
    np.testing.assert_allclose(parameter_change(replace(both, microbatch_size=4)), parameter_change(both), atol=1e-6)


def test_incompatible_options_raise():
    both = smd.learner.DenseLearner(0.5)
    with pytest.raises(ValueError, match="expected visibility 'shadow'.*got 'dense'"):
        smd.UpdateConfig(visibility="dense", correction=TIS, dense_learner=both)
    with pytest.raises(ValueError, match="a policy_coef > 0.*got 'shadow'.*, 0.0"):
        smd.UpdateConfig(policy_coef=0.0, distill=smd.DistillConfig(), dense_learner=both)
    with pytest.raises(ValueError, match="no critic with a dense_learner"):
        smd.UpdateConfig(value=ValueConfig(), dense_learner=both)


def test_invalid_shares_and_corrections_raise():
    for share in (0.0, 1.0, 1.5):
        with pytest.raises(ValueError, match=f"expected a share between 0 and 1.*got {share}"):
            smd.learner.DenseLearner(share)
    with pytest.raises(ValueError, match="got 'dense'. Choose another correction"):
        smd.UpdateConfig(dense_learner=smd.learner.DenseLearner(0.5, smd.corrections.Shadow()))
