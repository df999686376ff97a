"""The KV cache on hand-worked cases, and random rollouts against lists of columns."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from smd_jax.cache.slots import EMPTY, LayerCache, gather, observe, pad, select, settle, shift, visible, write
from smd_jax.devices.sharding import make_mesh
from smd_jax.eviction.statistics import NewestQueries, Observation, ReceivedAttention
from smd_jax.message.masks import NEVER, record_evictions


def layer(
    columns: list[list[int]], *, received: bool = False, queries: int = 0, dtype: Any = jnp.float32
) -> LayerCache:
    """One row; key and value of column c are filled with c + 0.5 and -c, its received attention is 10 c."""
    at = jnp.array(columns, jnp.int32)[None]
    fill = jnp.where(at == EMPTY, 0, at)[..., None].astype(dtype)
    return LayerCache(
        keys=jnp.where(at[..., None] == EMPTY, 0, fill + 0.5) * jnp.ones(2, dtype)[None, None, None],
        values=-fill * jnp.ones(2, dtype)[None, None, None],
        columns=at,
        states=(10.0 * fill[..., 0],) * received + (jnp.zeros((1, 2, queries, 2)),) * bool(queries),
        statistics=(ReceivedAttention(),) * received + (NewestQueries(queries),) * bool(queries),
    )


def observed(cache: LayerCache, received: jax.Array, q: jax.Array, number: int, *, absent: bool = False) -> LayerCache:
    """The cache after queries that gave its slots this attention; `absent` queries have no column."""
    columns = jnp.broadcast_to(number + jnp.arange(q.shape[2])[None], (q.shape[0], q.shape[2]))
    return observe(
        cache,
        Observation(
            queries=q,
            query_columns=jnp.full_like(columns, EMPTY) if absent else columns,
            keys=cache.keys,
            values=cache.values,
            columns=cache.columns,
            start=jnp.zeros(q.shape[0], jnp.int32),
            received=received,
            number=jnp.array(number),
            slot=jnp.array(0),
        ),
    )


def test_select_needs_memory_linear_in_slots():
    """A few integer arrays with one number per slot, not budget × rest."""
    slots, budget = 2048, 1536
    given_scores = jax.ShapeDtypeStruct((1, 2, slots), jnp.float32)
    valid = jax.ShapeDtypeStruct((1, 2, slots), bool)
    compiled = jax.jit(select, static_argnums=2).lower(given_scores, valid, budget).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None and analysis.temp_size_in_bytes <= 16 * 4 * 2 * slots


def test_select_on_a_mesh_communicates_nothing():
    """By itself, XLA would gather all scores on every device."""
    mesh = make_mesh(2, 2, 2)
    sharding = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "tensor"))
    rng = np.random.default_rng(0)
    given_scores = jnp.asarray(rng.integers(0, 9, (8, 2, 12)), jnp.float32)
    valid = jnp.asarray(rng.random((8, 2, 12)) < 0.8)
    expected = select(given_scores, valid, 5)
    given_scores, valid = (jax.device_put(x, sharding) for x in (given_scores, valid))
    with jax.set_mesh(mesh):
        program = jax.jit(select, static_argnums=2)
        assert "all-gather" not in (program.lower(given_scores, valid, 5).compile().as_text() or "")
        jax.tree.map(np.testing.assert_array_equal, program(given_scores, valid, 5), expected)


def test_gather_moves_all_data_of_a_slot():
    cache = layer([[EMPTY, 3, 7, 8]], received=True, queries=2)
    moved = gather(cache, jnp.array([[[1, 3]]]), buffer=2)
    expected = layer([[3, 8, EMPTY, EMPTY]], received=True, queries=2)
    jax.tree.map(np.testing.assert_array_equal, moved, expected)
    assert moved.valid.tolist() == [[[True, True, False, False]]]


def test_pad():
    padded = pad(layer([[3, 8]], received=True), 1, 2)
    jax.tree.map(np.testing.assert_array_equal, padded, layer([[EMPTY, 3, 8, EMPTY, EMPTY]], received=True))


def test_write():
    """In the cache's dtype; the attention received starts at 0."""
    cache = layer([[1, 2, 5, EMPTY], [0, 2, 4, EMPTY]], received=True, dtype=jnp.bfloat16)
    k = jnp.array([[[[9.0, 8.0]], [[7.0, 6.0]]]])
    after = write(cache, jnp.array(2), k, -k, jnp.array([[6]]))
    assert after.keys.dtype == after.values.dtype == jnp.bfloat16
    assert after.columns.tolist() == [[[1, 2, 6, EMPTY], [0, 2, 6, EMPTY]]]
    assert after.states[0].tolist() == [[[10, 20, 0, 0], [0, 20, 0, 0]]]
    assert after.keys[0, :, 2].tolist() == [[9, 8], [7, 6]] and after.values[0, :, 2].tolist() == [[-9, -8], [-7, -6]]
    np.testing.assert_array_equal(after.keys[:, :, [0, 1, 3]], cache.keys[:, :, [0, 1, 3]])


def test_tokens_without_a_column_write_nothing():
    one = layer([[1, EMPTY, EMPTY]])
    two = jax.tree.map(lambda x: jnp.concatenate([x, x]), one)
    kv = jnp.ones((2, 1, 2, 2))
    after = write(two, jnp.array(1), kv, kv, jnp.array([[6, 7], [EMPTY, 9]]))
    assert after.columns.tolist() == [[[1, 6, 7]], [[1, EMPTY, 9]]]
    assert after.valid.tolist() == [[[True, True, True]], [[True, False, True]]]


def test_visible():
    """A chunk of two columns sees the kept keys and its own past; an absent query sees nothing."""
    cache = layer([[EMPTY, 3, 7, 8]])
    seen = visible(cache, jnp.array([[7, 8]]))
    assert seen.tolist() == [[[[False, True, True, False], [False, True, True, True]]]]
    assert not visible(cache, jnp.array([[EMPTY]])).any()


def test_observe_adds_attention_and_overwrites_the_oldest_query():
    cache = layer([[1, 2]], received=True, queries=3)
    for column in (4, 5, 6, 7):
        q = jnp.full((1, 2, 1, 2), float(column))
        cache = observed(cache, jnp.array([[[0.25, 0.75]]]), q, column)
    received, queries = cache.states
    assert received.tolist() == [[[11.0, 23.0]]]
    assert queries[0, 1, :, 0].tolist() == [6.0, 7.0, 5.0]


@pytest.mark.parametrize("tokens", [2, 3, 5])
def test_observing_queries_at_once_equals_one_by_one(tokens: int):
    """A window holds the newest."""
    q = jnp.arange(4.0, 4.0 + tokens)[None, None, :, None] * jnp.ones((1, 2, 1, 2))
    one_by_one = together = layer([[1, 2]], queries=3)
    nothing = jnp.zeros((1, 1, 2))
    for index in range(tokens):
        one_by_one = observed(one_by_one, nothing, q[:, :, index : index + 1], 4 + index)
    together = observed(together, nothing, q, 4)
    np.testing.assert_array_equal(together.states[0], one_by_one.states[0])


def test_a_shifted_cache_equals_one_made_later():
    """Statistics with query numbers shift; in a ring cache all data of a slot shifts as well."""
    q = jnp.arange(5.0)[None, None, :, None] * jnp.ones((1, 2, 1, 2))
    nothing = jnp.zeros((1, 1, 2))
    early, late = (observed(layer([[1, 2]], queries=3), nothing, q, number) for number in (4, 4 + 7))
    jax.tree.map(np.testing.assert_array_equal, shift(early, jnp.array(7), ring=False), late)
    cache = layer([[1, 2, 5]], received=True)
    jax.tree.map(np.testing.assert_array_equal, shift(cache, jnp.array(2), ring=False), cache)
    expected = layer([[2, 5, 1]], received=True)
    jax.tree.map(np.testing.assert_array_equal, shift(cache, jnp.array(2), ring=True), expected)


# Random rollouts: a prompt, then steps that write a key and compress when the buffer is full.
BATCH, HEADS, BUDGET, BUFFER, PROMPT, T = 2, 2, 4, 3, 6, 24
SLOTS = BUDGET + BUFFER
SCORES = (-np.inf, np.nan, -2, -1, 0, 1, 2, np.inf)


@jax.jit
def write_jitted(cache: LayerCache, slot: Any, column: Any, live: Any) -> LayerCache:
    kv = jnp.broadcast_to(column.astype(jnp.float32), (BATCH, HEADS, 1, 2))
    return write(cache, slot, kv, -kv, jnp.where(live, column, EMPTY)[:, None])


@jax.jit
def compress_jitted(cache: LayerCache, given_scores: Any, evicted_at: Any, now: Any) -> tuple[LayerCache, Any]:
    slots, others = select(given_scores, cache.valid, BUDGET)
    dropped = jnp.take_along_axis(cache.columns, others, axis=2)
    return gather(cache, slots, BUFFER), record_evictions(evicted_at, dropped, now[None, None, None])


class ExpectedColumns:
    """Columns of each row and head in order, and when each was evicted."""

    def __init__(self, starts: list[int]) -> None:
        self.columns = {(b, h): list(range(starts[b], PROMPT)) for b in range(BATCH) for h in range(HEADS)}
        self.evicted_at = np.full((BATCH, HEADS, T), NEVER)

    def compress(self, score_of: np.ndarray, now: int) -> None:
        """Keeps the best scores; of equal scores the older key. NaN is the lowest score."""
        lowest = np.where(np.isnan(score_of), -np.inf, score_of)
        for (b, h), columns in self.columns.items():
            best = sorted(columns, key=lambda c, b=b, h=h: (-lowest[b, h, c], c))[:BUDGET]
            for column in set(columns) - set(best):
                self.evicted_at[b, h, column] = now
            self.columns[b, h] = sorted(best)


def check_cache(cache: LayerCache, evicted_at: Any, expected: ExpectedColumns, live: np.ndarray) -> None:
    """Equal columns in equal order, empty slots first, keys and values with their columns."""
    assert cache.columns.shape[-1] == SLOTS
    np.testing.assert_array_equal(evicted_at, expected.evicted_at)
    for (b, h), columns in expected.columns.items():
        held = np.asarray(cache.columns[b, h])
        assert held[held != EMPTY].tolist() == columns and len(columns) <= BUDGET + BUFFER
        if live[b]:
            kept = held[:BUDGET]
            assert not (np.diff((kept != EMPTY).astype(int)) < 0).any(), f"empty slots come first; got {held}"
        valid = held != EMPTY
        np.testing.assert_array_equal(np.asarray(cache.keys)[b, h, valid, 0], held[valid])
        np.testing.assert_array_equal(np.asarray(cache.values)[b, h, valid, 1], -held[valid])


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, PROMPT - 1), min_size=2, max_size=2), st.data())
def test_random_rollouts_hold_the_expected_columns(seed: int, starts: list[int], data: st.DataObject):
    """Scores have many ties, infinities and NaN; empty slots get the highest score."""
    rng = np.random.default_rng(seed)
    ends = [data.draw(st.integers(PROMPT, T)) for _ in range(BATCH)]
    expected, columns = ExpectedColumns(starts), np.full((BATCH, HEADS, SLOTS), EMPTY)
    columns[:, :, SLOTS - PROMPT :] = np.where(
        np.arange(PROMPT) >= np.array(starts)[:, None], np.arange(PROMPT), EMPTY
    )[:, None]
    kv = jnp.repeat(jnp.array(columns, jnp.float32)[..., None], 2, axis=-1)
    cache = LayerCache(kv, -kv, jnp.array(columns, jnp.int32))
    evicted_at = jnp.full((BATCH, HEADS, T), NEVER, jnp.int32)

    def compress(now: int) -> tuple[LayerCache, jax.Array]:
        score_of = rng.choice(np.array(SCORES, np.float32), (BATCH, HEADS, T))
        expected.compress(score_of, now)
        held = np.asarray(cache.columns)
        by_slot = np.take_along_axis(score_of, np.maximum(held, 0), axis=-1)
        by_slot = np.where(held == EMPTY, np.inf, by_slot)
        return compress_jitted(cache, jnp.array(by_slot), evicted_at, jnp.array(now, jnp.int32))

    cache, evicted_at = compress(PROMPT)
    for column in range(PROMPT, T):
        live = column < np.array(ends)
        filled = (column - PROMPT) % BUFFER
        cache = write_jitted(cache, jnp.array(BUDGET + filled), jnp.array(column, jnp.int32), jnp.array(live))
        for (b, _), held in expected.columns.items():
            if live[b]:
                held.append(column)
        check_cache(cache, evicted_at, expected, live)
        if filled == BUFFER - 1:
            cache, evicted_at = compress(column + 1)
            check_cache(cache, evicted_at, expected, live)


def test_settle():
    """After 2 of 3 steps and a step without the row, the cache is as if the buffer had just been filled."""
    cache = layer([[EMPTY, 3, 7, 8, 9, EMPTY]], received=True, queries=3)
    for number, filled in ((4, 1.0), (5, 2.0), (6, 3.0), (7, 4.0), (8, 99.0)):
        cache = observed(cache, jnp.zeros((1, 1, 6)), jnp.full((1, 2, 1, 2), filled), number, absent=filled == 99)
    settled = settle(cache, jnp.array([2]), buffer=3)
    jax.tree.map(np.testing.assert_array_equal, settled.columns, jnp.array([[[EMPTY, EMPTY, 3, 7, 8, 9]]]))
    assert settled.states[0].tolist() == [[[0, 0, 30, 70, 80, 90]]]
    # Query 7 was the newest, and two were written since the buffer's first, number 6: so it counts as number 5.
    ages = NewestQueries(3).ages(5)
    assert settled.states[1][0, 0, :, 0][jnp.argsort(ages)].tolist() == [4.0, 3.0, 2.0]
