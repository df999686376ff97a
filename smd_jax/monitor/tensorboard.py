"""Metrics for TensorBoard. Needs `tensorboardX`: `pip install -e '.[train]'`."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from smd_jax.monitor.loggers import check_installed, dashboard_name, is_evaluation

if TYPE_CHECKING:
    from tensorboardX.event_file_writer import EventsWriter


def check_tensorboard() -> None:
    """Raises MissingExtraError without tensorboardX."""
    check_installed("tensorboardX", "train", "TensorBoard's files need")


class TensorBoardLogger:
    """Writes event files into `directory/tensorboard`: `tensorboard --logdir DIRECTORY`.

    Each process of a resumed run writes its own file, which first invalidates older rows from its first step on. So
    TensorBoard shows every step once.

    Args:
      directory: of the run.

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
        from tensorboardX.summary import scalar

        if self._writer is None:
            # The training row of an evaluation that the run before left out is in its file, and stays valid.
            self._writer = self._begin(step + (step > 0 and is_evaluation(metrics)))
        now = time.time()
        for name, value in metrics.items():
            summary = scalar(dashboard_name(name), value)
            self._writer.write_event(messages().Event(wall_time=now, step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _begin(self, step: int) -> EventsWriter:
        # Not tensorboardX's SummaryWriter: a full disk kills its thread, and a later write would wait forever.
        from tensorboardX.event_file_writer import EventsWriter

        # Files are named by the second, and opening one empties it: a number separates quick restarts.
        number = len(list(self._folder.iterdir()))
        writer = EventsWriter(str(self._folder / "events"), f".{os.getpid()}.{number}")
        # TensorBoard then ignores this and later steps of older files.
        session = messages().SessionLog(status=messages().SessionLog.START)
        writer.write_event(messages().Event(wall_time=time.time(), step=step, session_log=session))
        return writer


def messages() -> ModuleType:
    """The classes of TensorBoard's messages, which are made at import, so that no type checker sees them."""
    return importlib.import_module("tensorboardX.proto.event_pb2")
