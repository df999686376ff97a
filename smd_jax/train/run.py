"""A run on disk: the loop with progress, metrics.jsonl, checkpoints and resume.

directory/metrics.jsonl      one row a step
directory/checkpoints/       parameters, optimizer, PRNG key, step, data position, resolved configuration
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax

from smd_jax.learner.state import TrainState
from smd_jax.monitor.metrics_log import MetricsWriter
from smd_jax.monitor.progress import training_progress
from smd_jax.sharding import shard_tree
from smd_jax.train import checkpoint
from smd_jax.train.loop import Loop

Evaluate = Callable[[TrainState], Mapping[str, float]]


@dataclass(frozen=True)
class RunConfig:
    """How a run is kept.

    Attributes:
      steps: rollouts in all, those before a resume included.
      checkpoint_every: rollouts between two checkpoints; the last one is always saved. 0 saves the last one only.
      evaluate_every: rollouts between two evaluations. 0 never evaluates.
    """

    steps: int
    checkpoint_every: int = 0
    evaluate_every: int = 0


def train(
    loop: Loop,
    state: TrainState,
    run: RunConfig,
    directory: str | Path,
    *,
    config: object,
    resume: bool = False,
    evaluate: Evaluate | None = None,
    label: str = "train",
) -> TrainState:
    """Runs `loop` to `run.steps`, and returns the last state.

    Args:
      state: where to start; where there is a checkpoint to resume from, only its structure and sharding count.
      directory: where this run is kept; a new run must not find another one there.
      config: resolved configuration, kept with every checkpoint; a resume under another one is refused.
      resume: continue from the newest checkpoint in `directory`, bitwise as if the run had not stopped. A run that
        stopped before its first checkpoint, or never began, starts at `state`.
      evaluate: gives metrics to log beside the step's own, such as "eval/sparse".

    Raises:
      FileExistsError: a new run in a directory that has one.
      ValueError: a resume whose configuration differs.
    """
    directory = Path(directory)
    checkpoints = directory / "checkpoints"
    check_directory(directory, resume)
    state = shard_tree(state, loop.mesh)
    # Without `resume` there is none: `check_directory` has seen to that.
    if checkpoint.latest_step(checkpoints) is not None:
        state = checkpoint.restore(checkpoints, state, config=config).state
    # Steps of the optimizer are kept in the state; a run counts in rollouts.
    start = done = int(state.step) // loop.config.steps_per_rollout

    def save() -> None:
        position = {"rollouts": done, "seed": loop.config.seed}
        checkpoint.save(checkpoints, done, state, data_position=position, config=config)

    with (
        # Rows behind the checkpoint belong to steps that are taken once more.
        MetricsWriter(directory / "metrics.jsonl", next_step=start if resume else None) as writer,
        training_progress(run.steps, start=start, name=label) as report,
    ):
        while done < run.steps:
            state, metrics = loop.step(state)
            done += 1
            if evaluate is not None and _due(done, run.evaluate_every):
                metrics |= evaluate(state)
            # Rows are numbered from 0, by the rollouts before them; the progress report counts finished ones.
            writer.write(done - 1, metrics)
            report(done, metrics)
            # The last one is saved below, whether it is due or not.
            if _due(done, run.checkpoint_every) and done < run.steps:
                save()
    if done > start:
        save()
    return jax.block_until_ready(state)


def check_directory(directory: str | Path, resume: bool) -> None:
    """Raises FileExistsError if a new run would write over another one. Cheap: call it before what is not."""
    directory = Path(directory)
    metrics = directory / "metrics.jsonl"
    begun = metrics.exists() and metrics.stat().st_size > 0
    if not resume and (begun or checkpoint.latest_step(directory / "checkpoints") is not None):
        raise FileExistsError(
            f"expected no earlier run in {directory}; got one. Continue it with resume=True, or name another directory"
        )


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0
