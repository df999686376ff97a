"""Shapes at the library's doors: an array that would broadcast to something else is refused by name.

The same as `chex.assert_shape`, which would cost a third of what importing this library may cost.
"""

from __future__ import annotations

from jaxtyping import Array


def check_shape(name: str, array: Array | None, *shapes: tuple[int | str, ...]) -> None:
    """Refuses an array that has none of the shapes. None, for what is optional, passes.

    Args:
      name: as the caller knows the array.
      shapes: an axis is its size, or a word such as "batch" where any size will do.

    Raises:
      ValueError: if the array has another rank or other sizes.
    """
    if array is None or any(_fits(array.shape, shape) for shape in shapes):
        return
    expected = " or ".join(_written(shape) for shape in shapes)
    raise ValueError(f"expected {name} of shape {expected}; got {_written(array.shape)}")


def _fits(shape: tuple[int, ...], expected: tuple[int | str, ...]) -> bool:
    if len(shape) != len(expected):
        return False
    return all(isinstance(wanted, str) or size == wanted for size, wanted in zip(shape, expected, strict=True))


def _written(shape: tuple[int | str, ...]) -> str:
    return f"[{', '.join(str(axis) for axis in shape)}]"
