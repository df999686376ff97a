"""Soft caps and learned sinks: the reference against NumPy, and every implementation against the reference."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.message.masks import KeyInterval
from smd_jax.model import attention
from smd_jax.model.attention import attend, decode
from smd_jax.testing import random_evictions
from smd_kernels import reference
from smd_kernels.blocks import BlockSizes
from smd_kernels.intervals import interval_attention
from smd_kernels.segments import Segments, segment_attention
from smd_kernels.tpu import MosaicTpuKernel
from smd_kernels.xla import XlaKernel
from tests import numpy_decoder

SEGMENTS = Segments(first=9, length=5, budget=7)
TOKENS, HEADS, HEAD_DIM = 37, 4, 64
EVICTED_AT = random_evictions(TOKENS, SEGMENTS, batch=2, kv_heads=2, padding=(0, 4)).evicted_at[:, 0]
VISIBLE = reference.interval_mask(EVICTED_AT)
SMALL = BlockSizes(rows=16, keys=8, scores=300)
OPTIONS = {"cap": (1.5, False), "sinks": (None, True), "both": (1.5, True)}
each_option = pytest.mark.parametrize("option", OPTIONS)


def inputs(option: str) -> tuple[float | None, list[jax.Array]]:
    """The soft cap; and q, k, v, optional sinks, and the gradient of the output."""
    softcap, has_sinks = OPTIONS[option]
    rng = np.random.default_rng(0)
    shapes = [(2, heads, TOKENS, HEAD_DIM) for heads in (HEADS, 2, 2)]
    arrays = [jnp.asarray(2 * rng.normal(size=shape), jnp.float32) for shape in shapes]
    sinks = [jnp.asarray(4 + rng.normal(size=HEADS), jnp.float32)] if has_sinks else []
    return softcap, [*arrays, *sinks, jnp.asarray(rng.normal(size=shapes[0]), jnp.float32)]


def numpy_attention(softcap: float | None, q: Any, k: Any, v: Any, sinks: Any = None) -> np.ndarray:
    return numpy_decoder.attention(q, k, v, VISIBLE, softcap, sinks)[0]


@partial(jax.jit, static_argnums=0)
def results(f: Any, arrays: list[jax.Array]) -> Any:
    """The output, and the gradients of q, k, v and sinks."""
    out, pull = jax.vjp(f, *arrays[:-1])
    return out, *pull(arrays[-1])


def by_reference(softcap: float | None) -> Any:
    return lambda q, k, v, sinks=None: reference.attention(q, k, v, VISIBLE, softcap, sinks)


@each_option
def test_reference_matches_numpy(option: str):
    softcap, arrays = inputs(option)
    assert not np.asarray(VISIBLE.any(-1)).all(), "some query must see no key"
    out, *gradients = results(by_reference(softcap), arrays)
    np.testing.assert_allclose(out, numpy_attention(softcap, *arrays[:-1]), atol=1e-5)
    assert all(np.isfinite(x).all() for x in gradients)
    plain = results(by_reference(None), [*arrays[:3], arrays[-1]])[0]
    assert np.abs(out - plain).max() > 0.1


def by_kernel(kernel: Any, segments: Segments | None) -> Any:
    def f(q: Any, k: Any, v: Any, sinks: Any = None) -> Any:
        rows = None if sinks is None else jnp.broadcast_to(sinks[None], q.shape[:2])
        if segments is None:
            return interval_attention(q, k, v, EVICTED_AT, kernel, None, rows)
        return segment_attention(q, k, v, EVICTED_AT, segments, kernel, 3, None, rows)

    return f


def by_attend(impl: Any, softcap: float | None) -> Any:
    mask = KeyInterval(EVICTED_AT, segments=SEGMENTS)
    return lambda q, k, v, sinks=None: attend(q, k, v, mask, impl, softcap=softcap, sinks=sinks)


IMPLEMENTATIONS = {
    "reference": partial(by_attend, "reference"),
    "xla": partial(by_attend, "xla"),
    "interval": partial(by_attend, "interval"),
    "segments": partial(by_attend, "segments"),
    "tiles": lambda softcap: by_kernel(XlaKernel(SMALL, softcap), None),
    "tiles of segments": lambda softcap: by_kernel(XlaKernel(SMALL, softcap), SEGMENTS),
    "tpu": lambda softcap: by_kernel(MosaicTpuKernel(BlockSizes(), True, softcap), None),
    "tpu segments": lambda softcap: by_kernel(MosaicTpuKernel(BlockSizes(), True, softcap), SEGMENTS),
}


# Interpreted kernels are slow: only with both options.
@pytest.mark.parametrize(
    ("name", "option"),
    [(name, option) for name in IMPLEMENTATIONS for option in OPTIONS if "tpu" not in name or option == "both"],
)
def test_implementations_match_the_reference(name: str, option: str):
    softcap, arrays = inputs(option)
    found = results(IMPLEMENTATIONS[name](softcap), arrays)
    for x, y in zip(found, results(by_reference(softcap), arrays), strict=True):
        np.testing.assert_allclose(x, y, atol=3e-5 * max(float(jnp.abs(y).max()), 1.0))


@pytest.mark.parametrize("impl", ["interval", "segments"])
def test_fully_masked_query_makes_no_nan(impl: str):
    """Intermediate results, too: `jax_debug_nans` checks every operation outside of jit."""
    softcap, arrays = inputs("both")
    expected = results(by_attend(impl, softcap), arrays)
    with jax.debug_nans(True):
        out, pull = jax.vjp(by_attend(impl, softcap), *arrays[:-1])
        found = out, *pull(arrays[-1])
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.parametrize("impl", ["reference", "xla", "interval", "segments"])
def test_sink_of_minus_infinity_has_no_effect(impl: str):
    """Also in a row that sees no key, whose softmax is empty."""
    _, (q, k, v, sinks, d_out) = inputs("sinks")
    *found, d_sinks = results(by_attend(impl, None), [q, k, v, jnp.full_like(sinks, -jnp.inf), d_out])
    for x, y in zip(found, results(by_attend(impl, None), [q, k, v, d_out]), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
    assert not np.asarray(d_sinks).any()


@each_option
def test_decode_matches_numpy(option: str):
    """The last query of a row, and of a row of empty slots. The attention that slots receive excludes the sink."""
    softcap, arrays = inputs(option)
    q, k, v, *rest = arrays[:-1]
    valid = VISIBLE[:, :, -1].at[1].set(False)
    out, received = decode(q[:, :, -1:], k, v, valid, softcap=softcap, sinks=rest[0] if rest else None)
    expected = numpy_attention(softcap, q, k, v, *rest)[:, :, -1:]
    np.testing.assert_allclose(out[0], expected[0], atol=1e-5)
    assert not np.asarray(out[1]).any() and not np.asarray(received[1]).any()
    share = np.asarray(received[0].sum(-1))
    assert (share < 1.99).all() if rest else np.allclose(share, 2)


def test_unsupported_options_fall_back_with_a_warning(monkeypatch: pytest.MonkeyPatch):
    """The GPU kernel has no cap, and its decode kernel neither cap nor sinks. Named kernels raise."""
    monkeypatch.setattr(attention, "wrong_device", lambda impl: None if impl == "mosaic_gpu" else "no TPU")
    q, k, v, _ = (x.astype(jnp.bfloat16) for x in inputs("cap")[1])
    mask = KeyInterval(EVICTED_AT)
    assert attention.best(q, k, mask) == "mosaic_gpu", "without a cap"
    with pytest.warns(RuntimeWarning, match="attention without the kernel mosaic_gpu.*expected no softcap.*got 1.25"):
        assert attention.best(q, k, mask, 1.25) == "portable"
    with pytest.raises(ValueError, match="got impl='mosaic_gpu': expected no softcap of scores.*got 1.25"):
        attend(q, k, v, mask, "mosaic_gpu", softcap=1.25)
    query, valid = q[:, :, -1:], jnp.ones(k.shape[:3], bool)
    with pytest.warns(RuntimeWarning, match="decoding without the kernel mosaic_gpu.*neither a softcap.*nor sinks"):
        decode(query, k, v, valid, sinks=jnp.zeros(HEADS))
    with pytest.raises(ValueError, match="got impl='mosaic_gpu': expected neither a softcap of scores nor sinks"):
        decode(query, k, v, valid, "mosaic_gpu", sinks=jnp.zeros(HEADS))
