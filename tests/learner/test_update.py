"""Train step of a tiny model: against explicit definitions, microbatches, mask storage, and errors."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.forward import make_replay, replay
from smd_jax.learner.state import TrainBatch, init_state
from smd_jax.learner.update import make_update
from smd_jax.losses.distillation import DistillConfig
from smd_jax.losses.kl import k3
from smd_jax.losses.policy import LossConfig
from smd_jax.message.masks import Segments
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.decoder import Decoder
from smd_jax.testing import count_compilations, random_evictions, random_params, tiny_model_config
from tests.tiny_update import (
    ADVANTAGES,
    LENGTH,
    MODEL,
    PARAMS,
    REFERENCE,
    ROWS,
    WIDTH,
    batch,
    distance,
    explicit_logprobs,
    explicit_token_logprobs,
    metrics_and_gradients,
    norm,
    trajectory,
    without_advantages,
)


def test_trajectory_covers_the_edge_cases():
    lengths = trajectory().lengths().tolist()
    assert min(lengths) < 5 < max(lengths) == LENGTH
    assert 0 < int(trajectory().terminated.sum()) < ROWS
    assert bool((trajectory().mask.evicted_at[:, :, :, :WIDTH] == WIDTH).any()), "the prompt must be compressed"


# --- on-policy


def test_shadow_mask_learner_matches_the_sampler():
    metrics, _ = metrics_and_gradients()
    assert metrics["sampling/sampling_logp_difference/max"] <= 2e-5
    assert metrics["mismatch_kl"] <= 1e-6
    for name in ("min", "mean", "max"):
        np.testing.assert_allclose(metrics[f"sampling/token_ratio/{name}"], 1.0, atol=2e-5)
    assert metrics["clip_ratio/region_mean"] == 0
    assert "kl" not in metrics, "no reference"


def test_replay_matches_the_sampler():
    logprobs = make_replay(MODEL, "shadow")(PARAMS, trajectory())
    np.testing.assert_allclose(logprobs * trajectory().response_mask, trajectory().logprobs, atol=2e-5)


@jax.jit
@jax.grad
def explicit_policy_gradient(params, weights):
    """At ratio 1 the gradient of the surrogate is that of advantage * log p."""
    logprobs = explicit_token_logprobs(params, trajectory().mask)
    return -jnp.sum(weights * ADVANTAGES[:, None] * jnp.where(trajectory().response_mask, logprobs, 0.0))


def test_gradient_and_metrics_against_the_definition():
    metrics, grads = metrics_and_gradients()
    mask = np.asarray(trajectory().response_mask)
    expected = explicit_policy_gradient(PARAMS, mask / mask.sum())
    assert distance(grads, expected) < 1e-5
    np.testing.assert_allclose(metrics["grad_norm"], norm(expected), rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], -(ADVANTAGES[:, None] * mask).sum() / mask.sum(), rtol=1e-5)
    logprobs = np.asarray(explicit_logprobs(PARAMS, trajectory().mask), np.float64)
    entropy = -(np.exp(logprobs) * logprobs).sum(-1)
    np.testing.assert_allclose(metrics["entropy"], entropy[mask].mean(), rtol=1e-5)


def test_clipping_is_counted_over_response_tokens():
    # Old log-probabilities half a nat lower make every ratio 1.65: clipped from above where the advantage is positive.
    data = batch().replace(old_logprobs=trajectory().logprobs - 0.5)
    metrics, _ = metrics_and_gradients(data=data)
    mask = np.asarray(trajectory().response_mask)
    share = mask[np.asarray(ADVANTAGES) > 0].sum() / mask.sum()
    np.testing.assert_allclose(metrics["clip_ratio/high_mean"], share, rtol=1e-6)
    assert metrics["clip_ratio/low_mean"] == 0
    assert metrics["clip_ratio/region_mean"] == metrics["clip_ratio/high_mean"]


# --- microbatches and mask storage


def test_microbatches_change_nothing():
    noise = jnp.asarray(np.random.default_rng(4).normal(size=(ROWS, LENGTH)), jnp.float32)
    data = batch().replace(old_logprobs=trajectory().logprobs + 0.1 * noise)  # some tokens are clipped
    whole, parts = metrics_and_gradients(data=data), metrics_and_gradients(UpdateConfig(microbatch_size=2), data)
    np.testing.assert_allclose(parts[0]["loss"], whole[0]["loss"], rtol=1e-6)
    assert distance(parts[1], whole[1]) < 1e-5
    for name, value in whole[0].items():
        np.testing.assert_allclose(parts[0][name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_boolean_masks_match_compact_masks():
    mask = trajectory().mask.to_boolean()
    assert mask.shape == (ROWS, 1, 2, WIDTH + LENGTH, WIDTH + LENGTH)
    explicit = batch().replace(trajectory=trajectory().replace(mask=mask))
    compact, boolean = metrics_and_gradients(), metrics_and_gradients(data=explicit)
    np.testing.assert_allclose(boolean[0]["loss"], compact[0]["loss"], rtol=1e-6)
    assert distance(boolean[1], compact[1]) < 1e-5  # T × T scores against gathered keys


# --- the reference policy

BETA = UpdateConfig(loss=LossConfig(beta=0.5))


def test_kl_to_a_reference():
    metrics, _ = metrics_and_gradients(BETA, reference=REFERENCE)
    policy, reference = (explicit_token_logprobs(p, trajectory().mask) for p in (PARAMS, REFERENCE))
    kl = np.asarray(k3(policy, reference))[np.asarray(trajectory().response_mask)].mean()
    assert kl > 0.1
    np.testing.assert_allclose(metrics["kl"], kl, rtol=1e-4)
    np.testing.assert_allclose(metrics["loss"], metrics_and_gradients()[0]["loss"] + 0.5 * kl, rtol=1e-4)


@pytest.mark.parametrize("config", [BETA, UpdateConfig(distill=DistillConfig(direction="anchor"))])
def test_missing_reference_raises(config):
    with pytest.raises(ValueError, match=r"expected reference parameters in the train state .*; got None"):
        metrics_and_gradients(config)


# --- distillation


@pytest.mark.slow
def test_distillation_uses_its_coefficient_and_the_reference():
    """Values and gradients of every direction: `test_distill`."""
    config = UpdateConfig(distill=DistillConfig(direction="anchor", coef=0.5))
    metrics, _ = metrics_and_gradients(config, without_advantages(), reference=REFERENCE)
    mask = np.asarray(trajectory().response_mask)
    dense = np.asarray(explicit_logprobs(REFERENCE, trajectory().dense_mask()), np.float64)
    shadow = np.asarray(explicit_logprobs(PARAMS, trajectory().mask), np.float64)
    value = (np.exp(dense) * (dense - shadow)).sum(-1)[mask].mean()
    np.testing.assert_allclose(metrics["distill"], value, rtol=1e-4)
    np.testing.assert_allclose(metrics["loss"], 0.5 * value, rtol=1e-4)
    agreement = np.minimum(np.exp(dense), np.exp(shadow)).sum(-1)[mask]
    np.testing.assert_allclose(metrics["distill/agreement_p5"], np.percentile(agreement, 5), rtol=1e-4)


# --- bad input


def test_greedy_trajectory_raises():
    data = batch()
    data = data.replace(trajectory=data.trajectory.replace(replayable=False))
    for call in (
        lambda: metrics_and_gradients(data=data),
        lambda: replay(MODEL, PARAMS, data.trajectory),
        lambda: replay(MODEL, PARAMS, data.trajectory, data.trajectory.dense_mask()),
    ):
        with pytest.raises(ValueError, match=r"at a temperature > 0, because.*got one from a greedy sampler"):
            call()


@pytest.mark.parametrize("size", [0, -4])
def test_microbatch_size_must_be_positive(size):
    with pytest.raises(ValueError, match=f"expected microbatch_size >= 1; got {size}"):
        UpdateConfig(microbatch_size=size)


# --- compilation, memory and dtypes


def test_update_compiles_once_and_donates_the_old_state():
    optimizer = optax.adam(1e-2)
    update = make_update(MODEL, optimizer, UpdateConfig(distill=DistillConfig()))
    first = state = init_state(jax.tree.map(jnp.copy, PARAMS), optimizer, jax.random.key(3))
    losses = []
    with count_compilations() as counts:
        for _ in range(4):
            state, metrics = update(state, batch())
            losses.append(float(metrics["loss"]))
    assert counts["update"] == 1
    assert int(state.step) == 4
    assert all(after < before for before, after in itertools.pairwise(losses)), losses
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((first.params, first.opt_state)))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(batch()))


def test_bfloat16_compute_keeps_float32_parameters():
    model = Decoder(dataclasses.replace(MODEL.config, dtype="bfloat16"))
    optimizer = optax.adam(1e-2)
    state = init_state(jax.tree.map(jnp.copy, PARAMS), optimizer, jax.random.key(3))
    state, metrics = make_update(model, optimizer, UpdateConfig())(state, batch())
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state.params)} == {"float32"}
    assert metrics["loss"].dtype == jnp.float32
    assert 1e-4 < metrics["sampling/sampling_logp_difference/max"] < 1.0, "bfloat16 must be at work, and near float32"
    assert all(np.isfinite(value) for value in metrics.values())
    assert distance(state.params, PARAMS) > 1e-3


def test_shadow_mask_update_has_no_quadratic_array():
    """The mask takes four bytes per key; the compiled update has no T × T array."""
    tokens, response = 1024, 960
    mask = random_evictions(tokens, Segments(tokens - response, 32, 64), batch=1, layers=1, kv_heads=2)
    assert isinstance(mask.evicted_at, jax.Array) and mask.evicted_at.nbytes == 4 * mask.evicted_at.size
    ids = jnp.ones((1, tokens), jnp.int32)
    logprobs = jnp.zeros((1, response))
    compact = Trajectory(ids, ids > 0, logprobs, jnp.zeros(1, bool), mask)
    model = Decoder(tiny_model_config(num_layers=1))

    def has_quadratic_array(trajectory: Trajectory) -> bool:
        state = init_state(random_params(model.config), optax.sgd(0.1), jax.random.key(0))
        batch = TrainBatch(trajectory, jnp.ones(1), None)
        program = str(make_update(model, optax.sgd(0.1), UpdateConfig()).lower(state, batch).compile().as_text())
        return f"{tokens},{tokens}]" in program

    assert not has_quadratic_array(compact)
    assert has_quadratic_array(compact.replace(mask=mask.to_boolean()))
