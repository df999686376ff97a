"""Mosaic GPU kernel without a GPU: interpreted against the reference, and lowered for CUDA."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from bench.engines.kernel_checks import random_blocks
from smd_kernels import gpu_tiles
from smd_kernels.blocks import Blocks, BlockSizes
from smd_kernels.gpu import MosaicGpuKernel
from smd_kernels.hardware import why_not_blocks
from smd_kernels.intervals import interval_attention
from smd_kernels.segments import Segments, segment_attention
from tests import races
from tests.attention_cases import (
    Case,
    Result,
    blocks_by_reference,
    by_kernel,
    evict_at_every_step,
    seen_by_each,
    with_gradients,
)
from tests.attention_cases import expected as expected_of


@pytest.fixture(autouse=True)
def no_races():
    with races.forbidden():
        yield


# Few cases, because the interpreter recompiles every pass: two warpgroups, ring buffers that wrap, several tiles of
# rows and keys, and lengths that fill no tile.
CASES = {
    "two warpgroups": (BlockSizes(keys=64, keys_dq=64, rows_dkv=64), (2, 100, 150, 64), "bfloat16"),
    "small tiles": (BlockSizes(64, 64, 64, 64, 64, 64), (1, 70, 100, 128), "float16"),
}


@cache
def results(case: str):
    sizes, shape, dtype = CASES[case]
    blocks, d_out = random_blocks(*shape, dtype)
    kernel = MosaicGpuKernel(sizes, races.STRICT_GPU)
    return kernel, blocks, d_out, by_kernel(kernel, blocks, d_out)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_match_the_reference(case):
    _, blocks, d_out, got = results(case)
    assert [x.dtype for x in got] == [blocks.q.dtype, jnp.float32, blocks.q.dtype, jnp.float32, jnp.float32]
    for name, value, expected in zip(Result._fields, got, blocks_by_reference(blocks, d_out), strict=True):
        # NumPy, because XLA's maximum on CPU ignores NaN.
        value, expected = np.asarray(value, np.float32), np.asarray(expected)
        # Weights and outputs are rounded to 8 bits (bfloat16).
        limit = 1e-5 if name == "lse" else 6e-3 * np.abs(expected).max()
        np.testing.assert_allclose(value, expected, rtol=0, atol=limit, err_msg=name)


@pytest.mark.parametrize("case", [pytest.param("two warpgroups", marks=pytest.mark.slow), "small tiles"])
def test_fully_masked_rows_and_unseen_keys_are_exactly_zero(case):
    _, blocks, _, (out, lse, dq, dk, dv) = results(case)
    seen = np.asarray(seen_by_each(blocks))
    masked, unseen = ~seen.any(2), ~seen.any(1)
    assert masked.any() and unseen.any()
    for value, where in ((out, masked), (dq, masked), (dk, unseen), (dv, unseen)):
        assert not np.asarray(value)[where].any()
    np.testing.assert_array_equal(np.isinf(lse), masked)


def with_gaps() -> tuple[Blocks, np.ndarray]:
    """Three tiles of 64 rows and keys, and `live[row_tile, key_tile]`. Row tile 0 and key tile 0 have a dead tile
    between live ones, as trees have between a branch and its beginning."""
    (q, k, v, *_), _ = random_blocks(1, 192, 192, 64, "bfloat16")
    column, born, evicted_at = (
        jnp.repeat(jnp.array([x], jnp.int32), 64, axis=1) for x in ([10, 50, 12], [0, 40, 0], [20, 60, 100])
    )
    return Blocks(q, k, v, column, born, evicted_at), np.array([[1, 0, 1], [0, 1, 1], [1, 0, 1]], bool)


def test_walks_skip_dead_tiles():
    blocks, live = with_gaps()
    for of_keys, expected in ((False, live), (True, live.T)):
        (table,) = np.asarray(gpu_tiles.walks(blocks, 64, 64, of_keys=of_keys))
        visited = [sorted(order[:steps]) for _, steps, *order in table.tolist()]
        assert visited == [np.flatnonzero(x).tolist() for x in expected]
        assert (table[:, 0] == table[:, 1]).all(), "every row of a live tile sees every key: no mask is computed"


@pytest.mark.slow
def test_dead_tiles_between_live_ones_are_not_computed():
    """NaN in dead tiles would spread, because 0 * NaN is NaN."""
    blocks, live = with_gaps()
    d_out = jnp.asarray(np.random.default_rng(1).standard_normal(blocks.q.shape), blocks.q.dtype)
    kernel = MosaicGpuKernel(BlockSizes(64, 64, 64, 64, 64, 64), races.STRICT_GPU)
    middle = (jnp.arange(192) // 64 == 1)[None, :, None]
    poisoned = blocks._replace(**{name: jnp.where(middle, jnp.nan, getattr(blocks, name)) for name in "qkv"})
    clean, got = by_kernel(kernel, blocks, d_out), by_kernel(kernel, poisoned, jnp.where(middle, jnp.nan, d_out))
    for name, x, y in zip(Result._fields, got, clean, strict=True):
        x, y = (np.asarray(value, np.float32).reshape(3, -1) for value in (x, y))  # by tile
        # The poisoned rows see key tile 2; other rows see no poisoned key.
        kept = [0] if name in ("dk", "dv") else [0, 2]
        np.testing.assert_array_equal(x[kept], y[kept], err_msg=name)
        assert np.isnan(x[1]).any(), "NaN must reach the poisoned tile"


def test_lowers_for_cuda():
    """head_dim 128; for 64 see tests/kernels/test_segments.py."""
    kernel = MosaicGpuKernel()
    blocks, _ = jax.eval_shape(lambda: random_blocks(2, 300, 500, 128, "bfloat16"))
    lse = jax.ShapeDtypeStruct(blocks.q.shape[:2], jnp.float32)
    forward = export.export(jax.jit(kernel.forward), platforms=["cuda"])(blocks)
    backward = export.export(jax.jit(kernel.backward), platforms=["cuda"])(blocks, blocks.q, lse, blocks.q)
    assert forward.mlir_module().count("custom_call @mosaic_gpu") == 1
    assert backward.mlir_module().count("custom_call @mosaic_gpu") == 2


@pytest.mark.parametrize(
    ("dtype", "head_dim", "reason"),
    [
        (jnp.bfloat16, 128, None),
        (jnp.float16, 64, None),
        (jnp.float32, 128, "expected bfloat16 or float16.*got float32"),
        (jnp.bfloat16, 80, r"expected head_dim in \(64, 128\); got 80"),
    ],
)
def test_unsupported_dtypes_and_head_dims_raise(dtype, head_dim, reason):
    if reason is None:
        assert why_not_blocks("mosaic_gpu", dtype, head_dim) is None
        return
    blocks, _ = random_blocks(1, 64, 80, head_dim, jnp.dtype(dtype).name)
    with pytest.raises(ValueError, match=reason):
        MosaicGpuKernel().forward(blocks)


def test_tile_sizes_must_be_whole_warpgroups():
    with pytest.raises(ValueError, match="expected rows_dq to be a multiple of 64; got 96"):
        MosaicGpuKernel(BlockSizes(rows_dq=96))


OUTER, INNER = ("rows", "rows_dq", "keys_dkv"), ("keys", "keys_dq", "rows_dkv")


@pytest.mark.parametrize(("name", "limit"), [*((name, 448) for name in OUTER), *((name, 256) for name in INNER)])
def test_tile_sizes_have_upper_limits(name: str, limit: int):
    """Limits of the thread block, and of TMA copies of at most 256 rows."""
    MosaicGpuKernel(BlockSizes(**{name: limit}))
    with pytest.raises(ValueError, match=f"expected {name} <= {limit}; got {limit + 64}"):
        MosaicGpuKernel(BlockSizes(**{name: limit + 64}))


def test_mixed_dtypes_and_x64_raise():
    blocks, _ = random_blocks(1, 64, 80, 64, "bfloat16")
    with pytest.raises(ValueError, match="expected q, k and v of one dtype; got bfloat16, bfloat16, float16"):
        MosaicGpuKernel().forward(blocks._replace(v=blocks.v.astype(jnp.float16)))
    with jax.enable_x64(True), pytest.raises(ValueError, match="expected jax_enable_x64 False"):
        MosaicGpuKernel().forward(blocks)


@pytest.mark.parametrize("warpgroups", range(1, 8))
def test_launch_has_enough_registers(warpgroups: int):
    """A thread block has 512 registers per lane; a launch rounds each warpgroup's share down to a multiple of 8."""
    launched = min(512 // (warpgroups + 1) // 8 * 8, 256) * (warpgroups + 1)
    requested = gpu_tiles.registers(warpgroups)
    assert requested % 8 == 0 and gpu_tiles.FETCHING_REGISTERS < requested <= 256
    assert warpgroups * requested + gpu_tiles.FETCHING_REGISTERS <= launched
    assert {1: 256, 2: 232, 4: 104}.get(warpgroups, requested) == requested


@pytest.mark.slow
@pytest.mark.parametrize("over_segments", [False, True], ids=["whole", "by segments"])
def test_learner_calls_match_the_reference(over_segments: bool):
    """GQA, padding, an eviction at every step; bfloat16 against float32. Interpreted runs recompile, so only one case
    runs twice, to compare bits."""
    case = Case(2, 64, Segments(9, 16, 8), evict_at_every_step((1, 1, 41), (3,), 8, 0), 1)
    evicted_at = jnp.asarray(case.evicted_at)
    kernel = MosaicGpuKernel(BlockSizes(64, 64, 64, 64, 64, 64), races.STRICT_GPU)
    if over_segments:
        attend = partial(segment_attention, evicted_at=evicted_at, segments=case.segments, kernel=kernel)
    else:
        attend = partial(interval_attention, evicted_at=evicted_at, kernel=kernel)
    got = with_gradients(lambda q, k, v: attend(q, k, v), case, jnp.bfloat16, twice=not over_segments)
    for x, y in zip(got, expected_of(case), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2**-6 * np.abs(y).max())
