"""Quantised caches and their replay against a float64 reference that follows KIVI's formulas group by group."""

from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smd_jax.cache.quantized import no_slots
from smd_jax.cache.slots import EMPTY, LayerCache, full_precision, gather, quantize, select, write
from smd_jax.devices.sharding import make_mesh
from smd_jax.message.masks import NEVER, KeyInterval, Segments, ShadowMask, head_mask
from smd_jax.message.quantization import (
    Parity,
    QuantConfig,
    QuantizedReplay,
    Ranges,
    dequantize,
    key_ranges,
    of_channels,
    of_columns,
    pack,
    unpack,
    value_ranges,
)
from smd_jax.message.quantization import quantize as to_codes
from smd_jax.model.attention import attend
from tests.attention_cases import out_and_gradients, sum_of_squares

EVERY_BITS = pytest.mark.parametrize("bits", [8, 4, 2])


# Bytes.


def test_pack_by_hand():
    """The first code in the lowest bits: 1 + 2 * 4 + 3 * 16 + 0 * 64, then 1."""
    assert pack(jnp.array([1, 2, 3, 0, 1], jnp.uint8), 2).tolist() == [57, 1]
    assert pack(jnp.array([15, 1], jnp.uint8), 4).tolist() == [31]
    assert pack(jnp.array([1, 0, 0, 0, 0, 0, 0, 1, 1], jnp.uint8), 1).tolist() == [129, 1]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 3, 8, 19]), st.integers(0, 99))
def test_unpack_inverts_pack(bits: int, count: int, seed: int):
    codes = np.random.default_rng(seed).integers(0, 2**bits, (2, 3, count)).astype(np.uint8)
    packed = jax.jit(pack, static_argnums=1)(codes, bits)
    assert packed.dtype == jnp.uint8 and packed.shape == (2, 3, -(-count * bits // 8))
    np.testing.assert_array_equal(jax.jit(unpack, static_argnums=(1, 2))(packed, bits, count), codes)


# Codes.


class Reference(NamedTuple):
    """Codes and dequantised numbers of one row and head, `[columns, head_dim]`."""

    codes: np.ndarray
    numbers: np.ndarray


def group_reference(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and numbers of one group, by the formulas of KIVI, section 3.1."""
    low, high = x.min(), x.max()
    scale = (high - low) / (2**bits - 1)
    if scale == 0:
        return np.zeros(x.shape, np.uint8), np.full(x.shape, low)
    codes = np.round((x - low) / scale).astype(np.uint8)
    return codes, codes * scale + low


def keys_reference(keys: np.ndarray, valid: np.ndarray, first: int, config: QuantConfig) -> Reference:
    """By channel, in groups of `group` columns, one of which begins at `first`."""
    out = Reference(np.zeros(keys.shape, np.uint8), np.zeros(keys.shape))
    group_of = (np.arange(len(keys)) - first) // config.group
    for group in np.unique(group_of):
        members = np.flatnonzero((group_of == group) & valid)
        for channel in range(keys.shape[1]) if len(members) else ():
            codes, numbers = group_reference(keys[members, channel], config.bits)
            out.codes[members, channel], out.numbers[members, channel] = codes, numbers
    return out


def values_reference(values: np.ndarray, config: QuantConfig) -> Reference:
    """By token, in groups of neighbouring channels."""
    out, size = Reference(np.zeros(values.shape, np.uint8), np.zeros(values.shape)), config.value_group
    for token in range(len(values)):
        for start in range(0, values.shape[1], size):
            part = slice(start, start + size)
            out.codes[token, part], out.numbers[token, part] = group_reference(values[token, part], config.bits)
    return out


@partial(jax.jit, static_argnums=(2, 3))
def quantized_keys(keys: Any, valid: Any, first: int, config: QuantConfig) -> tuple[Any, Any]:
    ranges = of_columns(key_ranges(keys, valid, first, config), first, keys.shape[2], config)
    codes = to_codes(keys, ranges, config)
    return codes, dequantize(codes, ranges.low, ranges.scale)


@partial(jax.jit, static_argnums=1)
def quantized_values(values: Any, config: QuantConfig) -> tuple[Any, Any]:
    ranges = of_channels(value_ranges(values, config), values.shape[3], config)
    codes = to_codes(values, ranges, config)
    return codes, dequantize(codes, ranges.low, ranges.scale)


# Bits, group, first and columns: groups that begin before, at and after the first column, whole and partial groups, of
# one column, and of more columns than there are. The few sizes are compiled once.
KIVI_SIZES: list[tuple[Any, int, int, int]] = [
    (8, 3, 4, 14), (4, 4, 0, 12), (2, 2, 5, 9), (2, 1, 3, 5), (4, 7, 12, 4), (8, 5, 1, 1), (2, 6, 11, 13)
]  # fmt: skip


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.sampled_from(KIVI_SIZES), st.integers(0, 16), st.integers(0, 99))
def test_against_kivi(sizes: tuple[Any, int, int, int], padding: int, seed: int):
    """Exact codes, in float64. Padding is large and must not widen a range."""
    bits, group, first, columns = sizes
    rng, config = np.random.default_rng(seed), QuantConfig(bits=bits, group=group, value_group=4)
    x = rng.normal(size=(2, 2, columns, 8)) * 10.0 ** rng.integers(-3, 4, (2, 2, 1, 8))
    valid = np.arange(columns) >= np.array([padding, 0])[:, None]
    with jax.enable_x64(True):
        given_keys = np.where(valid[:, None, :, None], x, 1e6)
        found = quantized_keys(given_keys, valid[:, None], min(first, columns), config), quantized_values(x, config)
    (codes, numbers), (value_codes, value_numbers) = jax.device_get(found)
    assert numbers.dtype == value_numbers.dtype == np.float64
    for b, h in np.ndindex(2, 2):
        expected = keys_reference(x[b, h], valid[b], min(first, columns), config)
        np.testing.assert_array_equal(codes[b, h, valid[b]], expected.codes[valid[b]])
        np.testing.assert_allclose(numbers[b, h, valid[b]], expected.numbers[valid[b]], atol=1e-11)
        expected = values_reference(x[b, h], config)
        np.testing.assert_array_equal(value_codes[b, h], expected.codes)
        np.testing.assert_allclose(value_numbers[b, h], expected.numbers, atol=1e-11)


def test_groups_without_a_range():
    """Groups without a key, with one, with equal keys, and with a range that vanishes in float32."""
    keys = jnp.array([9.0, 9.0, 3.0, 9.0, 4.0, 4.0, 1e-40, 0.0])[None, None, :, None]
    valid = jnp.array([False, False, True, False, True, True, True, True])[None, None]
    codes, numbers = quantized_keys(keys, valid, 0, QuantConfig(bits=2, group=2))
    assert np.isfinite(np.asarray(numbers)).all()
    np.testing.assert_allclose(numbers[0, 0, np.array([2, 4, 5, 6, 7]), 0], [3.0, 4.0, 4.0, 0.0, 0.0], atol=1e-39)


# Parity.


@EVERY_BITS
@pytest.mark.parametrize("error", [0.0, 0.3, 0.49])
def test_parity_recovers_the_samplers_code(bits: Any, error: float):
    """If the learner's quotient is off by less than a half, for any number of bits."""
    rng, config = np.random.default_rng(0), QuantConfig(bits=bits)
    quotient = np.concatenate([rng.uniform(0, config.highest, 4000), np.arange(config.highest) + 0.5])
    sampler = jnp.asarray(quotient, jnp.float32)[None, None, None]
    unit = Ranges(jnp.zeros_like(sampler), jnp.ones_like(sampler))
    codes = to_codes(sampler, unit, config)
    learner = sampler + jnp.asarray(rng.uniform(-error, error, quotient.shape), jnp.float32)[None, None, None]
    np.testing.assert_array_equal(to_codes(learner, unit, config, codes & 1), codes)
    plain = np.asarray(to_codes(learner, unit, config))
    assert (plain == codes).all() == (error == 0.0)
    too_far = sampler + 0.8 * jnp.sign(learner - sampler)
    assert error == 0.0 or (to_codes(too_far, unit, config, codes & 1) != codes).any()


@EVERY_BITS
def test_parity_keeps_codes_in_range(bits: Any):
    """Far outside the range, codes are the nearest end of that parity."""
    config, far = QuantConfig(bits=bits), jnp.array([-1e9, -1e9, 1e9, 1e9])[None, None, None]
    unit = Ranges(jnp.zeros_like(far), jnp.ones_like(far))
    codes = to_codes(far, unit, config, jnp.array([0, 1, 0, 1], jnp.uint8)[None, None, None])
    assert codes.tolist() == [[[[0, 1, config.highest - 1, config.highest]]]]


# The cache.

PROMPT, BUFFER, BUDGET, COLUMNS, HEAD_DIM = 7, 6, 5, 25, 8
CACHE_QUANT = QuantConfig(bits=2, group=3, value_group=4)


@EVERY_BITS
def test_kept_keys_are_quantised_once(bits: Any):
    """Under random evictions, a kept key reads as the reference rounded it with all columns of its group, also evicted
    ones. Keys in the buffer are exact."""
    config = replace(CACHE_QUANT, bits=bits)
    rng = np.random.default_rng(1)
    keys, values = rng.normal(size=(2, 2, 2, COLUMNS, HEAD_DIM)).astype(np.float32)
    live = np.arange(COLUMNS) >= np.array([0, 3])[:, None]
    live[1, 21:] = False  # row 1 ends within a segment

    columns = jnp.where(jnp.asarray(live[:, None, :PROMPT]), jnp.arange(PROMPT)[None, None], EMPTY)
    columns = jnp.broadcast_to(columns, (2, 2, PROMPT)).astype(jnp.int32)
    prompt_keys, prompt_values = (jnp.asarray(x[:, :, :PROMPT]) for x in (keys, values))
    cache = LayerCache(prompt_keys, prompt_values, columns, no_slots(prompt_keys, PROMPT, COLUMNS - PROMPT, config))
    quantised = 0
    for column in range(PROMPT, COLUMNS + 1):
        if (column - PROMPT) % BUFFER == 0:
            check_reads(cache, keys, values, live, quantised, config)
            cache, quantised = compress(cache, quantised, rng), column
            check_reads(cache, keys, values, live, quantised, config)
        if column < COLUMNS:
            slot = jnp.array(BUDGET + (column - PROMPT) % BUFFER)
            k, v = (jnp.asarray(x[:, :, column : column + 1]) for x in (keys, values))
            cache = write(cache, slot, k, v, jnp.where(jnp.asarray(live[:, column]), column, EMPTY)[:, None])


@jax.jit
def compress_jitted(cache: LayerCache, scores: Any, start: Any) -> LayerCache:
    slots, _ = select(scores, cache.valid, BUDGET)
    cache, _ = quantize(cache, jnp.full(2, start, jnp.int32))
    return gather(cache, slots, BUFFER)


def compress(cache: LayerCache, start: int, rng: Any) -> LayerCache:
    return compress_jitted(cache, jnp.asarray(rng.normal(size=cache.columns.shape)), start)


def check_reads(
    cache: LayerCache, keys: np.ndarray, values: np.ndarray, live: np.ndarray, quantised: int, config: QuantConfig
) -> None:
    got_keys, got_values = (np.asarray(x) for x in jax.jit(full_precision)(cache))
    for b, h in np.ndindex(2, 2):
        # A group holds the columns that were live when its segment ended.
        of_keys = keys_reference(keys[b, h].astype(np.float64), live[b], PROMPT, config).numbers
        of_values = values_reference(values[b, h].astype(np.float64), config).numbers
        for slot, column in enumerate(np.asarray(cache.columns)[b, h]):
            if column == EMPTY:
                continue
            rounded = column < quantised
            expected = (of_keys, of_values) if rounded else (keys[b, h], values[b, h])
            np.testing.assert_allclose(got_keys[b, h, slot], expected[0][column], atol=1e-6)
            np.testing.assert_allclose(got_values[b, h, slot], expected[1][column], atol=1e-6)


# The learner's attention.

T, LENGTH, FIRST = 23, 6, 5
SEGMENTS = Segments(FIRST, LENGTH, budget=7)
QUANT = QuantConfig(bits=2, group=3, value_group=4)


@cache
def problem() -> tuple[list[jax.Array], np.ndarray, KeyInterval]:
    """q, k, v and the gradient of the output; the visibility; and the same as a mask with parities."""
    rng = np.random.default_rng(3)
    q, k, v, d_out = (rng.normal(size=(2, heads, T, 8)).astype(np.float32) for heads in (4, 2, 2, 4))
    evicted_at = np.full((2, 2, T), NEVER)
    evicted_at[0, :, :2] = 0
    for column in range(FIRST, T, LENGTH):
        for row in evicted_at.reshape(-1, T):
            alive = np.flatnonzero(row[:column] > column)
            row[rng.permutation(alive)[SEGMENTS.budget :]] = column
    t = np.arange(T)
    visible = (t[None] <= t[:, None]) & (t[:, None] < evicted_at[..., None, :])
    valid = jnp.asarray(evicted_at > 0)
    codes = quantized_keys(jnp.asarray(k), valid, FIRST, QUANT)[0], quantized_values(jnp.asarray(v), QUANT)[0]
    parity = Parity(*(pack(x & 1, 1) for x in codes))
    mask = KeyInterval(jnp.asarray(evicted_at, jnp.int32), SEGMENTS, QuantizedReplay(parity, QUANT, FIRST, LENGTH))
    return [jnp.asarray(x) for x in (q, k, v, d_out)], visible, mask


def test_head_mask_refuses_quantised_masks():
    """Other attention reads no quantised keys, so it would replay another policy."""
    mask = problem()[2]
    whole = ShadowMask(mask.evicted_at[:, None], (SEGMENTS,), jax.tree.map(lambda x: x[:, None], mask.quantized))
    with pytest.raises(ValueError, match="expected the mask of a cache in full precision"):
        head_mask(whole, 0, num_heads=4)
    assert head_mask(whole.replace(quantized=None), 0, num_heads=4).shape == (2, 4, T, T)


def by_query(q: Any, k: Any, v: Any, visible: np.ndarray, rounded: tuple[np.ndarray, np.ndarray]) -> Any:
    """Straight-through attention with keys and values of each query, `[batch, kv_heads, queries, keys, head_dim]`."""
    t = np.arange(T)
    ends = np.where(t < FIRST, FIRST, FIRST + ((t - FIRST) // LENGTH + 1) * LENGTH)
    later = jnp.asarray(t[:, None] >= ends)[None, None, :, :, None]
    k, v = (
        jnp.where(later, (x + jax.lax.stop_gradient(r - x))[:, :, None], x[:, :, None])
        for x, r in ((k, rounded[0]), (v, rounded[1]))
    )
    grouped = q.reshape(2, 2, 2, T, 8)
    scores = jnp.einsum("bhgtd,bhtsd->bhgts", grouped, k) / np.sqrt(8)
    seen = jnp.asarray(visible)[:, :, None]
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores, 0.0)), 0.0)
    total = weights.sum(-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    return jnp.einsum("bhgts,bhtsd->bhgtd", weights, v).reshape(q.shape)


@cache
def expected_attention() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Output and gradients of `by_query`, and those without quantisation."""
    arrays, visible, mask = problem()
    valid = np.asarray(mask.evicted_at) > 0
    k, v = (np.asarray(x, np.float64) for x in arrays[1:3])
    rounded = [np.zeros(k.shape), np.zeros(k.shape)]
    for b, h in np.ndindex(2, 2):
        rounded[0][b, h] = keys_reference(k[b, h], valid[b, h], FIRST, QUANT).numbers
        rounded[1][b, h] = values_reference(v[b, h], QUANT).numbers
    numbers = rounded[0].astype(np.float32), rounded[1].astype(np.float32)
    expected = out_and_gradients(lambda q, k, v: by_query(q, k, v, visible, numbers), *arrays)
    full = mask.replace(quantized=None)
    return expected, out_and_gradients(lambda q, k, v: attend(q, k, v, full, "reference"), *arrays)


@pytest.mark.parametrize("impl", ["reference", "xla", "interval", "segments", "portable"])
def test_attention_uses_the_samplers_rounded_keys(impl: Any):
    """Output and straight-through gradients; queries that see no key give zeros."""
    arrays, _, mask = problem()
    expected, precise = expected_attention()
    got = out_and_gradients(lambda q, k, v: attend(q, k, v, mask, impl), *arrays)
    for name, x, y, z in zip(("out", "dq", "dk", "dv"), got, expected, precise, strict=True):
        np.testing.assert_allclose(x, y, atol=3e-6, err_msg=name)
        assert np.abs(z - y).max() > 1e-2, f"{name} would be the same without quantisation"
    assert not got[0][0, :, :2].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "impl"), [((2, 1, 2), "interval"), ((1, 1, 4), "segments"), ((3, 1, 1), "interval")], ids=str
)
def test_on_a_mesh(impl: Any, mesh: tuple[int, int, int]):
    """Four devices share two KV heads; three cannot share two rows."""
    (q, k, v, _), _, mask = problem()
    with jax.set_mesh(make_mesh(*mesh)):
        got = sum_of_squares(q, k, v, mask, impl)
    chex.assert_trees_all_close(got, sum_of_squares(q, k, v, mask, impl), rtol=2e-5, atol=1e-5)


def test_recorded_parities_decide_the_rounding():
    """The learner's keys differ slightly from the sampler's."""
    (q, k, v, _), _, mask = problem()
    assert mask.quantized is not None
    near = k + 1e-6 * jax.random.normal(jax.random.key(0), k.shape)
    attend_jitted = jax.jit(attend, static_argnums=4)
    out, again = (attend_jitted(q, x, v, mask, "xla") for x in (k, near))
    np.testing.assert_allclose(out, again, atol=1e-4)
    wrong = mask.quantized.replace(parity=jax.tree.map(lambda x: ~x, mask.quantized.parity))
    assert np.abs(attend_jitted(q, k, v, mask.replace(quantized=wrong), "xla") - out).max() > 0.1


# Invalid input.


def test_invalid_groups_are_refused():
    with pytest.raises(ValueError, match="expected group >= 1; got 0"):
        QuantConfig(bits=4, group=0)
    with pytest.raises(ValueError, match="expected value_group >= 1; got 0"):
        QuantConfig(bits=4, value_group=0)


def test_value_groups_divide_the_head():
    assert (
        QuantConfig(bits=4, value_group=32).channels(8) == 8 and QuantConfig(bits=4, value_group=32).channels(64) == 32
    )
    with pytest.raises(ValueError, match="value_group that divides head_dim 80; got 32"):
        QuantConfig(bits=4).channels(80)
