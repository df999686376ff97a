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
import numpy as np
import orbax.checkpoint as ocp

from smd_jax.devices.processes import all_or_none, differences, gather_json, is_first
from smd_jax.runs.checkpoint.errors import DamagedCheckpointError, OtherConfigError, OtherStateError, damage_named
from smd_jax.runs.checkpoint.files import (
    ITEMS,
    all_steps,
    check_files,
    check_path,
    existing_step,
    latest_step,
    leaf_table,
    read_meta,
)
from smd_jax.runs.settings import Json, to_jsonable

_Read = TypeVar("_Read")


@dataclass(frozen=True)
class Restored:
    """A checkpoint in memory.

    Attributes:
      step: the step of the checkpoint.
      state: pytree with the structure, shapes, dtypes and shardings of `like`.
      metadata: as given to `Writer.save`, as JSON.
      damaged: one line for each later checkpoint that cannot be read, the newest first.
    """

    step: int
    state: Any
    metadata: Json
    damaged: tuple[str, ...] = ()


def restore(directory: str | Path, like: Any, *, config: object, step: int | None = None) -> Restored:
    """Reads a checkpoint into the structure and onto the devices of `like`. All processes must call it.

    Args:
      directory: as given to `Writer`.
      like: pytree of arrays or `jax.ShapeDtypeStruct`; a jax leaf gets the leaf's `sharding` (None: the first device),
        a numpy leaf stays on the host. Dtypes and shapes must equal the saved ones.
      config: the configuration of the run that continues; it must equal the saved one.
      step: None: the newest that can be read. Later ones, which are damaged, stay on disk, see `discard_after`.

    Raises:
      FileNotFoundError: no checkpoint in `directory`, or none with this `step`.
      OtherConfigError, OtherStateError: the configuration or the structure of the state differs; the message lists
        every difference. Both are ValueErrors, as is a sharding that does not divide an array.
      OtherFormatError: another library or a later version wrote the checkpoint.
      DamagedCheckpointError: the checkpoint cannot be read, or none of them.
      OSError: the disk fails; the checkpoint may be intact.
      OtherProcessError: another process sees fewer files than the first.
    """
    if step is not None:
        return _restored(directory, like, config, existing_step(directory, step))
    if jax.process_count() == 1:
        restored, damaged = _newest_readable(directory, lambda step: _restored(directory, like, config, step))
    else:
        step, damaged = _agreed_step(directory)
        # No process may fall back to an older one by itself.
        with all_or_none():
            restored = _restored(directory, like, config, step, check=())
    return dataclasses.replace(restored, damaged=tuple(damaged))


def _restored(directory: str | Path, like: Any, config: object, step: int, check: Sequence[str] = ITEMS) -> Restored:
    meta = _checked_meta(directory, step, check)
    # Before any array is read: orbax would fail on a shape without naming the difference.
    _check_same_config(meta["config"], config)
    _check_same_leaves(meta["leaves"], like)
    target = jax.tree.map(_placed, like)
    # The sharding fits, so an error here comes from a file, of a checkpoint without checksums.
    with damage_named(directory, step):
        state = _read_arrays(directory, step, ocp.StandardCheckpointHandler(), ocp.args.StandardRestore(target))
    return Restored(step, state, meta.get("metadata"))


def _agreed_step(directory: str | Path) -> tuple[int, list[str]]:
    """The newest checkpoint with unchanged files, and a line for each later one.

    The first process reads the files and decides: every host would otherwise read all, and hosts could disagree.
    """
    found = None
    with all_or_none():
        if is_first():
            _, damaged = _newest_readable(directory, lambda step: _checked_meta(directory, step))
            found = all_steps(directory)[-1 - len(damaged)], damaged
    step, damaged = gather_json(found)[0]
    # A host may not see files yet that others wrote.
    with all_or_none():
        _checked_meta(directory, step, ())
    return step, damaged


def restore_part(directory: str | Path, like: dict[str, Any], step: int | None = None) -> dict[str, Any]:
    """Reads some fields of a checkpoint's state, such as its parameters without the optimizer's state.

    Args:
      like: for each field a pytree as `restore` takes it: `{"params": ...}`.
      step: None: the newest, also if it is damaged.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      DamagedCheckpointError: it is damaged.
      OtherStateError: these fields have another structure in the checkpoint.
    """
    step = existing_step(directory, step)
    leaves = _checked_meta(directory, step)["leaves"]
    _check_same_leaves({name: what for name, what in leaves.items() if name.partition("/")[0] in like}, like)
    target = jax.tree.map(_placed, like)
    part = ocp.args.PyTreeRestore(
        item=target, restore_args=ocp.checkpoint_utils.construct_restore_args(target), partial_restore=True
    )
    return _read_arrays(directory, step, ocp.PyTreeCheckpointHandler(), part)


def check_config(directory: str | Path, config: object) -> None:
    """Raises OtherConfigError if there is a checkpoint, and the newest has another configuration; reads no arrays."""
    if latest_step(directory) is not None:
        meta, _ = _newest_readable(directory, lambda step: _checked_meta(directory, step, ("meta",)))
        _check_same_config(meta["config"], config)


def _check_same_config(saved: Json, config: object) -> None:
    if lines := differences(saved, to_jsonable(config)):
        raise OtherConfigError(
            "the checkpoint was made under another configuration; expected is what it holds, got is what this run "
            "has:\n  " + "\n  ".join(lines)
        )


def _check_same_leaves(saved: dict[str, str], like: Any) -> None:
    if lines := differences(saved, leaf_table(like)):
        raise OtherStateError(
            "the state has another structure than the checkpoint; expected is what the checkpoint holds, got is what "
            "this run has:\n  " + "\n  ".join(lines)
        )


def _newest_readable(directory: str | Path, read: Callable[[int], _Read]) -> tuple[_Read, list[str]]:
    """The result of `read` for the newest checkpoint that is not damaged, and the errors of later ones."""
    last = existing_step(directory, None)
    damaged = list[str]()
    for step in reversed(all_steps(directory)):
        try:
            return read(step), damaged
        except DamagedCheckpointError as error:
            damaged.append(str(error))
    raise DamagedCheckpointError(
        f"expected a checkpoint that can be read, up to step {last}; got none:\n" + "\n".join(damaged)
    )


def _checked_meta(directory: str | Path, step: int, check: Sequence[str] = ITEMS) -> dict[str, Any]:
    """The JSON of a checkpoint.

    Args:
      check: the items whose files must be unchanged, which reads all of them. Of the others no file may be missing.
    """
    check_path(directory)
    folder = Path(directory) / str(step)
    with damage_named(directory, step):
        check_files(folder, check)
        return read_meta(folder)


def _placed(leaf: Any) -> Any:
    """The restore target of one leaf, always with a sharding; without one orbax would repeat the saved placement.

    Raises:
      ValueError: the sharding does not divide the array.
    """
    if isinstance(leaf, np.ndarray):
        return leaf
    sharding = leaf.sharding if leaf.sharding is not None else jax.sharding.SingleDeviceSharding(jax.devices()[0])
    sharding.shard_shape(leaf.shape)  # raises if it does not divide
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _read_arrays(directory: str | Path, step: int, handler: Any, args: Any) -> Any:
    with ocp.Checkpointer(handler) as checkpointer:
        return checkpointer.restore(Path(directory).resolve() / str(step) / "state", args=args)
