"""The look-up of tokens in the embedding table, and its gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def look_up(
    table: Float[Array, "vocab hidden"], tokens: Int[Array, "batch tokens"]
) -> Float[Array, "batch tokens hidden"]:
    """The rows of the tokens, in the dtype of the table. The gradient of a row is summed in float32 or wider."""
    table = jnp.asarray(table)  # a NumPy array cannot be indexed by traced tokens
    # JAX's own gradient of a table in 16 bits adds in 16 bits: the sum of a frequent token would stagnate. Tables in
    # float32 keep it, because it has forward-mode derivatives, too.
    return _look_up_wide(table, tokens) if table.dtype in (jnp.bfloat16, jnp.float16) else table[tokens]


@jax.custom_vjp
def _look_up_wide(table: Array, tokens: Array) -> Array:
    return table[tokens]


def _forward(table: Array, tokens: Array) -> tuple[Array, tuple[Array, Array]]:
    return table[tokens], (table, tokens)


def _backward(read: tuple[Array, Array], gradient: Array) -> tuple[Array, None]:
    table, tokens = read
    wide = jnp.zeros(table.shape, jnp.float32).at[tokens].add(gradient.astype(jnp.float32))
    return wide.astype(table.dtype), None


_look_up_wide.defvjp(_forward, _backward)
