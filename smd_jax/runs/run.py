"""A run on disk: the loop with progress, metrics, evaluations, checkpoints, resume, and an orderly end on Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax

from smd_jax.devices.processes import all_or_none, check_same, gather_json, is_first
from smd_jax.devices.sharding import shard_tree
from smd_jax.disk import stored_bytes
from smd_jax.learner.state import TrainState
from smd_jax.monitor.loggers import Logger, Loggers
from smd_jax.monitor.memory_use import memory_in_use
from smd_jax.monitor.metrics_log import numbers, without_nulls
from smd_jax.monitor.progress import Report, training_progress
from smd_jax.runs.checkpoint import reading
from smd_jax.runs.checkpoint.steps import all_steps, latest_step
from smd_jax.runs.checkpoint.writing import Writer, discard_after
from smd_jax.runs.frozen_base import with_base, without_base
from smd_jax.runs.interrupt import Rescue, is_whole
from smd_jax.runs.jsonable import Json, config_differences, to_jsonable
from smd_jax.runs.machine import machine
from smd_jax.runs.objective import Objective
from smd_jax.runs.progress_state import RunStanding, standing
from smd_jax.runs.resume_settings import split_settings
from smd_jax.runs.run_config import RunConfig
from smd_jax.runs.run_folder import (
    BEST,
    CHECKPOINTS,
    check_directory,
    check_progress,
    check_room,
    finished_rollouts,
)
from smd_jax.runs.run_log import Journal, NoJournal
from smd_jax.runs.stop import RunStoppedError, StopSignals
from smd_jax.text.visible_text import visible
from smd_jax.train.debug_dump import RefusedRolloutError, write_refused
from smd_jax.train.loop import Loop

Evaluate = Callable[[TrainState], Mapping[str, float]]

# In a checkpoint's data position: metrics of its last rollout, whose row waits for an evaluation.
UNEVALUATED = "unevaluated"


def train(
    loop: Loop,
    state: TrainState,
    run: RunConfig,
    directory: str | Path,
    *,
    config: object = None,
    noted: object = None,
    resume: bool = False,
    evaluate: Evaluate | None = None,
    label: str = "train",
    loggers: Sequence[Logger] = (),
) -> TrainState:
    """Runs `loop` to `run.steps`, or until its objective's patience ends, and returns the last state.

    On the main thread SIGINT (Ctrl-C) and SIGTERM let the rollout under way end, save a checkpoint and raise
    RunStoppedError; a second one ends the process at once.

    An error that ends a rollout, an update or an evaluation (a reward function that raises, for example) leaves with
    what was reached before it saved, and a note that says so. Not with several processes, which save together: the
    others may be anywhere, and the run goes on from its newest checkpoint. Nor where a failing update has taken over
    the state. An evaluation that failed is not made again.

    Args:
      state: where to start; where there is a checkpoint to resume from, only its structure and sharding count, and
        the base where there are adapters.
      directory: where this run is kept; a new run must not find another one there.
      config: what decides the result, kept with every checkpoint; a resume under another one is refused. None: what
        decides it of the loop's own, see `smd_jax.runs.resume_settings.split_settings`; a model, its task and its
        optimizer are not in there.
      noted: settings that are kept, too, and may differ at a resume, which prints the differences: plans of memory,
        places of files, what is logged. None: without a config the rest of the loop's own.
      resume: continue from the newest checkpoint in `directory`, bitwise as if the run had not stopped. A damaged one
        is said, and the last good one before it is taken. A run that stopped before its first checkpoint, or never
        began, starts at `state`.
      evaluate: gives metrics to log beside the step's own, see `smd_jax.train.evaluation.every_evaluation`. A resumed
        run does not evaluate its start again.
      loggers: get the evaluation at the start and every row of metrics.jsonl, by the number of finished rollouts. None
        of them can stop or delay the run; all are closed at its end.

    Raises:
      OtherProcessError: of several processes one was given something else, or sees other checkpoints.
      FileExistsError: a new run in a directory that has one.
      OSError: a directory that cannot be written; a disk without room for the checkpoints, at the start or later.
      ValueError: a resume whose configuration differs, or the base that adapters stand on; an objective that names no
        metric of the run.
      RunStoppedError: a signal stopped the run; what it had done is saved.
      RefusedRolloutError: sampler and learner are no one policy, or several updates in a row were not finite; the
        rollout is in `refused_<number>.safetensors`, and the run can go on: before that rollout, or behind it where
        its one update has left the parameters as they were.
    """
    directory = Path(directory)
    if config is None:
        config, of_loop = split_settings(loop.config)
        noted = of_loop if noted is None else noted
    evaluates = evaluate is not None and run.evaluate_every > 0
    if jax.process_count() > 1:
        # Before what only some of them would do, or not as often: the others would wait for them.
        same = {"resume": resume, "run": to_jsonable(run, "run"), "config": to_jsonable(config)}
        # What decides whether a rollout is refused.
        same |= {"guard": loop.max_difference, "max_skipped": loop.max_skipped}
        check_same(same | {"checkpoints": all_steps(directory / CHECKPOINTS)})
    size = stored_bytes(without_base(state))  # which all processes find out together
    with all_or_none():  # before the first process writes anything there
        check_directory(directory, resume)
        check_room(directory, size, run)
        _check_objective(run.objective, evaluates)
        check_progress(directory, resume, run)
    state = shard_tree(state, loop.mesh)
    here = machine(loop.mesh)
    state, unevaluated = _start(directory, state, config, noted, here)
    # Steps of the optimizer are kept in the state; a run counts in rollouts.
    start = done = int(state.step) // loop.config.steps_per_rollout
    # Rollouts that are in a checkpoint which is whole, and in one that may still be on its way to the disk.
    saved = begun = start
    with all_or_none():
        if resume and done > 0 and is_first():
            _say(f"goes on after {done} of {run.steps} rollouts" + _taken_again(directory, done))
    # Metrics of a rollout that is finished, until they are written: an evaluation follows, or the run has ended.
    unwritten: dict[str, float] | None = None

    def save(writer: Writer) -> None:
        position: dict[str, Any] = {"rollouts": done, "seed": loop.config.seed}
        if unwritten is not None:
            position[UNEVALUATED] = numbers(unwritten)
        trained = without_base(state)
        writer.save(done, trained, data_position=position, config=config, noted=noted, machine=here)

    def save_newest() -> None:
        nonlocal begun
        save(newest)
        begun = done

    def wait_for_newest() -> None:
        nonlocal saved, begun
        try:
            newest.wait()
        except OSError:
            begun = saved
            raise
        saved = begun

    def rescue() -> str:
        """Saves what an error leaves, and says so."""
        if jax.process_count() > 1:
            return f"the run goes on from its newest checkpoint in {directory} with resume, if there is one"
        # One that cannot be written is tried again below.
        with suppress(OSError):
            wait_for_newest()
        if done == saved and unwritten is None:
            return f"after {done} of {run.steps} rollouts; nothing is lost but the one under way"
        if not is_whole(state):
            return f"the failing update has taken over the state: what {done - saved} rollouts taught is not saved"
        try:
            if unwritten is not None:
                journal.write_row(done, unwritten)
            if done > saved:
                save_newest()
                wait_for_newest()
        except OSError as error:
            return f"what {done - saved} rollouts taught could not be saved: {error}"
        return f"saved after {done} of {run.steps} rollouts in {directory}; the run goes on with resume"

    def follows() -> bool:
        """Whether a rollout certainly follows the one under way, as far as is known before its update."""
        if done + 1 == run.steps:
            return False
        if now.may_end and run.objective is not None:
            counts = not run.objective.metric.startswith("eval/") or _due(done + 1, run.evaluate_every)
            return not counts
        # All processes must give one answer, and a signal may have come to one of them alone.
        return jax.process_count() > 1 or stop.received is None

    def is_due() -> bool:
        return evaluates and (_due(done, run.evaluate_every) or done == run.steps)

    def finish(metrics: dict[str, float]) -> RunStanding:
        """Evaluates where that is due, writes the row of the rollout that made `done`, and says where the run is."""
        nonlocal unwritten
        unwritten = metrics
        found: Mapping[str, float] = {}
        if evaluate is not None and is_due():
            loop.settle()
            found = evaluate(state)
        metrics |= {**found, **memory_in_use()}
        with all_or_none():
            if is_due():
                journal.write_evaluation(done, found)
            unwritten = None
            for warning in journal.write_rollout(done, metrics, evaluated=is_due()):
                print(warning, flush=True)
            others.write(done, metrics)
            report(done, metrics)
        now = standing(stop, journal, done)
        if run.keeps_best and now.is_best:
            save_best()
        return now

    def save_best() -> None:
        # One of this rollout or a later one is of rollouts that are taken once more, maybe from another start.
        best.discard_after(done - 1)
        save(best)

    with (
        StopSignals() as stop,
        Loggers(loggers if is_first() else ()) as others,
        _journal(
            directory,
            start if unevaluated is None else start - 1,
            resume=resume,
            objective=run.objective,
            evaluates=evaluates,
        ) as journal,
        _progress(run.steps, start, label) as report,
        # The first to close, because loggers that wait for a network must not keep a checkpoint from being whole; and
        # a signal that comes then must not cut it off.
        Writer(directory / CHECKPOINTS, run.keep) as newest,
        Writer(directory / BEST, 1) as best,
    ):
        now = standing(stop, journal, done)
        if evaluate is not None and evaluates and done == 0 and not now.start_is_evaluated:
            found = evaluate(state)
            with all_or_none():
                journal.write_evaluation(0, found)
                others.write(0, found)
                report(0, found)
            now = standing(stop, journal, done)
            if run.keeps_best and now.is_best:
                save_best()
        with Rescue(rescue):
            if unevaluated is not None and now.stopped is None:
                now = finish(unevaluated)
            while done < run.steps and now.stopped is None and not now.has_ended:
                try:
                    state, metrics = loop.step(state, follows)
                except RefusedRolloutError as refused:
                    with all_or_none():
                        journal.write_row(done + 1, refused.metrics)
                    file = write_refused(directory, refused)
                    # The state that was given to it may be gone. A rollout that was left out is finished, too.
                    state, done = refused.state, int(refused.state.step) // loop.config.steps_per_rollout
                    raise refused.with_file(file) from refused
                done += 1
                unwritten = metrics
                # A save goes on beside one rollout and no longer: a killed run loses no more than what lies between two
                # saves, and a disk that fails is noticed now.
                wait_for_newest()
                best.wait()
                if metrics.get("update/skipped", 0.0) > 0:
                    _say(_skipped(done - 1, metrics))
                # The last one is saved below, whether it is due or not.
                saves = _due(done, run.checkpoint_every) and done < run.steps
                if is_due():
                    # An evaluation may take minutes. What would be saved behind it is saved before it, with what is
                    # still to be written; and who is told to stop has no time for it: a resume makes it up.
                    now = standing(stop, journal, done)
                    if now.stopped is not None:
                        break
                    if saves or done == run.steps:
                        save_newest()
                now = finish(metrics)
                if saves and done > begun:
                    save_newest()
        if done > begun:
            save_newest()
    if now.stopped is not None:
        raise RunStoppedError(now.stopped, done, run.steps, directory)
    # A rollout may have been begun before patience ended the run. Whoever called may evaluate next, on these devices.
    loop.settle()
    if now.has_ended and done < run.steps:
        _say(journal.why_ended())
    return jax.block_until_ready(state)


def _start(
    directory: Path, state: TrainState, config: object, noted: object, here: Json
) -> tuple[TrainState, dict[str, float] | None]:
    """The state of the newest checkpoint that can be read, or `state` where there is none; says what is otherwise than
    it was, and that a checkpoint is damaged. Beside it the metrics of its last rollout, if the evaluation after it is
    still to come. Arguments are those of `train`; `here` is its machine."""
    # Without `resume` there is none: `check_directory` has seen to that.
    if latest_step(directory / CHECKPOINTS) is None:
        # A run that was killed before its first checkpoint may have left a best one, which this run goes on to compare.
        reading.check_config(directory / BEST, config)
        return state, None
    # A base below adapters is not in there: it comes from `state`, and is checked to be the same.
    restored = reading.restore_newest(directory / CHECKPOINTS, without_base(state), config=config)
    state = with_base(restored.state, state)
    for line in restored.damaged:
        _say(f"warning: {line}; the run goes on from step {restored.step}")
    # The run will save these steps again, and never behind them.
    discard_after(directory / CHECKPOINTS, restored.step)
    _say_differences("with another setting", restored.noted, noted)
    _say_differences("elsewhere, which may change rounding or rows", restored.machine, here)
    metrics = restored.data_position.get(UNEVALUATED)
    if not isinstance(metrics, dict):
        return state, None
    # The evaluation was made, if its row is there: in the eyes of the first process, so that all make it or none.
    rows = gather_json(finished_rollouts(directory))[0]
    if rows >= restored.data_position["rollouts"]:
        return state, None
    return state, without_nulls(metrics)


def _taken_again(directory: Path, done: int) -> str:
    behind = finished_rollouts(directory) - done
    return f"; {behind} behind them {'is' if behind == 1 else 'are'} taken again" if behind > 0 else ""


@contextmanager
def _journal(
    directory: Path, start: int, *, resume: bool, objective: Objective | None, evaluates: bool
) -> Iterator[Journal | NoJournal]:
    """The journal, which the first process alone writes."""
    with all_or_none():
        journal = (
            Journal(directory, start, resume=resume, objective=objective, evaluates=evaluates) if is_first() else None
        )
    if journal is None:
        yield NoJournal()
        return
    with journal:
        yield journal


@contextmanager
def _progress(steps: int, start: int, name: str) -> Iterator[Report]:
    """The progress report, which the first process alone shows."""
    if not is_first():
        yield lambda done, metrics: None
        return
    with training_progress(steps, start=start, name=name) as report:
        yield report


def _say(line: str) -> None:
    if is_first():
        print(line, flush=True)


def _check_objective(objective: Objective | None, evaluates: bool) -> None:
    if objective is not None and objective.metric.startswith("eval/") and not evaluates:
        raise ValueError(
            f"expected evaluations (evaluate_every > 0, and something to evaluate on) for the objective "
            f"{objective.metric!r}; got none"
        )


def _say_differences(what: str, saved: Json, given: object) -> None:
    """Prints what is noted with a checkpoint and is otherwise now."""
    # A checkpoint from before there were notes, or a caller without.
    if saved is None or given is None:
        return
    for line in config_differences(saved, to_jsonable(given, "noted"), words=("was", "is now")):
        _say(visible(f"resumed {what}, {line}"))


def _skipped(index: int, metrics: Mapping[str, float]) -> str:
    share = "" if metrics["update/skipped"] == 1 else f" {metrics['update/skipped']:.0%} of"
    return (
        f"warning: rollout {index}:{share} the update was left out, because loss or gradient was not finite (loss "
        f"{metrics['loss']:g}, grad_norm {metrics['grad_norm']:g})"
    )


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0
