"""The distillation term of a tiny model, against the divergence of every token from the model's plain call."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.corrections.uncorrected import Naive
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.distill import distill_term
from smd_jax.learner.forward import response_hidden
from smd_jax.losses.distillation import Direction, DistillConfig, Estimator
from smd_jax.model.decoder import Decoder
from smd_jax.model.protocol import Params
from smd_jax.testing import random_params
from tests.tiny_update import LENGTH, MODEL, PARAMS, REFERENCE, ROWS, distance, explicit_logprobs, trajectory

DIRECTIONS = ["forward", "reverse", "published", "anchor"]
VOCAB = MODEL.config.vocab_size
EVEN, ODD = [0, 2, 4, 6], [1, 3, 5, 7]


@functools.cache
def weights() -> np.ndarray:
    """Unequal, 0 outside the response."""
    return np.random.default_rng(1).uniform(0.5, 1.5, (ROWS, LENGTH)) * np.asarray(trajectory().response_mask)


def half(direction: Direction = "forward", estimator: Estimator = "exact") -> DistillConfig:
    """Half of the rows."""
    return DistillConfig(direction=direction, fraction=0.5, estimator=estimator)


@functools.cache
def term(config: DistillConfig, model: Decoder = MODEL):
    """The jitted (params, reference, step) -> (value, gradient)."""

    t, part = trajectory(), jnp.asarray(weights(), jnp.float32)

    def value(params, reference, step):
        hidden = response_hidden(model, params, t, t.mask)
        return distill_term(model, config, params, reference, step, t, hidden, part)[0]

    return jax.jit(jax.value_and_grad(value))


def reference_of(direction):
    return REFERENCE if direction == "anchor" else None


def run(config: DistillConfig, step: int = 0) -> tuple[jax.Array, Params]:
    return term(config)(PARAMS, reference_of(config.direction), jnp.int32(step))


def plain_logprobs(params, mask):
    """Log-probabilities `[ROWS, LENGTH, VOCAB]` from the model's plain call under T × T booleans."""
    return explicit_logprobs(params, mask.to_boolean())


@jax.jit
def plain_gradient(dense_params, shadow_params, of_dense, of_shadow):
    """Gradient by both parameters of the weighted sum of all log-probabilities, weights `[ROWS, LENGTH, VOCAB]`."""

    def weighted(dense_params, shadow_params):
        dense = plain_logprobs(dense_params, trajectory().dense_mask())
        shadow = plain_logprobs(shadow_params, trajectory().mask)
        return jnp.sum(of_dense * dense) + jnp.sum(of_shadow * shadow)

    return jax.grad(weighted, argnums=(0, 1))(dense_params, shadow_params)


@functools.cache
def policies(direction) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of the dense and the masked policy, float64."""
    dense = plain_logprobs(REFERENCE if direction == "anchor" else PARAMS, trajectory().dense_mask())
    return np.asarray(dense, np.float64), np.asarray(plain_logprobs(PARAMS, trajectory().mask), np.float64)


def expected(direction, slope: np.ndarray):
    """The gradient of a term whose learner has these slopes `[ROWS, LENGTH, VOCAB]` by its log-probabilities."""
    slopes, none = jnp.asarray(slope, jnp.float32), jnp.zeros(slope.shape)
    if direction == "published":
        return plain_gradient(PARAMS, PARAMS, slopes, none)[0]
    return plain_gradient(REFERENCE if direction == "anchor" else PARAMS, PARAMS, none, slopes)[1]


def exact(direction) -> tuple[np.ndarray, np.ndarray]:
    """Divergence `[ROWS, LENGTH]` and slopes `[ROWS, LENGTH, VOCAB]` by the learner's log-probabilities."""
    d, s = policies(direction)
    if direction == "reverse":
        return (np.exp(s) * (s - d)).sum(-1), np.exp(s) * (s - d + 1)
    if direction == "published":
        return (np.exp(d) * (d - s)).sum(-1), np.exp(d) * (d - s + 1)
    return (np.exp(d) * (d - s)).sum(-1), -np.exp(d)


def parts(rows) -> np.ndarray:
    """Weights of the chosen rows, scaled up to all of them."""
    chosen = np.zeros((ROWS, LENGTH))
    chosen[rows] = ROWS / len(rows)
    return chosen * weights()


@pytest.mark.parametrize(
    "direction",
    ["forward", "published", *(pytest.param(name, marks=pytest.mark.slow) for name in ("reverse", "anchor"))],
)
def test_all_rows(direction):
    value, grads = run(DistillConfig(direction=direction))
    each, slopes = exact(direction)
    np.testing.assert_allclose(value, (weights() * each).sum(), rtol=1e-4)
    assert distance(grads, expected(direction, weights()[..., None] * slopes)) < 1e-4
    assert distance(expected(direction, weights()[..., None] * -np.exp(policies(direction)[1])), grads) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "published"])
def test_half_of_the_rows(direction):
    each, slopes = exact(direction)
    for step, rows in ((0, EVEN), (1, ODD), (8, EVEN), (27, ODD)):
        value, grads = run(half(direction), step)
        chosen = parts(rows)
        np.testing.assert_allclose(value, (chosen * each).sum(), rtol=1e-4)
        assert distance(grads, expected(direction, chosen[..., None] * slopes)) < 1e-4


@pytest.mark.slow
def test_a_full_rotation_is_the_whole():
    whole, whole_grads = run(DistillConfig())
    turns = [run(half(), step) for step in range(ROWS)]
    np.testing.assert_allclose(np.mean([value for value, _ in turns]), whole, rtol=1e-5)
    assert np.ptp([value for value, _ in turns]) > 1e-3, "parts must differ"
    mean = jax.tree.map(lambda *leaves: np.mean(np.asarray(leaves, np.float64), axis=0), *[grads for _, grads in turns])
    assert distance(mean, whole_grads) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("direction", "estimator", "value", "slope"),
    [
        ("reverse", "k1", lambda x: -x, lambda x: -x),
        ("forward", "k3", lambda x: np.exp(x) * x - np.exp(x) + 1, lambda x: 1 - np.exp(x)),
        ("anchor", "k1", lambda x: np.exp(x) * x, lambda x: -np.exp(x)),
        ("published", "k2", lambda x: x**2 / 2, lambda x: x),
    ],
    ids=["reverse k1", "forward k3", "anchor k1", "published k2"],
)
def test_estimates_look_at_the_sampled_tokens(direction, estimator, value, slope):
    """`value` and `slope` are functions of log rho."""
    got, grads = run(half(direction, estimator), step=1)
    tokens = np.asarray(trajectory().response)[..., None]
    dense, shadow = (np.take_along_axis(x, tokens, -1)[..., 0] for x in policies(direction))
    chosen = parts(ODD)
    np.testing.assert_allclose(got, (chosen * value(dense - shadow)).sum(), rtol=1e-4)
    one_hot = np.eye(VOCAB)[tokens[..., 0]]
    assert distance(grads, expected(direction, (chosen * slope(dense - shadow))[..., None] * one_hot)) < 1e-4


def test_a_dense_student_of_the_anchor():
    """What a learner without masks is held to: the divergence of two dense policies."""

    t, part, config = trajectory(), jnp.asarray(weights(), jnp.float32), DistillConfig(direction="anchor")

    def value(params):
        hidden = response_hidden(MODEL, params, t, t.dense_mask())
        return distill_term(MODEL, config, params, REFERENCE, jnp.int32(0), t, hidden, part)[0]

    teacher = policies("anchor")[0]
    student = np.asarray(plain_logprobs(PARAMS, trajectory().dense_mask()), np.float64)
    each = (np.exp(teacher) * (teacher - student)).sum(-1)
    np.testing.assert_allclose(jax.jit(value)(PARAMS), (weights() * each).sum(), rtol=1e-4)
    UpdateConfig(visibility="dense", correction=Naive(), distill=DistillConfig(direction="anchor"))
    with pytest.raises(ValueError, match="whose teacher is the dense policy itself.*got 'dense' with"):
        UpdateConfig(visibility="dense", correction=Naive(), distill=DistillConfig(direction="forward"))


# No other array is as wide as this vocabulary, and this attention has as many products under every mask.
WIDE = Decoder(dataclasses.replace(MODEL.config, vocab_size=40), impl="reference")


def program(config: DistillConfig) -> str:
    params = jax.eval_shape(lambda: random_params(WIDE.config))
    reference = params if config.direction == "anchor" else None
    return str(jax.make_jaxpr(term.__wrapped__(config, WIDE))(params, reference, jnp.int32(0)))


def test_one_of_the_two_forward_passes_has_a_backward_pass():
    anchor, *others = (
        program(DistillConfig(direction=d)).count("dot_general") for d in ("anchor", "forward", "published")
    )
    assert others == [anchor, anchor], "the reference's parameters cannot have one, the live teacher must not"


def test_a_fraction_that_is_no_whole_number():
    message = r"distill_fraction \* rows of a microbatch to be a whole number >= 1; got 0.3 \* 8"
    with pytest.raises(ValueError, match=message):
        run(DistillConfig(fraction=0.3))
