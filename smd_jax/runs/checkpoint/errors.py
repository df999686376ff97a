"""Errors of checkpoints, each in one line that names the checkpoint and the reason."""

from __future__ import annotations

import logging
import shutil
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from smd_jax.disk import OS_ERROR, failure, is_trouble


class OtherConfigError(ValueError):
    """A checkpoint has another configuration than the run that would continue it."""


class OtherFormatError(ValueError):
    """Another library, or a later version of this one, wrote the checkpoint."""


class OtherStateError(ValueError):
    """A checkpoint holds the state of another model or optimizer."""


class DamagedCheckpointError(RuntimeError):
    """A checkpoint exists but cannot be read; the message names the step and the reason."""


@contextmanager
def damage_named(directory: str | Path, step: int) -> Iterator[None]:
    """Turns errors of reading a damaged file into a DamagedCheckpointError.

    If the disk fails, or a permission is missing, the file may be intact: that becomes an OSError.
    """
    try:
        yield
    except OtherFormatError:
        raise
    except Exception as error:
        # For files that are missing, truncated or changed. For a truncated array orbax raises Exception itself.
        if not isinstance(error, ValueError | KeyError | TypeError | OSError) and type(error) is not Exception:
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if is_trouble(error):
            raise OSError(
                f"expected to read checkpoint {step} in {directory}; got {reason}. It is unchanged: try again, or "
                "move it away to continue from an older one"
            ) from error
        raise DamagedCheckpointError(f"checkpoint {step} in {directory} cannot be read: {reason}") from error


@contextmanager
def disk_failure_named(directory: Path, step: int) -> Iterator[None]:
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
        for folder in directory.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(folder, ignore_errors=True)
        # Orbax's own timeout while it waits for other processes has no errno; that of a network disk has one.
        if isinstance(error, TimeoutError) and error.errno is None:
            message = f"expected all processes to write their parts of checkpoint {step} in {directory}; one did not: "
            raise OSError(f"{message}{error}") from error
        message = failure(f"checkpoint {step} in {directory}", directory, error)
        raise OSError(f"{message}. Earlier checkpoints are unchanged") from error


def _is_worth_printing(record: logging.LogRecord) -> bool:
    """False for errors of the disk that threads of orbax log and raise, too; true for all others."""
    error = record.exc_info[1] if record.exc_info else None
    if OS_ERROR in f"{record.getMessage()} {error}":
        return False
    if not isinstance(error, OSError):
        return True
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    return not any("orbax" in Path(file).parts for file in files)


def _quiet_late_writes() -> None:
    """Silences the errors that follow a failed write: later writes end after orbax has closed its event loop.

    TensorStore sends their RuntimeErrors to `sys.unraisablehook`; Python warns of those that never started. Other
    errors and warnings are printed.
    """
    warnings.filterwarnings("ignore", message=r"coroutine 'async_serialize\S*' was never awaited")
    before = sys.unraisablehook
    if getattr(before, "__module__", None) == __name__:
        return

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        trace = unraisable.exc_traceback
        # C++ calls it, so asyncio's frame is the outermost.
        if trace is None or trace.tb_frame.f_code.co_name != "call_soon_threadsafe":
            before(unraisable)

    sys.unraisablehook = hook
