"""Settings as JSON values: those that a resume must find unchanged, and those that it may change.

    train(loop, state, run, directory)          compares the settings of the loop; with further settings:

    compared, metadata = split_settings(loop.config)
    settings = {"config": {"loop": compared, "data": ...}, "metadata": {"loop": metadata, "memory": "80GiB"}}
    train(loop, state, run, directory, **settings)

`config` must be equal. Differences in `metadata` are printed, and the run continues.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from smd_jax.devices.processes import versions
from smd_jax.train.loop_config import LoopConfig

# Lists and objects hold Json, too. jaxtyping's checks could not resolve a recursive name here.
Json = None | bool | int | float | str | list[Any] | dict[str, Any]


def to_jsonable(value: object, path: str = "config") -> Json:
    """Configuration -> JSON values: nested dataclasses become objects that name their class under `_class`.

    Tuples become lists; paths and non-finite floats become strings. Errors begin with `path`.

    Raises:
      TypeError: a value (named by its dotted path) has no JSON form.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        # JSON has no infinity, and a comparison of texts works as well.
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [to_jsonable(item, f"{path}.{i}") for i, item in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Fields that do not compare are arrays, which a digest represents.
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.compare}
        # The class counts in a comparison: two policies may have the same fields.
        value = {"_class": type(value).__name__, **fields}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {str(key): to_jsonable(item, f"{path}.{key}") for key, item in value.items()}
    raise TypeError(
        f"{path}: expected None, bool, number, string, path, list, tuple, dict with string keys or a dataclass; got "
        f"{type(value).__name__} {value!r}"
    )


def machine(mesh: Mesh) -> dict[str, Json]:
    """Versions and devices of a run, which decide its rounding, and so its bits; see `docs/determinism.md`."""
    return {
        **versions(),
        "device": mesh.devices.flat[0].device_kind,
        "mesh": {str(name): size for name, size in mesh.shape.items()},
        "processes": jax.process_count(),
    }


def split_settings(config: LoopConfig) -> tuple[dict[str, Any], dict[str, Json]]:
    """The settings of a loop that a resume compares, and those that it may change, as JSON values.

    The latter change memory use and the order of sums, so numbers differ by rounding, as on another machine.
    """
    of_loop = ("decode_rows", "prefill_rows", "update_widths")
    of_update = ("update.microbatch_size", "update.pack_columns", "update.rows_per_prompt")
    # None and the visibility that it stands for are the same setting.
    implied = dataclasses.replace(config.update, visibility=None)
    if implied.learner_visibility == config.update.visibility:
        config = dataclasses.replace(config, update=implied)
    return split_fields(to_jsonable(config, "loop"), of_loop + of_update)


def split_fields(settings: Any, names: Sequence[str]) -> tuple[dict[str, Any], dict[str, Json]]:
    """Splits off the fields with these dotted names: the remaining object, and the fields by their names."""
    settings, selected = copy.deepcopy(settings), dict[str, Json]()
    for name in names:
        *parents, last = name.split(".")
        place = settings
        for parent in parents:
            place = place[parent]
        selected[name] = place.pop(last)
    return settings, selected
