"""Compression a few rows at a time: equal caches, bounded temporary memory, no communication on a mesh."""

import re
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from smd_jax.cache.compression import Compression, RowProgress
from smd_jax.cache.slots import LayerCache, no_keys
from smd_jax.devices.sharding import batch_sharding, make_mesh
from smd_jax.eviction.policies import RKV
from smd_jax.eviction.statistics import CacheShape

BUDGET, BUFFER, KV_HEADS = 96, 32, 2
KEYS = BUDGET + BUFFER
SIMILARITY_BYTES = KV_HEADS * KEYS * KEYS * 4  # of a row under R-KV


class Compressed(NamedTuple):
    result: Any
    temporary: int  # bytes per device
    communication: list[str]


def full_cache(rows: int) -> tuple[LayerCache, RowProgress]:
    """A full cache of random keys and queries."""
    rng = np.random.default_rng(0)
    cache = no_keys(RKV().statistics, CacheShape(rows, 2 * KV_HEADS, KV_HEADS, KEYS, 16, jnp.float32))
    keys, states = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), (cache.keys, cache.states))
    columns = jnp.broadcast_to(jnp.arange(KEYS, dtype=jnp.int32), cache.columns.shape)
    zero = jnp.zeros(rows, jnp.int32)
    progress = RowProgress(
        zero, zero + KEYS - 1, zero + BUDGET, zero + BUFFER, jax.random.split(jax.random.key(0), rows)
    )
    return cache.replace(keys=keys, values=keys, columns=columns, states=states), progress


def compressed(rows: int, mesh: Mesh | None) -> Compressed:
    given = full_cache(rows)
    with nullcontext() if mesh is None else jax.set_mesh(mesh):
        if mesh is not None and rows % 4 == 0:
            given = jax.device_put(given, batch_sharding(mesh))

        # The number is traced, as in a rollout, and the same for all rows.
        def compress(cache: LayerCache, progress: RowProgress, number: jax.Array) -> Any:
            return Compression(RKV(), BUDGET, BUFFER).in_place(cache, progress, number, {}, range(1))

        program = jax.jit(compress).lower(*given, jnp.int32(KEYS - 1)).compile()
        analysis: Any = program.memory_analysis()
        kinds = re.findall("all-gather|all-reduce|all-to-all|collective-permute", program.as_text() or "")
        return Compressed(jax.device_get(program(*given, jnp.int32(KEYS - 1))), analysis.temp_size_in_bytes, kinds)


@pytest.mark.parametrize("sizes", [(4, 1), (2, 2)])
def test_every_device_of_a_mesh_compresses_a_few_rows_at_a_time(sizes: tuple[int, int]):
    alone, one, many = compressed(32, None), compressed(128, None), compressed(128, make_mesh(*sizes))
    print(f"temporary bytes per device with 32 rows: alone {alone.temporary}, on a mesh {many.temporary}")
    assert many.temporary < 1.5 * alone.temporary
    assert many.temporary < 8 * SIMILARITY_BYTES, "less than those of all 32 rows"
    assert many.communication == []
    jax.tree.map(np.testing.assert_array_equal, many.result, one.result)


@pytest.mark.parametrize(("rows", "sizes"), [(40, (2, 1, 2)), (34, (4, 1))])
def test_meshes_that_split_heads_or_do_not_divide_the_rows(rows: int, sizes: tuple[int, ...]):
    """There, all rows are compressed at once."""
    found, expected = compressed(rows, make_mesh(*sizes)), compressed(rows, None)
    jax.tree.map(np.testing.assert_array_equal, found.result, expected.result)
