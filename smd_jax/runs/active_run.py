"""A run in progress: its rollouts, evaluations, rows and checkpoints, in the order that a resume depends on.

step ─► wait for the last checkpoint ─► evaluate, where due ─► row of metrics ─► checkpoint, where due
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from smd_jax.devices.processes import all_or_none, is_first
from smd_jax.learner.state import TrainState
from smd_jax.monitor.loggers import Loggers
from smd_jax.monitor.memory_use import memory_in_use
from smd_jax.monitor.metrics_log import numbers
from smd_jax.monitor.progress import Report
from smd_jax.runs.checkpoint.writing import Writer
from smd_jax.runs.frozen_base import without_base
from smd_jax.runs.interrupt import is_whole
from smd_jax.runs.jsonable import Json
from smd_jax.runs.progress_state import gather_progress
from smd_jax.runs.run_config import RunConfig
from smd_jax.runs.run_log import RunLog
from smd_jax.runs.stop import StopSignals
from smd_jax.train.debug_dump import RefusedRolloutError, dump_rollout
from smd_jax.train.loop import Loop

Evaluate = Callable[[TrainState], Mapping[str, float]]

# In a checkpoint's data position: metrics of its last rollout, whose row waits for an evaluation.
UNEVALUATED = "unevaluated"


@dataclass(frozen=True)
class Settings:
    """Settings that every checkpoint keeps, see `smd_jax.runs.run.train`."""

    config: object
    noted: object
    machine: dict[str, Json]


@dataclass(frozen=True)
class Outputs:
    """What a run writes to."""

    directory: Path
    log: RunLog
    loggers: Loggers
    report: Report
    newest: Writer
    best: Writer


class ActiveRun:
    """A run in progress.

    Args:
      evaluate: None: never.
      state: where the run begins.

    Attributes:
      state: the newest.
      done: finished rollouts.
      progress: whether the run stops, and which checkpoint is its best.
    """

    def __init__(
        self,
        loop: Loop,
        config: RunConfig,
        settings: Settings,
        outputs: Outputs,
        stop: StopSignals,
        evaluate: Evaluate | None,
        state: TrainState,
    ) -> None:
        self._loop, self._config, self._settings, self._out, self._stop = loop, config, settings, outputs, stop
        self._evaluate = evaluate
        self.state = state
        # The state counts optimizer steps; a run counts rollouts.
        self.done = self._rollouts_of(state)
        # Rollouts in the newest complete checkpoint, and in the newest one, which may still be being written.
        self._saved = self._submitted = self.done
        # Metrics of the last rollout until their row is written: an evaluation follows, or the run has ended.
        self._unwritten: dict[str, float] | None = None
        self.progress = gather_progress(stop, outputs.log, self.done)

    # --- rollouts

    def begin(self) -> None:
        """Evaluates a new run at its start."""
        if self._evaluate is None or self.done > 0 or self.progress.start_is_evaluated:
            return
        metrics = self._evaluate(self.state)
        with all_or_none():
            self._out.log.write_evaluation(0, metrics)
            self._out.loggers.write(0, metrics)
            self._out.report(0, metrics)
        self._update_progress()

    def finish_rollouts(self, unevaluated: dict[str, float] | None) -> None:
        """Takes rollouts until the run stops.

        Args:
          unevaluated: metrics of the last rollout, if a resumed run has still to evaluate it.
        """
        if unevaluated is not None and self.progress.stopped is None:
            self._finish_rollout(unevaluated)
        while self.done < self._config.steps and self.progress.stopped is None:
            metrics = self._step()
            self.done += 1
            self._unwritten = metrics
            # A save overlaps with one rollout at most. So a killed run loses no more than one interval, and a
            # disk that fails is noticed now.
            self._wait_for_newest()
            self._out.best.wait()
            if metrics.get("update/skipped", 0.0) > 0:
                print_once(_skipped(self.done - 1, metrics))
            # `save_last` saves the last one in any case.
            saves = is_due(self.done, self._config.checkpoint_every) and self.done < self._config.steps
            if self._evaluation_is_due:
                # An evaluation may take minutes. So the checkpoint comes before it, with the unwritten row. A run that
                # must stop skips the evaluation; a resume catches up on it.
                self.progress = gather_progress(self._stop, self._out.log, self.done)
                if self.progress.stopped is not None:
                    break
                if saves or self.done == self._config.steps:
                    self._save_newest()
            self._finish_rollout(metrics)
            if saves and self.done > self._submitted:
                self._save_newest()

    def _step(self) -> dict[str, float]:
        try:
            self.state, metrics = self._loop.step(self.state, self._next_follows)
        except RefusedRolloutError as refused:
            with all_or_none():
                self._out.log.write_row(self.done + 1, refused.metrics)
            refused.file = dump_rollout(self._out.directory, refused)
            # The state before it may be donated. A rollout whose update was skipped counts as finished.
            self.state = refused.state
            self.done = self._rollouts_of(refused.state)
            raise
        return metrics

    def _next_follows(self) -> bool:
        """Whether a rollout follows the present one, as far as is known before its update."""
        if self.done + 1 == self._config.steps:
            return False
        # All processes must give the same answer, and a signal may have reached only one.
        return jax.process_count() > 1 or self._stop.received is None

    @property
    def _evaluation_is_due(self) -> bool:
        if self._evaluate is None:
            return False
        return is_due(self.done, self._config.evaluate_every) or self.done == self._config.steps

    def _finish_rollout(self, metrics: dict[str, float]) -> None:
        """Evaluates where that is due, and writes the row of the last rollout."""
        self._unwritten = metrics
        evaluation: Mapping[str, float] = {}
        is_evaluated = self._evaluation_is_due
        if self._evaluate is not None and is_evaluated:
            self._loop.settle()
            evaluation = self._evaluate(self.state)
        metrics |= {**evaluation, **memory_in_use()}
        with all_or_none():
            if is_evaluated:
                self._out.log.write_evaluation(self.done, evaluation)
            self._unwritten = None
            for warning in self._out.log.write_rollout(self.done, metrics, evaluated=is_evaluated):
                print(warning, flush=True)
            self._out.loggers.write(self.done, metrics)
            self._out.report(self.done, metrics)
        self._update_progress()

    def _update_progress(self) -> None:
        """Reads the progress from the rows, and saves the best checkpoint where the newest row is the best."""
        self.progress = gather_progress(self._stop, self._out.log, self.done)
        if self.progress.is_best:
            # A best checkpoint of this or a later rollout is from before a resume that went back.
            self._out.best.discard_after(self.done - 1)
            self._save(self._out.best)

    def _rollouts_of(self, state: TrainState) -> int:
        return int(state.step) // self._loop.config.steps_per_rollout

    # --- checkpoints

    def save_last(self) -> None:
        """Begins the checkpoint of the last rollout, unless it is saved."""
        if self.done > self._submitted:
            self._save_newest()

    def save_after_error(self) -> str:
        """Saves what an error leaves, and says in one line what is saved."""
        directory, steps = self._out.directory, self._config.steps
        if jax.process_count() > 1:
            return f"resume continues from the newest checkpoint in {directory}, if there is one"
        with suppress(OSError):  # a checkpoint that failed is written again below
            self._wait_for_newest()
        lost = self.done - self._saved
        if not lost and self._unwritten is None:
            return f"after {self.done} of {steps} rollouts; nothing is lost but the rollout that failed"
        if not is_whole(self.state):
            return f"the failed update has donated the state: the last {lost} rollouts are not saved"
        try:
            if self._unwritten is not None:
                self._out.log.write_row(self.done, self._unwritten)
            if lost:
                self._save_newest()
                self._wait_for_newest()
        except OSError as error:
            return f"the last {lost} rollouts could not be saved: {error}"
        return f"saved after {self.done} of {steps} rollouts in {directory}; resume continues the run"

    def _save_newest(self) -> None:
        self._save(self._out.newest)
        self._submitted = self.done

    def _wait_for_newest(self) -> None:
        try:
            self._out.newest.wait()
        except OSError:
            self._submitted = self._saved
            raise
        self._saved = self._submitted

    def _save(self, writer: Writer) -> None:
        position: dict[str, Any] = {"rollouts": self.done, "seed": self._loop.config.seed}
        if self._unwritten is not None:
            position[UNEVALUATED] = numbers(self._unwritten)
        settings = self._settings
        writer.save(
            self.done,
            without_base(self.state),
            data_position=position,
            config=settings.config,
            noted=settings.noted,
            machine=settings.machine,
        )


def print_once(line: str) -> None:
    """Prints in the first process only."""
    if is_first():
        print(line, flush=True)


def is_due(done: int, every: int) -> bool:
    """Whether `done` is a multiple of `every`; 0: never."""
    return every > 0 and done % every == 0


def _skipped(index: int, metrics: Mapping[str, float]) -> str:
    share = "" if metrics["update/skipped"] == 1 else f" {metrics['update/skipped']:.0%} of"
    return (
        f"warning: rollout {index}:{share} the update was left out, because loss or gradient was not finite (loss "
        f"{metrics['loss']:g}, grad_norm {metrics['grad_norm']:g})"
    )
