"""Random numbers of a row: they come from its own key alone, whatever batch it is in and wherever it lies in it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key


def row_keys(key: Key[Array, ""] | Key[Array, " rows"], rows: int) -> Key[Array, " rows"]:
    """A key for every row: its own, or `fold_in(key, row)`.

    Raises:
      ValueError: for anything but typed threefry keys, `jax.random.key(seed)`. Those of other generators would give a
        row other numbers in another batch (`vmap` of "rbg" is not the same as one by one).
    """
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
    """The keys for eviction policies that draw while prompts are read: each prompt has that of its first row.

    A prompt is read once for its group, so all rows of the group share what it loses. The first row's key differs
    between rollouts, so a prompt loses other keys in each; and it is the same in any batch, engine and mesh.

    Args:
      keys: of all rows, see `row_keys`; the rows of a group lie side by side.
      group_size: rows of each prompt.
      copies: consecutive prompts that are copies of one, and draw the same numbers.
    """
    first = keys[:: group_size * copies]
    return first if copies == 1 else jnp.repeat(first, copies, axis=0)


def token_keys(keys: Key[Array, " rows"]) -> Key[Array, " rows"]:
    """The keys from which the tokens of a response are drawn."""
    # Apart from those of evictions: what a policy draws does not move the tokens' numbers.
    return jax.vmap(lambda key: jax.random.fold_in(key, 0))(keys)


def eviction_keys(keys: Key[Array, " rows"]) -> Key[Array, " rows"]:
    """The keys for eviction policies that draw."""
    return jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys)
