"""Separates the settings that a resume must find unchanged from those that it may change.

    train(loop, state, run, directory)          compares the settings of the loop; with further settings:

    compared, noted = split_settings(loop.config)
    train(loop, state, run, directory, config={"loop": compared, "data": ...}, noted={"loop": noted, "memory": "80GiB"})

`config` must be equal. Differences in `noted` are printed, and the run continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smd_jax.runs.jsonable import Json, to_jsonable
from smd_jax.train.loop_config import LoopConfig
from smd_jax.train.online_dpo import OnlineDPOConfig
from smd_jax.train.policy_learner import PolicyConfig


def rounding_only(config: LoopConfig) -> tuple[str, ...]:
    """Dotted names of the fields of a loop's configuration that change its memory and not its mathematics.

    They change the order of sums, so that numbers differ by rounding. Rounding may decide between two tokens, as it may
    on another machine.
    """
    names = ["decode_rows", "prefill_rows", "update_widths"]
    if isinstance(config, PolicyConfig | OnlineDPOConfig):
        names.append("update.microbatch_size")
    if isinstance(config, PolicyConfig):
        names += ["update.pack_columns", "update.rows_per_prompt"]
    return tuple(names)


def split_settings(config: LoopConfig) -> tuple[dict[str, Json], dict[str, Json]]:
    """The settings that a resume compares and those that it may change (`rounding_only`), as JSON values."""
    return split_fields(to_jsonable(config, "loop"), rounding_only(config))


def split_fields(settings: Json, names: Sequence[str]) -> tuple[dict[str, Json], dict[str, Json]]:
    """An object without the fields of these dotted names, and those fields by their names.

    Raises:
      ValueError: for a name that the object lacks.
    """
    selected: dict[str, Json] = {}
    for name in names:
        settings, selected[name] = _without(settings, name, name.split("."))
    if not isinstance(settings, dict):
        raise ValueError(f"expected an object of settings; got {settings!r}")
    return settings, selected


def _without(settings: Any, name: str, path: list[str]) -> tuple[Json, Json]:
    """A copy of the object without the field at `path`, and that field."""
    if not isinstance(settings, dict) or path[0] not in settings:
        raise ValueError(f"expected a setting {name!r}; got {settings!r}")
    rest = {key: value for key, value in settings.items() if key != path[0]}
    if len(path) == 1:
        return rest, settings[path[0]]
    inner, field = _without(settings[path[0]], name, path[1:])
    return {**rest, path[0]: inner}, field
