"""What orbax, TensorStore and the disk raise, as one line that says which checkpoint it is and what remains."""

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
    """A checkpoint is there but cannot be read; the message says which step and why, and of a checkpoint that was asked
    for also what remains."""


class DamageNamed:
    """Whatever reading a damaged file raises becomes one error that says which checkpoint it is, and why. Where the
    disk fails, or a permission is missing, nothing is known of the file: an OSError says so."""

    def __init__(self, directory: str | Path, step: int) -> None:
        self.directory = directory
        self.step = step

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What the checks here, JSON and orbax raise for files that are missing, cut off or changed; for an array that
        # is cut off, orbax raises no other class than Exception itself.
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
    """Adds to a DamagedCheckpointError which other steps there are. For a caller who can name one: what looks for the
    newest that can be read tries them all by itself."""
    try:
        yield
    except DamagedCheckpointError as error:
        others = [found for found in all_steps(directory) if found != step]
        advice = f"Steps {others} remain: choose one with step=..." if others else "No other step remains"
        raise DamagedCheckpointError(f"{error}. {advice}") from error.__cause__


@contextmanager
def disk_failure_named(directory: str | Path, step: int) -> Iterator[None]:
    """Turns what orbax raises when the disk fails into one line, and deletes what is half written."""
    for logger in ("absl", "asyncio"):
        logging.getLogger(logger).addFilter(_is_news)  # which adds the same filter no second time
    _quiet_late_writes()
    try:
        yield
    # Files that orbax writes by itself say OSError; TensorStore says ValueError, and the system's code in its text.
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) and OS_ERROR not in str(error):
            raise
        # As far as TensorStore has stopped: its threads may write a file more, which the next manager deletes.
        for half_written in unfinished(directory):
            shutil.rmtree(half_written, ignore_errors=True)
        # Orbax's own, after it has waited for others. A disk in a network has a number for what it took too long for.
        if isinstance(error, TimeoutError) and error.errno is None:
            said = f"expected all processes to write their parts of checkpoint {step} in {directory}; one did not: "
            raise OSError(f"{said}{error}") from error
        said = failure(f"checkpoint {step} in {directory}", directory, error)
        raise OSError(f"{said}. {_kept(directory)}") from error


def _kept(directory: str | Path) -> str:
    try:
        there = all_steps(directory)
    except OSError:  # without a free file handle a directory cannot be listed
        return "Earlier checkpoints are as they were"
    return f"Checkpoints {there} are as they were" if there else "There is no checkpoint yet"


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a log record is to be printed: not if a thread of orbax logs an error of the disk, which is raised, too.
    Other errors, and errors of other code that logs to absl or asyncio, are printed."""
    error = record.exc_info[1] if record.exc_info else None
    if OS_ERROR in f"{record.getMessage()} {error}":
        return False
    return not (isinstance(error, OSError) and _is_from_orbax(error.__traceback__))


def _quiet_late_writes() -> None:
    """TensorStore answers writes that end after the first has failed to an event loop that orbax has closed, and each
    RuntimeError goes to `sys.unraisablehook`. From now on those, and no other errors, are not printed."""
    before = sys.unraisablehook
    if getattr(before, "__module__", None) == __name__:
        return

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if not _is_answer_to_closed_loop(unraisable.exc_value, unraisable.exc_traceback):
            before(unraisable)

    sys.unraisablehook = hook


def _is_answer_to_closed_loop(error: BaseException | None, trace: TracebackType | None) -> bool:
    # Called by C++: no frame of Python's is above asyncio's.
    outermost = "" if trace is None else trace.tb_frame.f_code.co_name
    return isinstance(error, RuntimeError) and outermost == "call_soon_threadsafe" and "loop is closed" in str(error)


def _is_from_orbax(trace: TracebackType | None) -> bool:
    while trace is not None:
        if "orbax" in Path(trace.tb_frame.f_code.co_filename).parts:
            return True
        trace = trace.tb_next
    return False
