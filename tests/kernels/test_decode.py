"""Decode attention over plain and quantised caches: every implementation against NumPy. Pallas kernels are interpreted
and lowered."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.model import attention
from smd_kernels import decode_codes_gpu, decode_codes_tpu, decode_gpu, decode_tpu, reference
from smd_kernels.codes import Codes, by_plane, unpack
from smd_kernels.decode import decode_attention
from smd_kernels.decode_codes import decode_codes_attention
from smd_kernels.hardware import DECODE_KEYS, why_not_decode, why_not_decode_codes
from tests import numpy_decoder, races
from tests.interpreted_gpu import patch_interpreter


class Shape(NamedTuple):
    """Sizes of a call; `slots` need not fill whole tiles. Of a quantised cache: slots of codes, slots in full
    precision, groups of keys, parts of a value's head_dim."""

    heads: int
    kv_heads: int
    slots: int
    head_dim: int
    precise: int = 0
    groups: int = 0
    parts: int = 0


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
CODED = Shape(heads=4, kv_heads=2, slots=24, head_dim=64, precise=8, groups=3, parts=2)
CODED_SHAPES = {
    8: Shape(heads=2, kv_heads=2, slots=128, head_dim=128, precise=32, groups=5, parts=4),  # whole tiles of the TPU
    4: Shape(heads=4, kv_heads=2, slots=77, head_dim=64, precise=16, groups=9, parts=2),
    2: Shape(heads=3, kv_heads=1, slots=9, head_dim=64, precise=4, groups=1, parts=1),
}
# More tiles of codes than stages, so that the ring buffer wraps; a ragged tile; more groups than a product takes.
GPU_CODED_SHAPES = {
    8: Shape(heads=3, kv_heads=1, slots=392, head_dim=64, precise=72, groups=70, parts=2),
    4: Shape(heads=4, kv_heads=1, slots=392, head_dim=128, precise=40, groups=9, parts=4),
    2: Shape(heads=2, kv_heads=1, slots=136, head_dim=64, precise=136, groups=9, parts=1),
}


def inputs(shape: Shape, dtype: Any) -> tuple[jax.Array, ...]:
    """Two rows with random empty slots; the first row's last head has only empty ones."""
    rng = np.random.default_rng(0)
    sizes = ((shape.heads, 1), (shape.kv_heads, shape.slots), (shape.kv_heads, shape.slots))
    q, k, v = (jnp.asarray(rng.normal(size=(2, *size, shape.head_dim)), dtype) for size in sizes)
    valid = rng.random((2, shape.kv_heads, shape.slots)) < 0.6
    valid[0, -1] = False
    valid[1, -1, -1] = True
    return q, k, v, jnp.asarray(valid)


def coded_inputs(shape: Shape, bits: int, dtype: Any) -> tuple[jax.Array, Codes, jax.Array, jax.Array, jax.Array]:
    """`inputs` of all slots, the first ones in codes. Decoded values are about 1."""
    q, k, v, valid = inputs(shape._replace(slots=shape.slots + shape.precise), dtype)
    rng = np.random.default_rng(1)
    rows = (2, shape.kv_heads)

    def numbers(*size: int, factor: float = 1.0) -> jax.Array:
        return jnp.asarray(rng.normal(size=(*rows, *size)) * factor, dtype)

    def packed() -> jax.Array:
        return jnp.asarray(rng.integers(0, 256, (*rows, shape.slots, shape.head_dim * bits // 8)), jnp.uint8)

    step = 2 / (2**bits - 1)
    codes = Codes(
        keys=packed(),
        values=packed(),
        group=jnp.asarray(rng.integers(0, shape.groups, (*rows, shape.slots)), jnp.int32),
        key_low=numbers(shape.groups, shape.head_dim),
        key_scale=numbers(shape.groups, shape.head_dim, factor=step),
        value_low=numbers(shape.slots, shape.parts),
        value_scale=numbers(shape.slots, shape.parts, factor=step),
        bits=bits,
    )
    return q, codes, k[:, :, shape.slots :], v[:, :, shape.slots :], valid


def numpy_decode(q: Any, *cache: Any) -> tuple[np.ndarray, np.ndarray]:
    """Decodes codes in float64, rounds them to the dtype of q, and attends to all slots."""
    *_, k, v, valid = cache
    if len(cache) == 4:
        keys, values = decoded(cache[0], len(q[0, 0, 0]), q.dtype)
        k, v = np.concatenate([keys, k], axis=2), np.concatenate([values, v], axis=2)
    return numpy_decoder.attention(q, k, v, valid[:, :, None])


def decoded(codes: Codes, head_dim: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    channel, each = np.arange(head_dim), 8 // codes.bits

    def numbers(packed: Any, low: np.ndarray, scale: np.ndarray) -> jax.Array:
        code = np.asarray(packed)[..., channel // each] >> (channel % each * codes.bits) & (2**codes.bits - 1)
        return jnp.asarray(low + code * scale, dtype)

    of_group = (np.asarray(x, np.float64) for x in (codes.key_low, codes.key_scale))
    of_slot = (np.asarray(x, np.float64) for x in (codes.value_low, codes.value_scale))
    part = channel // (head_dim // codes.value_low.shape[3])
    group = np.asarray(codes.group)[..., None]
    keys = numbers(codes.keys, *(np.take_along_axis(x, group, axis=2) for x in of_group))
    return keys, numbers(codes.values, *(x[..., part] for x in of_slot))


def on_tpu(*args: Any, interpret: Any = True) -> tuple[jax.Array, jax.Array]:
    if len(args) == 5:
        return decode_codes_tpu.decode_codes_attention(*args, interpret=interpret)
    return decode_tpu.decode_attention(*args, interpret=interpret)


def on_gpu(*args: Any) -> tuple[jax.Array, jax.Array]:
    """Reads beyond the slots give zeros, as with TMA. Without such reads, unwritten memory is NaN."""
    coded = len(args) == 5
    ragged = coded or args[1].shape[2] % DECODE_KEYS
    params = replace(
        races.STRICT_GPU,
        out_of_bounds_reads="uninitialized" if ragged else "raise",
        uninitialized_memory="zero" if ragged else "nan",
    )
    run = decode_codes_gpu.decode_codes_attention if coded else decode_gpu.decode_attention
    return run(*args, interpret=params)


@pytest.fixture
def interpreted_gpu(monkeypatch: pytest.MonkeyPatch):
    """Lets the interpreter run the kernels; a race fails the test."""
    patch_interpreter(monkeypatch)
    with races.forbidden():
        yield


IMPLEMENTATIONS = {"reference": reference.decode_attention, "xla": decode_attention, "tpu": on_tpu}


def check(f: Callable[..., Any], args: tuple[Any, ...], *, twice: bool = True) -> None:
    """Checks values, dtypes, sums of weights and, if run twice, that the second run is bitwise equal."""
    compiled = jax.jit(f)
    out, received = compiled(*args)
    expected_out, expected_received = numpy_decode(*args)
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


@pytest.mark.parametrize("f", [decode_codes_attention, on_tpu], ids=["xla", "tpu"])
@pytest.mark.parametrize(
    ("bits", "dtype"), [*(pytest.param(bits, "float32", marks=pytest.mark.slow) for bits in (8, 4, 2)), (4, "bfloat16")]
)
def test_decode_of_codes_matches_numpy(f: Any, bits: int, dtype: str):
    check(f, coded_inputs(CODED_SHAPES[bits], bits, jnp.dtype(dtype)))


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted_gpu")
@pytest.mark.parametrize("shape", GPU_SHAPES.values(), ids=GPU_SHAPES)
def test_gpu_kernel_matches_numpy(shape: Shape):
    sizes = shape.head_dim, shape.slots, shape.heads // shape.kv_heads
    assert why_not_decode("mosaic_gpu", jnp.bfloat16, *sizes) is None
    check(on_gpu, inputs(shape, jnp.bfloat16), twice=shape is GPU_GQA)  # interpreted runs are slow


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted_gpu")
@pytest.mark.parametrize(("bits", "shape"), GPU_CODED_SHAPES.items(), ids=GPU_CODED_SHAPES)
def test_gpu_kernel_of_codes_matches_numpy(bits: int, shape: Shape):
    args = coded_inputs(shape, bits, jnp.bfloat16)
    assert why_not_decode_codes("mosaic_gpu", jnp.bfloat16, args[1], shape.precise, shape.heads) is None
    check(on_gpu, args)


CODED_INPUTS = coded_inputs(CODED, 2, jnp.float32)


@pytest.mark.parametrize(
    "args", [inputs(GQA, jnp.float32), pytest.param(CODED_INPUTS, marks=pytest.mark.slow)], ids=["plain", "codes"]
)
def test_tpu_has_no_races_and_reads_no_unwritten_memory(args: Any):
    with races.forbidden():
        check(partial(on_tpu, interpret=races.STRICT_TPU), args, twice=False)


@pytest.mark.usefixtures("interpreted_gpu")
@pytest.mark.parametrize(("f", "dtype"), [(decode_attention, "float32"), (on_tpu, "float32"), (on_gpu, "bfloat16")])
def test_empty_slots_have_no_effect(f: Any, dtype: str):
    q, k, v, valid = inputs(Shape(heads=2, kv_heads=2, slots=64, head_dim=64), jnp.dtype(dtype))
    other = [np.where(np.asarray(valid)[..., None], np.asarray(x), np.asarray(1e4, x.dtype)) for x in (k, v)]
    compiled = jax.jit(f)
    for left, right in zip(compiled(q, k, v, valid), compiled(q, *other, valid), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted_gpu")
@pytest.mark.parametrize(
    ("f", "dtype"), [(decode_codes_attention, "float32"), (on_tpu, "float32"), (on_gpu, "bfloat16")]
)
def test_empty_slots_of_codes_have_no_effect(f: Any, dtype: str):
    q, codes, k, v, valid = coded_inputs(CODED, 4, jnp.dtype(dtype))
    left, right = valid[..., : CODED.slots, None], valid[..., CODED.slots :, None]
    other = replace(
        codes,
        keys=jnp.where(left, codes.keys, 255 - codes.keys),
        values=jnp.where(left, codes.values, 255 - codes.values),
        group=jnp.where(left[..., 0], codes.group, 0),
        value_low=jnp.where(left, codes.value_low, 1e4).astype(dtype),
    )
    own = [jnp.where(right, x, 1e4).astype(dtype) for x in (k, v)]
    for one, two in zip(f(q, codes, k, v, valid), f(q, other, *own, valid), strict=True):
        np.testing.assert_array_equal(one, two)


def test_by_plane_orders_channels():
    """The order is that of shifted and masked bytes."""
    packed = jnp.asarray(np.random.default_rng(0).integers(0, 256, 8), jnp.uint8)
    for bits in (8, 4, 2):
        planes = np.concatenate([(np.asarray(packed) >> shift) & (2**bits - 1) for shift in range(0, 8, bits)])
        count = 8 * 8 // bits
        np.testing.assert_array_equal(planes, unpack(packed, bits, count)[by_plane(count, bits)])
    np.testing.assert_array_equal(by_plane(8, 4), [0, 2, 4, 6, 1, 3, 5, 7])


EIGHTH = Shape(heads=8, kv_heads=2, slots=1000, head_dim=64)
LOWERED = {
    "head_dim 64": (decode_attention, inputs(EIGHTH, jnp.bfloat16)),
    "head_dim 128": (decode_attention, inputs(EIGHTH._replace(head_dim=128), jnp.bfloat16)),
    "codes": (decode_codes_attention, coded_inputs(CODED._replace(slots=256, head_dim=128), 4, jnp.bfloat16)),
}


@pytest.mark.parametrize(("impl", "platform", "target"), [
    ("mosaic_gpu", "cuda", "mosaic_gpu"),
    ("mosaic_tpu", "tpu", "tpu_custom_call"),
])  # fmt: skip
@pytest.mark.parametrize(("f", "args"), LOWERED.values(), ids=LOWERED)
def test_lowers_without_the_device(impl: Any, platform: str, target: str, f: Any, args: Any):
    exported = jax.export.export(jax.jit(partial(f, impl=impl)), platforms=[platform])(*args)
    assert target in exported.mlir_module()
    assert [x.shape for x in exported.out_avals] == [args[0].shape, args[-1].shape]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tpu_kernel_sets_its_own_precision(dtype: str):
    """Mosaic cannot multiply bfloat16 in the full precision that `jax_default_matmul_precision` asks for."""
    with jax.default_matmul_precision("highest"):
        plain = inputs(Shape(heads=4, kv_heads=2, slots=128, head_dim=128), jnp.dtype(dtype))
        for f, args, products in (
            (decode_attention, plain, 2),
            (decode_codes_attention, coded_inputs(CODED, 4, jnp.dtype(dtype)), 8),
        ):
            program = str(jax.make_jaxpr(partial(f, impl="mosaic_tpu"))(*args))
            assert program.count("dot_general") == products
            assert program.count("HIGHEST") == (2 * products if dtype == "float32" else 0)


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


@pytest.mark.parametrize(("hardware", "change", "dtype", "reason"), [
    ("mosaic_gpu", {}, jnp.bfloat16, None),
    ("mosaic_gpu", {}, jnp.float32, "bfloat16; got float32"),
    ("mosaic_gpu", {"head_dim": 32}, jnp.bfloat16, "(64, 128); got 32"),
    ("mosaic_gpu", {"slots": 25}, jnp.bfloat16, "slots of codes in multiples of 8; got 25"),
    ("mosaic_gpu", {"precise": 9}, jnp.bfloat16, "slots in full precision in multiples of 8; got 9"),
    ("mosaic_gpu", {"heads": 18}, jnp.bfloat16, "at most 8 query heads per KV head; got 9"),
    ("mosaic_gpu", {"parts": 16}, jnp.bfloat16, "at most 8 ranges of values per token; got 16"),
    ("mosaic_gpu", {"groups": 900}, jnp.bfloat16, "24 + 8 slots of 64 and 900 groups of keys need"),
    ("mosaic_tpu", {}, jnp.float32, None),
    ("mosaic_tpu", {}, jnp.float16, "bfloat16 or float32; got float16"),
    ("mosaic_tpu", {"head_dim": 32}, jnp.float32, "(64, 128); got 32"),
    ("mosaic_tpu", {"slots": 16384}, jnp.float32, "16384 + 8 slots"),
    ("mosaic_gpu", {"precise": 0}, jnp.bfloat16, "expected at least one slot; got 0 slots in full precision"),
    ("mosaic_tpu", {"precise": 0}, jnp.float32, "expected at least one slot; got 0 slots in full precision"),
])  # fmt: skip
def test_why_not_decode_codes(hardware: Any, change: dict[str, int], dtype: Any, reason: str | None):
    shape = CODED._replace(**change)
    _, codes, *_ = coded_inputs(shape, 4, dtype)
    answer = why_not_decode_codes(hardware, dtype, codes, shape.precise, shape.heads // shape.kv_heads)
    assert answer is None if reason is None else reason in str(answer)


def test_named_implementation_that_cannot_run_raises():
    calls: list[tuple[Any, Any]] = [(decode_attention, inputs(GQA, jnp.float32))]
    calls.append((decode_codes_attention, coded_inputs(CODED, 4, jnp.float32)))
    for f, (*args, v, valid) in calls:
        with pytest.raises(ValueError, match=r"impl='mosaic_gpu' cannot run: expected bfloat16; got float32"):
            f(*args, v, valid, impl="mosaic_gpu")
        message = "cannot run: expected q, k and v of one dtype; got float32, float32, bfloat16"
        with pytest.raises(ValueError, match=message):
            f(*args, v.astype(jnp.bfloat16), valid, impl="mosaic_tpu")
        with jax.enable_x64(True), pytest.raises(ValueError, match="cannot run: expected jax_enable_x64 False"):
            f(*args, v, valid, impl="mosaic_tpu")
    with pytest.raises(ValueError, match=r"impl='mosaic_tpu' cannot run: expected bfloat16 or float32; got float16"):
        decode_attention(*inputs(GQA, jnp.float16), impl="mosaic_tpu")
    q, codes, k, v, valid = coded_inputs(CODED, 4, jnp.float32)
    with pytest.raises(ValueError, match="expected an implementation that can run here; got impl='mosaic_tpu': .* TPU"):
        attention.decode(q, k, v, valid, impl="mosaic_tpu", codes=codes)


@pytest.mark.parametrize(("device", "impl"), [("mosaic_gpu", "mosaic_gpu"), ("mosaic_tpu", "mosaic_tpu"), ("", "xla")])
def test_default_implementation_is_the_kernel_of_the_device(device: str, impl: str):
    q, codes, k, v, valid = coded_inputs(CODED, 4, jnp.bfloat16)
    chosen = []

    def attend(
        q: Any, codes: Any, k: Any, v: Any, valid: Any, impl: str, softcap: Any = None, sinks: Any = None
    ) -> Any:
        chosen.append(impl)
        return q, valid.astype(jnp.float32)

    with (
        mock.patch.object(attention, "wrong_device", lambda impl: None if impl == device else "elsewhere"),
        mock.patch.object(attention, "decode_codes_attention", attend),
    ):
        attention.decode(q, k, v, valid, codes=codes)
    assert chosen == [impl]
