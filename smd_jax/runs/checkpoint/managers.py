"""How orbax is asked: to write the checkpoints of a directory, or to read them."""

from __future__ import annotations

from pathlib import Path

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.options import MultiprocessingOptions

from smd_jax.runs.checkpoint.paths import check_readable_path
from smd_jax.runs.checkpoint.steps import GONE, delete_gone


def writing_manager(directory: str | Path) -> ocp.CheckpointManager:
    """A manager that writes in the background; of several processes all must write together. Deletes what saves that
    were cut off have left, and no finished checkpoint."""
    if jax.process_index() == 0:
        delete_gone(directory)  # a step of the same number could not be moved there
    options = ocp.CheckpointManagerOptions(
        # Orbax would delete old checkpoints before the new one is verified.
        preservation_policy=ocp.checkpoint_managers.LatestN(None),
        enable_async_checkpointing=True,
        # What a killed save left behind is removed.
        cleanup_tmp_directories=True,
        todelete_subdir=GONE,
    )
    return ocp.CheckpointManager(Path(directory).resolve(), options=options)


def reading_manager(directory: str | Path, alone: bool = False) -> ocp.CheckpointManager:
    """A manager that reads. Of several processes all must read together, unless each is to do it `alone`."""
    check_readable_path(directory)
    own = jax.process_index()
    who = MultiprocessingOptions(own, {own}) if alone else MultiprocessingOptions()
    # Looking for checkpoints must not make a directory.
    options = ocp.CheckpointManagerOptions(create=False, enable_async_checkpointing=False, multiprocessing_options=who)
    return ocp.CheckpointManager(Path(directory).resolve(), options=options)
