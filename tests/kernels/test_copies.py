"""Keys that later segments see as copies: interval and segment attention against booleans over twice as many keys."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smd_kernels import reference
from smd_kernels.blocks import BlockSizes
from smd_kernels.copies import Copies, append_copies, straight_through
from smd_kernels.intervals import interval_attention
from smd_kernels.segments import Segments, segment_attention
from smd_kernels.xla import XlaKernel
from tests.attention_cases import Case, Drawn, evict_at_every_step, masks_of_few_sizes, with_gradients

# Tiles and groups far smaller than the problems, so that every loop goes round more than once.
SMALL = XlaKernel(BlockSizes(rows=16, keys=8, scores=300))
LARGER = {37, 53}  # tokens of the sizes that run in the default tiles, too
PORTABLE = settings(max_examples=24, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def copies_of(case: Case, dtype: Any = np.float32) -> Copies:
    """Far from their keys, so that it matters which is seen."""
    rng, (_, k, v, _) = np.random.default_rng(case.seed + 1), case.arrays(dtype)
    k, v = (jnp.asarray(np.asarray(x) + rng.normal(size=x.shape).astype(dtype)) for x in (k, v))
    return Copies(k, v, case.segments.first, case.segments.length)


def by_reference(q: Any, k: Any, v: Any, evicted_at: Any, copies: Copies) -> Any:
    return reference.attention(q, *append_copies(k, v, reference.interval_mask(evicted_at), copies))


@cache
def over_intervals(kernel: XlaKernel) -> Any:
    """One function for every kernel, so that it is compiled once for all masks of a size."""
    return lambda q, k, v, evicted_at, copies: interval_attention(q, k, v, evicted_at, kernel, copies)


@cache
def over_segments(segments: Segments, kernel: XlaKernel, blocks_at_once: int) -> Any:
    return lambda q, k, v, evicted_at, copies: segment_attention(
        q, k, v, evicted_at, segments, kernel, blocks_at_once, copies
    )


def test_ends_by_hand():
    ends = Copies(jnp.zeros((8, 1)), jnp.zeros((8, 1)), first=3, length=2).ends(8)
    assert ends.tolist() == [3, 3, 3, 5, 5, 7, 7, 9]


def test_append_copies_by_hand():
    """A prompt of one, segments of two; key 1 is evicted after query 3, which alone sees its copy."""
    zeros = jnp.zeros((1, 1, 5, 1))
    visible = reference.interval_mask(jnp.array([[[9, 4, 9, 9, 9]]], jnp.int32))
    *_, seen = append_copies(zeros, zeros, visible, Copies(zeros, zeros, first=1, length=2))
    own = [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]
    copied = [[0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 1, 0, 0]]
    np.testing.assert_array_equal(seen[0, 0], np.concatenate([own, copied], axis=1))


def test_straight_through():
    """The value of the copy to the last bit, the gradient of the key."""
    x, copy = jnp.array([1e8, 1.0]), jnp.array([0.1, 0.3])
    out, pull = jax.vjp(straight_through, x, copy)
    np.testing.assert_array_equal(out, copy)
    gradients = pull(jnp.array([2.0, 3.0]))
    assert [g.tolist() for g in gradients] == [[2.0, 3.0], [0.0, 0.0]]


@pytest.mark.slow
@PORTABLE
@given(masks_of_few_sizes(), st.booleans())
def test_interval_attention(drawn: Drawn, whole: bool):
    case, kernel = drawn.case(), XlaKernel() if whole and drawn.tokens in LARGER else SMALL
    masked = jnp.asarray(case.evicted_at), copies_of(case)
    got, expected = (with_gradients(f, case, given=masked) for f in (over_intervals(kernel), by_reference))
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


@pytest.mark.slow
@PORTABLE
@given(masks_of_few_sizes(), st.booleans())
def test_segment_attention(drawn: Drawn, whole: bool):
    """One segment at a time, or up to eight."""
    case = drawn.case()
    how = (XlaKernel(), 100) if whole and drawn.tokens in LARGER else (SMALL, 1 if drawn.tokens % 2 else 8)
    masked = jnp.asarray(case.evicted_at), copies_of(case)
    got, expected = (with_gradients(f, case, given=masked) for f in (over_segments(case.segments, *how), by_reference))
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


CASE = Case(4, 64, Segments(5, 6, 7), evict_at_every_step((2, 2, 41), (3, 0), 7, 0), 1)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["interval", "segments"])
def test_float64(form: str):
    with jax.enable_x64(True):
        copies, evicted_at = copies_of(CASE, np.float64), jnp.asarray(CASE.evicted_at)
        visible = reference.interval_mask(evicted_at)

        def attend(q: Any, k: Any, v: Any) -> Any:
            if form == "interval":
                return interval_attention(q, k, v, evicted_at, SMALL, copies)
            return segment_attention(q, k, v, evicted_at, CASE.segments, SMALL, 8, copies)

        got = with_gradients(attend, CASE, np.float64)
        want = with_gradients(
            lambda q, k, v: reference.attention(q, *append_copies(k, v, visible, copies)), CASE, np.float64
        )
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-13)


def test_copies_have_no_gradient_of_their_own():
    """In all three forms: it is the key's."""
    q, k, v, d_out = CASE.arrays()
    copies, evicted_at = copies_of(CASE), jnp.asarray(CASE.evicted_at)
    visible = reference.interval_mask(evicted_at)
    forms = (
        lambda c: reference.attention(q, *append_copies(k, v, visible, c)),
        lambda c: interval_attention(q, k, v, evicted_at, SMALL, c),
        lambda c: segment_attention(q, k, v, evicted_at, CASE.segments, SMALL, 8, c),
    )
    for form in forms:
        gradients = jax.jit(jax.grad(lambda c, form=form: jnp.sum(form(c) * d_out)))(copies)
        assert not any(np.asarray(x).any() for x in jax.tree.leaves(gradients))
