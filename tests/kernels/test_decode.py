"""Decode attention: every implementation against NumPy. Pallas kernels are interpreted and lowered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_kernels import decode_gpu, decode_tpu, reference
from smd_kernels.decode import decode_attention
from smd_kernels.hardware import DecodeSizes, why_not_decode
from tests import numpy_decoder, races
from tests.interpreted_gpu import teach


class Shape(NamedTuple):
    """Sizes of a call; `slots` need not fill whole tiles."""

    heads: int
    kv_heads: int
    slots: int
    head_dim: int


GQA = Shape(heads=4, kv_heads=2, slots=77, head_dim=64)
SHAPES = {
    "GQA": GQA,
    "MHA, one tile": Shape(heads=2, kv_heads=2, slots=128, head_dim=128),
    "one KV head, few slots": Shape(heads=8, kv_heads=1, slots=5, head_dim=64),
    "group of three": Shape(heads=6, kv_heads=2, slots=130, head_dim=128),
}
# The GPU kernel needs a multiple of 8 slots. GQA has two more tiles than stages, so that the ring buffer wraps.
GPU_GQA = Shape(heads=4, kv_heads=2, slots=384, head_dim=64)
GPU_SHAPES = {
    "GQA": GPU_GQA,
    "group of three, ragged": Shape(heads=3, kv_heads=1, slots=72, head_dim=128),
    "full group, less than a tile": Shape(heads=8, kv_heads=1, slots=40, head_dim=64),
}


def inputs(shape: Shape, dtype: Any, seed: int = 0) -> tuple[jax.Array, ...]:
    """Two rows with random empty slots; the first row's last head has only empty ones."""
    rng = np.random.default_rng(seed)
    sizes = ((shape.heads, 1), (shape.kv_heads, shape.slots), (shape.kv_heads, shape.slots))
    q, k, v = (jnp.asarray(rng.normal(size=(2, *size, shape.head_dim)), dtype) for size in sizes)
    valid = rng.random((2, shape.kv_heads, shape.slots)) < 0.6
    valid[0, -1] = False
    valid[1, -1, -1] = True
    return q, k, v, jnp.asarray(valid)


def numpy_decode(q: Any, k: Any, v: Any, valid: Any) -> tuple[np.ndarray, np.ndarray]:
    return numpy_decoder.attention(q, k, v, valid[:, :, None])


def on_tpu(q: jax.Array, k: jax.Array, v: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    return decode_tpu.decode_attention(q, k, v, valid, interpret=True)


def on_gpu(q: jax.Array, k: jax.Array, v: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Reads beyond the slots give zeros, as with TMA. Without such reads, unwritten memory is NaN."""
    ragged = k.shape[2] % DecodeSizes().keys
    params = replace(
        races.STRICT_GPU,
        out_of_bounds_reads="uninitialized" if ragged else "raise",
        uninitialized_memory="zero" if ragged else "nan",
    )
    return decode_gpu.decode_attention(q, k, v, valid, interpret=params)


@pytest.fixture
def interpreted_gpu(monkeypatch: pytest.MonkeyPatch):
    """Lets the interpreter run the kernel; a race fails the test."""
    teach(monkeypatch, decode_gpu)
    with races.forbidden():
        yield


IMPLEMENTATIONS = {"reference": reference.decode_attention, "xla": decode_attention, "tpu": on_tpu}


def check(f: Callable[..., Any], args: tuple[Any, ...], *, twice: bool = True, definition: Any = numpy_decode) -> None:
    """Checks values, dtypes, sums of weights and, if run twice, that the second run is bitwise equal."""
    compiled = jax.jit(f)
    out, received = compiled(*args)
    expected_out, expected_received = definition(*args)
    assert out.dtype == args[0].dtype and received.dtype == jnp.float32
    rounding = 4 * float(jnp.finfo(out.dtype).eps)  # of the weights before the second product, and of the output
    np.testing.assert_allclose(np.asarray(out, np.float64), expected_out, atol=max(rounding, 2e-6), rtol=0)
    np.testing.assert_allclose(received, expected_received, atol=2e-6, rtol=1e-5)
    group = args[0].shape[1] // received.shape[1]
    np.testing.assert_allclose(np.asarray(received).sum(-1), group * np.asarray(args[-1]).any(-1), rtol=1e-5)
    for first, second in zip((out, received), compiled(*args) if twice else (out, received), strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("f", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("shape", "dtype"), [*((shape, "float32") for shape in SHAPES), ("group of three", "bfloat16")]
)
def test_decode_matches_numpy(f: Any, shape: str, dtype: str):
    check(f, inputs(SHAPES[shape], jnp.dtype(dtype)))


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted_gpu")
@pytest.mark.parametrize("shape", GPU_SHAPES.values(), ids=GPU_SHAPES)
def test_gpu_kernel_matches_numpy(shape: Shape):
    sizes = shape.head_dim, shape.slots, shape.heads // shape.kv_heads
    assert why_not_decode("mosaic_gpu", jnp.bfloat16, *sizes) is None
    check(on_gpu, inputs(shape, jnp.bfloat16), twice=shape is GPU_GQA)  # interpreted runs are slow


def test_tpu_has_no_races_and_reads_no_unwritten_memory():
    with races.forbidden():
        check(partial(decode_tpu.decode_attention, interpret=races.STRICT_TPU), inputs(GQA, jnp.float32), twice=False)


@pytest.mark.usefixtures("interpreted_gpu")
@pytest.mark.parametrize(("f", "dtype"), [(decode_attention, "float32"), (on_tpu, "float32"), (on_gpu, "bfloat16")])
def test_empty_slots_have_no_effect(f: Any, dtype: str):
    q, k, v, valid = inputs(Shape(heads=2, kv_heads=2, slots=64, head_dim=64), jnp.dtype(dtype))
    other = [np.where(np.asarray(valid)[..., None], np.asarray(x), np.asarray(1e4, x.dtype)) for x in (k, v)]
    compiled = jax.jit(f)
    for left, right in zip(compiled(q, k, v, valid), compiled(q, *other, valid), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize(("impl", "platform", "target"), [
    ("mosaic_gpu", "cuda", "mosaic_gpu"),
    ("mosaic_tpu", "tpu", "tpu_custom_call"),
])  # fmt: skip
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lowers_without_the_device(impl: Any, platform: str, target: str, head_dim: int):
    args = inputs(Shape(heads=8, kv_heads=2, slots=1000, head_dim=head_dim), jnp.bfloat16)
    exported = jax.export.export(jax.jit(partial(decode_attention, impl=impl)), platforms=[platform])(*args)
    assert target in exported.mlir_module()
    assert [x.shape for x in exported.out_avals] == [args[0].shape, args[3].shape]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tpu_kernel_sets_its_own_precision(dtype: str):
    """Mosaic cannot multiply bfloat16 in the full precision that `jax_default_matmul_precision` asks for."""
    args = inputs(Shape(heads=4, kv_heads=2, slots=128, head_dim=128), jnp.dtype(dtype))
    with jax.default_matmul_precision("highest"):
        program = str(jax.make_jaxpr(partial(decode_attention, impl="mosaic_tpu"))(*args))
    assert program.count("dot_general") == 2
    assert program.count("HIGHEST") == (4 if dtype == "float32" else 0)


@pytest.mark.parametrize(("hardware", "arguments", "reason"), [
    # The limits of docs/limits.md.
    ("mosaic_gpu", (jnp.bfloat16, 128, 4288, 8), None),
    ("mosaic_gpu", (jnp.bfloat16, 128, 4296, 8), "4296 slots"),
    ("mosaic_gpu", (jnp.bfloat16, 64, 5248, 8), None),
    ("mosaic_gpu", (jnp.bfloat16, 64, 5256, 8), "5256 slots"),
    ("mosaic_gpu", (jnp.float16, 128, 1024, 4), "bfloat16; got float16"),
    ("mosaic_tpu", (jnp.bfloat16, 80, 1024, 4), None),
    ("mosaic_tpu", (jnp.bfloat16, 128, 10880, 8), None),
    ("mosaic_tpu", (jnp.bfloat16, 128, 9728, 16), None),
    ("mosaic_tpu", (jnp.bfloat16, 128, 10881, 8), "10881 slots"),
    ("mosaic_tpu", (jnp.bfloat16, 128, 9729, 16), "9729 slots"),
    ("mosaic_gpu", (jnp.float32, 128, 1024, 4), "bfloat16; got float32"),
    ("mosaic_gpu", (jnp.bfloat16, 96, 1024, 4), "(64, 128); got 96"),
    ("mosaic_gpu", (jnp.bfloat16, 128, 1023, 4), "multiple of 8, the rows of a TMA tile; got 1023"),
    ("mosaic_gpu", (jnp.bfloat16, 128, 1024, 9), "at most 8 query heads per KV head; got 9"),
    ("mosaic_gpu", (jnp.bfloat16, 128, 8192, 4), "8192 slots"),
    ("mosaic_tpu", (jnp.bfloat16, 128, 8192, 4), None),
    ("mosaic_tpu", (jnp.float16, 128, 1024, 4), "bfloat16 or float32; got float16"),
    ("mosaic_tpu", (jnp.bfloat16, 72, 1024, 4), "multiple of 16; got 72"),
    ("mosaic_tpu", (jnp.float32, 128, 16384, 4), "16384 slots"),
    ("mosaic_gpu", (jnp.bfloat16, 128, 0, 4), "expected at least one slot; got 0"),
    ("mosaic_tpu", (jnp.bfloat16, 128, 0, 4), "expected at least one slot; got 0"),
])  # fmt: skip
def test_why_not_decode(hardware: Any, arguments: tuple[Any, ...], reason: str | None):
    answer = why_not_decode(hardware, *arguments)
    assert answer is None if reason is None else reason in str(answer)


def test_named_implementation_that_cannot_run_raises():
    q, k, v, valid = inputs(GQA, jnp.float32)
    with pytest.raises(ValueError, match=r"impl='mosaic_gpu' cannot run: expected bfloat16; got float32"):
        decode_attention(q, k, v, valid, impl="mosaic_gpu")
    with pytest.raises(ValueError, match=r"impl='mosaic_tpu' cannot run: expected bfloat16 or float32; got float16"):
        q16, k16, v16 = (x.astype(jnp.float16) for x in (q, k, v))
        decode_attention(q16, k16, v16, valid, impl="mosaic_tpu")
    with pytest.raises(
        ValueError, match="cannot run: expected q, k and v of one dtype; got float32, float32, bfloat16"
    ):
        decode_attention(q, k, v.astype(jnp.bfloat16), valid, impl="mosaic_tpu")
    with jax.enable_x64(True), pytest.raises(ValueError, match="cannot run: expected jax_enable_x64 False"):
        decode_attention(q, k, v, valid, impl="mosaic_tpu")


@pytest.mark.parametrize(("sizes", "message"), [
    ({"keys": 100}, "expected keys to be 64, 128, 192 or 256; got 100"),
    ({"stages": 1}, "expected at least 2 stages; got 1"),
])  # fmt: skip
def test_invalid_sizes_raise(sizes: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        DecodeSizes(**sizes)
