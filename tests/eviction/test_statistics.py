"""Statistics that the library has never seen: policies of a user's own, wherever keys are kept.

Two statistics of different kinds, each in a policy: a pytree per row that must leave padding out, and vectors per slot
that read the keys. What they keep is held against a simulation
in numpy, key by key and query by query.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from smd_jax.cache import slots as kv_cache
from smd_jax.devices.sharding import make_mesh, shard_batch, shard_tree
from smd_jax.eviction.base import CacheView, EvictionPolicy
from smd_jax.eviction.policies import H2O
from smd_jax.eviction.statistics import CacheShape, NewestQueries, Observation, ReceivedAttention, Statistic
from smd_jax.eviction.wrappers import Protect, Pyramid
from smd_jax.memory.compiled import tree_bytes
from smd_jax.message.masks import NEVER
from smd_jax.message.quantization import QuantConfig
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.decoder import Decoder
from smd_jax.sampler import engine as engine_module
from smd_jax.sampler.engine import Engine
from smd_jax.sampler.fixed_batch import RolloutConfig, rollout
from smd_jax.sampler.keys import row_keys
from smd_jax.sampler.prefill import prefill
from smd_jax.sampler.seats import empty
from smd_jax.sampler.static import Sampler
from smd_jax.testing import tiny_model_config
from tests import numpy_decoder
from tests.under_test import eviction_times, gap, left_padded, make_params

# --- an expected attention: the mean of all queries so far, and how well a key fits it


class Mean(NamedTuple):
    total: jax.Array  # [rows, heads, head_dim]
    count: jax.Array  # [rows]


@dataclass(frozen=True)
class MeanQuery(Statistic[Mean]):
    def init(self, shape: CacheShape) -> Mean:
        total = jnp.zeros((shape.rows, shape.heads, shape.head_dim), shape.wide)
        return Mean(total, jnp.zeros(shape.rows, jnp.int32))

    def observe(self, state: Mean, seen: Observation) -> Mean:
        there = seen.query_columns >= 0
        queries = jnp.where(there[:, None, :, None], seen.queries, 0).astype(state.total.dtype)
        return Mean(state.total + queries.sum(2), state.count + there.sum(1, dtype=jnp.int32))


@dataclass(frozen=True)
class ExpectedAttention(EvictionPolicy):
    @property
    def statistics(self) -> tuple[MeanQuery]:
        return (MeanQuery(),)

    def score(self, view: CacheView) -> jax.Array:
        total, count = view.statistic(MeanQuery())
        mean = total / count[:, None, None]
        rows, kv_heads, _, head_dim = view.keys.shape
        mean = mean.reshape(rows, kv_heads, -1, head_dim).mean(2)
        return jnp.einsum("rhd,rhsd->rhs", mean, view.keys.astype(mean.dtype))


# --- a running norm: root mean square of all queries that could see a key, channel by channel


@dataclass(frozen=True)
class Squares(Statistic[dict[str, jax.Array]]):
    per_slot: ClassVar[bool] = True

    def init(self, shape: CacheShape) -> dict[str, jax.Array]:
        slots = (shape.rows, shape.kv_heads, shape.slots)
        return {"total": jnp.zeros((*slots, shape.head_dim), shape.wide), "count": jnp.zeros(slots, jnp.int32)}

    def observe(self, state: dict[str, jax.Array], seen: Observation) -> dict[str, jax.Array]:
        total = state["total"]
        rows, kv_heads = seen.columns.shape[:2]
        grouped = seen.queries.astype(total.dtype).reshape(rows, kv_heads, -1, *seen.queries.shape[2:])
        key, query = seen.positions[:, :, None], seen.query_positions[:, None, :, None]
        sees = (key >= 0) & (key <= query)
        added = jnp.einsum("rhtd,rhts->rhsd", grouped.mean(2) ** 2, sees.astype(total.dtype))
        return {"total": total + added, "count": state["count"] + sees.sum(2, dtype=jnp.int32)}


@dataclass(frozen=True)
class RunningNorm(EvictionPolicy):
    @property
    def statistics(self) -> tuple[Squares, NewestQueries]:
        """Two of them, of both kinds; the score reads one."""
        return (Squares(), NewestQueries(3))

    def score(self, view: CacheView) -> jax.Array:
        state = view.statistic(Squares())
        rms = jnp.sqrt(state["total"] / jnp.maximum(state["count"], 1)[..., None])
        return jnp.linalg.norm(rms * view.keys, axis=-1)


POLICIES: dict[str, EvictionPolicy] = {
    "expected attention": ExpectedAttention(),
    "running norm": RunningNorm(),
    "Protect": Protect(ExpectedAttention(), sinks=1, recent=2),
    "Pyramid": Pyramid(ExpectedAttention(), beta=4.0),
}


# --- against numpy: one layer, whose queries and keys follow from the tokens alone

WIDTH, RESPONSE, BUDGET, BUFFER = 11, 31, 9, 3
LENGTHS = [11, 2, 7]
ONE_LAYER = tiny_model_config(vocab_size=20_000, num_layers=1, tie_embeddings=False)


@cache
def run_one_layer(name: str, chunk: int | None) -> Trajectory:
    prompts = left_padded(LENGTHS, WIDTH, ONE_LAYER.vocab_size)
    config = RolloutConfig(RESPONSE, BUDGET, BUFFER, prefill_chunk=chunk)
    params = make_params(ONE_LAYER)
    return rollout(Decoder(ONE_LAYER), params, prompts, jax.random.key(4), policy=POLICIES[name], config=config)


def readings(length: int, total: int, chunk: int | None) -> list[tuple[int, int, bool]]:
    """What of a row is read together, first and last position, and whether the cache is compressed behind it."""
    if chunk is None:
        prompt = [(0, length, True)]
    else:  # chunks end where the prompt does
        ends = list(range(length, 0, -chunk))[::-1]
        prompt = [(max(end - chunk, 0), end, True) for end in ends]
    return prompt + [(t, t + 1, (t + 1 - length) % BUFFER == 0) for t in range(length, total)]


class Book:
    """Both statistics of one row, by key."""

    def __init__(self, q: np.ndarray, k: np.ndarray) -> None:
        self.q, self.k, self.group = q, k, len(q) // len(k)
        self.mean, self.count = np.zeros((len(q), q.shape[2])), 0
        self.squares, self.seen = np.zeros(k.shape), np.zeros(k.shape[:2])

    def read(self, first: int, end: int, kept: list[list[int]]) -> None:
        for t in range(first, end):
            self.count += 1
            self.mean += (self.q[:, t] - self.mean) / self.count
            for h in range(len(self.k)):
                sees = [j for j in kept[h] if j <= t]
                heads = self.q[h * self.group : (h + 1) * self.group, t]
                self.squares[h, sees] += heads.mean(0) ** 2
                self.seen[h, sees] += 1

    def scores(self, name: str, h: int, keys: list[int]) -> np.ndarray:
        if name == "running norm":
            rms = np.sqrt(self.squares[h, keys] / self.seen[h, keys][:, None])
            return np.linalg.norm(rms * self.k[h, keys], axis=-1)
        fits = self.k[h, keys] @ self.mean[h * self.group : (h + 1) * self.group].mean(0)
        if name == "Protect":
            fits[(np.array(keys) < 1) | (np.arange(len(keys)) >= len(keys) - 2)] = np.inf
        return fits


def simulate(name: str, trajectory: Trajectory, b: int, chunk: int | None) -> np.ndarray:
    """`evicted_at [kv_heads, T]` of one row."""
    start = WIDTH - LENGTHS[b]
    tokens = np.asarray(trajectory.tokens[b, start:])
    params = make_params(ONE_LAYER)
    x = np.asarray(params["embed"]["embedding"], np.float64)[tokens]
    q, k, _ = numpy_decoder.projections(x, np.arange(len(x)), params["layers_0"], ONE_LAYER)
    book, kept = Book(q, k), [list[int]() for _ in range(len(k))]
    evicted_at = np.full((len(k), WIDTH + RESPONSE), NEVER)
    evicted_at[:, :start] = 0
    for first, end, compressed in readings(LENGTHS[b], len(x) - 1, chunk):  # the last token is never read
        for keys in kept:
            keys.extend(range(first, end))
        book.read(first, end, kept)
        for h, keys in enumerate(kept):
            if compressed and len(keys) > BUDGET:
                scores = book.scores(name, h, keys)
                best = sorted(range(len(keys)), key=lambda i, scores=scores: (-scores[i], i))[:BUDGET]
                evicted_at[h, [start + keys[i] for i in set(range(len(keys))) - set(best)]] = start + end
                kept[h] = [keys[i] for i in sorted(best)]
    return evicted_at


# Statistics are harder where keys go between chunks.
READ = [("expected attention", None), ("running norm", 4), ("Protect", 4)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "chunk"), READ)
def test_the_same_keys_as_in_numpy(name: str, chunk: int | None):
    trajectory = run_one_layer(name, chunk)
    for b in range(len(LENGTHS)):
        expected = simulate(name, trajectory, b, chunk)
        np.testing.assert_array_equal(eviction_times(trajectory)[b, 0], expected)
        assert ((expected > 0) & (expected < NEVER)).sum() > 20


# --- everywhere: the learner finds the sampler's probabilities, an engine gives what a fixed batch gives

SHAPE = tiny_model_config(vocab_size=40, num_layers=1, tie_embeddings=False)
MODEL, GROUP = Decoder(SHAPE), 2
TWO_LAYERS = Decoder(replace(SHAPE, num_layers=2))
MANY = [20, 3, 9, 1]
LIMITS = np.array([30, 3, 17, 22, 1, 9, 30, 28])
SIZES = RolloutConfig(max_new_tokens=30, budget=8, buffer=4, eos_token_id=7)
FORMS = {
    "whole prompts": SIZES,
    "in chunks": replace(SIZES, prefill_chunk=5),
    "quantised": replace(SIZES, quant=QuantConfig(bits=4, group=2)),
}
# Every statistic and every form of reading.
EVERYWHERE = [
    ("running norm", "quantised"),
    ("Protect", "in chunks"),
    ("Pyramid", "whole prompts"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), EVERYWHERE)
def test_identity_in_a_fixed_batch_and_in_an_engine(name: str, form: str):
    model = TWO_LAYERS if name == "Pyramid" else MODEL  # budgets that differ between layers
    policy, sizes, params = POLICIES[name], FORMS[form], make_params(model.config)
    prompts, key = left_padded(MANY, 20, SHAPE.vocab_size), jax.random.key(1)
    fixed = rollout(
        model, params, prompts, key, policy=policy, config=sizes, group_size=GROUP, limits=jnp.asarray(LIMITS)
    )
    seated = Engine(model, policy, sizes, 3, prefill_rows=2).run(params, prompts, key, group_size=GROUP, limits=LIMITS)
    np.testing.assert_array_equal(seated.trajectory.tokens, fixed.tokens)
    np.testing.assert_array_equal(eviction_times(seated.trajectory), eviction_times(fixed))
    for trajectory in (fixed, jax.device_put(seated.trajectory, fixed.tokens.sharding)):
        assert gap(model, trajectory).max() <= 2e-5
    assert gap(model, fixed, fixed.dense_mask()).max() > 1e-2, "nothing was evicted that mattered"


@pytest.mark.slow
def test_on_a_mesh():
    """Rows and heads of every statistic on devices of their own."""
    policy, params = RunningNorm(), make_params(SHAPE)
    config = RolloutConfig(9, 6, 3)
    prompts, key = left_padded([8, 5, 3, 8, 2, 6, 7, 1], 8, SHAPE.vocab_size), jax.random.key(2)
    one = rollout(MODEL, params, prompts, key, policy=policy, config=config)
    mesh = make_mesh(2, 2, 2)
    with jax.set_mesh(mesh):
        placed = shard_batch(prompts, mesh)
        many = rollout(MODEL, shard_tree(params, mesh), placed, key, policy=policy, config=config)
        sampler = Sampler(MODEL, policy, config, 8)
        prefilled = engine_module._prefill(sampler, params, placed, row_keys(key, 8))
        state = engine_module._empty(prefilled, 8)
    np.testing.assert_array_equal(many.tokens, one.tokens)
    np.testing.assert_array_equal(eviction_times(many), eviction_times(one))
    for squares, _ in (layer.states for layer in state.cache):
        for leaf in squares.values():
            assert leaf.sharding.spec == PartitionSpec(("data", "fsdp"), "tensor")


def test_a_step_copies_no_statistic():
    """A segment works with less than one layer's largest statistic beside the state, which it updates in place."""
    shape = tiny_model_config(vocab_size=40, num_layers=2, tie_embeddings=False, hidden_size=8, intermediate_size=8)
    config = RolloutConfig(max_new_tokens=64, budget=1000, buffer=24)
    sampler, rows = Sampler(Decoder(shape), RunningNorm(), config, 1020), 8

    def read(params: Any) -> Any:
        prompts = left_padded([1020], 1020, shape.vocab_size)
        return prefill(sampler, params, prompts, row_keys(jax.random.key(0), 1))

    params = jax.eval_shape(lambda: make_params(shape))
    state = jax.eval_shape(lambda x: empty(x, rows), jax.eval_shape(read, params))
    analysis = engine_module._segment.lower(sampler, params, state, None).compile().memory_analysis()
    assert analysis is not None
    assert analysis.alias_size_in_bytes >= tree_bytes(state.cache)
    assert analysis.temp_size_in_bytes < 1.5 * tree_bytes(state.cache[0])


def test_attention_is_observed_only_where_it_is_needed():
    assert kv_cache.needs_attention(H2O().statistics)
    assert not kv_cache.needs_attention(RunningNorm().statistics)
    assert ReceivedAttention() == ReceivedAttention() and hash(NewestQueries(3)) == hash(NewestQueries(3))
