"""The preference loss on a tiny model: against an explicit loss, over microbatches, and its errors."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from smd_jax.corrections.mismatch import TIS
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.pair_term import PairTerm
from smd_jax.learner.state import TrainBatch, init_state
from smd_jax.learner.step import ReferenceSync
from smd_jax.learner.update import make_update
from smd_jax.losses.dpo import DPOConfig
from smd_jax.losses.policy import LossConfig
from smd_jax.metrics import STEP_WEIGHTS
from tests import tiny_update
from tests.documented_metrics import documented
from tests.tiny_update import (
    MODEL,
    PARAMS,
    REFERENCE,
    WIDTH,
    copied,
    distance,
    explicit_token_logprobs,
    norm,
    rows_of,
    trajectory,
)

BETA = 0.3
CHOSEN, REJECTED = np.array([3, 0, 5, 7]), np.array([2, 1, 4, 6])
SIGNAL = np.array([True, True, False, True])


def batch(signal=SIGNAL) -> TrainBatch:
    rows = np.stack([CHOSEN, REJECTED], axis=1).reshape(-1)
    return TrainBatch(rows_of(trajectory(), rows), jnp.asarray(np.outer(signal, [1.0, -1.0]).reshape(-1)), None)


def config_of(**options: Any) -> UpdateConfig:
    return UpdateConfig(pairs=DPOConfig(beta=BETA), **options)


SHADOW = config_of()


def metrics_and_gradients(config=SHADOW, data=None, reference=REFERENCE):
    return tiny_update.metrics_and_gradients(config, batch() if data is None else data, reference=reference)


# --- against an explicit loss


def token_logprobs(params, visibility):
    """`[ROWS, LENGTH]` from one forward pass, 0 outside the responses."""
    t = trajectory()
    logprobs = explicit_token_logprobs(params, t.mask if visibility == "shadow" else t.dense_mask())
    return jnp.where(t.response_mask, logprobs, 0.0)


def implicit_rewards(params, visibility) -> tuple[jax.Array, jax.Array]:
    """Implicit rewards of the chosen and the rejected responses."""
    policy, reference = token_logprobs(params, visibility), token_logprobs(REFERENCE, visibility)
    per_row = BETA * jnp.sum(policy - reference, axis=1)
    return per_row[CHOSEN], per_row[REJECTED]


@functools.partial(jax.jit, static_argnums=(2, 3))
def explicit_loss(params, weights, visibility, loss_type):
    """Loss and gradient."""

    def loss(params):
        chosen, rejected = implicit_rewards(params, visibility)
        margin = chosen - rejected
        per_pair = jnp.log1p(jnp.exp(-margin)) if loss_type == "sigmoid" else (margin / BETA - 0.5 / BETA) ** 2
        return jnp.sum(weights * per_pair)

    return jax.value_and_grad(loss)(params)


def assert_matches(config: UpdateConfig, weights, data=None) -> None:
    metrics, grads = metrics_and_gradients(config, data)
    weights = jnp.asarray(weights, jnp.float32)
    assert config.pairs is not None
    value, expected = explicit_loss(PARAMS, weights, config.visibility, config.pairs.loss_type)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    assert distance(grads, expected) < 1e-5
    np.testing.assert_allclose(metrics["grad_norm"], norm(expected), rtol=1e-5)


@pytest.mark.parametrize(
    ("visibility", "loss_type"),
    [
        *(("shadow", "sigmoid"), ("dense", "ipo")),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("shadow", "ipo"), ("dense", "sigmoid"))),
    ],
)
def test_loss_and_gradient_against_the_definition(visibility, loss_type):
    assert_matches(UpdateConfig(visibility=visibility, pairs=DPOConfig(beta=BETA, loss_type=loss_type)), SIGNAL / 3)


def test_metrics_match_their_definitions():
    metrics, _ = metrics_and_gradients()
    others = {"loss", "grad_norm", "update/skipped", "entropy", "kl"}
    assert metrics.keys() == documented("Online DPO", "Sampler and learner") | others.union(STEP_WEIGHTS)
    assert metrics["update/learns"] == 3, "pairs with signal"
    assert metrics["update/tokens"] == trajectory().response_mask[np.concatenate([CHOSEN, REJECTED])].sum()
    chosen, rejected = (np.asarray(x, np.float64)[SIGNAL] for x in implicit_rewards(PARAMS, "shadow"))
    logps = np.asarray(token_logprobs(PARAMS, "shadow"), np.float64).sum(1)
    expected = {
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "rewards/margins": (chosen - rejected).mean(),
        "rewards/accuracies": (chosen > rejected).mean(),
        "logps/chosen": logps[CHOSEN][SIGNAL].mean(),
        "logps/rejected": logps[REJECTED][SIGNAL].mean(),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, err_msg=name)
    mask = np.asarray(trajectory().response_mask)
    log_ratio = np.asarray(token_logprobs(REFERENCE, "shadow") - token_logprobs(PARAMS, "shadow"), np.float64)[mask]
    np.testing.assert_allclose(metrics["kl"], (np.exp(log_ratio) - 1 - log_ratio).mean(), rtol=1e-4)
    assert 0 < metrics["entropy"] < np.log(32)
    # With shadow masks the learner is the sampler.
    assert metrics["mismatch_kl"] <= 1e-6 and metrics["sampling/sampling_logp_difference/max"] <= 2e-5


def test_pair_with_an_empty_response_is_ignored():
    pairs = batch()
    empty = pairs.trajectory.replace(valid=pairs.trajectory.valid.at[2, WIDTH:].set(False))
    without, grads = metrics_and_gradients(SHADOW, pairs.replace(trajectory=empty))
    remaining = SIGNAL & (np.arange(4) != 1)
    expected, expected_grads = metrics_and_gradients(SHADOW, batch(signal=remaining))
    np.testing.assert_allclose(without["loss"], expected["loss"], rtol=1e-5)
    assert distance(grads, expected_grads) < 1e-5


# --- microbatches


def test_microbatches_change_nothing():
    whole, parts = metrics_and_gradients(), metrics_and_gradients(config_of(microbatch_size=4))
    assert distance(parts[1], whole[1]) < 1e-5
    for name, value in whole[0].items():
        np.testing.assert_allclose(parts[0][name], value, rtol=1e-4, atol=1e-5, err_msg=name)


# --- bad input


def test_pairs_are_no_additional_term():
    """Microbatches would separate the rows of a pair."""
    with pytest.raises(ValueError, match=r"expected a PairTerm from UpdateConfig\(pairs=...\)"):
        UpdateConfig(terms=(PairTerm(DPOConfig(), "shadow"),), policy_coef=0.0)


def test_missing_reference_raises():
    with pytest.raises(ValueError, match="expected reference parameters in the train state for PairTerm: .*; got None"):
        metrics_and_gradients(reference=None)


def test_greedy_trajectories_raise():
    data = batch()
    data = data.replace(trajectory=data.trajectory.replace(replayable=False))
    with pytest.raises(ValueError, match=r"at a temperature > 0, because.*got one from a greedy sampler"):
        metrics_and_gradients(data=data)


def test_indivisible_microbatch_size_raises():
    with pytest.raises(ValueError, match="expected a microbatch_size that divides 8 rows; got 6"):
        metrics_and_gradients(config_of(microbatch_size=6))
    with pytest.raises(ValueError, match="expected a microbatch_size of whole pairs, two rows each; got 3"):
        config_of(microbatch_size=3)
    with pytest.raises(ValueError, match="expected microbatch_size >= 1; got 0"):
        config_of(microbatch_size=0)


def test_rows_that_are_no_pairs_raise():
    odd = TrainBatch(rows_of(trajectory(), np.arange(3)), jnp.ones(3), None)
    with pytest.raises(ValueError, match="expected two rows for each pair; got 3 rows"):
        metrics_and_gradients(data=odd)


def test_fields_of_a_policy_loss_raise():
    with pytest.raises(ValueError, match=r"no fields with pairs but \('visibility', .*; got \['correction', 'loss'\]"):
        config_of(visibility="dense", loss=LossConfig(beta=0.1), correction=TIS())


# --- training and reference sync


def trained(config: UpdateConfig, steps: int):
    """The state and the losses."""
    optimizer = optax.adam(1e-2)
    params, reference = copied((PARAMS, REFERENCE))
    state, update = init_state(params, optimizer, jax.random.key(3), reference), make_update(MODEL, optimizer, config)
    losses = []
    for _ in range(steps):
        state, metrics = update(state, batch())
        losses.append(float(metrics["loss"]))
    return state, losses


def test_the_loss_falls_and_the_reference_stays():
    state, losses = trained(SHADOW, 3)
    assert all(after < before for before, after in itertools.pairwise(losses)), losses
    jax.tree.map(np.testing.assert_array_equal, state.reference, REFERENCE)


def test_reference_sync_mixes_in_the_policy():
    """TR-DPO with alpha 0.5: halfway to the policy after the step."""
    state, _ = trained(config_of(reference_sync=ReferenceSync(0.5, 1)), 1)
    halfway = jax.tree.map(lambda new, old: 0.5 * (np.asarray(new) + old), state.params, REFERENCE)
    assert distance(state.reference, halfway) < 1e-6 < distance(REFERENCE, halfway)
