"""Work on a few rows at a time, so that the scratch space of one part is all there ever is.

Rows do not depend on each other. What compares all keys with all, or all queries with all keys, needs memory that grows
with the square of a length; of all rows at once it would be the largest thing of a rollout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

PARTS = 16  # of the rows at most


def rows_at_once(rows: int, devices: int) -> int:
    """Rows of a part; a smaller one may follow.

    On several devices the rows are apart already, and a part of them would lie on one device alone.
    """
    return rows if devices > 1 else -(-rows // PARTS)


def in_place(f: Callable[[Any, Any], tuple[Any, Any]], written: Any, read: Any) -> tuple[Any, Any]:
    """`f(written, read)` of a few rows at a time. Its first result takes the place of `written`, part by part; `read`
    stays as it is. All are pytrees of arrays with the rows first, and `f` keeps the shapes of `written`."""
    leaves = jax.tree.leaves((written, read))
    rows = leaves[0].shape[0]
    size = rows_at_once(rows, jax.sharding.get_abstract_mesh().size)
    # A single part needs no loop, and no slice of an axis that a mesh has split.
    if size == rows:
        return f(written, read)

    def one(first: Int[Array, ""] | int, count: int, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        def part(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, first, count)

        def put(old: Array, new: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(old, new, first, axis=0)

        return jax.tree.map(put, carry, f(*jax.tree.map(part, (carry[0], read))))

    # The loop's carry needs room for the results of all rows, and shapes are known without a run.
    _, like = jax.eval_shape(f, *jax.tree.map(lambda x: x[:size], (written, read)))
    results = jax.tree.map(lambda x: jnp.zeros((rows, *x.shape[1:]), x.dtype), like)
    parts, rest = divmod(rows, size)
    # The loop's carry is updated where it lies: no second copy of what is written ever exists.
    carry = jax.lax.fori_loop(0, parts, lambda index, carry: one(index * size, size, carry), (written, results))
    # Outside of the loop, whose parts have one size: slices of a compiled program have fixed lengths.
    return one(rows - rest, rest, carry) if rest else carry


def apart(f: Callable[..., Any], *read: Any) -> Any:
    """`f(*read)` of a few rows at a time, for results of other shapes."""
    return in_place(lambda _, read: ((), f(*read)), (), read)[1]
