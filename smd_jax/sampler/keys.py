"""PRNG keys per row, so that a row's random numbers do not depend on its batch or index."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key


def row_keys(key: Key[Array, ""] | Key[Array, " rows"], rows: int) -> Key[Array, " rows"]:
    """One key per row: the given keys, or `fold_in(key, row)`.

    Raises:
      ValueError: for anything but typed threefry keys, `jax.random.key(seed)`. With other generators a row's numbers
        depend on the batch (`vmap` of "rbg" differs from single calls).
    """
    if not hasattr(key, "dtype"):
        key = jnp.asarray(key)
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not typed or str(jax.random.key_impl(key)) != "threefry2x32":
        kind = jax.random.key_impl(key) if typed else f"{key.dtype}{list(key.shape)}"
        raise ValueError(f"expected threefry keys, jax.random.key(seed, impl='threefry2x32'); got {kind}")
    if key.ndim == 0:
        return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(rows))
    if key.shape != (rows,):
        raise ValueError(f"expected one key, or one for each of {rows} rows; got keys of shape {key.shape}")
    return key


def prompt_keys(keys: Key[Array, " rows"], group_size: int, copies: int = 1) -> Key[Array, " prompts"]:
    """The keys of prompts for random eviction policies: each prompt has the key of its first row.

    A prompt is read once for its group, so all rows of the group share its evictions. The first row's key differs
    between rollouts, and is the same in any batch, engine and mesh.

    Args:
      keys: keys of all rows, see `row_keys`; the rows of a group are adjacent.
      group_size: rows of each prompt.
      copies: number of consecutive copies of each prompt, which get the same key.
    """
    first = keys[:: group_size * copies]
    return first if copies == 1 else jnp.repeat(first, copies, axis=0)


def token_keys(keys: Key[Array, " rows"]) -> Key[Array, " rows"]:
    """The keys for sampling tokens."""
    # Different from the eviction keys, so that a random policy does not change the tokens' random numbers.
    return jax.vmap(lambda key: jax.random.fold_in(key, 0))(keys)


def eviction_keys(keys: Key[Array, " rows"]) -> Key[Array, " rows"]:
    """The keys for random eviction policies."""
    return jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys)
