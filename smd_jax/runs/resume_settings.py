"""Which settings of a run a resume must find again, and which it may change.

    train(loop, state, run, directory)          those of the loop, and with more than those:

    compared, noted = split_settings(loop.config)
    train(loop, state, run, directory, config={"loop": compared, "data": ...}, noted={"loop": noted, "memory": "80GiB"})

`config` must be equal; what differs in `noted` is printed, and the run goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smd_jax.runs.jsonable import Json, to_jsonable
from smd_jax.train.loop_config import LoopConfig
from smd_jax.train.online_dpo import OnlineDPOConfig
from smd_jax.train.policy_loop import PolicyConfig


def rounding_only(config: LoopConfig) -> tuple[str, ...]:
    """Fields of a loop's configuration that plan its memory and change nothing of its mathematics, by dotted names.

    Sums come in another order, so that numbers differ by rounding; which may decide between two tokens at the edge of
    a draw, as another machine may.
    """
    names = ["decode_rows", "prefill_rows"]
    distill = config.update.distill if isinstance(config, PolicyConfig) else None
    # A share of the rows is taken of every microbatch, and a share of the columns of those that the learner runs over:
    # other ones with other sizes.
    if isinstance(config, PolicyConfig | OnlineDPOConfig) and (distill is None or distill.fraction == 1):
        names.append("update.microbatch_size")
    if isinstance(config, PolicyConfig):
        names += ["update.pack_columns", "update.rows_per_prompt"]
    if distill is None or distill.position_fraction == 1:
        names.append("update_widths")
    return tuple(names)


def split_settings(config: LoopConfig) -> tuple[dict[str, Json], dict[str, Json]]:
    """What must be equal for a resume, and what need not be (`rounding_only`), as JSON values."""
    return taken_out(to_jsonable(config, "loop"), rounding_only(config))


def taken_out(settings: Json, names: Sequence[str]) -> tuple[dict[str, Json], dict[str, Json]]:
    """An object without the fields of these dotted names, and those fields alone, by their names.

    Raises:
      ValueError: for a name that is not there.
    """
    taken: dict[str, Json] = {}
    for name in names:
        settings, taken[name] = _without(settings, name, name.split("."))
    if not isinstance(settings, dict):
        raise ValueError(f"expected an object of settings; got {settings!r}")
    return settings, taken


def _without(settings: Any, name: str, path: list[str]) -> tuple[Json, Json]:
    """The object without the field at `path`, and that field; nothing is changed in place."""
    if not isinstance(settings, dict) or path[0] not in settings:
        raise ValueError(f"expected a setting {name!r}; got {settings!r}")
    rest = {key: value for key, value in settings.items() if key != path[0]}
    if len(path) == 1:
        return rest, settings[path[0]]
    inner, field = _without(settings[path[0]], name, path[1:])
    return {**rest, path[0]: inner}, field
