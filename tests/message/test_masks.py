"""Interval masks against explicit boolean masks, and invalid masks."""

import inspect
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from smd_jax.message.masks import (
    NEVER,
    KeyInterval,
    Segments,
    ShadowMask,
    check_mask,
    dense_mask,
    layer_mask,
    positions,
    to_visible,
    windowed,
)

BATCH, LAYERS, HEADS, T = 2, 2, 2, 6  # one shape, so that every example reuses the same compiled operations
INTERVALS = arrays(np.int32, (BATCH, LAYERS, HEADS, T), elements=st.sampled_from([*range(T + 3), NEVER]))


def explicit(evicted_at: np.ndarray) -> np.ndarray:
    """The definition, one entry at a time."""
    visible = np.zeros((*evicted_at.shape, evicted_at.shape[-1]), bool)
    for *where, query, key in np.ndindex(visible.shape):
        visible[*where, query, key] = key <= query < evicted_at[*where, key]
    return visible


def shadow_mask(mask: np.ndarray) -> ShadowMask:
    """From `[…, queries, keys]`, leading axes of size 1 filled in."""
    return ShadowMask.from_boolean(jnp.asarray(mask.reshape((1,) * (5 - mask.ndim) + mask.shape)))


def test_left_padded_rows():
    valid = jnp.array([[False, False, True, True], [True, True, True, True]])
    assert dense_mask(valid).evicted_at.tolist() == [[[[0, 0, NEVER, NEVER]]], [[[NEVER] * 4]]]
    assert positions(valid).tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]
    assert positions(jnp.array([[False, True, True, False]])).tolist() == [[0, 0, 1, 2]], "also after the row"


@settings(deadline=None)
@given(INTERVALS)
def test_intervals_match_their_definition(evicted_at: np.ndarray):
    mask = ShadowMask(jnp.array(evicted_at))
    np.testing.assert_array_equal(mask.to_boolean(), explicit(evicted_at))
    for index in range(LAYERS):
        np.testing.assert_array_equal(to_visible(layer_mask(mask, index)), explicit(evicted_at)[:, index])
        np.testing.assert_array_equal(to_visible(layer_mask(mask.to_boolean(), index)), explicit(evicted_at)[:, index])


@pytest.mark.parametrize("window", [T, 2**31 - 1, 2**40])
def test_a_window_of_all_columns_hides_nothing(window: int):
    mask = KeyInterval(jnp.array([[[0, 3, NEVER, 4, NEVER, 6]]], jnp.int32))
    for form in (mask, mask.to_boolean()):
        np.testing.assert_array_equal(to_visible(windowed(form, window)), mask.to_boolean())


@pytest.mark.parametrize("dtype", [np.int64, np.uint32])
def test_evictions_beyond_32_bits_mean_never(dtype: Any):
    evicted_at: Any = np.array([[[[0, 3, np.iinfo(dtype).max, 4]]]], dtype)
    mask = ShadowMask(evicted_at)
    assert mask.evicted_at.tolist() == [[[[0, 3, NEVER, 4]]]]
    np.testing.assert_array_equal(mask.to_boolean(), explicit(evicted_at))
    np.testing.assert_array_equal(to_visible(windowed(mask.layer(0), 9)), explicit(evicted_at)[:, 0])


@settings(deadline=None)
@given(INTERVALS)
def test_from_boolean_inverts_to_boolean(evicted_at: np.ndarray):
    """Up to equal meanings: an end after the last query is NEVER, and a key that no query sees ends at 0."""
    again = np.asarray(shadow_mask(explicit(evicted_at)).evicted_at)
    np.testing.assert_array_equal(explicit(again), explicit(evicted_at))
    seen = evicted_at > np.arange(T)
    np.testing.assert_array_equal(again, np.where(seen, np.where(evicted_at >= T, NEVER, evicted_at), 0))


@settings(deadline=None)
@given(INTERVALS, *(st.integers(0, size - 1) for size in (BATCH, LAYERS, HEADS, T, T)))
def test_one_wrong_entry_is_refused(evicted_at: np.ndarray, b: int, layer: int, h: int, query: int, key: int):
    """Flips one entry so that no interval is left; the message says where."""
    mask = explicit(evicted_at)
    mask[b, layer, h, query, key] ^= True
    seen = np.flatnonzero(mask[b, layer, h, :, key])
    assume(len(seen) and seen.tolist() != list(range(key, key + len(seen))))
    with pytest.raises(ValueError, match=f"batch {b}, layer {layer}, kv head {h}, key {key}"):
        shadow_mask(mask)


def test_unequal_numbers_of_queries_and_keys_are_refused():
    with pytest.raises(ValueError, match="as many queries as keys; got 2 queries and 3 keys"):
        shadow_mask(np.ones((2, 3), bool))


def test_masks_of_another_rank_are_refused():
    """A mask of one layer, or of one head."""
    flat: Any = ShadowMask(jnp.ones((2, 5), jnp.int32))
    for use in (flat.to_boolean, lambda: flat.layer(0)):
        with pytest.raises(ValueError, match=r"evicted_at of shape \[batch, layers, kv_heads, keys\]; got \[2, 5"):
            use()
    ask: Any = inspect.unwrap(ShadowMask.from_boolean)
    with pytest.raises(ValueError, match=r"mask of shape \[batch, layers, kv_heads, queries, keys\]; got \[5, 5"):
        ask(ShadowMask, np.tril(np.ones((5, 5), bool)))


def test_axes_of_size_one_serve_all_layers():
    shared = ShadowMask(jnp.array([[[[0, NEVER, 4, NEVER, NEVER, NEVER]]]]))
    for index in (0, 5):
        assert shared.layer(index).evicted_at.shape == (1, 1, 6)
        assert to_visible(layer_mask(shared.to_boolean(), index)).shape == (1, 1, 6, 6)


@pytest.mark.parametrize("index", [2, 5, -3])
def test_missing_layers_are_refused(index: int):
    mask = ShadowMask(jnp.array([[[[3, NEVER]], [[NEVER, NEVER]]]]))
    for use in (mask, mask.to_boolean()):
        with pytest.raises(ValueError, match=f"expected a layer from -2 to 1; got {index}"):
            layer_mask(use, index)


SIZES = {"batch": 2, "layers": 3, "kv_heads": 4, "columns": 5}


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 1, 1, 5), (2, 1, 4, 5), (1, 3, 1, 5)])
def test_masks_that_broadcast_are_accepted(shape: tuple[int, ...]):
    check_mask(ShadowMask(jnp.zeros(shape, jnp.int32)), **SIZES)
    check_mask(jnp.zeros((*shape, 5), bool), **SIZES)


@pytest.mark.parametrize("shape", [(2, 3, 4, 6), (2, 3, 2, 5), (3, 3, 4, 5), (2, 2, 4, 5), (2, 3, 4, 1)])
def test_masks_that_do_not_broadcast_are_refused(shape: tuple[int, ...]):
    got = rf"\(2, 3, 4, 5.*got \({', '.join(map(str, shape))}"
    with pytest.raises(ValueError, match=got):
        check_mask(ShadowMask(jnp.zeros(shape, jnp.int32)), **SIZES)
    with pytest.raises(ValueError, match=got):
        check_mask(jnp.zeros((*shape, shape[-1]), bool), **SIZES)


def test_changed_intervals_lose_their_segments():
    """With old segments, attention would skip keys that the new intervals show."""
    recorded = ShadowMask(jnp.array([[[[2, 3, NEVER, NEVER]]]])).with_segments((Segments(2, 1, 1),))
    forever = jnp.full_like(recorded.evicted_at, NEVER)
    changed = recorded.replace(evicted_at=forever)
    assert changed.segments == () and changed.layer(0).segments is None
    one = recorded.layer(0)
    assert one.segments == Segments(2, 1, 1) and one.replace(evicted_at=forever[:, 0]).segments is None
    kept = recorded.replace(evicted_at=forever, segments=recorded.segments)
    for same in (kept, recorded.replace(quantized=None), recorded.first_columns(3)):
        assert same.segments == recorded.segments


def test_flax_restores_masks_with_their_segments():
    recorded = ShadowMask(jnp.array([[[[2, 3, NEVER, NEVER]]]])).with_segments((Segments(2, 1, 1),))
    written = serialization.to_bytes({"mask": recorded, "layer": recorded.layer(0)})
    again: Any = serialization.from_bytes({"mask": recorded, "layer": recorded.layer(0)}, written)
    assert again["mask"].segments == recorded.segments and again["layer"].segments == Segments(2, 1, 1)
    assert again["mask"].evicted_at.tolist() == recorded.evicted_at.tolist()
    with pytest.raises(ValueError, match="expected a mask's fields"):
        serialization.from_state_dict(recorded, {"evicted_at": recorded.evicted_at})


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_masks_of_numbers_are_refused(dtype: Any):
    """Hugging Face adds 0 where a query sees a key and -1e9 elsewhere: read as booleans, the opposite."""
    numbers = np.zeros((2, 3, 4, 5, 5), dtype)
    message = f"expected a mask of booleans, true where a query sees a key; got {numbers.dtype}"
    check: Any = inspect.unwrap(check_mask)
    with pytest.raises(TypeError, match=message):
        check(numbers, **SIZES)
    convert: Any = inspect.unwrap(ShadowMask.from_boolean)
    with pytest.raises(TypeError, match=message):
        convert(ShadowMask, numbers)
    if dtype == np.float32:  # integers of 0 and 1 are a tokenizer's attention mask
        dense: Any = inspect.unwrap(dense_mask)
        with pytest.raises(TypeError, match=message):
            dense(np.zeros((2, 5), dtype))
