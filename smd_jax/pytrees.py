"""Helpers for pytrees: a decorator for their classes, and stacking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, no_type_check

import jax
import jax.numpy as jnp

any_leaves = no_type_check
"""Decorates pytree classes whose annotations describe arrays.

The annotations give the shapes that a user sees. JAX rebuilds the same classes with other leaves (shardings, axis
numbers, None), which shape checks at construction would refuse. So functions check their arguments, and constructors do
not.
"""


def stack(trees: Sequence[Any]) -> Any:
    """One pytree of several with the same structure, with a new first axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def unstack(tree: Any, count: int) -> list[Any]:
    """The inverse of `stack`."""
    return [jax.tree.map(lambda x, index=index: x[index], tree) for index in range(count)]
