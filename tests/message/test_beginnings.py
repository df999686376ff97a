"""The longest beginning that two sequences can share in one row, so that the row's mask is an interval mask."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from smd_jax.message.masks import NEVER, ShadowMask
from smd_jax.message.packing import shared_beginning


def shared_row(first: np.ndarray, second: np.ndarray, shared: int) -> np.ndarray | None:
    """Merges two visibilities `[heads, queries, keys]` into a row that holds the first `shared` tokens once; None where
    they differ there."""
    heads, n, _ = first.shape
    m = second.shape[1]
    if (first[:, :shared, :shared] != second[:, :shared, :shared]).any():
        return None
    row = np.zeros((heads, n + m - shared, n + m - shared), bool)
    row[:, :n, :n] = first
    own = np.arange(n, n + m - shared)
    row[:, own[:, None], own[None]] = second[:, shared:, shared:]
    row[:, n:, :shared] = second[:, shared:, :shared]
    return row


def is_interval(row: np.ndarray | None) -> bool:
    """Whether `ShadowMask.from_boolean` can rebuild the mask."""
    if row is None:
        return False
    try:
        ShadowMask.from_boolean(jnp.asarray(row[None, None]))
    except ValueError:
        return False
    return True


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**20), st.integers(1, 7), st.integers(0, 4), st.integers(0, 4), st.integers(0, 3))
def test_longest_shared_beginning(seed: int, equal: int, first_rest: int, second_rest: int, evictions: int):
    rng = np.random.default_rng(seed)
    first, second = np.arange(equal + first_rest), np.concatenate([np.arange(equal), 100 + np.arange(second_rest)])
    evicted_at = []
    for length in (len(first), len(second)):
        at = np.full((1, 2, length), NEVER)
        for _ in range(evictions):
            head, key = rng.integers(2), rng.integers(length)
            at[0, head, key] = rng.integers(key + 1, length + 1)
        evicted_at.append(at)
    if rng.random() < 0.5:  # often equal, as after one prefill
        evicted_at[1][..., :equal] = np.where(evicted_at[0][..., :equal] <= equal, evicted_at[0][..., :equal], NEVER)
    visible = []
    for at in evicted_at:
        query = np.arange(at.shape[-1])[:, None]
        visible.append((np.arange(at.shape[-1])[None] <= query) & (query < at[0][:, None]))
    shared = shared_beginning(first, second, (evicted_at[0], evicted_at[1]))
    allowed = [n for n in range(equal + 1) if is_interval(shared_row(visible[0], visible[1], n))]
    assert shared in allowed
    # Only lengths that suit any order of the branches: a key that only one branch evicts is not shared.
    never_evicted = [at >= at.shape[-1] for at in evicted_at]

    def in_any_order(n: int) -> bool:
        first, second = (at[..., :n] for at in evicted_at)
        return bool((never_evicted[0][..., :n] & never_evicted[1][..., :n] | (first == second) & (first <= n)).all())

    if first_rest and second_rest:
        assert shared == max(n for n in allowed if in_any_order(n))
