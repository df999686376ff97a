"""Checks and reports the disk space of a run's checkpoints."""

from __future__ import annotations

from pathlib import Path

import jax

from smd_jax.byte_sizes import show_bytes
from smd_jax.commands.arguments import RunArgs
from smd_jax.disk import stored_bytes
from smd_jax.learner.state import TrainState
from smd_jax.learner.trained import trained_params
from smd_jax.model.protocol import Params
from smd_jax.model.weights import check_export
from smd_jax.runs.checkpoint.files import all_steps
from smd_jax.runs.run_config import RunConfig
from smd_jax.runs.run_folder import CHECKPOINTS, check_room


def check_disk(args: RunArgs, state: TrainState, exported: Params, settings: RunConfig) -> int:
    """Checks the free disk space. Returns the bytes of one checkpoint.

    Args:
      state: shapes of the train state.
      exported: shapes of the exported model's parameters.

    Raises:
      OSError: the disk has no room for the checkpoints or for the trained model.
    """
    # A checkpoint of adapters does not hold the base model.
    size = stored_bytes(state.replace(params=trained_params(state.params)))
    check_room(args.output_dir, size, settings)
    stored = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, args.export_dtype), exported)
    check_export(args.output_dir / "model", stored_bytes(stored))
    return size


def checkpoint_plan(size: int, settings: RunConfig) -> str:
    """A line on the checkpoints that a run will keep, and how to keep fewer.

    Args:
      size: bytes of one checkpoint.
    """
    saves = 1 if settings.checkpoint_every == 0 else -(-settings.steps // settings.checkpoint_every)
    kept = min(saves, settings.keep)
    best = ", and the best one" if settings.objective else ""
    total = (kept + (settings.objective is not None)) * size
    newest = f"the newest {kept}" if kept > 1 else "the newest one"
    return (
        f"checkpoints: {newest}{best}, {show_bytes(size)} each, {show_bytes(total)} in all, with parameters, optimizer "
        f"and reference{_fewer(kept)}"
    )


def kept_on_disk(directory: Path) -> str:
    """A line on the checkpoints of a finished run, and how to keep fewer."""
    folder = directory / CHECKPOINTS
    steps = all_steps(folder)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return (
        f"checkpoints: {show_bytes(size)} in {folder}, after {', '.join(map(str, steps))} rollouts; needed only to "
        f"resume or for smd-export{_fewer(len(steps))}"
    )


def _fewer(kept: int) -> str:
    return "; --save-total-limit 1 keeps fewer" if kept > 1 else ""
