"""Turns errors of orbax, TensorStore and the disk into one line that names the checkpoint and what remains."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from smd_jax.disk import OS_ERROR, failure, is_trouble
from smd_jax.runs.checkpoint.steps import all_steps, unfinished


class DamagedCheckpointError(RuntimeError):
    """A checkpoint exists but cannot be read; the message names the step and the reason."""


class DamageNamed:
    """Turns errors of reading a damaged file into a DamagedCheckpointError.

    If the disk fails, or a permission is missing, the file may be intact: that becomes an OSError.
    """

    def __init__(self, directory: str | Path, step: int) -> None:
        self.directory = directory
        self.step = step

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Our checks, JSON and orbax raise these for files that are missing, truncated or changed; for a truncated array
        # orbax raises Exception itself.
        if not isinstance(error, ValueError | KeyError | OSError) and kind is not Exception:
            return
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if error is not None and is_trouble(error):
            raise OSError(
                f"expected to read checkpoint {self.step} in {self.directory}; got {reason}. It stays as it is: try "
                "again, or move it away to go on from an older one"
            ) from error
        raise DamagedCheckpointError(f"checkpoint {self.step} in {self.directory} cannot be read: {reason}") from error


@contextmanager
def others_named(directory: str | Path, step: int) -> Iterator[None]:
    """Adds the other steps to a DamagedCheckpointError, for a caller who can choose one."""
    try:
        yield
    except DamagedCheckpointError as error:
        others = [found for found in all_steps(directory) if found != step]
        advice = f"Steps {others} remain: choose one with step=..." if others else "No other step remains"
        raise DamagedCheckpointError(f"{error}. {advice}") from error.__cause__


@contextmanager
def disk_failure_named(directory: str | Path, step: int) -> Iterator[None]:
    """Turns errors of the disk into one line, and deletes incomplete files."""
    for logger in ("absl", "asyncio"):
        logging.getLogger(logger).addFilter(_is_worth_printing)  # a no-op the second time
    _quiet_late_writes()
    try:
        yield
    # Orbax raises OSError; TensorStore raises ValueError, with the system's code in its text.
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) and OS_ERROR not in str(error):
            raise
        # Threads of TensorStore may still write a file, which the next manager deletes.
        for folder in unfinished(directory):
            shutil.rmtree(folder, ignore_errors=True)
        # Orbax's own timeout while it waits for other processes has no errno; that of a network disk has one.
        if isinstance(error, TimeoutError) and error.errno is None:
            message = f"expected all processes to write their parts of checkpoint {step} in {directory}; one did not: "
            raise OSError(f"{message}{error}") from error
        message = failure(f"checkpoint {step} in {directory}", directory, error)
        raise OSError(f"{message}. {_kept(directory)}") from error


def _kept(directory: str | Path) -> str:
    try:
        there = all_steps(directory)
    except OSError:  # listing a directory needs a free file handle
        return "Earlier checkpoints are as they were"
    return f"Checkpoints {there} are as they were" if there else "There is no checkpoint yet"


def _is_worth_printing(record: logging.LogRecord) -> bool:
    """False for errors of the disk that threads of orbax log and raise, too; true for all others."""
    error = record.exc_info[1] if record.exc_info else None
    if OS_ERROR in f"{record.getMessage()} {error}":
        return False
    return not (isinstance(error, OSError) and _is_from_orbax(error.__traceback__))


def _quiet_late_writes() -> None:
    """Stops the printing of RuntimeErrors from writes that end after orbax has closed its event loop.

    TensorStore sends them to `sys.unraisablehook` when an earlier write has failed. Other errors are printed.
    """
    before = sys.unraisablehook
    if getattr(before, "__module__", None) == __name__:
        return

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if not _is_from_closed_loop(unraisable.exc_value, unraisable.exc_traceback):
            before(unraisable)

    sys.unraisablehook = hook


def _is_from_closed_loop(error: BaseException | None, trace: TracebackType | None) -> bool:
    # C++ calls it, so asyncio's frame is the outermost.
    outermost = "" if trace is None else trace.tb_frame.f_code.co_name
    return isinstance(error, RuntimeError) and outermost == "call_soon_threadsafe" and "loop is closed" in str(error)


def _is_from_orbax(trace: TracebackType | None) -> bool:
    while trace is not None:
        if "orbax" in Path(trace.tb_frame.f_code.co_filename).parts:
            return True
        trace = trace.tb_next
    return False
