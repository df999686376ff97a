"""Writes checkpoints during the steps of a run.

    main thread    rollout 8 ─► update ─► save: arrays to the host ─► rollout 9 ─► update …
    other thread                                  └─► files ─► rename ─► open again ─► checksums ─► delete old

Older checkpoints are deleted after the new one is reopened and has its checksums; orbax's own retention would
delete them earlier. A checkpoint without checksums, from a run that was killed after the rename, is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from smd_jax.devices.processes import all_or_none
from smd_jax.disk import check_handles
from smd_jax.runs.checkpoint.errors import disk_failure_named
from smd_jax.runs.checkpoint.files import (
    FORMAT,
    all_steps,
    check_opens,
    check_path,
    delete_steps,
    latest_step,
    leaf_table,
    stored_shapes,
    write_checksums,
)
from smd_jax.runs.settings import to_jsonable


class Writer:
    """Writes the checkpoints of one run during its steps, one at a time.

    `save` returns when the arrays are on the host, so that an update may donate their buffers.

    Args:
      directory: checkpoints of one run; created by the first save.
      max_to_keep: number of newest checkpoints to keep, >= 1.

    Raises:
      ValueError: `max_to_keep` below 1; a path that orbax misreads, see `check_path`.
    """

    def __init__(self, directory: str | Path, max_to_keep: int = 3) -> None:
        if max_to_keep < 1:
            raise ValueError(f"expected max_to_keep >= 1; got {max_to_keep}")
        check_path(directory)
        self.directory = Path(directory)
        self._max_to_keep = max_to_keep
        self._manager: ocp.CheckpointManager | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: tuple[int, Future[None]] | None = None

    def save(self, step: int, state: Any, *, config: object, metadata: object = None, best: int | None = None) -> None:
        """Begins to write checkpoint `step`; then deletes all but the newest `max_to_keep` and the step `best`.

        Args:
          step: number of finished updates; later than every existing step.
          state: pytree whose leaves are jax or numpy arrays with at least one element; typed PRNG keys are allowed.
          config: the resolved configuration, see `to_jsonable`. A run that continues must have the same.
          metadata: settings to save that may differ when the run is resumed.

        Raises:
          ValueError: `step` is not later than the newest one; an empty array.
          TypeError: a leaf of `state` is not an array; `config` or `metadata` is not JSON.
          OSError: the disk is full or fails, or this checkpoint or the previous one cannot be reopened. The message is
            one line. Earlier checkpoints are unchanged.
        """
        # Built first, so that bad input is refused before a file is written.
        meta = {
            "format": FORMAT,
            "leaves": leaf_table(state),
            "config": to_jsonable(config),
            "metadata": to_jsonable(metadata, "metadata"),
        }
        self.wait()
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))
        # A failure in one process, such as in the checksums that the first one writes, stops all processes.
        with all_or_none():
            newest = latest_step(self.directory)
            # Orbax returns False, without an error, for a step that is not later than its newest.
            if newest is not None and step <= newest:
                raise ValueError(
                    f"expected a step later than {newest}, the newest in {self.directory}; got {step}. To go back to "
                    "an earlier step call discard_after(directory, step) first"
                )
            with disk_failure_named(self.directory, step):
                check_handles()
                self._manager = self._manager or _manager(self.directory)
                self._manager.save(step, args=items)
            self._writing = step, self._thread.submit(self._finish, self._manager, step, stored_shapes(state), best)
            if jax.process_count() > 1:
                # The processes wait for each other while they write, which must not mix with waits of the next step.
                self.wait()

    def wait(self) -> None:
        """Waits until the last checkpoint is complete; raises OSError, as `save`, if it could not be written."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        step, written = writing
        try:
            with disk_failure_named(self.directory, step):
                written.result()
        except OSError:
            self._manager = None  # closing it would raise again
            raise

    def close(self) -> None:
        """Waits and raises like `wait`, then frees its thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            if self._manager is not None:
                self._manager.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _finish(
        self, manager: ocp.CheckpointManager, step: int, shapes: Sequence[tuple[int, ...]], best: int | None
    ) -> None:
        manager.wait_until_finished()
        if jax.process_index() == 0:
            check_opens(self.directory / str(step), shapes)
            write_checksums(self.directory / str(step))
            delete_steps(
                self.directory, [old for old in all_steps(self.directory)[: -self._max_to_keep] if old != best]
            )


def discard_after(directory: str | Path, step: int) -> list[int]:
    """Deletes the checkpoints later than `step` and returns their steps. All processes must call it.

    For a run that goes back, by choice or because the newest checkpoint is damaged. `Writer.save` refuses to write an
    earlier step than an existing one, which the next resume would read as the newest.
    """
    with all_or_none():
        later = [found for found in all_steps(directory) if found > step]
    with all_or_none():
        if jax.process_index() == 0:
            delete_steps(Path(directory), later)
    return later


def _manager(directory: Path) -> ocp.CheckpointManager:
    """An orbax manager that writes in the background; several processes must write together.

    It deletes what interrupted saves have left, and no finished checkpoint.
    """
    options = ocp.CheckpointManagerOptions(
        # `Writer` deletes older checkpoints.
        preservation_policy=ocp.checkpoint_managers.LatestN(None),
        enable_async_checkpointing=True,
        cleanup_tmp_directories=True,
    )
    return ocp.CheckpointManager(directory.resolve(), options=options)
