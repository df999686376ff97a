"""Means of a model's queries before RoPE, which TriAttention measures once per model.

Entries f and f + head_dim / 2 of a query are one complex number, which RoPE rotates by `position * frequency[f]`. The
mean before the rotation predicts which keys a head attends to at which distance.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

ARRAYS = ("mean", "length", "frequencies")


@dataclass(frozen=True)
class QueryCenters:
    """Statistics of queries before RoPE. Hashable by value, so it can be a static argument.

    `smd_jax.model.query_centers` measures them on texts; other tools may provide the numbers.

    Attributes:
      mean: complex `[layers, heads, head_dim / 2]` mean query.
      length: `[layers, heads, head_dim / 2]` mean absolute value.
      frequencies: `[layers, head_dim / 2]` of RoPE, radians per position; a single row is for all layers.
      digest: of all numbers.

    Raises:
      ValueError: shapes that do not fit together, numbers that are not finite, or a mean longer than the mean length.
    """

    mean: np.ndarray = field(compare=False, repr=False)
    length: np.ndarray = field(compare=False, repr=False)
    frequencies: np.ndarray = field(compare=False, repr=False)
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        mean, length = np.asarray(self.mean, np.complex64), np.asarray(self.length, np.float32)
        if mean.ndim != 3 or length.shape != mean.shape:
            raise ValueError(
                f"expected mean and length [layers, heads, head_dim / 2]; got {mean.shape} and {length.shape}"
            )
        layers, _, half = mean.shape
        given = np.asarray(self.frequencies, np.float64)
        if given.shape not in ((half,), (1, half), (layers, half)):
            raise ValueError(f"expected frequencies {(layers, half)} or {(half,)}; got {given.shape}")
        frequencies = np.broadcast_to(given, (layers, half))
        if not all(np.isfinite(numbers).all() for numbers in (mean, length, frequencies)):
            raise ValueError("expected finite query centers; got NaN or infinity")
        if (np.abs(mean) > length * (1 + 1e-3) + 1e-6).any():
            raise ValueError("expected mean absolute values of at least |mean| in length; got smaller ones")
        numbers = b"".join(np.ascontiguousarray(x).tobytes() for x in (mean, length, frequencies))
        found = {"mean": mean, "length": length, "frequencies": frequencies}
        for name, value in (found | {"digest": hashlib.sha256(numbers).hexdigest()[:16]}).items():
            object.__setattr__(self, name, value)  # frozen from here on

    def save(self, path: str | Path) -> None:
        """Writes an .npz file, for `load_query_centers`."""
        with open(path, "wb") as file:
            np.savez(file, allow_pickle=False, **{name: getattr(self, name) for name in ARRAYS})


def load_query_centers(path: str | Path) -> QueryCenters:
    """Reads a file that `QueryCenters.save` wrote.

    Raises:
      FileNotFoundError: no such file.
      ValueError: another kind of file, or numbers that `QueryCenters` refuses.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"expected a file of query centers at {path}; found none")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in ARRAYS}
    except (KeyError, BadZipFile, EOFError, TypeError, ValueError) as error:
        raise ValueError(f"expected an .npz file with the arrays {', '.join(ARRAYS)}; got {path}") from error
    return QueryCenters(**found)
