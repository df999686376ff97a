"""The arrays of a state by name, dtype and shape, which a checkpoint and the run that continues it must share."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from smd_jax.runs.jsonable import ABSENT


class OtherStateError(ValueError):
    """A checkpoint holds the state of another model or optimizer."""


def leaf_table(tree: Any) -> dict[str, str]:
    """Path -> `dtype[shape]`. A typed key's dtype names its implementation, such as `key<fry>`.

    Raises:
      TypeError: a leaf is no array.
      ValueError: an array without elements, which orbax cannot save.
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {_leaf_name(path): _described(_leaf_name(path), leaf) for path, leaf in leaves}


def _leaf_name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _described(name: str, leaf: Any) -> str:
    if not isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        raise TypeError(f"state leaf {name!r} must be an array; got {type(leaf).__name__} {leaf!r}")
    if math.prod(leaf.shape) == 0:
        raise ValueError(f"state leaf {name!r} must have at least one element; got shape {leaf.shape}")
    return f"{leaf.dtype}{list(leaf.shape)}"


def placed(leaf: Any) -> Any:
    """The restore target of one leaf, always with a sharding; without one orbax would repeat the saved placement.

    Raises:
      ValueError: the sharding does not divide the array.
    """
    if isinstance(leaf, np.ndarray):
        return leaf
    sharding = leaf.sharding if leaf.sharding is not None else jax.sharding.SingleDeviceSharding(jax.devices()[0])
    sharding.shard_shape(leaf.shape)  # raises if it does not divide
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def check_leaves(saved: dict[str, str], given: dict[str, str]) -> None:
    """Raises OtherStateError, with every difference, unless the two tables are equal."""
    lines = [
        f"{name}: expected {saved.get(name, ABSENT)}, got {given.get(name, ABSENT)}"
        for name in saved | given
        if saved.get(name) != given.get(name)
    ]
    if lines:
        raise OtherStateError(
            "the state has another structure than the checkpoint; expected is what the checkpoint holds, got is what "
            "this run has:\n  " + "\n  ".join(lines)
        )
