"""Attention against NumPy loops, the choice of implementation, meshes and invalid inputs."""

import inspect
import re
import warnings
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from smd_jax.devices.sharding import make_mesh
from smd_jax.message.masks import NEVER, KeyInterval, Segments, ShadowMask
from smd_jax.model import attention
from smd_jax.model.attention import attend, best, decode, pays, why_not
from smd_jax.testing import random_evictions
from smd_kernels.observed import attend_and_observe
from tests import numpy_decoder
from tests.attention_cases import sum_of_squares

BATCH, T, D = 2, 7, 4
HEADS = {"MHA": (2, 2), "GQA": (4, 2), "one kv head": (4, 1)}
SHAPES = pytest.mark.parametrize(("heads", "kv_heads"), HEADS.values(), ids=HEADS)


def inputs(heads: int, kv_heads: int, dtype: Any = jnp.float32, seed: int = 0) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=(BATCH, n, T, D)), dtype) for n in (heads, kv_heads, kv_heads))


def random_mask(kv_heads: int, seed: int = 1) -> np.ndarray:
    """Random booleans; query 0 sees no key, query 3 none in the first head."""
    mask = np.random.default_rng(seed).random((BATCH, kv_heads, T, T)) < 0.5
    mask[:, :, 0] = False
    mask[:, 0, 3] = False
    return mask


def loop_attend(q: Any, k: Any, v: Any, mask: np.ndarray) -> np.ndarray:
    return numpy_decoder.attention(q, k, v, mask)[0]


@SHAPES
@pytest.mark.parametrize("impl", ["reference", "xla", None])
def test_forward(impl: Any, heads: int, kv_heads: int):
    q, k, v = inputs(heads, kv_heads)
    mask = random_mask(kv_heads)
    np.testing.assert_allclose(attend(q, k, v, jnp.array(mask), impl), loop_attend(q, k, v, mask), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("impl", ["reference", "xla"])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_a_query_that_sees_nothing_gives_zeros(impl: Any, scale: float):
    """Exact zeros with zero gradients, even where scores would overflow an exponential."""
    q, k, v = (scale * x for x in inputs(4, 2))
    mask = random_mask(2)
    blind = np.repeat(~mask.any(-1), 2, axis=1)

    @jax.jit
    def with_gradients(d_out: jax.Array) -> Any:
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, jnp.array(mask), impl), q, k, v)
        return out, pull(d_out)

    everywhere = np.ones(q.shape, np.float32)
    out, gradients = jax.device_get(with_gradients(everywhere))
    assert blind.any() and not out[blind].any() and np.isfinite(out).all()
    assert all(np.isfinite(gradient).all() for gradient in gradients) and not gradients[0][blind].any()
    for gradient in with_gradients(np.where(blind[..., None], everywhere, 0))[1]:
        assert not np.asarray(gradient).any()


def test_unseen_keys_do_not_matter():
    q, k, v = inputs(4, 2)
    mask = random_mask(2)
    mask[..., 4] = False
    plain = attend(q, k, v, jnp.array(mask))
    changed = attend(q, k.at[:, :, 4].set(1e30), v.at[:, :, 4].set(1e30), jnp.array(mask))
    np.testing.assert_array_equal(plain, changed)


@pytest.mark.parametrize("impl", ["reference", "xla"])
@pytest.mark.parametrize("shared", [False, True])
def test_intervals_equal_their_booleans(impl: Any, shared: bool):
    q, k, v = inputs(4, 2)
    ends = np.random.default_rng(5).choice([0, 2, 3, 5, NEVER], size=(BATCH, 1 if shared else 2, T))
    interval = KeyInterval(jnp.array(ends, jnp.int32))
    visible = np.zeros((BATCH, 2, T, T), bool)
    for b, h, t, s in np.ndindex(visible.shape):
        visible[b, h, t, s] = s <= t < ends[b, 0 if shared else h, s]
    expected = attend(q, k, v, jnp.array(visible), impl)
    np.testing.assert_array_equal(attend(q, k, v, interval, impl), expected)
    np.testing.assert_array_equal(attend(q, k, v, interval.to_boolean(), impl), expected)


TOLERANCES: dict[Any, float] = {"reference": 2**-8, "xla": 2**-6}


def test_bfloat16():
    """Within the rounding of the inputs and of the products; the reference rounds only at the end."""
    q, k, v = inputs(4, 2, jnp.bfloat16)
    mask = random_mask(2)
    exact = loop_attend(q, k, v, mask)
    for impl, tolerance in TOLERANCES.items():
        out = attend(q, k, v, jnp.array(mask), impl)
        assert out.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(out, np.float64), exact, atol=tolerance * np.abs(exact).max())


def test_float64_inputs_give_float64_outputs():
    with jax.enable_x64(True):
        q, k, v = inputs(4, 2, jnp.float64)
        mask = random_mask(2)
        for impl in ("reference", "xla"):
            out = attend(q, k, v, jnp.array(mask), impl)
            assert out.dtype == jnp.float64
            np.testing.assert_allclose(out, loop_attend(q, k, v, mask), atol=1e-14)


@SHAPES
def test_attention_received(heads: int, kv_heads: int):
    """Sums of the softmax over queries and query heads."""
    q, k, v = inputs(heads, kv_heads)
    mask = random_mask(kv_heads)
    out, received = attend_and_observe(q, k, v, jnp.array(mask))
    expected = numpy_decoder.attention(q, k, v, mask)
    np.testing.assert_allclose(out, expected[0], atol=1e-6)
    np.testing.assert_allclose(received, expected[1], atol=1e-6)


def interval(tokens: int, segments: Segments | None = None) -> KeyInterval:
    return KeyInterval(jnp.full((1, 1, tokens), NEVER, jnp.int32), segments)


def shaped(tokens: int, dtype: Any = jnp.bfloat16, head_dim: int = 64) -> tuple[jax.Array, jax.Array]:
    """q and k of 4 and 2 heads."""
    return jnp.zeros((1, 4, tokens, head_dim), dtype), jnp.zeros((1, 2, tokens, head_dim), dtype)


class Accelerator:
    """The attribute of a GPU that the choice reads."""

    compute_capability = "9.0"


@pytest.mark.parametrize("has_kernel", [False, True], ids=["booleans", "intervals"])
def test_best_implementation(has_kernel: bool, monkeypatch: pytest.MonkeyPatch):
    """Plain JAX on CPUs, a kernel where one can run. JAX's default device decides, not the first device."""
    mask, portable = (interval(64), "portable") if has_kernel else (jnp.ones((1, 1, 64, 64), bool), "xla")
    assert best(*shaped(64), mask) == portable
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert best(*shaped(64), mask) == ("mosaic_tpu" if has_kernel else "xla")
    with jax.default_device(jax.devices("cpu")[0]):
        assert best(*shaped(64), mask) == portable
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Accelerator()])
    assert best(*shaped(64), mask) == ("mosaic_gpu" if has_kernel else "xla")
    assert best(*shaped(64, jnp.float32), mask) == portable  # wgmma multiplies 16 bits
    monkeypatch.setattr(Accelerator, "compute_capability", "8.0")
    assert best(*shaped(64), mask) == portable


@pytest.mark.parametrize(
    ("installed", "usable"), [("12.6.85", True), ("12.8.93", False), ("12.9.41", False), ("12.9.86", True)]
)
def test_an_assembler_that_may_miscompile_is_refused(installed: str, usable: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Accelerator()])
    monkeypatch.setattr(attention.metadata, "version", lambda package: installed)
    monkeypatch.setattr(attention, "_wrong_assembler", attention._wrong_assembler.__wrapped__)  # without its cache
    reason = (
        f"expected {attention.PTXAS} before 12.8 or from 12.9.86: others may miscompile the kernel; got {installed}"
    )
    assert attention.wrong_device("mosaic_gpu") == (None if usable else reason)


def test_segments_are_gathered_where_cheaper(monkeypatch: pytest.MonkeyPatch):
    """732 of 2,048 keys are too many: the causal triangle has 1,024 on average."""
    assert pays(Segments(64, 32, 128), 2048) and not pays(Segments(64, 32, 700), 2048)
    assert not pays(None, 2048) and not pays(Segments(2048, 32, 8), 2048)
    taken = []
    for name in ("segment_attention", "interval_attention"):
        real = getattr(attention, name)
        monkeypatch.setattr(attention, name, lambda *x, real=real, name=name, **y: taken.append(name) or real(*x, **y))
    q, k = shaped(256)
    for segments in (Segments(16, 16, 16), Segments(16, 16, 200), None):
        jax.eval_shape(lambda q, k, segments=segments: attend(q, k, k, interval(256, segments)), q, k)
    assert taken == ["segment_attention", "interval_attention", "interval_attention"]


def best_decode(q: jax.Array, k: jax.Array) -> str:
    return attention._best_decode(partial(attention.why_not_decode, q=q, k=k))


def test_best_decode_implementation(monkeypatch: pytest.MonkeyPatch):
    q, k = jnp.zeros((1, 4, 1, 64), jnp.bfloat16), jnp.zeros((1, 2, 64, 64), jnp.bfloat16)
    assert best_decode(q, k) == "xla"
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert best_decode(q, k) == "mosaic_tpu"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Accelerator()])
    assert best_decode(q, k) == "mosaic_gpu"
    attention._warn_once.cache_clear()
    with pytest.warns(
        RuntimeWarning, match="decoding without the kernel mosaic_gpu, .* expected bfloat16; got float32"
    ):
        assert best_decode(q.astype(jnp.float32), k.astype(jnp.float32)) == "xla"
    many = jnp.zeros((1, 2, 8192, 64), jnp.bfloat16)
    with pytest.warns(RuntimeWarning, match="shared memory; 8192 slots of 64 need"):
        assert best_decode(q, many) == "xla"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert best_decode(q, many) == "xla", "warned twice"
    monkeypatch.setattr(Accelerator, "compute_capability", "8.0")
    assert best_decode(q, k) == "xla"


@pytest.mark.parametrize(
    ("impl", "reason"), [("mosaic_gpu", "expected JAX to run on a GPU; got 'cpu'"), ("flash", "expected one of xla")]
)
def test_a_named_decode_implementation_that_cannot_run_says_why(impl: Any, reason: str):
    q, k = jnp.zeros((1, 4, 1, 64)), jnp.zeros((1, 2, 64, 64))
    with pytest.raises(ValueError, match=reason):
        inspect.unwrap(decode)(q, k, k, jnp.ones((1, 2, 64), bool), impl)


def test_meshes_with_other_axes_are_left_to_the_compiler():
    q, k, v = inputs(4, 2)
    mask = KeyInterval(jnp.full((1, 1, T), NEVER, jnp.int32))
    expected = attend(q, k, v, mask)
    for mesh in (jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,)), jax.make_mesh((2,), ("x",))):
        with jax.set_mesh(mesh):
            np.testing.assert_allclose(jax.jit(attend)(q, k, v, mask), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("impl", "mask", "reason"),
    [
        ("interval", jnp.ones((1, 1, 9, 9), bool), "a mask in interval form (ShadowMask, KeyInterval); got bool"),
        ("segments", interval(9), "expected a mask that says where its segments are; got none"),
        ("segments", interval(7), "9 queries, 9 keys and a mask of 7"),
        ("flash", interval(9), "got impl='flash': expected one of reference, xla"),
        ("mosaic_gpu", interval(9), "expected JAX to run on a GPU; got 'cpu'"),
        ("mosaic_tpu", interval(9), "expected JAX to run on a TPU; got 'cpu'"),
    ],
)
def test_a_named_implementation_that_cannot_run_says_why(impl: Any, mask: Any, reason: str):
    q, k = shaped(9)
    unchecked_attend: Any = inspect.unwrap(attend)  # without the type checks under pytest
    with pytest.raises(ValueError, match=re.escape(reason)):
        unchecked_attend(q, k, k, mask, impl)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.ones((2, 9, 8))}, "expected q of shape [batch, heads, queries, head_dim]; got [2, 9, 8]"),
        ({"k": jnp.ones((1, 2, 9, 4))}, "expected k of shape [1, kv_heads, keys, 8]; got [1, 2, 9, 4]"),
        ({"v": jnp.ones((1, 2, 7, 8))}, "expected v of shape [1, 2, 9, 8]; got [1, 2, 7, 8]"),
        ({"q": jnp.ones((1, 3, 9, 8))}, "expected heads of q to be a multiple of the 2 KV heads of k; got 3"),
        ({"mask": ShadowMask(jnp.ones((1, 1, 1, 9), jnp.int32))}, "expected the mask of one layer, mask.layer(index)"),
        ({"mask": None}, "expected the mask as a KeyInterval or as booleans; got NoneType"),
        # Hugging Face adds 0 where a query sees a key and -1e9 elsewhere: as booleans, the opposite.
        ({"mask": jnp.full((1, 1, 9, 9), -1e9)}, "a mask of booleans, true where a query sees a key; got float32"),
        ({"mask": np.ones((1, 1, 9, 9), np.int32)}, "a mask of booleans, true where a query sees a key; got int32"),
        ({"mask": jnp.ones((9, 9), bool)}, "expected mask of shape [1, 2, 9, 9] for 9 queries of 4 heads and 9 keys"),
        ({"mask": jnp.ones((1, 4, 9, 9), bool)}, "where the first two axes may be 1; got [1, 4, 9, 9]"),
        ({"mask": KeyInterval(jnp.ones((3, 2, 9), jnp.int32))}, "expected mask.evicted_at of shape [1, 2, 9] for 9"),
        ({"sinks": jnp.ones(2), "impl": "xla"}, "expected sinks of shape [4]; got [2]"),
        ({"sinks": jnp.ones(1), "impl": "interval"}, "expected sinks of shape [4]; got [1]"),
        ({"q": jnp.ones((1, 4, 0, 8)), **dict.fromkeys("kv", jnp.ones((1, 2, 0, 8)))}, "at least one token; got 0"),
        ({"softcap": 0.0}, "expected a finite softcap > 0, or None for no cap; got 0.0"),
        ({"softcap": float("inf")}, "expected a finite softcap > 0, or None for no cap; got inf"),
    ],
)
def test_invalid_arrays_are_refused(change: dict[str, Any], message: str):
    unchecked_attend: Any = inspect.unwrap(attend)
    arrays = {"q": jnp.ones((1, 4, 9, 8)), "k": jnp.ones((1, 2, 9, 8)), "v": jnp.ones((1, 2, 9, 8))}
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        unchecked_attend(**{**arrays, "mask": interval(9), **change})


def test_reasons_against_the_gpu_kernel(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Accelerator()])
    assert "got float32" in str(why_not("mosaic_gpu", *shaped(9, jnp.float32), interval(9)))
    assert "got 40" in str(why_not("mosaic_gpu", *shaped(9, head_dim=40), interval(9)))
    q, k = shaped(9)
    mixed = "expected q, k and v of one dtype; got bfloat16, float32, float32"
    assert why_not("mosaic_gpu", q, k.astype(jnp.float32), interval(9)) == mixed
    assert attention.why_not_decode("mosaic_gpu", q[:, :, :1], k.astype(jnp.float32)) == mixed
    with pytest.raises(ValueError, match="expected q, k and v of one dtype; got bfloat16, bfloat16, float32"):
        attend(q, k, k.astype(jnp.float32), interval(9), "mosaic_gpu")
    with pytest.raises(ValueError, match="expected q, k and v of one dtype; got bfloat16, bfloat16, float32"):
        decode(q[:, :, :1], k, k.astype(jnp.float32), jnp.ones((1, 2, 9), bool), "mosaic_gpu")
    monkeypatch.setattr(Accelerator, "compute_capability", "10.0")
    assert "got 10.0" in str(why_not("mosaic_gpu", *shaped(9), interval(9)))


def test_x64_uses_plain_jax_instead_of_kernels(monkeypatch: pytest.MonkeyPatch):
    """Pallas would give the kernels indices of 64 bits, which its compilers refuse."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    q, k = shaped(64)
    one = q[:, :, :1]
    attention._warn_once.cache_clear()
    reason = "expected jax_enable_x64 False, because Pallas' kernels have 32-bit indices; got True"
    with jax.enable_x64(True):
        assert why_not("mosaic_tpu", q, k, interval(64)) == reason
        assert attention.why_not_decode("mosaic_tpu", one, k) == reason
        with pytest.warns(RuntimeWarning, match=f"attention without the kernel mosaic_tpu, which is slower: {reason}"):
            assert best(q, k, interval(64)) == "portable"
        with pytest.warns(RuntimeWarning, match=f"decoding without the kernel mosaic_tpu, which is slower: {reason}"):
            assert best_decode(one, k) == "xla"
    assert best(q, k, interval(64)) == best_decode(one, k) == "mosaic_tpu"


@pytest.mark.parametrize("impl", ["interval", "segments"])
def test_masks_shared_by_heads_and_rows(impl: Any):
    q, k, v = inputs(4, 2)
    ends = jnp.asarray([[[0, 3, NEVER, 4, NEVER, 6, NEVER]]], jnp.int32)
    mask = KeyInterval(ends, Segments(2, 2, 3))
    expected = attend(q, k, v, mask.to_boolean(), "reference")
    np.testing.assert_allclose(attend(q, k, v, mask, impl), expected, atol=1e-6)


EVERY_CPU_IMPL = pytest.mark.parametrize("impl", ["reference", "xla", "interval", "segments", "portable"])


@EVERY_CPU_IMPL
def test_evictions_beyond_32_bits_mean_never(impl: Any):
    q, k, v = inputs(4, 2)
    segments = Segments(2, 2, T)

    def mask(end: int, dtype: Any) -> KeyInterval:
        ends: Any = np.asarray([[[0, 3, end, 4, end, 6, end]]], dtype)
        return KeyInterval(ends, segments)

    expected = attend(q, k, v, mask(NEVER, np.int32), impl)
    for dtype in (np.int64, np.uint32, np.uint64):
        wide = mask(np.iinfo(dtype).max, dtype)
        np.testing.assert_array_equal(attend(q, k, v, wide, impl), expected)
        np.testing.assert_array_equal(jax.jit(attend, static_argnums=4)(q, k, v, wide, impl), expected)
    with jax.enable_x64(True):
        wide = KeyInterval(jnp.asarray([[[0, 3, 2**40, 4, 2**63 - 1, 6, 2**32]]]), segments)
        np.testing.assert_allclose(attend(q, k, v, wide, impl), expected, atol=1e-6)


@EVERY_CPU_IMPL
def test_an_empty_batch(impl: Any):
    q, k, v = (x[:0] for x in inputs(4, 2))
    mask = interval(T, Segments(2, 2, T))
    out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, mask, impl), q, k, v)
    assert [x.shape for x in (out, *pull(out))] == [q.shape, q.shape, k.shape, v.shape]


ON_MESHES = [("interval", (2, 2, 2)), ("interval", (1, 1, 4)), ("segments", (2, 2, 2)), ("segments", (3, 1, 2))]


@pytest.mark.parametrize(("impl", "mesh"), ON_MESHES, ids=str)
def test_a_mesh_splits_rows_and_heads_without_communication(impl: Any, mesh: tuple[int, int, int]):
    """Eight rows, four query and two KV heads. Three devices cannot share eight rows, so each computes all; four
    repeat the KV heads."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(8, n, 40, 8)), jnp.float32) for n in (4, 2, 2))
    mask = random_evictions(40, Segments(5, 4, 6), batch=8, kv_heads=2).layer(0)
    expected = sum_of_squares(q, k, v, mask, impl)
    with jax.set_mesh(make_mesh(*mesh)):
        rows = ("data", "fsdp") if mesh[0] != 3 else None
        sharded = [jax.device_put(x, P(rows, "tensor" if x.shape[1] % mesh[2] == 0 else None)) for x in (q, k, v)]
        program = sum_of_squares.lower(*sharded, mask, impl).compile()
        got = program(*sharded, mask)
    chex.assert_trees_all_close(got, expected, rtol=2e-5, atol=1e-5)
    if mesh[2] != 4:  # there K and V start replicated
        assert not re.findall(r"all-gather|all-to-all|collective-permute", str(program.as_text()))
