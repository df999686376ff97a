"""Shape checks of public functions, so that no array broadcasts to another shape unnoticed.

Like `chex.assert_shape`; importing chex would add a third to this library's import time.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Array


def check_shape(name: str, array: Array | np.ndarray | None, *shapes: tuple[int | str, ...]) -> None:
    """Checks that an array has one of the shapes; None, an absent optional array, passes.

    Args:
      name: of the array, for the message.
      shapes: an axis is its size, or a word such as "batch" for any size.

    Raises:
      TypeError: for lists and other objects that are no arrays.
      ValueError: if the array has another rank or other sizes.
    """
    if array is None:
        return
    check_array(name, array)
    if any(_fits(array.shape, shape) for shape in shapes):
        return
    expected = " or ".join(_written(shape) for shape in shapes)
    raise ValueError(f"expected {name} of shape {expected}; got {_written(array.shape)}")


def check_array(name: str, array: object) -> None:
    """Raises TypeError for lists and other objects that are no arrays."""
    if not hasattr(array, "shape"):
        raise TypeError(f"expected {name} as an array, as jnp.asarray gives; got {type(array).__name__}")


def _fits(shape: tuple[int, ...], expected: tuple[int | str, ...]) -> bool:
    if len(shape) != len(expected):
        return False
    return all(isinstance(wanted, str) or size == wanted for size, wanted in zip(shape, expected, strict=True))


def _written(shape: tuple[int | str, ...]) -> str:
    return f"[{', '.join(str(axis) for axis in shape)}]"
