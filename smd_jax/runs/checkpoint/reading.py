"""Reads checkpoints. The JSON comes first: another configuration or another structure is refused, with names, before
any array is read.
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
from smd_jax.runs.checkpoint.errors import DamagedCheckpointError, DamageNamed, others_named
from smd_jax.runs.checkpoint.integrity import check_files, check_there, names_in
from smd_jax.runs.checkpoint.leaves import check_leaves, leaf_table, placed
from smd_jax.runs.checkpoint.ownership import (
    ITEMS,
    check_format,
    check_keys,
    check_not_emptied,
    check_ours,
    read_meta_file,
)
from smd_jax.runs.checkpoint.steps import all_steps, check_readable_path, existing_step, folder_of, latest_step
from smd_jax.runs.jsonable import Json, config_differences, to_jsonable

META = ("meta",)
_Read = TypeVar("_Read")


class OtherConfigError(ValueError):
    """A checkpoint was made under another configuration than that of the run which would continue it."""


@dataclass(frozen=True)
class Restored:
    """A checkpoint in memory.

    Attributes:
      step: the step of the checkpoint.
      state: pytree with the structure, shapes, dtypes and shardings of `like`.
      data_position: the JSON object given to `save`.
      noted, machine: as given to `save`, as JSON; None also for old checkpoints.
      damaged: one line for each later checkpoint that cannot be read, the newest first; see `restore_newest`.
    """

    step: int
    state: Any
    data_position: dict[str, Json]
    noted: Json
    machine: Json = None
    damaged: tuple[str, ...] = ()


def restore(directory: str | Path, like: Any, *, config: object, step: int | None = None) -> Restored:
    """Reads a checkpoint into the structure and onto the devices of `like`.

    Args:
      directory: as given to `save`.
      like: pytree of arrays or `jax.ShapeDtypeStruct`; a jax leaf gets the leaf's `sharding` (None: the first device),
        a numpy leaf stays on the host. Dtypes and shapes must equal the saved ones.
      config: the configuration of the run that continues; it must equal the saved one.
      step: None: the newest.

    Raises:
      FileNotFoundError: no checkpoint in `directory`, or none with this `step`.
      OtherConfigError, OtherStateError: the configuration or the structure of the state differs; the message lists
        every difference. Both are ValueErrors, as is a sharding that does not divide an array.
      OtherFormatError: another library or a later version wrote the checkpoint.
      DamagedCheckpointError: the checkpoint cannot be read, or is empty. The message lists the other steps.
    """
    step = existing_step(directory, step)
    with others_named(directory, step):
        return _restored(directory, like, config, step)


def _restored(directory: str | Path, like: Any, config: object, step: int, checked: bool = False) -> Restored:
    """`restore` of an existing checkpoint, whose error does not list other steps.

    Args:
      checked: its files are known to be unchanged.
    """
    meta = _read_meta(directory, step, () if checked else ITEMS)
    # Before any array is read: orbax would fail on a shape without naming the difference.
    _check_config(meta["config"], to_jsonable(config))
    check_leaves(meta["leaves"], leaf_table(like))
    target = jax.tree.map(placed, like)
    # The sharding fits, so an error here comes from a file, of a checkpoint without checksums.
    with DamageNamed(directory, step):
        state = _read_item(directory, step, ocp.StandardCheckpointHandler(), ocp.args.StandardRestore(target))
    return Restored(step, state, meta["data_position"], meta.get("noted"), meta.get("machine"))


def restore_newest(directory: str | Path, like: Any, *, config: object) -> Restored:
    """Reads the newest readable checkpoint; arguments and errors are those of `restore`.

    Later ones, which are damaged, stay on disk, see `discard_after`. All processes must call it, and all read the same.

    Raises:
      DamagedCheckpointError: none can be read.
      OSError: the disk fails; the checkpoint may be intact.
      OtherProcessError: another process sees fewer files than the first.
    """
    if jax.process_count() == 1:
        restored, damaged = _newest_readable(directory, lambda step: _restored(directory, like, config, step))
    else:
        step, damaged = _agreed_step(directory)
        # No process may fall back to an older one by itself.
        with all_or_none():
            restored = _restored(directory, like, config, step, checked=True)
    return dataclasses.replace(restored, damaged=tuple(damaged))


def _agreed_step(directory: str | Path) -> tuple[int, list[str]]:
    """The newest checkpoint with unchanged files, and a line for each later one.

    The first process reads the files and decides: every host would otherwise read all, and hosts could disagree.
    """

    def whole(step: int) -> tuple[int, list[str]]:
        _read_meta(directory, step)
        return step, names_in(folder_of(directory, step), ITEMS)

    found = None
    with all_or_none():
        if is_first():
            found = _newest_readable(directory, whole)
    (step, names), damaged = gather_json(found)[0]
    # A host may not see files yet that others wrote.
    with all_or_none(), DamageNamed(directory, step):
        check_there(folder_of(directory, step), names)
    return step, damaged


def saved_config(directory: str | Path) -> Json:
    """The configuration of the newest readable checkpoint.

    Raises:
      FileNotFoundError, OtherFormatError, DamagedCheckpointError: as `restore_newest`.
    """
    return _newest_readable(directory, lambda step: _read_meta(directory, step, META))[0]["config"]


def restore_part(directory: str | Path, like: dict[str, Any], step: int | None = None) -> dict[str, Any]:
    """Reads some fields of a checkpoint's state, such as its parameters without the optimizer's state.

    Args:
      like: for each field a pytree as `restore` takes it: `{"params": ...}`.
      step: None: the newest.

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
    return _read_item(directory, step, ocp.PyTreeCheckpointHandler(), part)


def check_config(directory: str | Path, config: object) -> None:
    """Raises OtherConfigError if a checkpoint exists and has another configuration.

    It reads no arrays and waits for no other process.
    """
    if latest_step(directory) is not None:
        _check_config(saved_config(directory), to_jsonable(config))


def check_state(directory: str | Path, like: Any) -> None:
    """Raises OtherStateError if a checkpoint exists and has other arrays than `like`.

    It reads no arrays and waits for no other process.
    """
    if latest_step(directory) is not None:
        meta, _ = _newest_readable(directory, lambda step: _read_meta(directory, step, META))
        check_leaves(meta["leaves"], leaf_table(like))


def _check_config(saved: Json, given: Json) -> None:
    lines = config_differences(saved, given)
    if lines:
        raise OtherConfigError(
            "the checkpoint was made under another configuration; expected is what it holds, got is what this run "
            "has:\n  " + "\n  ".join(lines)
        )


def _newest_readable(directory: str | Path, read: Callable[[int], _Read]) -> tuple[_Read, list[str]]:
    """The result of `read` for the newest checkpoint that is not damaged, and the errors of later ones."""
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
    """The JSON of a checkpoint.

    Args:
      check: the items whose files must be unchanged; all their files are read.
    """
    check_readable_path(directory)
    folder = folder_of(directory, step)
    check_ours(folder, [folder_of(directory, other) for other in all_steps(directory) if other != step])
    with DamageNamed(directory, step):
        check_not_emptied(folder)
        check_files(folder, check, left_out=[item for item in ITEMS if item not in check])
        meta = read_meta_file(folder)
        check_keys(meta)
    check_format(meta, folder)
    return meta


def _read_item(directory: str | Path, step: int, handler: Any, args: Any) -> Any:
    """Reads the arrays; all processes must call it."""
    with ocp.Checkpointer(handler) as checkpointer:
        return checkpointer.restore(folder_of(directory, step).resolve() / "state", args=args)
