"""User-defined statistics, a pytree per row and vectors per slot, against a NumPy simulation."""

from dataclasses import dataclass, replace
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
from smd_jax.model.decoder import Decoder
from smd_jax.sampler import engine as engine_module
from smd_jax.sampler.fixed_batch import RolloutConfig, rollout
from smd_jax.sampler.keys import row_keys
from smd_jax.sampler.prefill import prefill
from smd_jax.sampler.seats import empty
from smd_jax.sampler.static import Sampler
from smd_jax.testing import tiny_model_config
from tests.eviction.test_eviction import RESPONSE, WIDTH, run_one_layer, simulate
from tests.numpy_policies import FORMULAS, Row
from tests.sampler.test_engine import MODEL, SHAPE, SIZES, TWO_LAYERS, check_alike
from tests.under_test import eviction_times, gap, left_padded, make_params

# --- expected attention: the product of a key and the mean of all queries so far


class Mean(NamedTuple):
    total: jax.Array  # [rows, heads, head_dim]
    count: jax.Array  # [rows]


@dataclass(frozen=True)
class MeanQuery(Statistic[Mean]):
    def init(self, shape: CacheShape) -> Mean:
        total = jnp.zeros((shape.rows, shape.heads, shape.head_dim), shape.wide)
        return Mean(total, jnp.zeros(shape.rows, jnp.int32))

    def observe(self, state: Mean, seen: Observation) -> Mean:
        exists = seen.query_columns >= 0
        queries = jnp.where(exists[:, None, :, None], seen.queries, 0).astype(state.total.dtype)
        return Mean(state.total + queries.sum(2), state.count + exists.sum(1, dtype=jnp.int32))


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


# --- running norm: a key weighted by the root mean square of the queries that saw it, per channel


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
        """One per slot and one per row; the score reads the first."""
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


# --- against numpy: one layer, whose queries and keys depend only on the tokens


def expected_attention(policy: ExpectedAttention, row: Row) -> np.ndarray:
    mean = row.queries.mean(axis=1).reshape(len(row.keys), row.group, -1).mean(axis=1)
    return np.stack([keys @ query for keys, query in zip(row.keys, mean, strict=True)])


def running_norm(policy: RunningNorm, row: Row) -> np.ndarray:
    scores = np.zeros(row.keys.shape[:2])
    for h, j in np.ndindex(*scores.shape):
        sees = row.query_positions >= row.positions[h, j]
        heads = row.queries[h * row.group : (h + 1) * row.group, sees]
        scores[h, j] = np.linalg.norm(np.sqrt((heads.mean(axis=0) ** 2).mean(axis=0)) * row.keys[h, j])
    return scores


FORMULAS.update({ExpectedAttention: expected_attention, RunningNorm: running_norm})

# With chunks of 4, keys are also evicted within the prompt.
PREFILLS = [("expected attention", None), ("running norm", 4), ("Protect", 4)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "chunk"), PREFILLS)
def test_evictions_match_the_simulation(name: str, chunk: int | None):
    config = RolloutConfig(max_new_tokens=RESPONSE, budget=9, buffer=3, prefill_chunk=chunk)
    run = run_one_layer(POLICIES[name], config)
    for b in range(3):
        expected = simulate(run, b, window=WIDTH + RESPONSE)
        np.testing.assert_array_equal(run.evicted_at[b], expected)
        assert ((expected > 0) & (expected < NEVER)).sum() > 20


# --- identity in a fixed batch, in an engine and on a mesh

# Every statistic and every form of prefill.
IDENTITY_CASES = [
    ("running norm", replace(SIZES, quant=QuantConfig(bits=4, group=2))),
    ("Protect", replace(SIZES, prefill_chunk=5)),
    ("Pyramid", SIZES),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes"), IDENTITY_CASES, ids=["quantised", "in chunks", "whole prompts"])
def test_identity_in_a_fixed_batch_and_in_an_engine(name: str, sizes: RolloutConfig):
    model = TWO_LAYERS if name == "Pyramid" else MODEL  # budgets that differ between layers
    done = check_alike(POLICIES[name], sizes, model)
    assert gap(model, done, done.dense_mask()).max() > 1e-2, "the evictions must matter"


@pytest.mark.slow
def test_on_a_mesh():
    """Rows and heads of every statistic are sharded."""
    policy, params = RunningNorm(), make_params(SHAPE)
    config = RolloutConfig(max_new_tokens=9, budget=6, buffer=3)
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


def test_a_segment_updates_statistics_in_place():
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


@dataclass(frozen=True)
class Narrowed(MeanQuery):
    def observe(self, state: Mean, seen: Observation) -> Any:
        return super().observe(state, seen)._replace(count=jnp.zeros(3, jnp.int8))


@dataclass(frozen=True)
class NothingReturned(MeanQuery):
    def observe(self, state: Mean, seen: Observation) -> Any:
        return None


@pytest.mark.parametrize(
    ("statistic", "got"), [(Narrowed(), r"'int8\[3\]'"), (NothingReturned(), r"\[\] in PyTreeDef\(None\)")]
)
def test_a_state_of_another_form_is_refused(statistic: Any, got: str):
    @dataclass(frozen=True)
    class Reads(EvictionPolicy):
        statistics: Any = (statistic,)

    message = rf"expected {type(statistic).__name__}.observe .*'int32\[3\]'\] in .*; got .*{got}"
    with pytest.raises(TypeError, match=message):
        run_one_layer(Reads())
