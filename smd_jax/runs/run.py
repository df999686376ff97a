"""A run in a directory: the loop with progress, metrics, evaluations, checkpoints, resume, and a clean stop.

A resume depends on the order of a rollout's parts:

step ─► wait for the last checkpoint ─► row of metrics ─► checkpoint, where due ─► evaluate, where due
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Any

import jax
import numpy as np

from smd_jax.devices.processes import all_or_none, check_same, differences, gather_json, is_first
from smd_jax.devices.sharding import shard_tree
from smd_jax.disk import stored_bytes
from smd_jax.learner.state import TrainState
from smd_jax.monitor.loggers import Logger, Loggers
from smd_jax.monitor.metrics_log import memory_in_use
from smd_jax.monitor.progress import Report, training_progress
from smd_jax.runs.checkpoint.files import all_steps, latest_step, leaf_table
from smd_jax.runs.checkpoint.reading import restore
from smd_jax.runs.checkpoint.writing import Writer, discard_after
from smd_jax.runs.frozen_base import with_base, without_base
from smd_jax.runs.lock import lock_directory
from smd_jax.runs.run_config import RunConfig
from smd_jax.runs.run_folder import CHECKPOINTS, check_directory, check_progress, check_room, finished_rollouts
from smd_jax.runs.run_log import RunLog
from smd_jax.runs.settings import machine, split_settings, to_jsonable
from smd_jax.runs.stop import RunStoppedError, StopSignals
from smd_jax.text.visible_text import visible
from smd_jax.train.loop import Loop
from smd_jax.train.samples import RefusedRolloutError, dump_rollout

Evaluate = Callable[[TrainState], Mapping[str, float]]


def train(
    loop: Loop,
    state: TrainState,
    run: RunConfig,
    directory: str | Path,
    *,
    config: object = None,
    metadata: Mapping[str, Any] | None = None,
    resume: bool = False,
    evaluate: Evaluate | None = None,
    label: str = "train",
    loggers: Sequence[Logger] = (),
) -> TrainState:
    """Runs `loop` to `run.steps` rollouts and returns the last state.

    Signals and errors are described in docs/runs.md.

    Args:
      state: the initial state, at step 0. A resume uses only its structure and sharding, and the base below adapters.
      directory: of this run; a new run must not find another one there.
      config: settings that determine the result, saved with every checkpoint; a resume with others is refused. None:
        those of the loop, see `smd_jax.runs.settings.split_settings`, without model, task and optimizer; a resume
        prints that these were not compared.
      metadata: settings that are saved too and may differ at a resume, which prints the differences. None: without a
        config the other settings of the loop. Versions and devices are added as `machine`.
      resume: continue from the newest readable checkpoint in `directory`, bitwise as if the run had not stopped.
        Without any checkpoint the run begins at `state`.
      evaluate: returns metrics to log, see `smd_jax.train.evaluation.every_evaluation`; needs `run.evaluate_every`.
      loggers: get every row of metrics.jsonl and evaluations.jsonl, by the number of finished rollouts. They cannot
        stop or delay the run; all are closed at its end.

    Raises:
      OtherProcessError: of several processes one has other arguments, or sees other checkpoints.
      FileExistsError: a new run in a directory that has one.
      TypeError: a leaf of the state is no array, or `config` or `metadata` does not fit into JSON.
      OSError: a directory that cannot be written; a disk without room for the checkpoints, at the start or later.
      ValueError: a resume with another configuration, another base below adapters, or another number of optimizer
        steps per rollout; a new run with a state past step 0; `evaluate` without `run.evaluate_every`, or the reverse;
        an objective that names no metric of the run; an empty array in the state.
      DirectoryInUseError: another run trains in the directory.
      RunStoppedError: a signal stopped the run; its rollouts are saved.
      RefusedRolloutError: sampler and learner differ, or several updates in a row were not finite; the rollout is in
        `refused_<number>.safetensors`. A resume continues before that rollout, or after it if its update was skipped.
    """
    directory = Path(directory)
    without_config = config is None
    if config is None:
        config, of_loop = split_settings(loop.config)
        metadata = of_loop if metadata is None else metadata
    metadata = {**(metadata or {}), "machine": machine(loop.mesh)}
    _check(loop, state, run, directory, config, metadata, resume, evaluates=evaluate is not None)
    with ExitStack() as held:
        with all_or_none():
            held.enter_context(lock_directory(directory))
            check_directory(directory, resume)  # again: another run may have been here since
        state = _start(directory, shard_tree(state, loop.mesh), config, metadata, loop.config.steps_per_rollout)
        start = int(state.step) // loop.config.steps_per_rollout
        if resume and start > 0:
            _print_resume(directory, start, run.steps, without_config)
        progress = training_progress(run.steps, start=start, name=label) if is_first() else nullcontext(lambda *_: None)
        stop = held.enter_context(StopSignals())
        others = held.enter_context(Loggers(loggers if is_first() else ()))
        log = held.enter_context(RunLog(directory, start, run.objective))
        report = held.enter_context(progress)
        # Closed first: loggers that wait for a network, and signals at that time, must not cut off a checkpoint.
        checkpoints = held.enter_context(Writer(directory / CHECKPOINTS, run.keep))
        active = ActiveRun(
            loop, run, directory, config, metadata, log, others, report, checkpoints, stop, evaluate, state
        )
        try:
            active.run()
        except Exception as error:
            error.add_note(active.save_after_error())
            raise
    if active.stopped is not None:
        raise RunStoppedError(active.stopped, active.done, run.steps, directory)
    return jax.block_until_ready(active.state)


def _check(
    loop: Loop,
    state: TrainState,
    run: RunConfig,
    directory: Path,
    config: object,
    metadata: object,
    resume: bool,
    evaluates: bool,
) -> None:
    """Refuses a run that could not be saved or resumed, before anything is written; errors as `train`."""
    with all_or_none():
        # A checkpoint holds both as JSON. The first one may be due only after hours.
        compared = to_jsonable(config)
        to_jsonable(metadata, "metadata")
    if jax.process_count() > 1:
        # Before anything that only some of the processes would do, while the others wait for them.
        same = {"resume": resume, "run": to_jsonable(run, "run"), "config": compared}
        # These decide whether a rollout is refused.
        same |= {"guard": loop.max_difference, "max_skipped": loop.max_skipped}
        # All processes take part in an evaluation, and send their rows to the first one before it calls `watch`.
        same |= {"evaluate": evaluates, "watch": loop.watch is not None, "watch_every": loop.watch_every}
        check_same(same | {"checkpoints": all_steps(directory / CHECKPOINTS)})
    saved = without_base(state)  # all processes compute it together
    with all_or_none():
        # Raises for leaves that a checkpoint cannot hold. Scalars of NumPy become arrays on the mesh.
        leaf_table(jax.tree.map(lambda x: np.asarray(x) if isinstance(x, np.generic) else x, saved))
        check_directory(directory, resume)
        check_room(directory, stored_bytes(saved), run)
        if run.objective is not None and run.objective.metric.startswith("eval/") and not evaluates:
            raise ValueError(
                f"expected evaluations (evaluate_every > 0, and something to evaluate on) for the objective "
                f"{run.objective.metric!r}; got none"
            )
        if evaluates != (run.evaluate_every > 0):
            raise ValueError(
                "expected both evaluate and RunConfig(evaluate_every=...) above 0, or neither; got evaluate_every "
                f"{run.evaluate_every} {'with' if evaluates else 'without'} evaluate"
            )
        check_progress(directory, resume, run)
        if latest_step(directory / CHECKPOINTS) is None and int(state.step) != 0:
            raise ValueError(
                "expected a state at step 0, from which a new run counts its rollouts; got one at step "
                f"{int(state.step)}. Begin with init_state(state.params, loop.optimizer, key), or keep the optimizer's "
                "state with state.replace(step=jnp.zeros((), jnp.int32))"
            )


def _start(directory: Path, state: TrainState, config: object, metadata: object, steps_per_rollout: int) -> TrainState:
    """The state of the newest readable checkpoint, or `state` without one.

    Prints what differs from the checkpoint, and which checkpoints are damaged.

    Raises:
      ValueError: the checkpoint's rollouts took another number of optimizer steps than the loop's.
    """
    checkpoints = directory / CHECKPOINTS
    # Without `resume` there is none, which `check_directory` has checked.
    if latest_step(checkpoints) is None:
        return state
    # A checkpoint has no base below adapters: it comes from `state`, and must be the same as before.
    restored = restore(checkpoints, without_base(state), config=config)
    state = with_base(restored.state, state)
    if int(state.step) != restored.step * steps_per_rollout:
        raise ValueError(
            f"expected a checkpoint with {steps_per_rollout} optimizer steps per rollout, the minibatches times "
            f"num_iterations of the loop; got {int(state.step)} steps after {restored.step} rollouts. Resume with the "
            "minibatches and num_iterations of the earlier run"
        )
    for line in restored.damaged:
        print_once(f"warning: {line}; the run continues from step {restored.step}")
    # The run saves these steps again, and a save must be later than all others.
    discard_after(checkpoints, restored.step)
    for line in differences(restored.metadata, to_jsonable(metadata, "metadata"), words=("was", "is now")):
        print_once(visible(f"resumed with another setting, {line}"))
    return state


def _print_resume(directory: Path, start: int, steps: int, without_config: bool) -> None:
    """Prints where a run resumes; all processes must call it."""
    with all_or_none():
        if is_first():
            later = finished_rollouts(directory) - start
            repeated = f"; {later} later {'one is' if later == 1 else 'ones are'} repeated" if later > 0 else ""
            print(f"resumes after {start} of {steps} rollouts{repeated}", flush=True)
            if without_config:
                print("not compared with the earlier run: model, task, optimizer (train(config=...) compares them)")


@dataclass
class ActiveRun:
    """A run in progress: its rollouts, rows, checkpoints and evaluations.

    Attributes:
      config, metadata: saved with every checkpoint, see `smd_jax.runs.run.train`.
      evaluate: None: never.
      state: the newest; initially that of the start.
      done: finished rollouts.
      stopped: the signal that one of the processes received; None without any.
    """

    loop: Loop
    run_config: RunConfig
    directory: Path
    config: object
    metadata: object
    log: RunLog
    loggers: Loggers
    report: Report
    checkpoints: Writer
    stop: StopSignals
    evaluate: Evaluate | None
    state: TrainState

    def __post_init__(self) -> None:
        # The state counts optimizer steps; a run counts rollouts.
        self.done = int(self.state.step) // self.loop.config.steps_per_rollout
        # Rollouts in the newest complete checkpoint, and in the newest one, which may still be being written.
        self._saved = self._submitted = self.done
        self._look_at_log()

    def run(self) -> None:
        """Takes rollouts until the run stops or has all of them."""
        self._finish_evaluation()  # of the start, or one that is due after a resume
        while self.done < self.run_config.steps and self.stopped is None:
            metrics = self._step()
            self.done += 1
            # A save overlaps with at most one rollout. So a killed run loses at most one interval, and a disk failure
            # is noticed now.
            try:
                self._wait_for_checkpoint()
            finally:  # also after a failure, because `save_after_error` may save this rollout
                self._write_rollout(metrics)
            self._look_at_log()
            is_last = self.done == self.run_config.steps
            # Before the evaluation, which may take minutes.
            if is_last or is_due(self.done, self.run_config.checkpoint_every):
                self._save()
            self._finish_evaluation()
        self._save()

    def _step(self) -> dict[str, float]:
        try:
            self.state, metrics = self.loop.step(self.state, self._next_follows)
        except RefusedRolloutError as refused:
            with all_or_none():
                self.log.write_refused(self.done + 1, refused.metrics)
            refused.file = dump_rollout(self.directory, refused)
            # The state before it may be donated. A rollout whose update was skipped counts as finished.
            self.state = refused.state
            self.done = int(self.state.step) // self.loop.config.steps_per_rollout
            raise
        return metrics

    def _next_follows(self) -> bool:
        """Whether another rollout follows this one, as far as is known before its update."""
        if self.done + 1 == self.run_config.steps:
            return False
        # All processes must give the same answer, and a signal may have reached only one.
        return jax.process_count() > 1 or self.stop.received is None

    def _write_rollout(self, metrics: dict[str, float]) -> None:
        metrics |= memory_in_use()
        with all_or_none():
            warnings = self.log.write_rollout(self.done, metrics)
            self.loggers.write(self.done, metrics)
            for warning in warnings:  # after the row, because a print fails if the output is closed
                print(warning, flush=True)
            self.report(self.done, metrics)
        if metrics.get("update/skipped", 0.0) > 0:
            share = "" if metrics["update/skipped"] == 1 else f" {metrics['update/skipped']:.0%} of"
            print_once(
                f"warning: rollout {self.done - 1}:{share} the update was left out, because loss or gradient was not "
                f"finite (loss {metrics['loss']:g}, grad_norm {metrics['grad_norm']:g})"
            )

    def _finish_evaluation(self) -> None:
        """Runs an evaluation that is due and not yet done. A run that must stop leaves it to a resume."""
        every, is_last = self.run_config.evaluate_every, self.done == self.run_config.steps
        if self.evaluate is None or self.stopped is not None or not (is_due(self.done, every) or is_last):
            return
        # The log of the first process decides, so that all evaluate or none.
        if gather_json(self.log.has_evaluation(self.done))[0]:
            return
        self.loop.settle()
        metrics = self.evaluate(self.state)
        with all_or_none():
            self.log.write_evaluation(self.done, metrics)
            self.loggers.write(self.done, metrics)
            self.report(self.done, metrics)
        self._look_at_log()

    def _look_at_log(self) -> None:
        """Reads a signal, which may have reached any process, and saves if the newest row is the best.

        All processes must call it: they stop together and save together.
        """
        own = self.stop.received, self.log.best
        gathered = gather_json(own)
        received = next((number for number, _ in gathered if number is not None), None)
        self.stopped = None if received is None else Signals(received)
        # The log of the first process decides.
        self._best: int | None = gathered[0][1]
        if self._best == self.done > self._submitted:
            self._save()

    # --- checkpoints

    def save_after_error(self) -> str:
        """Saves the state after an error; returns one line that describes what is saved."""
        directory, steps = self.directory, self.run_config.steps
        if jax.process_count() > 1:
            return f"resume continues from the newest checkpoint in {directory}, if there is one"
        # Saving may fail with any error, such as one of orbax. None may hide the error that ends the run.
        with suppress(Exception):  # a checkpoint that failed is written again below
            self._wait_for_checkpoint()
        lost = self.done - self._saved
        if not lost:
            return f"after {self.done} of {steps} rollouts; nothing is lost but the rollout that failed"
        # An update that fails has already donated the buffers of its state.
        if any(x.is_deleted() for x in jax.tree.leaves(self.state) if isinstance(x, jax.Array)):
            return f"the failed update has donated the state: the last {lost} rollouts are not saved"
        try:
            self._save()
            self._wait_for_checkpoint()
        except Exception as error:  # noqa: BLE001  as above
            reason = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            return f"the last {lost} rollouts could not be saved: {reason}"
        return f"saved after {self.done} of {steps} rollouts in {directory}; resume continues the run"

    def _save(self) -> None:
        if self.done > self._submitted:
            state = without_base(self.state)
            self.checkpoints.save(self.done, state, config=self.config, metadata=self.metadata, best=self._best)
            self._submitted = self.done

    def _wait_for_checkpoint(self) -> None:
        submitted, self._submitted = self._submitted, self._saved  # if it fails, it is not saved
        self.checkpoints.wait()
        self._saved = self._submitted = submitted


def print_once(line: str) -> None:
    """Prints in the first process only."""
    if is_first():
        print(line, flush=True)


def is_due(done: int, every: int) -> bool:
    """Whether `done` is a multiple of `every`; 0: never."""
    return every > 0 and done % every == 0
