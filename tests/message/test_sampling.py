"""Sampling against NumPy in float64: drawable tokens, sampled tokens, log-probabilities and entropies."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from smd_jax.devices.sharding import make_mesh, shard_batch
from smd_jax.message.sampling import BLOCK, Sampled, SamplingConfig, _first_beyond, drawable_form, inverse_cdf, sample

PROBABILITIES = np.array([0.1, 0.4, 0.05, 0.25, 0.2])
LOGITS = np.log(PROBABILITIES).astype(np.float32) + np.float32(3.0)  # logits are free up to a constant

GATHERED = re.compile(r"= \(?\w+\[([\d,]*)\]\S* all-gather")  # sizes of an all-gather's results

sample_jitted = partial(jax.jit, static_argnums=2)(sample)


def draw(logits: Any, uniforms: Any, config: SamplingConfig) -> Sampled:
    return sample_jitted(jnp.asarray(logits, jnp.float32), jnp.asarray(uniforms, jnp.float32), config)


def to_boolean(drawn: Sampled, vocab: int) -> np.ndarray:
    """The drawable tokens as booleans `[batch, vocab]`."""
    if drawn.drawable is None:
        return np.ones((len(drawn.tokens), vocab), bool)
    drawable = np.asarray(drawn.drawable)
    if drawable.dtype == np.uint8:
        return np.unpackbits(drawable, axis=1, bitorder="little")[:, :vocab] == 1
    return np.array([np.isin(np.arange(vocab), row) for row in drawable])


# --- an independent implementation, float64


class DecidedByRounding(Exception):
    """Rounding decides the result of this example."""


def drawable_by_definition(logits: np.ndarray, config: SamplingConfig) -> np.ndarray:
    """`[vocab]` booleans of one row, from the definitions of the filters.

    Raises:
      DecidedByRounding: if a token is within rounding of a threshold.
    """
    x = logits.astype(np.float64) / config.temperature
    drawable = np.isfinite(x)
    if config.top_k:
        rank = np.empty(len(x), int)
        rank[sorted(range(len(x)), key=lambda i: (-x[i], i))] = np.arange(len(x))
        drawable &= rank < config.top_k
    p = np.where(drawable, np.exp(x - x.max()), 0.0)
    if config.top_p < 1:
        larger = np.array([p[p > each].sum() for each in p]) / p.sum()
        if np.abs(larger[drawable] - config.top_p).min() < 1e-5:
            raise DecidedByRounding
        drawable &= larger < config.top_p
    if config.min_p:
        if np.abs(p / config.min_p - 1).min() < 1e-5:
            raise DecidedByRounding
        drawable &= p >= config.min_p
    return drawable


def log_softmax(logits: np.ndarray, drawable: np.ndarray, temperature: float) -> np.ndarray:
    """In float64 over the drawable tokens; -inf outside."""
    x = np.where(drawable, logits.astype(np.float64) / temperature, -np.inf)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def check_rows(logits: np.ndarray, uniforms: np.ndarray, config: SamplingConfig, drawn: Sampled) -> None:
    """Checks the drawable set, the log-probability, the entropy and the interval of every row."""
    inside = to_boolean(drawn, logits.shape[1])
    for row, x in enumerate(logits):
        drawable = drawable_by_definition(x, config)
        expected = log_softmax(x, drawable, config.temperature)
        assert drawable[int(drawn.tokens[row])]
        if drawn.drawable is not None:
            likely = expected - expected.max() > -80  # float32 may underflow further below
            np.testing.assert_array_equal(inside[row][likely], drawable[likely])
            assert not inside[row][~drawable].any()
        check_row(drawn, row, expected, float(uniforms[row]), in_order=config.left_by_top_k(len(x)) > 0)


def check_row(drawn: Sampled, row: int, logprobs: np.ndarray, uniform: float, *, in_order: bool) -> None:
    """Checks log-probability and entropy, and that the uniform number is in the token's interval. Intervals are ordered
    by id or, with `in_order`, by probability."""
    token, p = int(drawn.tokens[row]), np.exp(logprobs)
    np.testing.assert_allclose(drawn.logprobs[row], logprobs[token], rtol=1e-5, atol=2e-5)
    entropy = -(p[p > 0] * logprobs[p > 0]).sum()
    np.testing.assert_allclose(drawn.entropy[row], entropy, rtol=1e-4, atol=1e-5)
    order = np.argsort(-logprobs, kind="stable") if in_order else np.arange(len(logprobs))
    ends = np.cumsum(p[order])
    rank = int(np.flatnonzero(order == token)[0])
    start = ends[rank - 1] if rank else 0.0
    assert max(start - uniform, uniform - ends[rank]) < 1e-5


# --- drawable sets


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 3, 4}),
        ({"top_k": 9}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.3}, {1}),
        ({"top_p": 0.7}, {1, 3, 4}),
        ({"top_p": 1e-6}, {1}),
        ({"min_p": 0.2}, {0, 1, 3, 4}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 3, "top_p": 0.7}, {1, 3}),  # of 0.85 that are left, 0.4 and 0.25 are 76 %
        ({"top_k": 2, "top_p": 0.99}, {1, 3}),
        ({"top_k": 4, "min_p": 0.2}, {0, 1, 3, 4}),
        ({"top_p": 0.9, "min_p": 0.5}, {1, 3, 4}),
        ({"top_p": 0.62, "min_p": 0.45}, {1, 3}),  # only min-p would leave the third too
        ({"top_p": 0.72, "min_p": 0.45}, {1, 3, 4}),  # min-p first would leave 0.85, 76 % of it in two
        ({"temperature": 0.5, "top_p": 0.7}, {1, 3}),  # squares: 0.16 and 0.0625 are 83 % of all
        ({"temperature": 2.0, "top_p": 0.7}, {1, 3, 4}),  # roots: the first two are only 53 %
        ({"temperature": 0.5, "min_p": 0.3}, {1, 3}),  # 0.0625 and 0.04 of 0.16
    ],
)
def test_sets(options: dict[str, Any], expected: set[int]):
    inside = to_boolean(draw(LOGITS[None], [0.5], SamplingConfig(**options)), 5)[0]
    assert set(np.flatnonzero(inside).tolist()) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"top_k": 2}, {1, 2}),  # exactly two: the first of the equals
        ({"top_p": 0.5}, {1, 2, 4}),  # two would reach 0.5, but none of the three is likelier than the others
        ({"top_k": 2, "top_p": 0.1}, {1, 2}),
        ({"min_p": 0.5}, {1, 2, 4}),
    ],
)
def test_equally_likely_tokens(options: dict[str, Any], expected: set[int]):
    logits = np.log([[6, 29, 29, 6, 29]])
    inside = to_boolean(draw(logits, [0.5], SamplingConfig(**options)), 5)[0]
    assert set(np.flatnonzero(inside).tolist()) == expected


# --- draws

CONFIGS = [
    SamplingConfig(),
    SamplingConfig(temperature=0.7, top_k=3),
    SamplingConfig(temperature=1.3, top_k=9, top_p=0.8),
    SamplingConfig(top_p=0.9),
    SamplingConfig(temperature=0.5, min_p=0.05),
    SamplingConfig(top_p=0.5, min_p=0.2),
    SamplingConfig(temperature=2.0, top_k=20, top_p=0.95, min_p=0.01),
    SamplingConfig(top_p=0.999, min_p=1e-4),
]
ROWS = 4


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    vocab=st.sampled_from([2, 40, BLOCK, 300]),
    spread=st.sampled_from([0.1, 2.0, 30.0]),
    steps=st.sampled_from([0, 2, 1000]),
    forbidden=st.sampled_from([0.0, 0.3, 0.99]),
    config=st.sampled_from(CONFIGS),
    uniforms=st.lists(st.floats(0, 1, exclude_max=True, width=32), min_size=ROWS, max_size=ROWS),
)
def test_draws(seed, vocab, spread, steps, forbidden, config, uniforms):
    """With ties (`steps` logits per unit), tokens of probability 0, and uniform numbers at both ends."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(ROWS, vocab)).astype(np.float32)
    logits = np.round(logits * steps) / steps if steps else logits
    logits = np.float32(spread) * logits + np.float32(rng.normal() * 30)
    out = rng.random(logits.shape) < forbidden
    out[np.arange(ROWS), rng.integers(0, vocab, ROWS)] = False
    logits = np.where(out, -np.inf, logits).astype(np.float32)
    uniforms = np.array(uniforms, np.float32)
    drawn = draw(logits, uniforms, config)
    try:
        check_rows(logits, uniforms, config, drawn)
    except DecidedByRounding:
        assume(False)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("flat", SamplingConfig()),
        ("extreme", SamplingConfig()),
        ("wide", SamplingConfig(temperature=0.9, top_k=50)),
        ("extreme", SamplingConfig(temperature=0.9, top_k=50, top_p=0.9, min_p=0.01)),
        ("flat", SamplingConfig(top_p=0.9)),
        ("extreme", SamplingConfig(temperature=0.7, min_p=0.02)),
    ],
    ids=str,
)
def test_large_vocabularies(kind: str, config: SamplingConfig):
    """Nearly Qwen2's vocabulary, in no whole number of blocks; uniform numbers include 0 and the last one below 1."""
    vocab, rng = 151_936 - 7, np.random.default_rng(2)
    logits = rng.normal(size=(4, vocab)).astype(np.float32)
    if kind == "wide":
        logits = 3 * logits + 100
    if kind == "extreme":  # one likely token is in the last block; many blocks have none
        logits = np.where(rng.random(logits.shape) < 0.9, -np.inf, 1e4 * logits).astype(np.float32)
        logits[:, -1] = logits[:, 500] = 5e4
    uniforms = np.array([0.0, 0.3, 0.77, np.nextafter(np.float32(1), np.float32(0))], np.float32)
    drawn = draw(logits, uniforms, config)
    inside = to_boolean(drawn, vocab)
    for row in range(4):
        x = logits[row].astype(np.float64) / config.temperature
        p = np.where(inside[row], np.exp(x - x.max()), 0.0)
        assert p[int(drawn.tokens[row])] > 0
        expected = log_softmax(logits[row], p > 0, config.temperature)
        check_row(drawn, row, expected, float(uniforms[row]), in_order=config.top_k > 0)
        if config.top_k:
            assert inside[row].sum() <= 50
        if config.top_p < 1 and kind != "extreme":
            everything = np.sort(np.exp(x - x.max()))[::-1][: config.top_k or vocab]
            reached = everything.cumsum() / everything.sum()
            assert inside[row].sum() <= np.searchsorted(reached, config.top_p + 1e-5) + 1
            if not config.min_p:
                assert p.sum() / everything.sum() > config.top_p - 1e-5


jitted_cdf = jax.jit(inverse_cdf)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    count=st.sampled_from([1, BLOCK, 1000]),
    share=st.sampled_from([0.0, 0.01, 0.5]),
    magnitude=st.sampled_from([0.0, 10.0, 80.0]),
)
def test_a_weight_of_zero_is_never_drawn(seed, count, share, magnitude):
    """Even for uniform numbers that no generator gives: 1, and a little more."""
    rng = np.random.default_rng(seed)
    weights = np.exp(-magnitude * rng.random((5, count))) * (rng.random((5, count)) < share)
    weights[np.arange(5), rng.integers(0, count, 5)] = 1.0
    weights = weights.astype(np.float32)
    index = np.asarray(jitted_cdf(jnp.asarray(weights), jnp.array([0.0, 1 - 2**-24, 1.0, 1.0001, rng.random()])))
    assert index.dtype == np.int32 and (weights[np.arange(5), index] > 0).all()


def test_running_sums_that_rise_at_zero_weights():
    """Tree summation makes such rises; a number that falls into one must not draw the weight of zero."""
    rng = np.random.default_rng(0)
    weights = (rng.random((500, 1187)) * (rng.random((500, 1187)) < 0.5)).astype(np.float32)
    sums = np.asarray(jax.jit(partial(jnp.cumsum, axis=-1))(weights))
    rows, before = np.nonzero((weights[:, 1:] == 0) & (sums[:, 1:] > sums[:, :-1]))
    assert len(rows) > 100
    index, _ = jax.jit(_first_beyond)(jnp.asarray(weights[rows]), jnp.asarray(sums[rows, before]))
    assert (weights[rows, np.asarray(index)] > 0).all()


def test_greedy():
    """The likeliest token for any uniform number and filters; log-probability and entropy at temperature 1."""
    drawn = draw(np.stack([LOGITS, LOGITS]), [0.0, 0.99], SamplingConfig(temperature=0.0, top_k=3, min_p=0.1))
    assert drawn.tokens.tolist() == [1, 1] and drawn.drawable is None
    np.testing.assert_allclose(drawn.logprobs, np.log(0.4), rtol=1e-5)
    np.testing.assert_allclose(drawn.entropy, -(PROBABILITIES * np.log(PROBABILITIES)).sum(), rtol=1e-5)


@pytest.mark.parametrize("config", [*CONFIGS[:5], SamplingConfig(temperature=0.0)], ids=str)
def test_a_row_depends_only_on_its_own_number_and_logits(config: SamplingConfig):
    rng = np.random.default_rng(0)
    logits, uniforms = rng.normal(size=(6, 40)), rng.random(6)
    drawn = draw(logits, uniforms, config)
    reversed_rows = draw(logits[::-1], uniforms[::-1], config)
    jax.tree.map(lambda one, other: np.testing.assert_array_equal(one, other[::-1]), drawn, reversed_rows)
    for row in range(6):
        alone = draw(logits[row : row + 1], uniforms[row : row + 1], config)
        assert alone.tokens[0] == drawn.tokens[row]
        np.testing.assert_allclose(alone.logprobs[0], drawn.logprobs[row], rtol=1e-6)


@pytest.mark.slow
def test_float64_logits_give_float64_results():
    with jax.enable_x64(True):
        logits = jnp.asarray(np.random.default_rng(4).normal(size=(3, 50)))
        for config in CONFIGS:
            drawn = sample(logits, jnp.array([0.1, 0.5, 0.9]), config)
            assert drawn.tokens.dtype == jnp.int32 and drawn.logprobs.dtype == drawn.entropy.dtype == jnp.float64
            for row in range(3):
                x = np.asarray(logits[row])
                expected = log_softmax(x, drawable_by_definition(x, config), config.temperature)
                np.testing.assert_allclose(drawn.logprobs[row], expected[drawn.tokens[row]], rtol=1e-12)


# --- form of the drawable set


@pytest.mark.parametrize(
    ("config", "vocab", "expected"),
    [
        (SamplingConfig(), 100, None),
        (SamplingConfig(temperature=0.0, top_k=5, top_p=0.9), 100, None),  # greedy
        (SamplingConfig(top_k=100), 100, None),  # all
        (SamplingConfig(top_k=3), 100, ((3,), jnp.int32)),  # 12 bytes of 13
        (SamplingConfig(top_k=4, min_p=0.1), 100, ((13,), jnp.uint8)),  # 16 bytes
        (SamplingConfig(top_k=50), 151_936, ((50,), jnp.int32)),
        (SamplingConfig(top_p=0.9), 151_936, ((18_992,), jnp.uint8)),
        (SamplingConfig(min_p=0.1, top_k=200), 101, ((13,), jnp.uint8)),
    ],
)
def test_drawable_form_predicts_shape_and_dtype(config: SamplingConfig, vocab: int, expected: Any):
    form = drawable_form(config, vocab)
    assert (None if form is None else (form.shape, form.dtype)) == expected
    drawn = jax.eval_shape(partial(sample, config=config), jnp.zeros((2, vocab)), jnp.zeros(2)).drawable
    assert (None if drawn is None else (drawn.shape[1:], drawn.dtype)) == expected


def test_drawable_ids_are_sorted_and_padded():
    logits = np.full((1, 2000), -np.inf)
    logits[0, [700, 3, 1999]] = [2.0, 5.0, 1.0]
    for min_p, expected in ((0.0, [3, 700, 1999, -1, -1]), (0.04, [3, 700, -1, -1, -1])):
        np.testing.assert_array_equal(draw(logits, [0.5], SamplingConfig(top_k=5, min_p=min_p)).drawable, [expected])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "a finite temperature >= 0; got -0.1"),
        ({"temperature": float("nan")}, "a finite temperature >= 0; got nan"),
        ({"temperature": float("inf")}, "a finite temperature >= 0; got inf"),
        ({"top_k": -1}, r"top_k >= 0, a whole number \(0: no filter\); got -1"),
        ({"top_p": float("nan")}, r"0 < top_p <= 1 \(1: no filter\); got nan"),
        ({"top_p": 0.0}, r"0 < top_p <= 1 \(1: no filter\); got 0.0"),
        ({"top_p": 1.1}, r"0 < top_p <= 1 \(1: no filter\); got 1.1"),
        ({"min_p": -0.1}, r"0 <= min_p <= 1 \(0: no filter\); got -0.1"),
        ({"min_p": 1.1}, r"0 <= min_p <= 1 \(0: no filter\); got 1.1"),
    ],
)
def test_invalid_settings_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**options)


# --- non-finite logits, meshes


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "config",
    [
        SamplingConfig(),
        SamplingConfig(top_k=3),
        SamplingConfig(top_p=0.5),
        SamplingConfig(top_k=3, top_p=0.5, min_p=0.1),
        SamplingConfig(temperature=0.0),
    ],
    ids=str,
)
def test_non_finite_logits_give_ids_of_the_vocabulary(config: SamplingConfig, bad: float):
    """Ids outside of the vocabulary would break later code before the NaN in the log-probabilities is noticed."""
    vocab = 100  # less than a block, so that a block's last index is outside
    drawn = draw(np.full((2, vocab), bad), [0.0, 0.9], config)
    tokens = np.asarray(drawn.tokens)
    assert ((tokens >= 0) & (tokens < vocab)).all()
    assert np.isnan(drawn.logprobs).all()


@pytest.mark.parametrize("config", [SamplingConfig(top_k=5), SamplingConfig(top_p=0.7, min_p=0.02)], ids=str)
def test_a_mesh_gathers_no_logits(config: SamplingConfig):
    """By itself, the compiler would gather the logits of all rows to sort them (openxla/xla#49006)."""
    vocab, mesh = 1000, make_mesh(data=2, fsdp=4)
    rng = np.random.default_rng(0)
    logits, uniforms = rng.normal(size=(16, vocab)).astype(np.float32), rng.random(16, np.float32)
    alone = draw(logits, uniforms, config)
    with jax.set_mesh(mesh):
        program = jax.jit(partial(sample, config=config))
        sharded = shard_batch((jnp.asarray(logits), jnp.asarray(uniforms)), mesh)
        hlo = str(program.lower(*sharded).compile().as_text())
        together = program(*sharded)
    gathered = [int(np.prod([int(n) for n in size.split(",") if n])) for size in GATHERED.findall(hlo)]
    assert max(gathered, default=0) < vocab, f"arrays of these sizes are gathered: {gathered}"
    np.testing.assert_array_equal(together.tokens, alone.tokens)
    np.testing.assert_array_equal(together.drawable, alone.drawable)
    np.testing.assert_allclose(together.logprobs, alone.logprobs, rtol=1e-6)
