"""Gradients of a batch, summed microbatch by microbatch: memory of one, result of all.

The weights of a loss are made from the whole batch before it is split, so that the sum over microbatches is the loss of
the batch, in any split.
"""

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
      The loss; its gradients, summed in float32 or wider; the sums and the terms of the objective, terms in the order
      of the rows.
    """
    value_and_grad = jax.value_and_grad(objective, has_aux=True)
    # There is nothing to sum: the gradients keep the dtype of the parameters.
    if count == 1:
        (loss, (sums, terms)), grads = value_and_grad(params, batch)
        return loss, grads, sums, terms
    parts = split(batch, count, together)
    # Shapes alone: the carry of the scan must exist before the first microbatch has run. Without gradients, which look
    # like the parameters and would take as long again to trace.
    loss, (sums, _) = jax.eval_shape(objective, params, jax.tree.map(lambda x: x[0], parts))

    def one(carry: Any, part: Any) -> tuple[Any, Any]:
        (loss, (sums, terms)), grads = value_and_grad(params, part)
        return jax.tree.map(jnp.add, carry, (loss, sums, grads)), terms

    # Gradients have the shapes of their parameters. A sum in 16 bits would lose small summands, so it is wider.
    wide = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), (loss, sums, params))
    # A scan and no vmap: the activations of one microbatch are all that exist at a time.
    (loss, sums, grads), terms = jax.lax.scan(one, wide, parts)
    return loss, grads, sums, merge(terms, together)


def in_parts(f: Callable[[Any], Any], batch: Any, count: int, together: int = 1) -> Any:
    """`f` of every microbatch one after another, its results `[rows, ...]` in the order of the rows; `together` as in
    `split`."""
    # `map` takes one microbatch after another, where `vmap` would hold all of them at once.
    return f(batch) if count == 1 else merge(jax.lax.map(f, split(batch, count, together)), together)


def split(tree: Any, count: int, together: int = 1) -> Any:
    """`[rows, ...]` -> `[count, rows / count, ...]`: microbatch i takes groups i, i + count, … of `together` rows after
    one another, so that every microbatch has rows of every device and nothing moves between them."""

    def split_leaf(x: Array) -> Array:
        # A reshape to [count, rows / count] would give microbatch 0 the rows of the first devices alone.
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
    """How many microbatches of `size` rows there are; None is one of all.

    Args:
      what: they are, in the error.

    Raises:
      ValueError: if the rows do not divide into them.
    """
    if size is not None and rows % size:
        raise ValueError(f"expected a microbatch_size that divides {rows} {what}; got {size}")
    return 1 if size is None else rows // size
