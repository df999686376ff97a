"""Random numbers of a row: they come from its own key alone, whatever batch it is in and wherever it lies in it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, UInt32

from smd_jax.masks import positions
from smd_jax.text.prompts import PromptBatch


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


@jax.jit
def prompt_keys(prompts: PromptBatch) -> Key[Array, " prompts"]:
    """The keys for eviction policies that draw while prompts are read: each comes from the prompt's own tokens.

    A prompt is read once for all of its responses, so what it loses cannot depend on one row's key. This way it depends
    on nothing else either: not on padding, on the batch, on the size of its group, or on how a mesh splits the group.
    """
    # One more than the position, because mixing leaves 0 as it is.
    place = _mixed(positions(prompts.valid).astype(jnp.uint32) + 1)
    # A sum, so that padding adds nothing wherever it is; each token is mixed with its place first.
    words = _mixed(place ^ prompts.tokens.astype(jnp.uint32))
    content = jnp.where(prompts.valid, words, 0).sum(axis=1, dtype=jnp.uint32)
    begin = jax.random.key(0, impl="threefry2x32")
    return jax.vmap(lambda word: jax.random.fold_in(begin, word))(content)


def _mixed(x: UInt32[Array, "prompts P"]) -> UInt32[Array, "prompts P"]:
    """Every bit depends on every bit (the last step of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def token_keys(keys: Key[Array, " rows"]) -> Key[Array, " rows"]:
    """The keys from which the tokens of a response are drawn."""
    # Apart from those of evictions: what a policy draws does not move the tokens' numbers.
    return jax.vmap(lambda key: jax.random.fold_in(key, 0))(keys)


def eviction_keys(keys: Key[Array, " rows"]) -> Key[Array, " rows"]:
    """The keys for eviction policies that draw."""
    return jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys)
