"""Gradient accumulation over microbatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from smd_jax.model.protocol import Params

# (params, part of the batch) -> (loss, (pytree of scalars to sum up, pytree of arrays [rows, ...]))
Objective = Callable[[Params, Any], tuple[Array, tuple[Any, Any]]]


def accumulate(
    objective: Objective, params: Params, batch: Any, count: int, together: int = 1
) -> tuple[Float[Array, ""], Params, Any, Any]:
    """Loss and gradients of `batch`, a pytree of `[rows, ...]`, in `count` microbatches; `together` as in `split`.

    Returns:
      The loss; its gradients, summed in float32 or wider; the objective's sums; its terms in row order.
    """
    value_and_grad = jax.value_and_grad(objective, has_aux=True)
    # Nothing to sum: the gradients keep the dtype of the parameters.
    if count == 1:
        (loss, (sums, terms)), grads = value_and_grad(params, batch)
        return loss, grads, sums, terms
    parts = split(batch, count, together)
    # Shapes for the scan's carry. Gradients have the parameters' shapes; tracing them would double the time.
    loss, (sums, _) = jax.eval_shape(objective, params, jax.tree.map(lambda x: x[0], parts))

    def one(carry: Any, part: Any) -> tuple[Any, Any]:
        (loss, (sums, terms)), grads = value_and_grad(params, part)
        return jax.tree.map(jnp.add, carry, (loss, sums, grads)), terms

    # In 16 bits, sums would lose small addends.
    wide = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), (loss, sums, params))
    # A scan, not a vmap, so that only one microbatch has activations at a time.
    (loss, sums, grads), terms = jax.lax.scan(one, wide, parts)
    return loss, grads, sums, merge(terms, together)


def in_parts(f: Callable[[Any], Any], batch: Any, count: int, together: int = 1) -> Any:
    """Applies `f` to each microbatch in sequence. Results `[rows, ...]` are in row order; `together` as in `split`."""
    # `map` runs one microbatch at a time; `vmap` would hold all in memory.
    return f(batch) if count == 1 else merge(jax.lax.map(f, split(batch, count, together)), together)


def split(tree: Any, count: int, together: int = 1) -> Any:
    """`[rows, ...]` -> `[count, rows / count, ...]`. Microbatch i gets groups i, i + count, … of `together` consecutive
    rows, so every microbatch has rows of every device and no rows move between devices."""

    def split_leaf(x: Array) -> Array:
        # A plain reshape to [count, rows / count] would give microbatch 0 only rows of the first devices.
        groups = x.reshape(-1, count, together, *x.shape[1:]).swapaxes(0, 1)
        return groups.reshape(count, -1, *x.shape[1:])

    return jax.tree.map(split_leaf, tree)


def merge(tree: Any, together: int = 1) -> Any:
    """The inverse of `split`."""

    def merge_leaf(x: Array) -> Array:
        groups = x.reshape(len(x), -1, together, *x.shape[2:]).swapaxes(0, 1)
        return groups.reshape(-1, *x.shape[2:])

    return jax.tree.map(merge_leaf, tree)


def count_parts(rows: int, size: int | None, what: str = "rows") -> int:
    """Number of microbatches of `size` rows; None is one microbatch of all rows.

    Args:
      what: noun for the rows in the error.

    Raises:
      ValueError: if `size` is not positive or does not divide the rows.
    """
    if size is not None and (size < 1 or rows % size):
        raise ValueError(f"expected a microbatch_size that divides {rows} {what}; got {size}")
    return 1 if size is None else rows // size
