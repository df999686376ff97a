"""Distillation of a tiny model against per-token divergences from a plain forward pass."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.corrections.base import Naive
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.distill import distill_term
from smd_jax.learner.forward import response_hidden
from smd_jax.losses.distillation import DistillConfig
from smd_jax.model.decoder import Decoder
from smd_jax.model.protocol import Params
from smd_jax.testing import random_params
from tests.tiny_update import LENGTH, MODEL, PARAMS, REFERENCE, ROWS, distance, explicit_logprobs, trajectory

VOCAB = MODEL.config.vocab_size


@functools.cache
def weights() -> np.ndarray:
    """Unequal token weights, 0 outside the response."""
    return np.random.default_rng(1).uniform(0.5, 1.5, (ROWS, LENGTH)) * np.asarray(trajectory().response_mask)


@functools.cache
def jitted_term(config: DistillConfig, model: Decoder = MODEL):
    """(params, reference) -> (value, gradient)."""
    t, part = trajectory(), jnp.asarray(weights(), jnp.float32)

    def value(params, reference):
        hidden = response_hidden(model, params, t, t.mask)
        return distill_term(model, config, params, reference, t, hidden, part)[0]

    return jax.jit(jax.value_and_grad(value))


def reference_of(direction):
    return REFERENCE if direction == "anchor" else None


def value_and_gradient(config: DistillConfig) -> tuple[jax.Array, Params]:
    return jitted_term(config)(PARAMS, reference_of(config.direction))


def plain_logprobs(params, mask):
    """Log-probabilities `[ROWS, LENGTH, VOCAB]` from a plain forward pass under a T × T mask."""
    return explicit_logprobs(params, mask.to_boolean())


@jax.jit
def plain_gradient(dense_params, shadow_params, dense_weights, shadow_weights):
    """Gradients of the sum of all log-probabilities, weighted by `[ROWS, LENGTH, VOCAB]`."""

    def weighted(dense_params, shadow_params):
        dense = plain_logprobs(dense_params, trajectory().dense_mask())
        shadow = plain_logprobs(shadow_params, trajectory().mask)
        return jnp.sum(dense_weights * dense) + jnp.sum(shadow_weights * shadow)

    return jax.grad(weighted, argnums=(0, 1))(dense_params, shadow_params)


@functools.cache
def logprobs_of(direction) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of the dense and the masked policy, float64."""
    dense = plain_logprobs(REFERENCE if direction == "anchor" else PARAMS, trajectory().dense_mask())
    return np.asarray(dense, np.float64), np.asarray(plain_logprobs(PARAMS, trajectory().mask), np.float64)


def chain_gradient(direction, slope: np.ndarray):
    """Parameter gradient from the slopes `[ROWS, LENGTH, VOCAB]` by the learner's log-probabilities."""
    slopes, zeros = jnp.asarray(slope, jnp.float32), jnp.zeros(slope.shape)
    if direction == "published":
        return plain_gradient(PARAMS, PARAMS, slopes, zeros)[0]
    return plain_gradient(REFERENCE if direction == "anchor" else PARAMS, PARAMS, zeros, slopes)[1]


def exact_divergence(direction) -> tuple[np.ndarray, np.ndarray]:
    """Divergence `[ROWS, LENGTH]` and slopes `[ROWS, LENGTH, VOCAB]` by the learner's log-probabilities."""
    d, s = logprobs_of(direction)
    if direction == "reverse":
        return (np.exp(s) * (s - d)).sum(-1), np.exp(s) * (s - d + 1)
    if direction == "published":
        return (np.exp(d) * (d - s)).sum(-1), np.exp(d) * (d - s + 1)
    return (np.exp(d) * (d - s)).sum(-1), -np.exp(d)


@pytest.mark.parametrize(
    "direction",
    ["forward", "published", *(pytest.param(name, marks=pytest.mark.slow) for name in ("reverse", "anchor"))],
)
def test_value_and_gradient_match_the_exact_divergence(direction):
    value, grads = value_and_gradient(DistillConfig(direction=direction))
    divergences, slopes = exact_divergence(direction)
    np.testing.assert_allclose(value, (weights() * divergences).sum(), rtol=1e-4)
    assert distance(grads, chain_gradient(direction, weights()[..., None] * slopes)) < 1e-4
    assert distance(chain_gradient(direction, weights()[..., None] * -np.exp(logprobs_of(direction)[1])), grads) > 0.1


def test_dense_learner_distills_from_the_anchor():
    """The divergence is that of two dense models."""
    t, part, config = trajectory(), jnp.asarray(weights(), jnp.float32), DistillConfig(direction="anchor")

    def value(params):
        hidden = response_hidden(MODEL, params, t, t.dense_mask())
        return distill_term(MODEL, config, params, REFERENCE, t, hidden, part)[0]

    teacher = logprobs_of("anchor")[0]
    student = np.asarray(plain_logprobs(PARAMS, trajectory().dense_mask()), np.float64)
    divergences = (np.exp(teacher) * (teacher - student)).sum(-1)
    np.testing.assert_allclose(jax.jit(value)(PARAMS), (weights() * divergences).sum(), rtol=1e-4)
    UpdateConfig(visibility="dense", correction=Naive(), distill=DistillConfig(direction="anchor"))
    with pytest.raises(ValueError, match="whose teacher is the dense policy itself.*got 'dense' with"):
        UpdateConfig(visibility="dense", correction=Naive(), distill=DistillConfig(direction="forward"))


# Reference attention has the same number of products under every mask.
WIDE = Decoder(dataclasses.replace(MODEL.config, vocab_size=40), impl="reference")


def jaxpr_text(config: DistillConfig) -> str:
    params = jax.eval_shape(lambda: random_params(WIDE.config))
    reference = params if config.direction == "anchor" else None
    return str(jax.make_jaxpr(jitted_term.__wrapped__(config, WIDE))(params, reference))


def test_the_teacher_has_no_backward_pass():
    anchor, *others = (
        jaxpr_text(DistillConfig(direction=d)).count("dot_general") for d in ("anchor", "forward", "published")
    )
    assert others == [anchor, anchor], "a live teacher needs no more products than the frozen anchor"
