"""TPU kernels: interpreted against the reference, skipped tiles, and export for a TPU."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from smd_kernels import tpu_walk
from smd_kernels.blocks import BlockKernel, Blocks, BlockSizes, even
from smd_kernels.hardware import TPU_SIZES, why_not_blocks
from smd_kernels.intervals import interval_attention
from smd_kernels.segments import segment_attention
from smd_kernels.tpu import MosaicTpuKernel
from tests import races
from tests.attention_cases import (
    FEW_SIZES,
    Drawn,
    Result,
    blocks_by_reference,
    by_kernel,
    expected,
    seen_by_each,
    with_gradients,
)

KERNEL = MosaicTpuKernel(BlockSizes(), interpret=True)
COLUMNS = 300  # query columns are below this
SHAPES = {  # blocks, rows, keys, head_dim
    "less than a tile": (2, 5, 3, 64),
    "whole tiles": (1, 256, 128, 128),
    "odd sizes": (2, 150, 301, 128),
    "one row": (2, 1, 129, 64),
}


def random_blocks(shape: tuple[int, ...], dtype: Any = jnp.float32) -> Blocks:
    """Random intervals, some empty. Row 1 is padding; row 2 has column 0, where no key is born yet."""
    count, rows, keys, head_dim = shape
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(count, n, head_dim)), dtype) for n in (rows, keys, keys))
    column = rng.integers(1, COLUMNS, size=(count, rows))
    column[:, 1:2], column[:, 2:3] = -1, 0
    born = rng.integers(1, COLUMNS, size=(count, keys))
    evicted_at = born + rng.integers(-5, COLUMNS, size=(count, keys))
    evicted_at[rng.random((count, keys)) < 0.2] = 0
    column, born, evicted_at = (jnp.asarray(x, jnp.int32) for x in (column, born, evicted_at))
    return Blocks(q, k, v, column, born, evicted_at)


def cotangent(blocks: Blocks) -> jax.Array:
    return jnp.asarray(np.random.default_rng(9).normal(size=blocks.q.shape), blocks.q.dtype)


def assert_like_reference(kernel: BlockKernel, blocks: Blocks) -> Result:
    d_out = cotangent(blocks)
    got, expected = by_kernel(kernel, blocks, d_out), blocks_by_reference(blocks, d_out)
    # bfloat16 has 8 bits: weights and the gradients of scores are rounded to it before the second products.
    tolerance = 3e-2 if blocks.q.dtype == jnp.bfloat16 else 2e-5
    for name, x, y in zip(Result._fields, got, expected, strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y)
        finite = np.isfinite(y)
        np.testing.assert_array_equal(np.isposinf(x), ~finite, err_msg=name)
        np.testing.assert_allclose(x[finite], y[finite], atol=tolerance, rtol=tolerance, err_msg=name)
    return got


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "dtype"), [*((shape, jnp.float32) for shape in SHAPES), ("odd sizes", jnp.bfloat16)])
def test_kernel_matches_the_reference(shape: str, dtype: Any):
    got = assert_like_reference(KERNEL, random_blocks(SHAPES[shape], dtype))
    assert [x.dtype for x in got] == [dtype, jnp.float32, dtype, jnp.float32, jnp.float32]


def test_no_races_and_no_unwritten_memory():
    """Two tiles of rows by two of keys, shared by two cores."""
    with races.forbidden():
        assert_like_reference(MosaicTpuKernel(BlockSizes(), races.STRICT_TPU), random_blocks((1, 150, 200, 64)))


def test_passes_have_their_own_tile_sizes():
    """A tile size of 200 is rounded up to 256."""
    sizes = BlockSizes(rows=128, keys=256, rows_dq=200, keys_dq=128, rows_dkv=384, keys_dkv=128, stages=1)
    assert_like_reference(MosaicTpuKernel(sizes, interpret=True), random_blocks((1, 380, 270, 64)))


def test_blocks_have_their_own_live_tiles():
    """Most tiles are dead. Block 1 has reversed keys, block 2 reversed rows, block 3 only padding."""
    blocks = random_blocks((4, 600, 300, 64))
    rows, keys = jnp.repeat(jnp.arange(300, dtype=jnp.int32), 2), jnp.arange(300, dtype=jnp.int32)
    column, born = jnp.stack([rows, rows, rows[::-1], 0 * rows - 1]), jnp.stack([keys, keys[::-1], keys, keys])
    assert_like_reference(KERNEL, blocks._replace(column=column, born=born, evicted_at=born + 40))


def test_large_negative_scores():
    """About -1000, so that softmax must subtract the maximum of the visible scores."""
    blocks = random_blocks((1, 130, 140, 64))
    shifted = blocks._replace(q=10 + 0.1 * blocks.q, k=-12.5 + 0.1 * blocks.k)
    got, expected = (f(shifted, cotangent(shifted)) for f in (partial(by_kernel, KERNEL), blocks_by_reference))
    np.testing.assert_array_equal(np.isfinite(got.lse), np.isfinite(expected.lse))
    np.testing.assert_allclose(got.out, expected.out, atol=1e-3)  # scores of 1000 have an error of 1e-4 themselves


def test_fully_masked_rows_and_unseen_keys_are_exactly_zero():
    blocks = random_blocks((2, 150, 301, 128))
    mask = seen_by_each(blocks)
    masked, unseen = ~mask.any(2), ~mask.any(1)
    assert masked.any() and unseen.any()
    got = by_kernel(KERNEL, blocks, cotangent(blocks))
    assert jnp.all(got.lse[masked] == jnp.inf)
    for x in (got.out[masked], got.dq[masked], got.dk[unseen], got.dv[unseen]):
        np.testing.assert_array_equal(x, 0.0)


def test_dead_tiles_are_not_computed():
    """NaN there would spread, because 0 * NaN is NaN. Tile 1 is between live tiles, tile 3 after them."""
    blocks = random_blocks((1, 128, 512, 64))
    tile = jnp.arange(512)[None] // 128
    born = jnp.array([0, 500, 0, 500])[tile]
    dead = born == 500
    blocks = blocks._replace(born=born, evicted_at=jnp.full_like(born, 600))
    poisoned = blocks._replace(
        k=jnp.where(dead[..., None], jnp.nan, blocks.k), v=jnp.where(dead[..., None], jnp.inf, blocks.v)
    )
    clean, got = (by_kernel(KERNEL, x, cotangent(blocks)) for x in (blocks, poisoned))
    for x, y in zip(got, clean, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("rows_outside", [True, False])
def test_dead_tiles_are_not_fetched(rows_outside: bool):
    """Outer tile 0 has no live inner tile. Outer tile 1 has 1 and 2 in one block, and 1, 4 and 5 in the other, where
    dead tiles fetch the last live one."""
    live = np.zeros((2, 2, 6), bool)
    live[0, 1, [1, 2]] = live[1, 1, [1, 4, 5]] = True
    if rows_outside:  # row tile 0 is padding
        column = np.where(live.any(2), 50, -1)
        born = np.where(live[:, 1], 20, 90)
    else:  # the keys of key tile 0 are born after every row
        column = np.where(live[:, 1], 50, 10)
        born = np.where(live.any(2), 20, 90)
    x = jnp.zeros((2, 1, 64))
    column, born = (jnp.asarray(np.repeat(x, 128, axis=1), jnp.int32) for x in (column, born))
    blocks = Blocks(x, x, x, column, born, born + 1000)
    walk = tpu_walk.Walk(128, 128, *((2, 6) if rows_outside else (6, 2)), rows_outside=rows_outside, stages=2)
    table = tpu_walk.spans(blocks, 128, 128, rows_outside=rows_outside)
    index_map: Any = walk.matrix(not rows_outside, 64).index_map
    fetched = [[[int(index_map(n, i, j, table)[1]) for j in range(6)] for i in range(2)] for n in range(2)]
    assert fetched == [[[0] * 6, [1, 1, 2, 2, 2, 2]], [[0] * 6, [1, 1, 5, 5, 4, 5]]]


def test_even_tiles():
    """1,152 keys in tiles of at most 512 are three of 384, not two and a quarter."""
    assert [even(n, 512, 128) for n in (1152, 1024, 100, 513)] == [384, 512, 128, 384]


@pytest.mark.parametrize("sizes", [BlockSizes(), TPU_SIZES], ids=["default sizes", "TPU sizes"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_export_for_tpu(dtype: Any, sizes: BlockSizes):
    blocks = jax.eval_shape(lambda: random_blocks((16, 1024, 1152, 128), dtype))
    exported = export.export(jax.jit(partial(by_kernel, MosaicTpuKernel(sizes))), platforms=["tpu"])(blocks, blocks.q)
    assert exported.mlir_module().count("@tpu_custom_call") == 3


def test_unsupported_inputs_raise():
    assert why_not_blocks("mosaic_tpu", jnp.bfloat16, 128) is None
    assert why_not_blocks("mosaic_tpu", jnp.float32, 64) is None
    assert "bfloat16 or float32; got float16" in str(why_not_blocks("mosaic_tpu", jnp.float16, 128))
    assert "expected head_dim in (64, 128); got 96" in str(why_not_blocks("mosaic_tpu", jnp.float32, 96))
    with pytest.raises(ValueError, match="stages to be 1 or 2; got 3"):
        MosaicTpuKernel(BlockSizes(stages=3))
    shapes = jax.eval_shape(lambda: random_blocks((1, 1024, 1152, 128)))
    many = jax.tree.map(lambda x: jax.ShapeDtypeStruct((5243, *x.shape[1:]), x.dtype), shapes)
    # More blocks than scalar memory has tables for run in groups; a single block that is too long raises.
    assert jax.eval_shape(KERNEL.forward, many)[0].shape == (5243, 1024, 128)
    short = jax.eval_shape(lambda: random_blocks((1, 1024, 128, 128)))
    # Only shapes: drawing random blocks of 8 million rows would take a minute.
    rows_of_long = {1024: 2**23}
    long = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct([rows_of_long.get(side, side) for side in x.shape], x.dtype), short
    )
    with pytest.raises(ValueError, match="1 blocks of 65536 row tiles and 1 key tiles need"):
        jax.eval_shape(MosaicTpuKernel(BlockSizes(), interpret=True).forward, long)
    with pytest.raises(ValueError, match="expected bfloat16 or float32; got float16"):
        jax.eval_shape(KERNEL.forward, jax.eval_shape(lambda: random_blocks((1, 8, 8, 64), jnp.float16)))
    small = random_blocks((1, 8, 8, 64))
    with pytest.raises(ValueError, match="expected q, k and v of one dtype; got float32, bfloat16, float32"):
        KERNEL.forward(small._replace(k=small.k.astype(jnp.bfloat16)))
    with jax.enable_x64(True), pytest.raises(ValueError, match="expected jax_enable_x64 False"):
        KERNEL.forward(small)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "over_segments"), [(3, False), (4, True), (5, True)])
def test_learner_calls_match_the_reference(size: int, over_segments: bool):
    """Three masks of each size, with and without segments."""
    shape, tokens, head_dim, segments = FEW_SIZES[size]

    def attend(q: Any, k: Any, v: Any, evicted_at: Any) -> Any:
        if over_segments:
            return segment_attention(q, k, v, evicted_at, segments=segments, kernel=KERNEL)
        return interval_attention(q, k, v, evicted_at, kernel=KERNEL)

    for seed, every_step in enumerate((True, False, True)):
        padding = (0, 17 * seed)[-shape[0] :]
        case = Drawn(shape, tokens, head_dim, segments, padding, every_step, seed).case()
        got = with_gradients(attend, case, given=(jnp.asarray(case.evicted_at),))
        for x, y in zip(got, expected(case), strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=2e-5)
