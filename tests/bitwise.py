"""Equality of whole trees to the last bit, random keys included."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp


def assert_bitwise_equal(left: Any, right: Any) -> None:
    """Same structure, dtypes, shapes and values."""
    chex.assert_trees_all_equal(_raw_keys(left), _raw_keys(right), strict=True)


def _raw_keys(tree: Any) -> Any:
    """Typed random keys as the numbers that they are: NumPy knows no others."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, tree)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
