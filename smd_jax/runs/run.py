"""A run in a directory: the loop with progress, metrics, evaluations, checkpoints, resume, and a clean stop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from smd_jax.devices.processes import all_or_none, check_same, differences, is_first
from smd_jax.devices.sharding import shard_tree
from smd_jax.disk import stored_bytes
from smd_jax.learner.state import TrainState
from smd_jax.monitor.loggers import Logger, Loggers
from smd_jax.monitor.progress import Report, training_progress
from smd_jax.runs.active_run import ActiveRun, Evaluate, Outputs, print_once
from smd_jax.runs.checkpoint.files import all_steps, latest_step
from smd_jax.runs.checkpoint.reading import restore
from smd_jax.runs.checkpoint.writing import Writer, discard_after
from smd_jax.runs.frozen_base import with_base, without_base
from smd_jax.runs.run_config import RunConfig
from smd_jax.runs.run_folder import CHECKPOINTS, check_directory, check_progress, check_room, finished_rollouts
from smd_jax.runs.run_log import RunLog
from smd_jax.runs.settings import machine, split_settings, to_jsonable
from smd_jax.runs.stop import RunStoppedError, StopSignals
from smd_jax.text.visible_text import visible
from smd_jax.train.loop import Loop


def train(
    loop: Loop,
    state: TrainState,
    run: RunConfig,
    directory: str | Path,
    *,
    config: object = None,
    noted: Mapping[str, Any] | None = None,
    resume: bool = False,
    evaluate: Evaluate | None = None,
    label: str = "train",
    loggers: Sequence[Logger] = (),
) -> TrainState:
    """Runs `loop` to `run.steps` rollouts and returns the last state.

    Signals and errors are described in docs/runs.md.

    Args:
      state: the initial state. A resume uses only its structure and sharding, and the base below adapters.
      directory: of this run; a new run must not find another one there.
      config: settings that determine the result, saved with every checkpoint; a resume with others is refused. None:
        those of the loop, see `smd_jax.runs.settings.split_settings`, without model, task and optimizer.
      noted: settings that are saved too and may differ at a resume, which prints the differences. None: without a
        config the other settings of the loop. Versions and devices are added as `machine`.
      resume: continue from the newest readable checkpoint in `directory`, bitwise as if the run had not stopped.
        Without any checkpoint the run begins at `state`.
      evaluate: returns metrics to log, see `smd_jax.train.evaluation.every_evaluation`.
      loggers: get every row of metrics.jsonl and evaluations.jsonl, by the number of finished rollouts. They cannot
        stop or delay the run; all are closed at its end.

    Raises:
      OtherProcessError: of several processes one has other arguments, or sees other checkpoints.
      FileExistsError: a new run in a directory that has one.
      OSError: a directory that cannot be written; a disk without room for the checkpoints, at the start or later.
      ValueError: a resume with another configuration or another base below adapters; an objective that names no metric
        of the run.
      RunStoppedError: a signal stopped the run; its rollouts are saved.
      RefusedRolloutError: sampler and learner differ, or several updates in a row were not finite; the rollout is in
        `refused_<number>.safetensors`. A resume continues before that rollout, or after it if its update was skipped.
    """
    directory = Path(directory)
    if config is None:
        config, of_loop = split_settings(loop.config)
        noted = of_loop if noted is None else noted
    noted = {**(noted or {}), "machine": machine(loop.mesh)}
    evaluate = evaluate if run.evaluate_every > 0 else None
    _check(loop, state, run, directory, config, resume, evaluates=evaluate is not None)
    state = _start(directory, shard_tree(state, loop.mesh), config, noted)
    start = int(state.step) // loop.config.steps_per_rollout
    with all_or_none():
        if resume and start > 0 and is_first():
            print_once(f"resumes after {start} of {run.steps} rollouts" + _repeated(directory, start))
    with (
        StopSignals() as stop,
        Loggers(loggers if is_first() else ()) as others,
        RunLog(directory, start, run.objective) as log,
        _progress(run.steps, start, label) as report,
        # Closed first: loggers that wait for a network, and signals at that time, must not cut off a checkpoint.
        Writer(directory / CHECKPOINTS, run.keep) as checkpoints,
    ):
        outputs = Outputs(directory, config, noted, log, others, report, checkpoints)
        active = ActiveRun(loop, run, outputs, stop, evaluate, state)
        try:
            active.run()
        except Exception as error:
            error.add_note(active.save_after_error())
            raise
    if active.stopped is not None:
        raise RunStoppedError(active.stopped, active.done, run.steps, directory)
    return jax.block_until_ready(active.state)


def _check(
    loop: Loop, state: TrainState, run: RunConfig, directory: Path, config: object, resume: bool, evaluates: bool
) -> None:
    """Refuses a run that could not be saved or resumed, before anything is written; errors as `train`."""
    if jax.process_count() > 1:
        # Before anything that only some of the processes would do, while the others wait for them.
        same = {"resume": resume, "run": to_jsonable(run, "run"), "config": to_jsonable(config)}
        # These decide whether a rollout is refused.
        same |= {"guard": loop.max_difference, "max_skipped": loop.max_skipped}
        check_same(same | {"checkpoints": all_steps(directory / CHECKPOINTS)})
    size = stored_bytes(without_base(state))  # all processes compute it together
    with all_or_none():
        check_directory(directory, resume)
        check_room(directory, size, run)
        if run.objective is not None and run.objective.metric.startswith("eval/") and not evaluates:
            raise ValueError(
                f"expected evaluations (evaluate_every > 0, and something to evaluate on) for the objective "
                f"{run.objective.metric!r}; got none"
            )
        check_progress(directory, resume, run)


def _start(directory: Path, state: TrainState, config: object, noted: object) -> TrainState:
    """The state of the newest readable checkpoint, or `state` without one.

    Prints what differs from the checkpoint, and which checkpoints are damaged.
    """
    checkpoints = directory / CHECKPOINTS
    # Without `resume` there is none, which `check_directory` has checked.
    if latest_step(checkpoints) is None:
        return state
    # A checkpoint has no base below adapters: it comes from `state`, and must be the same as before.
    restored = restore(checkpoints, without_base(state), config=config)
    state = with_base(restored.state, state)
    for line in restored.damaged:
        print_once(f"warning: {line}; the run continues from step {restored.step}")
    # The run saves these steps again, and a save must be later than all others.
    discard_after(checkpoints, restored.step)
    for line in differences(restored.noted, to_jsonable(noted, "noted"), words=("was", "is now")):
        print_once(visible(f"resumed with another setting, {line}"))
    return state


def _repeated(directory: Path, done: int) -> str:
    later = finished_rollouts(directory) - done
    return f"; {later} later {'one is' if later == 1 else 'ones are'} repeated" if later > 0 else ""


@contextmanager
def _progress(steps: int, start: int, name: str) -> Iterator[Report]:
    """The progress report, which only the first process shows."""
    if not is_first():
        yield lambda done, metrics: None
        return
    with training_progress(steps, start=start, name=name) as report:
        yield report
