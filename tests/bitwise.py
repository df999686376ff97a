"""Bitwise equality of pytrees, PRNG keys included."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np


def assert_bitwise_equal(left: Any, right: Any) -> None:
    """Same structure, dtypes, shapes and bytes: 0.0 is not -0.0."""
    left, right = _raw_keys(left), _raw_keys(right)
    chex.assert_trees_all_equal(left, right, strict=True)
    assert [np.asarray(x).tobytes() for x in jax.tree.leaves(left)] == [
        np.asarray(x).tobytes() for x in jax.tree.leaves(right)
    ]


def _raw_keys(tree: Any) -> Any:
    """Replaces typed PRNG keys by their data, which NumPy can compare."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, tree)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
