"""Decode attention over codes: every implementation against NumPy. Pallas kernels are interpreted and lowered."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from smd_jax.model import attention
from smd_kernels import decode_codes_gpu, decode_codes_tpu
from smd_kernels.codes import Codes, by_plane, unpack
from smd_kernels.decode_codes import decode_codes_attention
from smd_kernels.hardware import why_not_decode_codes
from tests import numpy_decoder, races
from tests.interpreted_gpu import teach
from tests.kernels.test_decode import check as check_decode

Inputs = tuple[jax.Array, Codes, jax.Array, jax.Array, jax.Array]


class Shape(NamedTuple):
    """Sizes of a call: slots of codes, slots in full precision, groups of keys, parts of a value's head_dim."""

    heads: int
    kv_heads: int
    slots: int
    precise: int
    head_dim: int
    groups: int
    parts: int


SMALL = Shape(heads=4, kv_heads=2, slots=24, precise=8, head_dim=64, groups=3, parts=2)
SHAPES = {
    "GQA": Shape(heads=4, kv_heads=2, slots=77, precise=16, head_dim=64, groups=9, parts=2),
    "MHA, whole tiles": Shape(heads=2, kv_heads=2, slots=128, precise=32, head_dim=128, groups=5, parts=4),
    "group of three, one part": Shape(heads=3, kv_heads=1, slots=9, precise=4, head_dim=64, groups=1, parts=1),
}
# More tiles of codes than stages, so that the ring buffer wraps; a ragged tile; more groups than a product takes.
GPU_SHAPES = {
    8: Shape(heads=3, kv_heads=1, slots=392, precise=72, head_dim=64, groups=70, parts=2),
    4: Shape(heads=4, kv_heads=1, slots=392, precise=40, head_dim=128, groups=9, parts=4),
    2: Shape(heads=2, kv_heads=1, slots=136, precise=136, head_dim=64, groups=9, parts=1),
}


def inputs(shape: Shape, bits: int, dtype: Any, seed: int = 0) -> Inputs:
    """Two rows with random empty slots; the first row's last head has only empty ones. Decoded values are about 1."""
    rng = np.random.default_rng(seed)
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
    q = jnp.asarray(rng.normal(size=(2, shape.heads, 1, shape.head_dim)), dtype)
    k, v = (numbers(shape.precise, shape.head_dim) for _ in range(2))
    valid = rng.random((*rows, shape.slots + shape.precise)) < 0.6
    valid[0, -1] = False
    valid[1, -1, 0] = valid[1, -1, -1] = True
    return q, codes, k, v, jnp.asarray(valid)


def numpy_decode(q: Any, codes: Codes, k: Any, v: Any, valid: Any) -> tuple[np.ndarray, np.ndarray]:
    """Decodes in float64, rounds to the dtype of q, and attends to all slots."""
    channel, each = np.arange(q.shape[3]), 8 // codes.bits

    def numbers(packed: Any, low: np.ndarray, scale: np.ndarray) -> jax.Array:
        code = np.asarray(packed)[..., channel // each] >> (channel % each * codes.bits) & (2**codes.bits - 1)
        return jnp.asarray(low + code * scale, q.dtype)

    of_group = (np.asarray(x, np.float64) for x in (codes.key_low, codes.key_scale))
    of_slot = (np.asarray(x, np.float64) for x in (codes.value_low, codes.value_scale))
    part = channel // (len(channel) // codes.value_low.shape[3])
    group = np.asarray(codes.group)[..., None]
    keys = numbers(codes.keys, *(np.take_along_axis(x, group, axis=2) for x in of_group))
    values = numbers(codes.values, *(x[..., part] for x in of_slot))
    keys, values = np.concatenate([keys, k], axis=2), np.concatenate([values, v], axis=2)
    return numpy_decoder.attention(q, keys, values, valid[:, :, None])


def on_tpu(*args: Any) -> tuple[jax.Array, jax.Array]:
    return decode_codes_tpu.decode_codes_attention(*args, interpret=True)


def on_gpu(*args: Any) -> tuple[jax.Array, jax.Array]:
    """Reads beyond the slots give zeros, as with TMA."""
    params = replace(races.STRICT_GPU, out_of_bounds_reads="uninitialized", uninitialized_memory="zero")
    return decode_codes_gpu.decode_codes_attention(*args, interpret=params)


def load(ref: Any, *index: Any, optimized: bool) -> jax.Array:
    """Like `plgpu.load`, which the interpreter lacks."""
    loaded = ref[...]
    plgpu.commit_smem()  # on the device a copy of TMA waits for all reads of the warpgroup
    return loaded


@pytest.fixture
def interpreted_gpu(monkeypatch: pytest.MonkeyPatch):
    """Lets the interpreter run the kernel; a race fails the test."""
    teach(monkeypatch, decode_codes_gpu)
    monkeypatch.setattr(plgpu, "load", load)
    with races.forbidden():
        yield


check = partial(check_decode, definition=numpy_decode)


@pytest.mark.slow
@pytest.mark.parametrize(("f", "first"), [(decode_codes_attention, 0), (on_tpu, 1)], ids=["xla", "tpu"])
@pytest.mark.parametrize("place", range(3))
def test_decode_matches_numpy(f: Any, first: int, place: int):
    """All numbers of bits and all shapes, in different pairs per implementation."""
    shape = [*SHAPES.values()][(first + place) % 3]
    check(f, inputs(shape, [8, 4, 2][place], jnp.float32))


@pytest.mark.parametrize("f", [decode_codes_attention, on_tpu], ids=["xla", "tpu"])
def test_bfloat16_matches_numpy(f: Any):
    check(f, inputs(SHAPES["GQA"], 4, jnp.bfloat16))


@pytest.mark.slow
def test_tpu_has_no_races_and_reads_no_unwritten_memory():
    with races.forbidden():
        check(
            partial(decode_codes_tpu.decode_codes_attention, interpret=races.STRICT_TPU),
            inputs(SMALL, 2, jnp.float32),
            twice=False,
        )


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted_gpu")
@pytest.mark.parametrize(("bits", "shape"), GPU_SHAPES.items(), ids=GPU_SHAPES)
def test_gpu_kernel_matches_numpy(bits: int, shape: Shape):
    args = inputs(shape, bits, jnp.bfloat16)
    assert why_not_decode_codes("mosaic_gpu", jnp.bfloat16, args[1], shape.precise, shape.heads) is None
    check(on_gpu, args)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted_gpu")
@pytest.mark.parametrize(
    ("f", "dtype"), [(decode_codes_attention, "float32"), (on_tpu, "float32"), (on_gpu, "bfloat16")]
)
def test_empty_slots_have_no_effect(f: Any, dtype: str):
    q, codes, k, v, valid = inputs(SMALL, 4, jnp.dtype(dtype))
    left, right = valid[..., : SMALL.slots, None], valid[..., SMALL.slots :, None]
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


@pytest.mark.parametrize(("impl", "platform", "target"), [
    ("mosaic_gpu", "cuda", "mosaic_gpu"),
    ("mosaic_tpu", "tpu", "tpu_custom_call"),
])  # fmt: skip
def test_lowers_without_the_device(impl: Any, platform: str, target: str):
    args = inputs(Shape(8, 2, 256, 32, 128, 9, 4), 4, jnp.bfloat16)
    exported = jax.export.export(jax.jit(partial(decode_codes_attention, impl=impl)), platforms=[platform])(*args)
    assert target in exported.mlir_module()
    assert [x.shape for x in exported.out_avals] == [args[0].shape, args[4].shape]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tpu_kernel_sets_its_own_precision(dtype: str):
    """Mosaic cannot multiply bfloat16 in the full precision that `jax_default_matmul_precision` asks for."""
    with jax.default_matmul_precision("highest"):
        args = inputs(SMALL, 4, jnp.dtype(dtype))
        program = str(jax.make_jaxpr(partial(decode_codes_attention, impl="mosaic_tpu"))(*args))
    assert program.count("dot_general") == 8
    assert bool(program.count("HIGHEST")) == (dtype == "float32")


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
    shape = SMALL._replace(**change)
    _, codes, *_ = inputs(shape, 4, dtype)
    answer = why_not_decode_codes(hardware, dtype, codes, shape.precise, shape.heads // shape.kv_heads)
    assert answer is None if reason is None else reason in str(answer)


def test_named_implementation_that_cannot_run_raises():
    args = inputs(SMALL, 4, jnp.float32)
    with pytest.raises(ValueError, match=r"impl='mosaic_gpu' cannot run: expected bfloat16; got float32"):
        decode_codes_attention(*args, impl="mosaic_gpu")
    q, codes, k, v, valid = args
    with pytest.raises(
        ValueError, match="cannot run: expected q, k and v of one dtype; got float32, float32, bfloat16"
    ):
        decode_codes_attention(q, codes, k, v.astype(jnp.bfloat16), valid, impl="mosaic_tpu")
    with jax.enable_x64(True), pytest.raises(ValueError, match="cannot run: expected jax_enable_x64 False"):
        decode_codes_attention(*args, impl="mosaic_tpu")
    with pytest.raises(ValueError, match="expected an implementation that can run here; got impl='mosaic_tpu': .* TPU"):
        attention.decode(q, k, v, valid, impl="mosaic_tpu", codes=codes)


@pytest.mark.parametrize(("device", "impl"), [("mosaic_gpu", "mosaic_gpu"), ("mosaic_tpu", "mosaic_tpu"), ("", "xla")])
def test_default_implementation_is_the_kernel_of_the_device(device: str, impl: str):
    q, codes, k, v, valid = inputs(SMALL, 4, jnp.bfloat16)
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
