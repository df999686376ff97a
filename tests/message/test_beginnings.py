"""How much of their beginnings two sequences can share: exactly as much as leaves an interval mask."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from smd_jax.message.masks import NEVER, ShadowMask
from smd_jax.message.packing import shared_beginning


def of_row(first: np.ndarray, second: np.ndarray, shared: int) -> np.ndarray | None:
    """What the queries of one row see that has `shared` tokens once, from what they saw in rows of their own
    `[heads, queries, keys]`; None where the two saw different things."""
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
    """By the product's own check, which rebuilds the mask."""
    if row is None:
        return False
    try:
        ShadowMask.from_boolean(jnp.asarray(row[None, None]))
    except ValueError:
        return False
    return True


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**20), st.integers(1, 7), st.integers(0, 4), st.integers(0, 4), st.integers(0, 3))
def test_a_longer_beginning_would_be_no_interval(seed: int, equal: int, left: int, right: int, evictions: int):
    rng = np.random.default_rng(seed)
    first, second = np.arange(equal + left), np.concatenate([np.arange(equal), 100 + np.arange(right)])
    gone = []
    for length in (len(first), len(second)):
        at = np.full((1, 2, length), NEVER)
        for _ in range(evictions):
            head, key = rng.integers(2), rng.integers(length)
            at[0, head, key] = rng.integers(key + 1, length + 1)
        gone.append(at)
    if rng.random() < 0.5:  # often the same, as after one prefill
        gone[1][..., :equal] = np.where(gone[0][..., :equal] <= equal, gone[0][..., :equal], NEVER)
    seen = []
    for at in gone:
        query = np.arange(at.shape[-1])[:, None]
        seen.append((np.arange(at.shape[-1])[None] <= query) & (query < at[0][:, None]))
    found = shared_beginning(first, second, (gone[0], gone[1]))
    allowed = [n for n in range(equal + 1) if is_interval(of_row(seen[0], seen[1], n))]
    assert found in allowed
    # Of these, the ones that need no order of the branches: a key that only the last one evicts is not shared.
    stay = [at >= at.shape[-1] for at in gone]

    def in_any_order(n: int) -> bool:
        first, second = (at[..., :n] for at in gone)
        return bool((stay[0][..., :n] & stay[1][..., :n] | (first == second) & (first <= n)).all())

    if left and right:
        assert found == max(n for n in allowed if in_any_order(n))
