"""The distillation term of a tiny model, against the divergence of every token from the model's plain call."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.corrections.uncorrected import Naive
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.distill import distill_term
from smd_jax.learner.forward import response_hidden
from smd_jax.losses.distillation import Direction, DistillConfig, Estimator
from smd_jax.masks import Segments
from smd_jax.model.decoder import Decoder
from smd_jax.model.protocol import Params
from smd_jax.model.teacher_forced import apply_model
from smd_jax.testing import random_evictions, random_params, tiny_model_config
from smd_jax.trajectory import Trajectory

ROWS, WIDTH, LENGTH, VOCAB = 4, 4, 6, 40
TEMPERATURE = 0.9
DIRECTIONS = ["forward", "reverse", "published", "anchor"]
MODEL = Decoder(tiny_model_config(vocab_size=VOCAB, max_positions=16))


def spread_params(seed: int):
    """Parameters whose logits are not all alike, so that it matters what a query sees."""
    leaves, structure = jax.tree.flatten(random_params(MODEL.config))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return structure.unflatten([x + 0.2 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)])


PARAMS, REFERENCE = spread_params(0), spread_params(1)


def make_trajectory() -> Trajectory:
    """Four rows of unequal prompts and responses, with three keys of up to ten kept."""
    rng = np.random.default_rng(0)
    first, last = np.array([0, 2, 1, 3]), np.array([10, 7, 9, 10])
    columns = np.arange(WIDTH + LENGTH)
    valid = (columns >= first[:, None]) & (columns < last[:, None])
    tokens = np.where(valid, rng.integers(0, VOCAB, valid.shape), 0)
    mask = random_evictions(
        WIDTH + LENGTH, Segments(WIDTH, 2, 3), batch=ROWS, layers=2, kv_heads=2, padding=tuple(first.tolist())
    )
    return Trajectory(
        tokens=jnp.asarray(tokens, jnp.int32),
        valid=jnp.asarray(valid),
        logprobs=jnp.zeros((ROWS, LENGTH)),
        terminated=jnp.asarray(last < WIDTH + LENGTH),
        mask=mask,
        temperature=TEMPERATURE,
    )


TRAJECTORY = make_trajectory()
# Unequal, 0 outside the response.
WEIGHTS = np.random.default_rng(1).uniform(0.5, 1.5, (ROWS, LENGTH)) * np.asarray(TRAJECTORY.response_mask)


def half(direction: Direction = "forward", estimator: Estimator = "exact") -> DistillConfig:
    """Half of the rows and half of the positions."""
    return DistillConfig(direction, fraction=0.5, position_fraction=0.5, estimator=estimator)


@functools.cache
def term(config: DistillConfig):
    """The jitted (params, reference, step) -> (value, gradient)."""

    def value(params, reference, step):
        hidden = response_hidden(MODEL, params, TRAJECTORY, TRAJECTORY.mask)
        part = jnp.asarray(WEIGHTS, jnp.float32)
        return distill_term(MODEL, config, params, reference, step, TRAJECTORY, hidden, part)[0]

    return jax.jit(jax.value_and_grad(value))


def reference_of(direction):
    return REFERENCE if direction == "anchor" else None


def run(config: DistillConfig, step: int = 0) -> tuple[jax.Array, Params]:
    return term(config)(PARAMS, reference_of(config.direction), jnp.int32(step))


def plain_logprobs(params, mask):
    """Log-probabilities `[ROWS, LENGTH, VOCAB]` from the model's plain call under T × T booleans."""
    mask = mask.to_boolean()
    logits = apply_model(MODEL, params, TRAJECTORY.tokens, TRAJECTORY.positions, mask)
    return jax.nn.log_softmax(logits[:, WIDTH - 1 : -1] / TEMPERATURE)


@jax.jit
def plain_gradient(dense_params, shadow_params, of_dense, of_shadow):
    """Gradient by both parameters of the weighted sum of all log-probabilities, weights `[ROWS, LENGTH, VOCAB]`."""

    def weighted(dense_params, shadow_params):
        dense = plain_logprobs(dense_params, TRAJECTORY.dense_mask())
        shadow = plain_logprobs(shadow_params, TRAJECTORY.mask)
        return jnp.sum(of_dense * dense) + jnp.sum(of_shadow * shadow)

    return jax.grad(weighted, argnums=(0, 1))(dense_params, shadow_params)


@functools.cache
def policies(direction) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of the dense and the masked policy, float64."""
    dense = plain_logprobs(REFERENCE if direction == "anchor" else PARAMS, TRAJECTORY.dense_mask())
    return np.asarray(dense, np.float64), np.asarray(plain_logprobs(PARAMS, TRAJECTORY.mask), np.float64)


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


def parts(rows, columns) -> np.ndarray:
    """Weights where rows and columns are chosen, scaled up to all of them."""
    chosen = np.zeros((ROWS, LENGTH))
    chosen[np.ix_(rows, columns)] = ROWS * LENGTH / (len(rows) * len(columns))
    return chosen * WEIGHTS


def distance(left, right) -> float:
    """|left - right| / |right| over all leaves, in float64."""
    pairs = [(np.float64(a), np.float64(b)) for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)]
    difference = sum(np.sum((a - b) ** 2) for a, b in pairs)
    return float(np.sqrt(difference / sum(np.sum(b**2) for _, b in pairs)))


def test_the_two_policies_differ():
    d, s = policies("forward")
    assert np.abs(d - s)[np.asarray(TRAJECTORY.response_mask)].max() > 0.1


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_all_rows_and_positions(direction):
    value, grads = run(DistillConfig(direction))
    each, slopes = exact(direction)
    np.testing.assert_allclose(value, (WEIGHTS * each).sum(), rtol=1e-4)
    assert distance(grads, expected(direction, WEIGHTS[..., None] * slopes)) < 1e-4


def test_a_dense_student_of_the_anchor():
    """What a learner without masks is held to: the divergence of two dense policies."""

    def value(params):
        dense = TRAJECTORY.dense_mask()
        hidden = response_hidden(MODEL, params, TRAJECTORY, dense)
        part = jnp.asarray(WEIGHTS, jnp.float32)
        return distill_term(MODEL, DistillConfig("anchor"), params, REFERENCE, jnp.int32(0), TRAJECTORY, hidden, part)[
            0
        ]

    teacher = policies("anchor")[0]
    student = np.asarray(plain_logprobs(PARAMS, TRAJECTORY.dense_mask()), np.float64)
    each = (np.exp(teacher) * (teacher - student)).sum(-1)
    np.testing.assert_allclose(jax.jit(value)(PARAMS), (WEIGHTS * each).sum(), rtol=1e-4)
    UpdateConfig("dense", correction=Naive(), distill=DistillConfig("anchor"))
    with pytest.raises(ValueError, match="whose teacher is the dense policy itself.*got 'dense' with"):
        UpdateConfig("dense", correction=Naive(), distill=DistillConfig("forward"))


@pytest.mark.parametrize(
    ("step", "rows", "columns"),
    [(0, [0, 2], [0, 2, 4]), (1, [1, 3], [1, 3, 5]), (4, [0, 2], [1, 3, 5]), (27, [3, 1], [3, 5, 1])],
)
@pytest.mark.parametrize("direction", ["forward", "published"])
def test_half_of_the_rows_and_half_of_the_positions(direction, step, rows, columns):
    value, grads = run(half(direction), step)
    each, slopes = exact(direction)
    chosen = parts(rows, columns)
    np.testing.assert_allclose(value, (chosen * each).sum(), rtol=1e-4)
    assert distance(grads, expected(direction, chosen[..., None] * slopes)) < 1e-4


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_full_rotation_is_the_whole(direction):
    whole, whole_grads = run(DistillConfig(direction))
    turns = [run(half(direction), step) for step in range(ROWS * LENGTH)]
    np.testing.assert_allclose(np.mean([value for value, _ in turns]), whole, rtol=1e-5)
    assert np.ptp([value for value, _ in turns]) > 1e-3, "parts must differ"
    mean = jax.tree.map(lambda *leaves: np.mean(np.asarray(leaves, np.float64), axis=0), *[grads for _, grads in turns])
    assert distance(mean, whole_grads) < 1e-4


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
    tokens = np.asarray(TRAJECTORY.response)[..., None]
    dense, shadow = (np.take_along_axis(x, tokens, -1)[..., 0] for x in policies(direction))
    chosen = parts([1, 3], [1, 3, 5])
    np.testing.assert_allclose(got, (chosen * value(dense - shadow)).sum(), rtol=1e-4)
    one_hot = np.eye(VOCAB)[tokens[..., 0]]
    assert distance(grads, expected(direction, (chosen * slope(dense - shadow))[..., None] * one_hot)) < 1e-4


def program(config: DistillConfig) -> str:
    return str(jax.make_jaxpr(term(config))(PARAMS, reference_of(config.direction), jnp.int32(0)))


def test_only_chosen_positions_are_projected_to_the_vocabulary():
    # No other array is as wide as the vocabulary.
    configs = DistillConfig(), half()
    whole, part = (set(re.findall(rf"f32\[(\d+,\d+),{VOCAB}\]", program(config))) for config in configs)
    assert whole == {f"{ROWS},{LENGTH}"}
    assert part == {f"{ROWS // 2},{LENGTH // 2}"}


def test_one_of_the_two_forward_passes_has_a_backward_pass():
    anchor, *others = (program(DistillConfig(d)).count("dot_general") for d in ("anchor", "forward", "published"))
    assert others == [anchor, anchor], "the reference's parameters cannot have one, the live teacher must not"


def test_a_missing_reference():
    with pytest.raises(ValueError, match="expected reference parameters for direction 'anchor'; got None"):
        term(DistillConfig("anchor"))(PARAMS, None, jnp.int32(0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fraction": 0.3}, r"distill_fraction \* rows of a microbatch to be a whole number >= 1; got 0.3 \* 4"),
        ({"position_fraction": 0.25}, r"\* columns of the response to be a whole number >= 1; got 0.25 \* 6"),
    ],
)
def test_fractions_that_are_no_whole_number(options, message):
    with pytest.raises(ValueError, match=message):
        run(DistillConfig(**options))
