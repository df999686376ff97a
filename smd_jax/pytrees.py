"""A base class of pytrees, and stacking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from smd_kernels.pytrees import any_leaves as any_leaves


class PyTreeNode(struct.PyTreeNode):
    """Flax's dataclass that is a pytree. Its annotations describe arrays for the reader; the constructor checks none.

    JAX rebuilds pytrees with other leaves: shardings, axis numbers, None. A check of shapes would refuse these, so
    functions check their arguments.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        any_leaves(cls)


def stack(trees: Sequence[Any]) -> Any:
    """One pytree of several with the same structure, with a new first axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def unstack(tree: Any, count: int) -> list[Any]:
    """The inverse of `stack`."""
    return [jax.tree.map(lambda x, index=index: x[index], tree) for index in range(count)]
