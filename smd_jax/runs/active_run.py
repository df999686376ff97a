"""A run in progress: its rollouts, rows, checkpoints and evaluations, in the order that a resume depends on.

step ─► wait for the last checkpoint ─► row of metrics ─► checkpoint, where due ─► evaluate, where due
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import Signals

import jax

from smd_jax.devices.processes import all_or_none, gather_json, is_first
from smd_jax.learner.state import TrainState
from smd_jax.monitor.loggers import Loggers
from smd_jax.monitor.metrics_log import memory_in_use
from smd_jax.monitor.progress import Report
from smd_jax.runs.checkpoint.writing import Writer
from smd_jax.runs.frozen_base import without_base
from smd_jax.runs.run_config import RunConfig
from smd_jax.runs.run_log import RunLog
from smd_jax.runs.stop import StopSignals
from smd_jax.train.loop import Loop
from smd_jax.train.samples import RefusedRolloutError, dump_rollout

Evaluate = Callable[[TrainState], Mapping[str, float]]


@dataclass(frozen=True)
class Outputs:
    """Outputs of a run; `config` and `noted` are saved with every checkpoint, see `smd_jax.runs.run.train`."""

    directory: Path
    config: object
    noted: object
    log: RunLog
    loggers: Loggers
    report: Report
    checkpoints: Writer


class ActiveRun:
    """A run in progress.

    Args:
      evaluate: None: never.
      state: where the run begins.

    Attributes:
      state: the newest.
      done: finished rollouts.
      stopped: the signal that one of the processes received; None without any.
    """

    def __init__(
        self,
        loop: Loop,
        config: RunConfig,
        outputs: Outputs,
        stop: StopSignals,
        evaluate: Evaluate | None,
        state: TrainState,
    ) -> None:
        self._loop, self._config, self._out, self._stop = loop, config, outputs, stop
        self._evaluate = evaluate
        self.state = state
        # The state counts optimizer steps; a run counts rollouts.
        self.done = self._rollouts_of(state)
        # Rollouts in the newest complete checkpoint, and in the newest one, which may still be being written.
        self._saved = self._submitted = self.done
        self._look_at_log()

    def run(self) -> None:
        """Takes rollouts until the run stops or has all of them."""
        self._finish_evaluation()  # of the start, or one that is due after a resume
        while self.done < self._config.steps and self.stopped is None:
            metrics = self._step()
            self.done += 1
            # A save overlaps with at most one rollout. So a killed run loses at most one interval, and a disk failure
            # is noticed now.
            self._wait_for_checkpoint()
            self._write_rollout(metrics)
            is_last = self.done == self._config.steps
            # Before the evaluation, which may take minutes.
            if is_last or is_due(self.done, self._config.checkpoint_every):
                self._save()
            self._finish_evaluation()
        self._save()

    def _step(self) -> dict[str, float]:
        try:
            self.state, metrics = self._loop.step(self.state, self._next_follows)
        except RefusedRolloutError as refused:
            with all_or_none():
                self._out.log.write_refused(self.done + 1, refused.metrics)
            refused.file = dump_rollout(self._out.directory, refused)
            # The state before it may be donated. A rollout whose update was skipped counts as finished.
            self.state = refused.state
            self.done = self._rollouts_of(refused.state)
            raise
        return metrics

    def _next_follows(self) -> bool:
        """Whether another rollout follows this one, as far as is known before its update."""
        if self.done + 1 == self._config.steps:
            return False
        # All processes must give the same answer, and a signal may have reached only one.
        return jax.process_count() > 1 or self._stop.received is None

    def _write_rollout(self, metrics: dict[str, float]) -> None:
        if metrics.get("update/skipped", 0.0) > 0:
            print_once(_skipped(self.done - 1, metrics))
        metrics |= memory_in_use()
        with all_or_none():
            for warning in self._out.log.write_rollout(self.done, metrics):
                print(warning, flush=True)
            self._out.loggers.write(self.done, metrics)
            self._out.report(self.done, metrics)
        self._look_at_log()

    def _finish_evaluation(self) -> None:
        """Runs an evaluation that is due and not yet done. A run that must stop leaves it to a resume."""
        every, is_last = self._config.evaluate_every, self.done == self._config.steps
        if self._evaluate is None or self.stopped is not None or not (is_due(self.done, every) or is_last):
            return
        # The log of the first process decides, so that all evaluate or none.
        if gather_json(self._out.log.has_evaluation(self.done))[0]:
            return
        self._loop.settle()
        metrics = self._evaluate(self.state)
        with all_or_none():
            self._out.log.write_evaluation(self.done, metrics)
            self._out.loggers.write(self.done, metrics)
            self._out.report(self.done, metrics)
        self._look_at_log()

    def _look_at_log(self) -> None:
        """Reads a signal, which may have reached any process, and saves if the newest row is the best.

        All processes must call it: they stop together and save together.
        """
        own = self._stop.received, self._out.log.best
        gathered = gather_json(own)
        received = next((number for number, _ in gathered if number is not None), None)
        self.stopped = None if received is None else Signals(received)
        # The log of the first process decides.
        self._best: int | None = gathered[0][1]
        if self._best == self.done > self._submitted:
            self._save()

    def _rollouts_of(self, state: TrainState) -> int:
        return int(state.step) // self._loop.config.steps_per_rollout

    # --- checkpoints

    def save_after_error(self) -> str:
        """Saves the state after an error; returns one line that describes what is saved."""
        directory, steps = self._out.directory, self._config.steps
        if jax.process_count() > 1:
            return f"resume continues from the newest checkpoint in {directory}, if there is one"
        with suppress(OSError):  # a checkpoint that failed is written again below
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
        except OSError as error:
            return f"the last {lost} rollouts could not be saved: {error}"
        return f"saved after {self.done} of {steps} rollouts in {directory}; resume continues the run"

    def _save(self) -> None:
        if self.done > self._submitted:
            out = self._out
            out.checkpoints.save(
                self.done, without_base(self.state), config=out.config, noted=out.noted, best=self._best
            )
            self._submitted = self.done

    def _wait_for_checkpoint(self) -> None:
        try:
            self._out.checkpoints.wait()
        except OSError:
            self._submitted = self._saved
            raise
        self._saved = self._submitted


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
