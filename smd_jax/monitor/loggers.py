"""Loggers copy a run's metrics to TensorBoard, Weights & Biases, or your own destination.

    train(loop, state, run, directory, config=config, loggers=[TensorBoardLogger(directory)])

metrics.jsonl is the record, and a run that cannot write it stops. Each logger writes a copy on its own thread, so that
a slow network delays no step. A logger that raises gets no more rows, and one line says so. TensorBoard needs
`tensorboardX` (`pip install 'smd_jax[train]'`), Weights & Biases needs `wandb` (`pip install 'smd_jax[wandb]'`).
"""

from __future__ import annotations

import importlib
import json
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from smd_jax.disk import replaced
from smd_jax.tasks.task import MissingExtraError
from smd_jax.text.visible_text import one_line

if TYPE_CHECKING:
    from tensorboardX.event_file_writer import EventsWriter


@runtime_checkable
class Logger(Protocol):
    """Receives metrics.

    A resumed run repeats the steps after its checkpoint; the step of the first row shows where it continues.
    """

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receives one row of numbers on the host; NaN marks missing ones.

        Args:
          step: finished rollouts: 1 for the first rollout's row, 0 for the evaluation before training; never lower than
            before. An evaluation comes after the row of its rollout, with the same step.
        """
        ...

    def close(self) -> None:
        """Ends the log. Called once, also for a logger that has raised."""
        ...


def dashboard_name(name: str) -> str:
    """`train/reward` for `reward`; `eval/sparse` is unchanged.

    transformers' Trainer and TRL have the same names on dashboards, so that their runs and ours share charts.
    """
    return name if name.startswith("eval/") else f"train/{name}"


def is_evaluation(metrics: Mapping[str, float]) -> bool:
    """Whether a row is that of an evaluation, and not of a rollout."""
    return bool(metrics) and all(name.startswith("eval/") for name in metrics)


def check_installed(package: str, extra: str, what: str) -> None:
    """Raises MissingExtraError if a logger's package is not installed, without importing it. `extra` installs it."""
    spec = find_spec(package)
    # A folder of that name in the working directory, such as wandb's, has no origin.
    if spec is None or spec.origin is None:
        raise MissingExtraError(f"{what} {package}, which is not installed: pip install 'smd_jax[{extra}]'")


class Loggers:
    """Several loggers, none of which can stop or delay the run."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        # One thread per logger keeps the order of its rows and waits for no other logger.
        self._working = [(logger, ThreadPoolExecutor(1)) for logger in loggers]
        self._waiting: dict[int, list[Future[None]]] = {index: [] for index in range(len(loggers))}
        self._failed: set[int] = set()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends one row to every working logger; returns at once."""
        row = dict(metrics)  # the caller may change its own while a thread reads
        for index, (logger, thread) in enumerate(self._working):
            self._look_at(index, wait=False)
            if index not in self._failed:
                self._waiting[index].append(thread.submit(logger.write, step, row))

    def close(self) -> None:
        """Waits until all rows are written, and closes the loggers."""
        for index, (logger, thread) in enumerate(self._working):
            self._look_at(index, wait=True)
            self._waiting[index] = [thread.submit(logger.close)]
            self._look_at(index, wait=True)
            thread.shutdown()

    def __enter__(self) -> Loggers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _look_at(self, index: int, wait: bool) -> None:
        """Drops written rows; after the first failure prints a line and drops the rest."""
        waiting = self._waiting[index]
        while waiting and (wait or waiting[0].done()):
            # `exception` waits, and returns the error of the logger.
            error = waiting.pop(0).exception()
            if error is None:
                continue
            for row in waiting:
                row.cancel()
            waiting.clear()
            if index not in self._failed:
                self._failed.add(index)
                print(
                    f"{type(self._working[index][0]).__name__} failed and gets no more metrics of this run; "
                    f"metrics.jsonl has all of them. {one_line(f'{type(error).__name__}: {error}')}",
                    file=sys.stderr,
                    flush=True,
                )


def check_tensorboard() -> None:
    """Raises MissingExtraError without tensorboardX."""
    check_installed("tensorboardX", "train", "TensorBoard's files need")


class TensorBoardLogger:
    """Writes event files into `directory/tensorboard`: `tensorboard --logdir DIRECTORY`.

    Each process of a resumed run writes its own file, which first invalidates older rows from its first step on. So
    TensorBoard shows every step once.

    Raises:
      MissingExtraError: without tensorboardX.
    """

    def __init__(self, directory: str | Path) -> None:
        # Fails now and not after a rollout if the package is missing or broken.
        check_tensorboard()
        importlib.import_module("tensorboardX.event_file_writer")
        self._folder = Path(directory) / "tensorboard"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._writer: EventsWriter | None = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        # Not tensorboardX's SummaryWriter: a full disk kills its thread, and a later write would wait forever.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.summary import scalar

        if self._writer is None:
            # If the earlier run skipped an evaluation, the training row of that step is in its file and stays valid.
            first = step + (step > 0 and is_evaluation(metrics))
            # Files are named by the second, and opening one empties it: a number separates quick restarts.
            number = len(list(self._folder.iterdir()))
            self._writer = EventsWriter(str(self._folder / "events"), f".{os.getpid()}.{number}")
            # TensorBoard then ignores this and later steps of older files.
            session = messages().SessionLog(status=messages().SessionLog.START)
            self._writer.write_event(messages().Event(wall_time=time.time(), step=first, session_log=session))
        now = time.time()
        for name, value in metrics.items():
            summary = scalar(dashboard_name(name), value)
            self._writer.write_event(messages().Event(wall_time=now, step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def messages() -> ModuleType:
    """The classes of TensorBoard's messages, which are made at import, so that no type checker sees them."""
    return importlib.import_module("tensorboardX.proto.event_pb2")


def check_wandb() -> None:
    """Raises MissingExtraError without wandb."""
    check_installed("wandb", "wandb", "Weights & Biases needs")


class WandbLogger:
    """Logs to Weights & Biases, or with "offline" only into `directory/wandb`, for a later `wandb sync`.

    `directory/wandb.json` holds the run's id and its next steps. A resumed run continues under the same id and skips
    the steps that were logged before: repeated steps are bitwise equal. Weights & Biases rejects rows of earlier
    steps, so an evaluation that the earlier run skipped appears one step later, unless that step has one, too.

    Args:
      directory: of the run.
      project: of the run; None: the variable WANDB_PROJECT, or else smd_jax.
      name: of the run; None: Weights & Biases chooses one.
      config: shown as the run's configuration.
      mode: "offline" needs neither a network nor an account; None: the variable WANDB_MODE, or else "online".
      resume: continue the run of this directory, if there is one.

    Raises:
      MissingExtraError: without wandb.
      OSError: Weights & Biases does not start, as online without a key or a network.
    """

    def __init__(
        self,
        directory: str | Path,
        project: str | None = None,
        *,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        mode: Literal["online", "offline"] | None = None,
        resume: bool = False,
    ) -> None:
        check_wandb()
        import wandb

        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._file = directory / "wandb.json"
        known = json.loads(self._file.read_text()) if resume and self._file.is_file() else {}
        self._known: dict[str, Any] = {"id": secrets.token_hex(4), "next_step": 0} | known
        self._known.setdefault("next_evaluation", self._known["next_step"])
        self._first = dict(self._known)
        try:
            self._run = wandb.init(
                project=project or os.environ.get("WANDB_PROJECT") or "smd_jax",
                name=name,
                id=self._known["id"],
                dir=directory,
                config=None if config is None else dict(config),
                mode=mode,
                resume="allow",
                # Keeps this run separate from other runs in the process, such as the user's own.
                reinit="create_new",
                # Not captured: standard output has frames of the progress bar.
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as error:
            got = one_line(str(error), 300).rstrip(".")
            raise OSError(
                f"expected Weights & Biases to start; got {got}. `wandb login` stores a key; WANDB_MODE=offline writes "
                "files to upload later"
            ) from error
        self._save()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        kind = "next_evaluation" if is_evaluation(metrics) else "next_step"
        if step < self._first[kind]:
            return
        named = {dashboard_name(name): value for name, value in metrics.items()}
        self._run.log(named, step=max(step, self._first["next_step"]))
        self._known[kind] = step + 1
        self._save()

    def close(self) -> None:
        self._run.finish()

    def _save(self) -> None:
        with replaced(self._file) as temporary:
            temporary.write_text(json.dumps(self._known) + "\n")
