"""The lock of a run's directory: one process trains there at a time."""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from smd_jax.devices.processes import is_first
from smd_jax.disk import disk_errors_named

LOCK = "process.lock"
# Errors of file systems without locks: Lustre mounted without `flock`, NFS without its lock daemon, others.
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)

# Directories that this process has locked for a run that has not begun.
_reserved: set[Path] = set()


class DirectoryInUseError(RuntimeError):
    """Another run trains in the directory."""


@contextmanager
def reserve_directory(directory: Path) -> Iterator[None]:
    """Locks a directory for a `lock_directory` of the body, which would otherwise find it locked; errors are those of
    `lock_directory`."""
    path = directory.resolve()
    with lock_directory(directory):
        _reserved.add(path)
        try:
            yield
        finally:
            _reserved.discard(path)


@contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Locks the directory of a run during the body; the system unlocks it if the process is killed. Makes the directory
    if it is absent. Prints a warning if the file system has no locks. Of several processes the first locks it for all.

    Raises:
      DirectoryInUseError: another run has locked it.
      OSError: the lock cannot be written.
    """
    path = directory.resolve()
    if not is_first() or path in _reserved:
        _reserved.discard(path)  # for one run at a time
        yield
        return
    with disk_errors_named(directory / LOCK):
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / LOCK).open("w")
    with file:
        with disk_errors_named(directory / LOCK):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise DirectoryInUseError(
                    f"expected no other process that trains in {directory}; got one. Wait for it, or choose another "
                    "directory"
                ) from error
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                print(
                    f"warning: expected a file system with locks at {directory}; got {error.strerror}. Make sure that "
                    "no second process trains there",
                    flush=True,
                )
        yield
