"""Writes checkpoints, beside the steps of a run.

    main thread    rollout 8 ─► update ─► save: arrays to the host ─► rollout 9 ─► update …
    beside it                                                   └─► files ─► rename ─► verify ─► checksums ─► delete old

The checksums are written after the rename and compared before anything is read. A checkpoint without them, from a run
killed in between, is complete and is read. Older checkpoints are deleted after the new one has been opened again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from smd_jax.devices.processes import all_or_none
from smd_jax.disk import check_handles
from smd_jax.runs.checkpoint.checksums import write_checksums
from smd_jax.runs.checkpoint.errors import disk_failure_named
from smd_jax.runs.checkpoint.leaves import leaf_table
from smd_jax.runs.checkpoint.managers import writing_manager
from smd_jax.runs.checkpoint.ownership import FORMAT, ITEMS
from smd_jax.runs.checkpoint.paths import check_writable_path
from smd_jax.runs.checkpoint.steps import all_steps, delete_gone, delete_oldest, folder_of, latest_step
from smd_jax.runs.checkpoint.verification import stored_shapes, verify
from smd_jax.runs.jsonable import Json, to_jsonable


class Writer:
    """Writes the checkpoints of one run beside its steps. `save` returns when the arrays are on the host, so that an
    update may take their buffers; one checkpoint is written at a time.

    Args:
      directory: where the checkpoints of one run lie; made when the first is saved.
      max_to_keep: the newest that stay, at least 1.

    Raises:
      ValueError: `max_to_keep` below 1; a path that orbax cannot write, see `check_writable_path`.
    """

    def __init__(self, directory: str | Path, max_to_keep: int = 3) -> None:
        if max_to_keep < 1:
            raise ValueError(f"max_to_keep must be at least 1; got {max_to_keep}")
        check_writable_path(directory)
        self.directory = Path(directory)
        self._max_to_keep = max_to_keep
        self._manager: ocp.CheckpointManager | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: tuple[int, Future[None]] | None = None

    def save(
        self,
        step: int,
        state: Any,
        *,
        data_position: Mapping[str, Any],
        config: object,
        noted: object = None,
        machine: Mapping[str, Json] | None = None,
    ) -> None:
        """Begins to write checkpoint `step`, after which all but the newest `max_to_keep` are deleted. Arguments and
        errors are those of the function `save`; an OSError may come from a later call."""
        # Whatever can be refused is refused before a file is written.
        meta = {
            "format": FORMAT,
            "leaves": leaf_table(state),
            "data_position": _checked_position(data_position),
            "config": to_jsonable(config),
            "noted": to_jsonable(noted, "noted"),
            "machine": to_jsonable(machine, "machine"),
        }
        self.wait()
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))
        # What fails in one of several processes, such as the list of checksums that the first one writes, ends all.
        with all_or_none():
            _check_later(self.directory, step)
            with disk_failure_named(self.directory, step):
                check_handles()
                self._manager = self._manager or writing_manager(self.directory)
                self._manager.save(step, args=items)
            self._writing = step, self._thread.submit(self._finish, self._manager, step, stored_shapes(state))
            if jax.process_count() > 1:
                # Beside it the processes wait for each other, which must not come between those of the next step.
                self.wait()

    def wait(self) -> None:
        """Waits until the last checkpoint is whole, and raises OSError, as `save`, if it could not be written."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        step, written = writing
        try:
            with disk_failure_named(self.directory, step):
                written.result()
        except OSError:
            self._manager = None  # which would raise once more when it is closed
            raise

    def discard_after(self, step: int) -> list[int]:
        """The function `discard_after` of this directory."""
        self.wait()
        self._close_manager()  # it remembers which checkpoints there are
        return discard_after(self.directory, step)

    def close(self) -> None:
        """Waits, and raises, as `wait`."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._close_manager()
            if jax.process_index() == 0:
                delete_gone(self.directory)

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _finish(self, manager: ocp.CheckpointManager, step: int, shapes: Sequence[tuple[int, ...]]) -> None:
        manager.wait_until_finished()
        if jax.process_index() == 0:
            folder = folder_of(self.directory, step)
            verify(folder, shapes)
            write_checksums(folder, ITEMS)
            delete_oldest(self.directory, self._max_to_keep)

    def _close_manager(self) -> None:
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.close()


def save(
    directory: str | Path,
    step: int,
    state: Any,
    *,
    data_position: Mapping[str, Any],
    config: object,
    noted: object = None,
    machine: Mapping[str, Json] | None = None,
    max_to_keep: int = 3,
) -> None:
    """Writes checkpoint `step`, waits until it is whole, and then deletes all but the newest `max_to_keep`.

    Args:
      directory: where the checkpoints of one run lie; made when absent.
      step: number of finished updates. Later than every step already there.
      state: pytree whose leaves are jax or numpy arrays with at least one element; typed PRNG keys are allowed.
      data_position: what the data source needs to continue, as JSON values with string keys.
      config: the resolved configuration, see `to_jsonable`. A run that continues must have the same.
      noted: settings that are kept, and that a run which continues may change.
      machine: what the run stands on, see `smd_jax.runs.machine`; None: nothing is kept of it.
      max_to_keep: how many checkpoints stay, at least 1.

    Raises:
      ValueError: `step` is not later than the newest one; an empty array; `max_to_keep` below 1; a path with one of
        `* ? [ \\`.
      TypeError: a leaf of `state` is no array, or `data_position`, `config` or `noted` does not fit into JSON.
      OSError: the disk is full, or fails, or the new checkpoint cannot be opened again; in one line. The checkpoints
        that were there are as they were.
    """
    with Writer(directory, max_to_keep) as writer:
        writer.save(step, state, data_position=data_position, config=config, noted=noted, machine=machine)


def discard_after(directory: str | Path, step: int) -> list[int]:
    """Deletes the checkpoints later than `step` and returns their steps.

    For a run that goes back, by choice or because the newest checkpoint is damaged: `save` refuses to write behind a
    later one, since that one would be taken for the newest at the next resume.
    """
    later = [found for found in all_steps(directory) if found > step]
    if later:
        with writing_manager(directory) as manager:
            for found in later:
                manager.delete(found)
        if jax.process_index() == 0:
            delete_gone(directory)
    return later


def _checked_position(position: Mapping[str, Any]) -> dict[str, Json]:
    """The position, proven to come back from JSON as it went in (a tuple or an integer key would not)."""
    plain = dict(position)
    text = json.dumps(plain, allow_nan=False)
    if json.loads(text) != plain:
        raise TypeError(f"data_position must come back from JSON unchanged; {plain!r} comes back as {text}")
    return plain


def _check_later(directory: str | Path, step: int) -> None:
    # orbax answers False, without a word, when asked to save behind its newest step.
    newest = latest_step(directory)
    if newest is not None and step <= newest:
        raise ValueError(
            f"expected a step later than {newest}, the newest in {directory}; got {step}. To go back to an earlier "
            f"step call discard_after(directory, step) first"
        )
