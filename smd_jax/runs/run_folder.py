"""The directory of a run, and the checks of it before anything expensive.

directory/metrics.jsonl       one row per rollout, with the evaluation after it if there was one
directory/evaluations.jsonl   one row per evaluation; "step" counts finished rollouts, so that 0 is the start
directory/checkpoints/        the newest: parameters, optimizer, PRNG key, step, data position, configuration; with
                              adapters only those, without their base
directory/best/               the checkpoint with the best value of the objective
"""

from __future__ import annotations

from pathlib import Path

from smd_jax.byte_sizes import show_bytes
from smd_jax.disk import check_handles, check_space, check_writable
from smd_jax.learner.state import TrainState
from smd_jax.monitor.metrics_log import EVALUATIONS_FILE, METRICS_FILE, read_metrics
from smd_jax.runs.checkpoint import reading
from smd_jax.runs.checkpoint.steps import all_steps, check_writable_path, latest_step, unfinished_bytes
from smd_jax.runs.run_config import RunConfig

CHECKPOINTS = "checkpoints"
BEST = "best"


def finished_rollouts(directory: Path) -> int:
    """Number of rows in metrics.jsonl."""
    metrics = directory / METRICS_FILE
    return len(read_metrics(metrics)) if metrics.exists() else 0


def check_config(directory: str | Path, config: object) -> None:
    """Raises OtherConfigError if the newest checkpoint, or else the best one, has another configuration."""
    directory = Path(directory)
    has_newest = latest_step(directory / CHECKPOINTS) is not None
    reading.check_config(directory / (CHECKPOINTS if has_newest else BEST), config)


def check_state(directory: str | Path, saved: TrainState) -> None:
    """Raises OtherStateError if the newest checkpoint holds another model or optimizer; reads no arrays.

    Args:
      saved: a state as checkpoints hold it: `without_base`.
    """
    reading.check_state(Path(directory) / CHECKPOINTS, saved)


def check_progress(directory: str | Path, resume: bool, run: RunConfig) -> None:
    """Refuses a resume that would lose rollouts. Cheap, and changes nothing.

    Raises:
      ValueError: more rollouts are finished than the run shall have.
      FileNotFoundError: the metrics show that checkpoints were saved, and none exists.
    """
    directory = Path(directory)
    finished = latest_step(directory / CHECKPOINTS)
    if finished is not None and run.steps < finished:
        raise ValueError(
            f"expected steps of at least {finished}, the rollouts that are finished in {directory}; got {run.steps}"
        )
    if not resume or finished is not None or run.checkpoint_every == 0:
        return
    rows = finished_rollouts(directory)
    # A row is written once the save before it is complete, except the last row of a run that ended with an error.
    if run.checkpoint_every < rows - 1:
        raise FileNotFoundError(
            f"expected a checkpoint in {directory / CHECKPOINTS}, since {METRICS_FILE} has {rows} rollouts and one is "
            f"saved every {run.checkpoint_every}; found none. Bring it back, or begin in another directory"
        )


def check_directory(directory: str | Path, resume: bool) -> None:
    """Refuses a directory that cannot hold the run. Cheap, and leaves nothing behind.

    Raises:
      FileExistsError: a new run would overwrite another one.
      ValueError: orbax misreads the path.
      OSError: it cannot be written, or too few files can be opened.
    """
    directory = Path(directory)
    check_writable_path(directory)
    check_writable(directory)
    check_handles()
    files = [directory / name for name in (METRICS_FILE, EVALUATIONS_FILE)]
    begun = any(file.exists() and file.stat().st_size > 0 for file in files)
    begun |= any(latest_step(directory / name) is not None for name in (CHECKPOINTS, BEST))
    if not resume and begun:
        raise FileExistsError(
            f"expected no earlier run in {directory}; got one. Continue it with resume=True, or name another directory"
        )


def check_room(directory: str | Path, state_bytes: int, run: RunConfig) -> None:
    """Raises OSError if the disk lacks room for the checkpoints that the run still has to write.

    Args:
      state_bytes: size of one checkpoint, see `smd_jax.disk.stored_bytes`.
    """
    directory = Path(directory)
    there = all_steps(directory / CHECKPOINTS)
    left = run.steps - max(there, default=0)
    if left <= 0:
        return
    saves = 1 if run.checkpoint_every == 0 else -(-left // run.checkpoint_every)
    # An old one is deleted after the new one is complete, so that for a moment one more exists.
    new = min(saves, max(run.keep + 1 - len(there), 1))
    if run.objective is not None:
        new += 2 - min(len(all_steps(directory / BEST)), 1)
    what = f"{new} checkpoints of {show_bytes(state_bytes)}" if new > 1 else "one checkpoint"
    # The next save first deletes what an interrupted one has left.
    half_written = sum(unfinished_bytes(directory / name) for name in (CHECKPOINTS, BEST))
    check_space(directory, new * state_bytes, what, half_written)
