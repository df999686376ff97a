"""Interval and segment attention in plain JAX against the float32 reference, and their tables."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import export

from smd_jax.message.masks import NEVER, ShadowMask
from smd_kernels import reference
from smd_kernels.blocks import Blocks, BlockSizes, live_tiles, pad_blocks, tile_order
from smd_kernels.copies import Copies, append_copies, straight_through
from smd_kernels.gpu import MosaicGpuKernel
from smd_kernels.intervals import interval_attention
from smd_kernels.segments import EMPTY, Segments, segment_attention, slot_table
from smd_kernels.tpu import MosaicTpuKernel
from smd_kernels.xla import XlaKernel
from tests.attention_cases import Case, Drawn, evict_at_every_step, expected, masks_of_few_sizes, with_gradients

# Small tiles and groups, so that every loop runs more than once.
SMALL = XlaKernel(BlockSizes(rows=16, keys=8, scores=300))
DEFAULT = XlaKernel()
LARGER = {37, 53}  # numbers of tokens that run with both kernels

PORTABLE = settings(max_examples=24, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def copies_of(case: Case) -> Copies:
    """Different from their keys, so that it matters which one a query sees."""
    rng, (_, k, v, _) = np.random.default_rng(case.seed + 1), case.arrays()
    k, v = (jnp.asarray(np.asarray(x) + rng.normal(size=x.shape).astype(np.float32)) for x in (k, v))
    return Copies(k, v, case.segments.first, case.segments.length)


def by_reference(q: Any, k: Any, v: Any, evicted_at: Any, copies: Copies | None = None) -> Any:
    """Copies are appended as further keys."""
    arrays = k, v, reference.interval_mask(evicted_at)
    return reference.attention(q, *(arrays if copies is None else append_copies(*arrays, copies)))


@cache
def over_intervals(kernel: XlaKernel) -> Any:
    """Cached, so that it compiles once for all masks of a size."""
    return lambda q, k, v, evicted_at, copies=None: interval_attention(q, k, v, evicted_at, kernel, copies)


@cache
def over_segments(segments: Segments, kernel: XlaKernel, blocks_at_once: int) -> Any:
    return lambda q, k, v, evicted_at, copies=None: segment_attention(
        q, k, v, evicted_at, segments, kernel, blocks_at_once, copies
    )


def assert_like_reference(attend: Any, case: Case, has_copies: bool) -> None:
    given = jnp.asarray(case.evicted_at), copies_of(case) if has_copies else None
    got, wanted = (with_gradients(f, case, given=given) for f in (attend, by_reference))
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


with_copies = pytest.mark.parametrize("has_copies", [False, pytest.param(True, marks=pytest.mark.slow)])


@with_copies
@PORTABLE
@given(drawn=masks_of_few_sizes(), whole=st.booleans())
def test_interval_attention(has_copies: bool, drawn: Drawn, whole: bool):
    kernel = DEFAULT if whole and drawn.tokens in LARGER else SMALL
    assert_like_reference(over_intervals(kernel), drawn.case(), has_copies)


@with_copies
@PORTABLE
@given(drawn=masks_of_few_sizes(), whole=st.booleans())
def test_segment_attention(has_copies: bool, drawn: Drawn, whole: bool):
    """One segment at a time, or up to eight."""
    options = (DEFAULT, 100) if whole and drawn.tokens in LARGER else (SMALL, 1 if drawn.tokens % 2 else 8)
    assert_like_reference(over_segments(drawn.segments, *options), drawn.case(), has_copies)


def test_append_copies_by_hand():
    """A prompt of one, segments of two; key 1 is evicted after query 3, and only query 3 sees its copy."""
    zeros = jnp.zeros((1, 1, 5, 1))
    visible = reference.interval_mask(jnp.array([[[9, 4, 9, 9, 9]]], jnp.int32))
    *_, mask = append_copies(zeros, zeros, visible, Copies(zeros, zeros, first=1, length=2))
    own = [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]
    copied = [[0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 1, 0, 0]]
    np.testing.assert_array_equal(mask[0, 0], np.concatenate([own, copied], axis=1))


def test_straight_through():
    """The exact value of the copy, and the gradient of the key."""
    x, copy = jnp.array([1e8, 1.0]), jnp.array([0.1, 0.3])
    out, pull = jax.vjp(straight_through, x, copy)
    np.testing.assert_array_equal(out, copy)
    gradients = pull(jnp.array([2.0, 3.0]))
    assert [g.tolist() for g in gradients] == [[2.0, 3.0], [0.0, 0.0]]


@partial(jax.jit, static_argnums=(1, 2))
def tables(ends: Any, rows: int, keys: int) -> Any:
    """Jitted, because single operations would each compile a program."""
    column = jnp.broadcast_to(jnp.arange(ends.shape[1], dtype=jnp.int32)[None], ends.shape)
    empty = jnp.zeros((*ends.shape, 1))
    blocks = pad_blocks(Blocks(empty, empty, empty, column, column, ends), rows, keys)
    return blocks.column, blocks.born, blocks.evicted_at, live_tiles(blocks, rows, keys)


def test_tree_visits_only_live_tiles():
    """A prompt of 64 with branches of 32 and 16: a query visits its prompt and its own branch, and no tile between."""
    branches = [(64 + 48 * i + start, 64 + 48 * i + end) for i in range(3) for start, end in ((0, 32), (32, 48))]
    ends = np.full((1, 2, 64 + 3 * 48), 64 + 3 * 48, np.int32)
    for start, end in branches:
        ends[..., start:end] = end
    case = Case(4, 8, Segments(1, 1, 1), ends, 0)
    got = with_gradients(over_intervals(SMALL), case, given=(jnp.asarray(ends),))
    for x, y in zip(got, expected(case), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)

    column, born, evicted_at, live = jax.device_get(tables(jnp.asarray(ends[0]), 16, 8))
    visible = (born[:, None] <= column[:, :, None]) & (column[:, :, None] < evicted_at[:, None])
    tiles = visible.reshape(2, 13, 16, 26, 8).any((2, 4))
    np.testing.assert_array_equal(live, tiles)
    count, order = tile_order(jnp.asarray(live))
    for row in range(13):
        assert order[row, : count[row]].tolist() == np.flatnonzero(tiles[0, row]).tolist()
    assert count[-1] == 8 + 2, "the prompt's tiles and its own"


CASE = Case(4, 64, Segments(5, 6, 7), evict_at_every_step((2, 2, 41), (3, 0), 7, 0), 1)
FORMS = {
    "interval": lambda q, k, v: interval_attention(q, k, v, jnp.asarray(CASE.evicted_at), SMALL),
    "segments": lambda q, k, v: segment_attention(q, k, v, jnp.asarray(CASE.evicted_at), CASE.segments, SMALL, 8),
}


def test_copies_have_no_gradient():
    q, k, v, d_out = CASE.arrays()
    copies, evicted_at = copies_of(CASE), jnp.asarray(CASE.evicted_at)
    for attend in (by_reference, over_intervals(SMALL), over_segments(CASE.segments, SMALL, 8)):
        loss = jax.jit(jax.grad(lambda c, attend=attend: jnp.sum(attend(q, k, v, evicted_at, c) * d_out)))
        assert not any(np.asarray(x).any() for x in jax.tree.leaves(loss(copies)))


@pytest.mark.parametrize("form", FORMS)
def test_float64_matches_the_reference(form: str):
    with jax.enable_x64(True):
        exact = with_gradients(by_reference, CASE, np.float64, (jnp.asarray(CASE.evicted_at),))
        for x, y in zip(with_gradients(FORMS[form], CASE, np.float64), exact, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-13)


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_matches_the_reference(form: str):
    """Within the rounding of inputs, weights and results; gradients are summed in float32."""
    got = with_gradients(FORMS[form], CASE, jnp.bfloat16)
    for x, y in zip(got, expected(CASE), strict=True):
        np.testing.assert_allclose(x, y, atol=2**-6 * np.abs(y).max())


@pytest.mark.parametrize("form", FORMS)
def test_fully_masked_rows_are_exactly_zero(form: str):
    out, dq, _, _ = with_gradients(FORMS[form], CASE, jnp.bfloat16)
    assert not out[0, :, :3].any() and not dq[0, :, :3].any() and out[0, :, 3].any()


@pytest.mark.parametrize("form", FORMS)
def test_memory_grows_linearly_with_the_length(form: str):
    """From the compiled programs, forward and backward: four times the tokens, at most 4.5 times the memory."""

    def temporary(tokens: int) -> int:
        evicted_at = jnp.full((1, 2, tokens), NEVER, jnp.int32)
        attend = partial(interval_attention, evicted_at=evicted_at, kernel=DEFAULT)
        if form == "segments":
            attend = partial(segment_attention, evicted_at=evicted_at, segments=Segments(0, 64, 128), kernel=DEFAULT)
        arrays = [jax.ShapeDtypeStruct((1, 2, tokens, 64), jnp.float32)] * 3
        run = jax.jit(jax.grad(lambda q, k, v: attend(q, k, v).sum(), argnums=(0, 1, 2)))
        memory: Any = run.lower(*arrays).compile().memory_analysis()
        return memory.temp_size_in_bytes

    assert temporary(8192) <= 4.5 * temporary(2048)


def test_invalid_segments_raise():
    with pytest.raises(ValueError, match=r"expected first >= 0, length >= 1 and budget >= 1; got Segments\(first=0"):
        Segments(0, 0, 4)
    with pytest.raises(ValueError, match="expected rows >= 1, a whole number; got 0"):
        BlockSizes(rows=0)
    mask = ShadowMask(jnp.full((1, 2, 1, 9), NEVER, jnp.int32))
    with pytest.raises(ValueError, match=r"at most 4 earlier keys visible at column 6 .*; got 6 \(batch 0, layer 0"):
        mask.with_segments((Segments(3, 3, 4),))
    with pytest.raises(ValueError, match="expected segments of 1 or 2 layers; got 3"):
        mask.with_segments((Segments(3, 3, 9),) * 3)
    assert mask.with_segments((Segments(3, 3, 9),)).layer(1).segments == Segments(3, 3, 9)


def window(tokens: int, width: int) -> jax.Array:
    """`evicted_at` where every query sees its own key and the `width` keys before."""
    return jnp.asarray(np.arange(tokens, dtype=np.int32)[None] + width + 1)


@pytest.mark.parametrize("tokens", [31, 32, 33, 63])
def test_slot_table_of_one_reused_slot(tokens: int):
    """The longest possible chain of predecessors, `tokens - 1`, takes as many doublings as its length has bits."""
    slot, kept = map(np.asarray, jax.jit(slot_table, static_argnums=1)(window(tokens, 1), Segments(0, 1, 1)))
    np.testing.assert_array_equal(kept[0, :, 0], [EMPTY, *range(tokens - 1)])
    np.testing.assert_array_equal(slot[0, :-1], 0)


@pytest.mark.parametrize("count", [32, 33, 64])
def test_groups_of_segments_are_balanced(count: int):
    """33 segments in groups of 32 are two of 17, not one of 32 and 31 of padding."""
    block_counts = []

    class RecordingKernel(XlaKernel):
        def forward(self, blocks: Blocks) -> Any:
            block_counts.append(blocks.q.shape[0])
            return super().forward(blocks)

    q = jnp.ones((1, 1, 2 * count, 8))
    forever = jnp.full((1, 1, 2 * count), NEVER, jnp.int32)
    attend = partial(segment_attention, segments=Segments(0, 2, 4), kernel=RecordingKernel(), blocks_at_once=32)
    jax.eval_shape(lambda q: attend(q, q, q, forever), q)
    assert set(block_counts) == {{32: 32, 33: 17, 64: 32}[count]}


def test_prompt_without_response():
    """Segments begin after the last token."""
    q, k, v, _ = CASE.arrays()
    ends = jnp.asarray(CASE.evicted_at)
    got = jax.jit(partial(segment_attention, segments=Segments(50, 4, 7), kernel=SMALL))(q, k, v, ends)
    np.testing.assert_allclose(got, reference.attention(q, k, v, reference.interval_mask(ends)), atol=1e-6)


def test_under_vmap():
    q, k, v, _ = CASE.arrays()
    ends = jnp.asarray(CASE.evicted_at)
    for attend in (
        partial(interval_attention, kernel=SMALL),
        partial(segment_attention, segments=CASE.segments, kernel=SMALL),
    ):
        one = jax.jit(jax.vmap(lambda *x, attend=attend: attend(*(y[None] for y in x))[0]))(q, k, v, ends)
        np.testing.assert_allclose(one, jax.jit(attend)(q, k, v, ends), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "platform"), [(MosaicGpuKernel(), "cuda"), (MosaicTpuKernel(), "tpu")])
def test_export_with_gradients(kernel: Any, platform: str):
    """Gathers, kernels and sums along slots lower without the device."""
    segments = Segments(100, 64, 128)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, evicted_at: jax.Array) -> jax.Array:
        out = segment_attention(q, k, v, evicted_at, segments=segments, kernel=kernel)
        return out.astype(jnp.float32).sum()

    q, k = (jax.ShapeDtypeStruct((1, heads, 1000, 64), jnp.bfloat16) for heads in (4, 2))
    evicted_at = jax.ShapeDtypeStruct((1, 2, 1000), jnp.int32)
    exported = export.export(jax.jit(jax.grad(loss, argnums=(0, 1, 2))), platforms=[platform])(q, k, k, evicted_at)
    assert "mosaic_gpu" in exported.mlir_module() or "tpu_custom_call" in exported.mlir_module()
