"""Processes a few rows of a device at a time to limit scratch memory.

Comparing all keys with all keys, or all queries with all keys, needs quadratic memory. For all rows at once it would be
the largest allocation of a rollout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from smd_jax.devices.sharding import over_rows, splits_rows_only

PARTS = 16  # maximum number of parts; the last one may have fewer rows


def in_place(f: Callable[[Any, Any], tuple[Any, Any]], written: Any, read: Any) -> tuple[Any, Any]:
    """`f(written, read)`, a few rows at a time. Its first result overwrites `written`; `read` is not changed. All are
    pytrees of arrays with the rows first, and `f` keeps the shapes of `written`.

    On a mesh of rows only, every device loops over its own rows, without communication. On a mesh that splits heads,
    and for rows that do not divide over the devices, all rows are one part.
    """
    if jax.sharding.get_abstract_mesh().size <= 1:
        return _loop(f, written, read)
    # A slice of rows that lie on several devices would be sent to one of them.
    if not splits_rows_only(jax.tree.leaves((written, read))[0].shape[0]):
        return f(written, read)
    return over_rows(partial(_loop, f), written, read)


def _loop(f: Callable[[Any, Any], tuple[Any, Any]], written: Any, read: Any) -> tuple[Any, Any]:
    """`in_place` for rows of one device."""
    rows = jax.tree.leaves((written, read))[0].shape[0]
    size = -(-rows // PARTS)
    if size == rows:  # a single part needs no loop
        return f(written, read)

    def one(first: Int[Array, ""] | int, count: int, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        part = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, count), (carry[0], read))
        put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=first, axis=0)
        return jax.tree.map(put, carry, f(*part))

    # The loop's carry holds the results of all rows.
    _, like = jax.eval_shape(f, *jax.tree.map(lambda x: x[:size], (written, read)))
    results = jax.tree.map(lambda x: jnp.zeros((rows, *x.shape[1:]), x.dtype), like)
    parts, rest = divmod(rows, size)
    # The loop's carry is updated in place, without a second copy.
    carry = jax.lax.fori_loop(0, parts, lambda index, carry: one(index * size, size, carry), (written, results))
    # Outside the loop, because slices in a compiled loop have one length.
    return one(rows - rest, rest, carry) if rest else carry


def apart(f: Callable[..., Any], *read: Any) -> Any:
    """`f(*read)`, a few rows at a time, for results of other shapes."""
    return in_place(lambda _, read: ((), f(*read)), (), read)[1]
