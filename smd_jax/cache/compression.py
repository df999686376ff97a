"""What happens to a cache between two segments: the policy scores its keys, the best stay, the rest is recorded.

    [ 3 7 8 9 | 10 11 12 ]   ── score, keep 4 ──►   [ 3 8 10 12 | . . . ]      and a note that 7, 9 and 11 are gone

Rows do not depend on each other: a cache is compressed a few rows at a time and in place, so that no second cache ever
exists, nor the scratch space that a policy needs for all rows at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int, Key

from smd_jax.cache import slots as kv_cache
from smd_jax.cache.slots import EMPTY, LayerCache
from smd_jax.eviction.base import CacheView, EvictionPolicy
from smd_jax.pytrees import any_leaves
from smd_jax.quantization import Parity

PARTS = 16  # of the rows at most; each is compressed by itself


@any_leaves
class Moment(struct.PyTreeNode):
    """Where every row stands when its cache is compressed.

    Attributes:
      start: `[rows]` column of its first token.
      newest: `[rows]` column of its newest query.
      begun: `[rows]` column where the segment began that ends now; what is in full precision begins there.
      step: `[rows]` tokens of the response before the next segment; at a prompt's end 0, within a prompt negative.
      rng: `[rows]` keys for policies that draw, consumed.
    """

    start: Int[Array, " rows"]
    newest: Int[Array, " rows"]
    begun: Int[Array, " rows"]
    step: Int[Array, " rows"]
    rng: Key[Array, " rows"]


@any_leaves
class Gone(struct.PyTreeNode):
    """What the learner will have to know of one compression.

    Attributes:
      dropped: `[rows, kv_heads, slots - budget]` columns of the keys that went, -1 in place of empty slots; None if
        there was room for all.
      parity: of the codes that a quantised cache made, `[rows, kv_heads, columns, bytes]`; None without any.
    """

    dropped: Int[Array, "rows kv_heads rest"] | None
    parity: Parity | None


@dataclass(frozen=True)
class Compression:
    """Of one layer; static.

    Attributes:
      policy: scores the keys. budget: how many stay. buffer: empty slots to put at their right.
      layer: index of the layer. record_parity: of a quantised cache.
      window: newest columns that a query of this layer sees; None: all.
    """

    policy: EvictionPolicy
    budget: int
    buffer: int
    layer: int
    record_parity: bool = False
    window: int | None = None

    def __call__(self, cache: LayerCache, moment: Moment, number: Int[Array, ""]) -> tuple[LayerCache, Gone]:
        """The cache with `budget + buffer` slots. `number`: of the newest query, see `LayerCache.queries`."""
        rest = cache.columns.shape[2] - self.budget
        if rest <= 0:
            cache, parity = self._quantize(cache, moment)
            return kv_cache.pad(cache, -rest, self.buffer), Gone(None, parity)
        if self.policy.evicts:
            seen = self._within_window(cache, moment)
            kept, gone = kv_cache.select(self.policy.score(self._view(seen, moment, number)), seen.valid, self.budget)
            dropped = jnp.take_along_axis(seen.columns, gone, axis=2)
        else:  # the oldest slots are empty
            kept = jnp.broadcast_to(jnp.arange(rest, rest + self.budget), (*cache.columns.shape[:2], self.budget))
            dropped = None
        cache, parity = self._quantize(cache, moment)
        return kv_cache.gather(cache, kept, self.buffer), Gone(dropped, parity)

    def in_place(self, cache: LayerCache, moment: Moment, number: Int[Array, ""]) -> tuple[LayerCache, Gone]:
        """The same for a cache that has `budget + buffer` slots already."""

        def compress(slots: LayerCache, read: tuple[Array | None, Moment]) -> tuple[LayerCache, Gone]:
            queries, moment = read
            new, gone = self(slots.replace(queries=queries), moment, number)
            return new.replace(queries=None), gone

        # Queries are read alone: among what is written they would be copied for every part.
        new, gone = by_row_parts(compress, cache.replace(queries=None), (cache.queries, moment))
        return new.replace(queries=cache.queries), gone

    def _within_window(self, cache: LayerCache, moment: Moment) -> LayerCache:
        """Slots whose keys no query to come will see count as empty, so that they go first. When their keys became
        invisible is known without a record: `smd_jax.masks.windowed`."""
        if self.window is None:
            return cache
        next_query = (moment.newest + 1)[:, None, None]
        return cache.replace(columns=jnp.where(next_query < cache.columns + self.window, cache.columns, EMPTY))

    def _quantize(self, cache: LayerCache, moment: Moment) -> tuple[LayerCache, Parity | None]:
        """Quantises what a layer holds in full precision, if it is to be."""
        if cache.quantized is None:
            return cache, None
        cache, parity = kv_cache.quantize(cache, cache.quantized, moment.begun)
        return cache, parity if self.record_parity else None

    def _view(self, cache: LayerCache, moment: Moment, number: Int[Array, ""]) -> CacheView:
        window = self.policy.query_window
        age = number - kv_cache.newest_columns(number, max(window, 1))[:window]
        rng = jax.vmap(lambda key, step: jax.random.fold_in(jax.random.fold_in(key, step), self.layer))
        keys, values = kv_cache.full_precision(cache)
        return CacheView(
            keys=keys,
            values=values,
            valid=cache.valid,
            positions=jnp.where(cache.valid, cache.columns - moment.start[:, None, None], EMPTY),
            received=cache.received,
            queries=cache.queries,
            query_positions=(moment.newest - moment.start)[:, None] - age[None],
            keys_rng=rng(moment.rng, moment.step.astype(jnp.uint32)),
            budget=self.budget,
        )


def by_row_parts(
    f: Callable[[LayerCache, Any], tuple[LayerCache, Gone]], cache: LayerCache, read: Any
) -> tuple[LayerCache, Gone]:
    """`f(cache, read)` of a few rows at a time, whose result takes the place of `cache`; `read` stays as it is."""
    rows = cache.columns.shape[0]
    size = _rows_at_once(rows)
    if size == rows:
        return f(cache, read)

    def compress(first: Int[Array, ""] | int, count: int, carry: tuple[LayerCache, Gone]) -> tuple[LayerCache, Gone]:
        def part(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, first, count)

        def put(old: Array, new: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(old, new, first, axis=0)

        return jax.tree.map(put, carry, f(*jax.tree.map(part, (carry[0], read))))

    _, like = jax.eval_shape(f, *jax.tree.map(lambda x: x[:size], (cache, read)))
    gone = jax.tree.map(lambda x: jnp.zeros((rows, *x.shape[1:]), x.dtype), like)
    parts, rest = divmod(rows, size)
    carry = jax.lax.fori_loop(0, parts, lambda index, carry: compress(index * size, size, carry), (cache, gone))
    return compress(rows - rest, rest, carry) if rest else carry


def _rows_at_once(rows: int) -> int:
    """On several devices the rows are apart already, and a part of them would lie on one device alone."""
    return rows if jax.sharding.get_abstract_mesh().size > 1 else -(-rows // PARTS)
