"""Checks of the disk before a run, atomic replacement of files, and one-line errors when a write fails."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from smd_jax.byte_sizes import show_bytes

# TensorStore's notation for the system's error code, at the end of a page of text.
OS_ERROR = "os_error_code="
# Free file handles that a save needs: orbax opens a few per thread.
HANDLES = 32


def check_writable(directory: str | Path) -> None:
    """Raises OSError unless a file can be created in `directory`, or in its nearest existing parent. Leaves no file."""
    directory = Path(directory)
    there = nearest(directory)
    if not there.is_dir():
        raise NotADirectoryError(f"expected a directory, or nothing, at {directory}; got the file {there}")
    try:
        # Permission bits are not enough: they allow root everything, even on a read-only file system.
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise PermissionError(f"expected a directory that can be written at {directory}; got {error}") from error


def check_space(directory: str | Path, needed: int, what: str) -> None:
    """Raises OSError if the disk of `directory` has less than `needed` bytes free for `what`, such as "4 checkpoints of
    1.5 GiB"."""
    free = shutil.disk_usage(nearest(Path(directory))).free
    if free < needed:
        raise OSError(
            f"expected {show_bytes(needed)} free on the disk of {directory}, for {what}; got {show_bytes(free)}. Make "
            "room, keep fewer checkpoints (keep), or name another directory"
        )


def check_handles() -> None:
    """Raises OSError if this process cannot open the files of a checkpoint at once. Orbax's threads would only print
    tracebacks."""
    handles = list[int]()
    try:
        for _ in range(HANDLES):
            handles.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        raise OSError(
            error.errno,
            f"expected {HANDLES} free file handles, for a checkpoint; got {len(handles)} ({error.strerror}). Raise the "
            "limit, as by `ulimit -n 4096`",
        ) from error
    finally:
        for handle in handles:
            os.close(handle)


def stored_bytes(tree: Any) -> int:
    """Bytes of a pytree of arrays or shapes (`jax.ShapeDtypeStruct`) on disk."""
    return sum(_leaf_bytes(leaf) for leaf in jax.tree.leaves(tree))


def _leaf_bytes(leaf: Any) -> int:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yields a temporary path. The file that the body writes there replaces `path` at the end, so that readers find the
    old or the new file, also after a crash."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Writes the file atomically, with the umask's mode; safetensors itself makes files that only their owner can read.

    Raises:
      OSError: the file cannot be written.
    """
    with replaced(path) as new:
        new.touch()
        mode = new.stat().st_mode
        try:
            save_file(dict(tensors), new, metadata=dict(metadata))
        except SafetensorError as error:
            raise OSError(f"{path.name} could not be written: {error}") from error
        new.chmod(mode)


@contextmanager
def disk_errors_named(path: Path) -> Iterator[None]:
    """Adds the path and the free space to disk errors of its body, in one line."""
    try:
        yield
    # An existing file is no failure of the disk.
    except FileExistsError:
        raise
    except OSError as error:
        raise OSError(failure(str(path), path, error)) from error


def failure(what: str, place: str | Path, error: Exception) -> str:
    """One line that says why something could not be written to the disk of `place`."""
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    if code := _code_in(error):
        reason = os.strerror(code)
    free = show_bytes(shutil.disk_usage(nearest(Path(place))).free)
    return f"{what} could not be written ({free} free on the disk): {reason}"


def is_trouble(error: BaseException) -> bool:
    """Whether reading failed because of the disk, the network, a permission or too many open files, so that the file
    itself may be intact. A missing file does not count."""
    if isinstance(error, TimeoutError):
        return True
    code = error.errno if isinstance(error, OSError) else _code_in(error)
    return code not in (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)


def _code_in(error: BaseException) -> int | None:
    """The system's error code in a message of TensorStore."""
    found = re.search(rf"{OS_ERROR}'(\d+)'", str(error))
    return int(found[1]) if found else None


def nearest(path: Path) -> Path:
    """The path if it exists, else its nearest existing parent."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
