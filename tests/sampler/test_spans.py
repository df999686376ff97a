"""Evictions of spans that a token triggers: sampled, replayed exactly, and equal in a batch and an engine."""

import itertools
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smd_jax.eviction.base import EvictionPolicy
from smd_jax.eviction.policies import H2O, Dense, Knorm, LearnedGate, SnapKV
from smd_jax.eviction.wrappers import OnTokens, Protect
from smd_jax.message.masks import NEVER, ShadowMask
from smd_jax.message.quantization import QuantConfig
from smd_jax.message.spans import TokenSpans
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.decoder import Decoder
from smd_jax.sampler.engine import Engine
from smd_jax.sampler.fixed_batch import RolloutConfig, rollout
from smd_jax.sampler.static import Sampler
from smd_jax.testing import tiny_model_config
from tests.under_test import eviction_times, gap, left_padded, make_params

# A small vocabulary, so that random weights often sample the marker tokens.
SHAPE = tiny_model_config(vocab_size=8, tie_embeddings=False)
MODEL = Decoder(SHAPE)
MEMENTO = TokenSpans(open=3, close=4, summary=(5, 6))
FOLD = TokenSpans(open=3, close=4, delimiters=True)
SIZES = RolloutConfig(max_new_tokens=96, budget=14, buffer=6)
LENGTHS, WIDTH = [20, 9, 15, 4], 20
LIMITS = np.array([96, 41, 96, 60])  # rows end at different times


@partial(jax.jit, static_argnums=0)
def span_evictions(spans: TokenSpans, tokens: Any, columns: Any) -> jax.Array:
    """`evicted_at` of whole rows."""
    return spans.read(spans.begin(len(tokens)), tokens, columns, tokens.shape[1])[1]


@cache
def sampled(policy: EvictionPolicy, sizes: RolloutConfig = SIZES, engine: bool = False) -> Trajectory:
    prompts, key = left_padded(LENGTHS, WIDTH, 8), jax.random.key(1)
    if engine:
        two_rows = Engine(MODEL, policy, sizes, decode_rows=2, prefill_rows=3)
        return two_rows.run(make_params(SHAPE), prompts, key, limits=LIMITS).trajectory
    return rollout(MODEL, make_params(SHAPE), prompts, key, policy=policy, config=sizes, limits=LIMITS)


def by_hand(spans: TokenSpans, tokens: list[int]) -> list[int]:
    """`evicted_at` of one row without padding, token by token."""
    evicted_at = [NEVER] * len(tokens)
    opened: int | None = None
    closed: range | None = None
    summarising = False
    for query, token in enumerate(tokens):
        evicts = False
        if token == spans.close and opened is not None:
            closed = range(opened, query + 1) if spans.delimiters else range(opened + 1, query)
            opened, summarising, evicts = None, False, spans.summary is None
        elif token == spans.open:
            opened = query
        elif spans.summary is not None and token == spans.summary[0] and closed is not None:
            summarising = True
        elif spans.summary is not None and token == spans.summary[1]:
            evicts, summarising = summarising, False
        if evicts and closed is not None:
            for key in closed:
                evicted_at[key] = query if key < query else NEVER
            closed = None
    return evicted_at


def expected_spans(spans: TokenSpans, trajectory: Trajectory) -> np.ndarray:
    """`evicted_at` by spans alone, `[rows, T]`."""
    tokens, valid = np.asarray(trajectory.tokens), np.asarray(trajectory.valid)
    evicted_at = np.full(tokens.shape, NEVER, np.int64)
    for row in range(len(tokens)):
        columns = np.flatnonzero(valid[row])
        positions = np.array(by_hand(spans, tokens[row, columns].tolist()))
        evicted_at[row, columns] = np.where(positions < NEVER, positions + columns[0], NEVER)
    return evicted_at


IN_CHUNKS = replace(SIZES, prefill_chunk=5)
CASES = [
    pytest.param(OnTokens(FOLD), replace(SIZES, prefill_chunk=1), id="fold, a token at a time"),
    pytest.param(OnTokens(MEMENTO, inner=SnapKV(window=4, kernel=3)), SIZES, id="Memento and SnapKV"),
    pytest.param(Protect(OnTokens(FOLD, inner=H2O()), sinks=1), IN_CHUNKS, id="fold and H2O in chunks"),
]


@pytest.mark.parametrize(("policy", "sizes"), CASES)
def test_identity(policy: EvictionPolicy, sizes: RolloutConfig):
    """The learner replays spans and budget evictions together; spans evicted one query late miss."""
    trajectory, spans = sampled(policy, sizes), policy.spans
    assert spans is not None
    span_end = expected_spans(spans, trajectory)
    assert (span_end[:, WIDTH:] < NEVER).sum() > 9 and (span_end[:, :WIDTH] < WIDTH).any(), "choose another key"
    times = eviction_times(trajectory)
    assert (times <= span_end[:, None, None]).all()
    assert gap(MODEL, trajectory).max() <= 2e-5
    evicts = policy.evicts
    if evicts:
        trajectory.mask.with_segments(trajectory.mask.segments)  # raises unless the mask fits its segments
        assert (times < span_end[:, None, None]).any(), "the budget evicted nothing"
    else:
        np.testing.assert_array_equal(times[:, 0, 0], np.where(np.asarray(trajectory.valid), span_end, 0))
    late = np.where(span_end < NEVER, span_end + 1, NEVER)[:, None, None]
    late = np.where(times == span_end[:, None, None], late, times)
    assert gap(MODEL, trajectory, ShadowMask(jnp.asarray(late, jnp.int32))).max() > 1e-3


def test_evicted_spans_leave_no_holes_between_slots():
    """The newest keys are in the last slots, although spans between them were evicted."""
    trajectory = sampled(OnTokens(FOLD, inner=Protect(Knorm(), recent=4)))
    span_end, times = expected_spans(FOLD, trajectory), eviction_times(trajectory)
    holes = 0
    for row, boundary in itertools.product(range(len(LENGTHS)), range(WIDTH, WIDTH + 41, SIZES.buffer)):
        live = np.flatnonzero(np.asarray(trajectory.valid)[row, :boundary] & (span_end[row, :boundary] > boundary))
        newest = live[-4:]
        holes += int(boundary - newest[0] > 4)
        assert (times[row, :, :, newest] > boundary).all()
    assert holes > 3, "choose another key"


@pytest.mark.slow
def test_an_engine_equals_a_fixed_batch():
    policy = OnTokens(MEMENTO, inner=SnapKV(window=4, kernel=3))
    one, other = sampled(policy), sampled(policy, engine=True)
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(eviction_times(one), eviction_times(other))


IDS = st.lists(st.integers(2, 8), min_size=1, max_size=24)


@settings(deadline=None)
@given(tokens=IDS, pad=st.integers(0, 3), spans=st.sampled_from([MEMENTO, FOLD, replace(MEMENTO, delimiters=True)]))
def test_spans_of_any_tokens(tokens: list[int], pad: int, spans: TokenSpans):
    width = 27
    row = np.full((1, width), 3, np.int32)  # padding with the id of a marker
    row[0, pad : pad + len(tokens)] = tokens
    columns = np.full((1, width), -1, np.int32)
    columns[0, pad : pad + len(tokens)] = np.arange(pad, pad + len(tokens))
    span_end = np.array(by_hand(spans, tokens))
    expected = np.full(width, NEVER)
    expected[pad : pad + len(tokens)] = np.where(span_end < NEVER, span_end + pad, NEVER)
    np.testing.assert_array_equal(span_evictions(spans, row, columns)[0], expected)


def test_invalid_spans_are_refused():
    with pytest.raises(ValueError, match="expected different token ids"):
        TokenSpans(open=3, close=3)
    with pytest.raises(ValueError, match="expected token ids below 8"):
        Sampler(MODEL, OnTokens(TokenSpans(open=3, close=8)), SIZES, WIDTH)
    with pytest.raises(ValueError, match="expected a policy without draws"):
        Sampler(MODEL, OnTokens(FOLD, inner=LearnedGate()), SIZES, WIDTH)
    with pytest.raises(ValueError, match="expected an inner policy without spans"):
        OnTokens(FOLD, inner=Protect(OnTokens(TokenSpans(open=5, close=6), inner=Knorm()), sinks=1))
    with pytest.raises(ValueError, match="expected quant None with token spans"):
        Sampler(MODEL, OnTokens(FOLD, inner=Dense()), replace(SIZES, quant=QuantConfig(bits=8, group=6)), WIDTH)
