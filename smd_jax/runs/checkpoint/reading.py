"""Reads checkpoints: what lies beside the arrays first, so that a run under another configuration, or a state of
another shape, is refused with names before any array is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

from smd_jax.devices.processes import all_or_none, gather_json, is_first
from smd_jax.runs.checkpoint.checksums import check_files, check_there, names_in
from smd_jax.runs.checkpoint.errors import DamagedCheckpointError, DamageNamed, others_named
from smd_jax.runs.checkpoint.leaves import check_leaves, leaf_table, placed
from smd_jax.runs.checkpoint.managers import reading_manager
from smd_jax.runs.checkpoint.ownership import ITEMS, check_format, check_keys, check_not_emptied, check_ours
from smd_jax.runs.checkpoint.steps import all_steps, existing_step, folder_of, latest_step
from smd_jax.runs.jsonable import Json, config_differences, to_jsonable

META = ("meta",)
_Read = TypeVar("_Read")


class OtherConfigError(ValueError):
    """A checkpoint was made under another configuration than the one that would go on from it."""


@dataclass(frozen=True)
class Restored:
    """What `restore` gives back.

    Attributes:
      step: the step under which the checkpoint was saved.
      state: pytree with the structure, shapes, dtypes and shardings of `like`.
      data_position: the JSON object given to `save`.
      noted, machine: what was given to `save`, as JSON; None also for checkpoints from before there was such a thing.
      damaged: one line on each later checkpoint that cannot be read, the newest first; see `restore_newest`.
    """

    step: int
    state: Any
    data_position: dict[str, Json]
    noted: Json
    machine: Json = None
    damaged: tuple[str, ...] = ()


def restore(
    directory: str | Path,
    like: Any,
    *,
    config: object,
    step: int | None = None,
    may_differ: Sequence[str] = (),
) -> Restored:
    """Reads a checkpoint into the structure and onto the devices of `like`.

    Args:
      directory: as given to `save`.
      like: pytree of arrays or `jax.ShapeDtypeStruct`; a jax leaf is placed by the leaf's `sharding` (none: the first
        device), a numpy leaf stays on the host. Dtypes and shapes must be those that were saved.
      config: the configuration of the run that continues; it must equal the saved one.
      step: which checkpoint; None means the newest.
      may_differ: dotted names of fields (with all below them) that may differ, such as `("num_steps",)`.

    Raises:
      FileNotFoundError: no checkpoint in `directory`, or none with this `step`.
      OtherConfigError, OtherStateError: the configuration or the structure of the state differs; the message lists
        every difference. Both are ValueErrors, as is a sharding that does not divide an array.
      OtherFormatError: this is no checkpoint of this library, or one of a later version.
      DamagedCheckpointError: the checkpoint cannot be read, or is empty beside others of this library. Older ones are
        untouched and are named.
    """
    step = existing_step(directory, step)
    with others_named(directory, step):
        return _restored(directory, like, config, step, may_differ)


def _restored(
    directory: str | Path, like: Any, config: object, step: int, may_differ: Sequence[str], checked: bool = False
) -> Restored:
    """`restore`, of a checkpoint that is there; where it is damaged without a word on others.

    Args:
      checked: its files are known to be as they were written.
    """
    meta = _read_meta(directory, step, () if checked else ITEMS)
    # Both before any array is read: they name the difference where orbax would fail on a shape.
    _check_config(meta["config"], to_jsonable(config), may_differ)
    check_leaves(meta["leaves"], leaf_table(like))
    target = jax.tree.map(placed, like)
    # The sharding fits, so what fails here is the file: of a checkpoint whose checksums were never written.
    with DamageNamed(directory, step):
        state = _read_item(directory, step, ocp.args.Composite(state=ocp.args.StandardRestore(target)))["state"]
    return Restored(step, state, meta["data_position"], meta.get("noted"), meta.get("machine"))


def restore_newest(directory: str | Path, like: Any, *, config: object, may_differ: Sequence[str] = ()) -> Restored:
    """Reads the newest checkpoint that can be read; arguments and errors are those of `restore`. The later ones, which
    are damaged, stay as they are, see `discard_after`. Of several processes all must call it, and all read the same.

    Raises:
      DamagedCheckpointError: none can be read.
      OSError: the disk fails, which says nothing of what lies on it.
      OtherProcessError: another process sees less of the checkpoint than the first.
    """
    if jax.process_count() == 1:
        restored, damaged = _newest_readable(
            directory, lambda step: _restored(directory, like, config, step, may_differ)
        )
    else:
        step, damaged = _agreed_step(directory)
        # None of them may go back to an older one by itself.
        with all_or_none():
            restored = _restored(directory, like, config, step, may_differ, checked=True)
    return dataclasses.replace(restored, damaged=tuple(damaged))


def _agreed_step(directory: str | Path) -> tuple[int, list[str]]:
    """The newest checkpoint whose files are as they were written, and a line on each later one. The first process reads
    them all; the others take its word, because every host would read the checkpoints of all, and might come to another
    step."""

    def whole(step: int) -> tuple[int, list[str]]:
        _read_meta(directory, step)
        return step, names_in(folder_of(directory, step), ITEMS)

    found = None
    with all_or_none():
        if is_first():
            found = _newest_readable(directory, whole)
    (step, names), damaged = gather_json(found)[0]
    # A host may not have heard yet of files that others wrote.
    with all_or_none(), DamageNamed(directory, step):
        check_there(folder_of(directory, step), names)
    return step, damaged


def saved_config(directory: str | Path) -> Json:
    """The configuration of the newest checkpoint that can be read.

    Raises:
      FileNotFoundError, OtherFormatError, DamagedCheckpointError: as `restore_newest`.
    """
    return _newest_readable(directory, lambda step: _read_meta(directory, step, META))[0]["config"]


def restore_part(directory: str | Path, like: dict[str, Any], step: int | None = None) -> dict[str, Any]:
    """Reads some fields of a checkpoint's state, such as its parameters without the optimizer's state.

    Args:
      like: for each field a pytree as `restore` takes it: `{"params": ...}`.
      step: which checkpoint; None means the newest.

    Raises:
      FileNotFoundError, DamagedCheckpointError: as `restore`.
      ValueError: these fields have another structure in the checkpoint.
    """
    step = existing_step(directory, step)
    with others_named(directory, step):
        meta = _read_meta(directory, step)
    saved = {name: what for name, what in meta["leaves"].items() if name.partition("/")[0] in like}
    check_leaves(saved, leaf_table(like))
    target = jax.tree.map(placed, like)
    part = ocp.args.PyTreeRestore(
        item=target, restore_args=ocp.checkpoint_utils.construct_restore_args(target), partial_restore=True
    )
    return _read_item(directory, step, ocp.args.Composite(state=part))["state"]


def check_config(directory: str | Path, config: object) -> None:
    """Raises OtherConfigError if the newest checkpoint, if there is one, is of another configuration: as
    `restore_newest` does, before anything is read that takes long. It waits for no other process."""
    if latest_step(directory) is not None:
        _check_config(saved_config(directory), to_jsonable(config), ())


def check_state(directory: str | Path, like: Any) -> None:
    """Raises OtherStateError if the newest checkpoint, if there is one, is of other arrays than `like`: as
    `restore_newest` does, before any array is read. It waits for no other process."""
    if latest_step(directory) is not None:
        meta, _ = _newest_readable(directory, lambda step: _read_meta(directory, step, META))
        check_leaves(meta["leaves"], leaf_table(like))


def _check_config(saved: Json, given: Json, may_differ: Sequence[str]) -> None:
    lines = config_differences(saved, given, may_differ)
    if lines:
        raise OtherConfigError(
            "the checkpoint was made under another configuration; expected is what it holds, got is what this run "
            "has:\n  " + "\n  ".join(lines)
        )


def _newest_readable(directory: str | Path, read: Callable[[int], _Read]) -> tuple[_Read, list[str]]:
    """What `read` gives of the newest checkpoint for which it raises no DamagedCheckpointError, and those errors."""
    damaged = list[str]()
    last = existing_step(directory, None)
    for step in sorted(all_steps(directory), reverse=True):
        try:
            return read(step), damaged
        except DamagedCheckpointError as error:
            damaged.append(str(error))
    raise DamagedCheckpointError(
        f"expected a checkpoint that can be read, up to step {last}; got none:\n" + "\n".join(damaged)
    )


def _read_meta(directory: str | Path, step: int, check: Sequence[str] = ITEMS) -> dict[str, Any]:
    """What lies beside the arrays of a checkpoint.

    Args:
      check: the items whose files must be as they were written, for which all of them are read.
    """
    others = [folder_of(directory, other) for other in all_steps(directory) if other != step]
    check_ours(folder_of(directory, step), others)
    with DamageNamed(directory, step):
        check_not_emptied(folder_of(directory, step))
        check_files(folder_of(directory, step), check, left_out=[item for item in ITEMS if item not in check])
        # By each process for itself: where one fails, and never comes to read, nobody waits for it.
        with reading_manager(directory, alone=True) as manager:
            meta = manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
        check_keys(meta)
    check_format(meta, folder_of(directory, step))
    return meta


def _read_item(directory: str | Path, step: int, args: ocp.args.Composite) -> Any:
    with reading_manager(directory) as manager:
        return manager.restore(step, args=args)
