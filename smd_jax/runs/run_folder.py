"""The directory of a run, and the checks of it before anything expensive.

directory/metrics.jsonl       one row per rollout
directory/evaluations.jsonl   one row per evaluation; "step" counts finished rollouts, so that 0 is the start
directory/checkpoints/        the newest, and the one with the best value of the objective: parameters, optimizer, PRNG
                              key, step, configuration; with adapters only those, without their base
"""

from __future__ import annotations

from pathlib import Path

from smd_jax.byte_sizes import show_bytes
from smd_jax.disk import check_handles, check_space, check_writable
from smd_jax.monitor.metrics_log import EVALUATIONS_FILE, METRICS_FILE, read_metrics
from smd_jax.runs.checkpoint.files import all_steps, check_path, latest_step
from smd_jax.runs.run_config import RunConfig

CHECKPOINTS = "checkpoints"


def finished_rollouts(directory: Path) -> int:
    """Number of rows in metrics.jsonl."""
    metrics = directory / METRICS_FILE
    return len(read_metrics(metrics)) if metrics.exists() else 0


def check_progress(directory: Path, resume: bool, run: RunConfig) -> None:
    """Refuses a resume that would lose rollouts. Cheap, and changes nothing.

    Raises:
      ValueError: more rollouts are finished than `run.steps`, or a line of a metrics file cannot be read.
      FileNotFoundError: the metrics show that checkpoints were saved, and none exists.
    """
    finished = latest_step(directory / CHECKPOINTS)
    if finished is not None and run.steps < finished:
        raise ValueError(
            f"expected steps of at least {finished}, the rollouts that are finished in {directory}; got {run.steps}"
        )
    if not resume:
        return
    rows = finished_rollouts(directory)
    if (directory / EVALUATIONS_FILE).exists():
        read_metrics(directory / EVALUATIONS_FILE)
    if finished is not None or run.checkpoint_every == 0:
        return
    # A row is written once the save before it is complete, except the last row of a run that ended with an error.
    if run.checkpoint_every < rows - 1:
        raise FileNotFoundError(
            f"expected a checkpoint in {directory / CHECKPOINTS}, since {METRICS_FILE} has {rows} rollouts and one is "
            f"saved every {run.checkpoint_every}; found none. Bring it back, or begin in another directory. If the run "
            "saved less often before, resume it with that number"
        )


def check_directory(directory: Path, resume: bool) -> None:
    """Refuses a directory that cannot hold the run. Cheap; leaves no files.

    Raises:
      FileExistsError: a new run would overwrite another one.
      ValueError: orbax misreads the path.
      OSError: it cannot be written, or too few files can be opened.
    """
    check_path(directory)
    check_writable(directory)
    check_handles()
    files = [directory / name for name in (METRICS_FILE, EVALUATIONS_FILE)]
    begun = any(file.exists() and file.stat().st_size > 0 for file in files) or all_steps(directory / CHECKPOINTS)
    if not resume and begun:
        raise FileExistsError(
            f"expected no earlier run in {directory}; got one. Continue it with resume=True, or name another directory"
        )


def check_room(directory: Path, state_bytes: int, run: RunConfig) -> None:
    """Raises OSError if the disk lacks room for the checkpoints that the run still has to write.

    Args:
      state_bytes: size of one checkpoint, see `smd_jax.disk.stored_bytes`.
    """
    there = all_steps(directory / CHECKPOINTS)
    left = run.steps - max(there, default=0)
    if left <= 0:
        return
    # An old one is deleted after the new one is complete, so that for a moment one more exists.
    most = run.keep + 1 + (run.objective is not None)
    if run.objective is None:
        most = min(most, len(there) + (1 if run.checkpoint_every == 0 else -(-left // run.checkpoint_every)))
    new = max(most - len(there), 1)
    what = f"{new} checkpoints of {show_bytes(state_bytes)}" if new > 1 else "one checkpoint"
    check_space(directory, new * state_bytes, what)
