"""Absolute paths of a run's files, so that it can be resumed from any folder, and the lock of its directory."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import jax

from smd_jax.commands.arguments import Common
from smd_jax.commands.decode_names import policy_text, split_decodes
from smd_jax.commands.described_policies import with_full_path
from smd_jax.commands.errors import UserError, print_box
from smd_jax.commands.policy_names import own_place
from smd_jax.disk import written
from smd_jax.tasks.build import PROCEDURAL
from smd_jax.tasks.functions import is_file_name
from smd_jax.tasks.presets import PRESETS

PATHS = ("model", "tokenizer", "dataset", "dataset_source", "eval_dataset", "eval_source", "output_dir")
FUNCTIONS = ("map_function", "reward", "environment")
POLICIES = ("eviction", "eval_decode")
LOCK = "process.lock"
# Errors of file systems without locks: Lustre mounted without `flock`, NFS without its lock daemon, others.
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


def full_path(name: str | Path) -> Path:
    """The absolute path of a name, with `~` expanded.

    Raises:
      UserError: no such user, no home folder, a removed current folder, a loop of links, or characters that no file
        system has.
    """
    try:
        return Path(name).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"expected a path; got {str(name)[:200]!r}: {str(error)[:200]}") from error


def is_file(path: Path) -> bool:
    """Whether the path is a file; False for a name that is too long or that no file system has."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def exists(path: Path) -> bool:
    """Whether the path exists; False for a name that is too long or that no file system has."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def from_the_root(args: Common) -> Common:
    """The arguments with absolute paths. Names, ids on the Hub and paths that do not exist stay as they are."""
    groups = {name: dataclasses.replace(group, **dict(_spelled(group))) for name, group in vars(args).items()}
    return dataclasses.replace(args, **groups)


def _spelled(group: Any) -> Iterator[tuple[str, Any]]:
    for name, value in vars(group).items():
        if isinstance(value, Path):
            yield name, full_path(value)
        elif name in PATHS and isinstance(value, str):
            yield name, path_from_the_root(value)
        elif name in FUNCTIONS and isinstance(value, str):
            yield name, function_from_the_root(value)
        elif name in FUNCTIONS and isinstance(value, tuple):
            yield name, tuple(map(function_from_the_root, value))
        elif name in POLICIES and isinstance(value, str):
            yield name, policy_from_the_root(value)
        elif name in POLICIES and isinstance(value, tuple):
            yield name, tuple(",".join(map(policy_from_the_root, split_decodes(words))) for words in value)


def path_from_the_root(name: str) -> str:
    """The absolute path of a path that exists. The name of a task stays, even if a folder has that name."""
    if not name or name in PRESETS or name.startswith(PROCEDURAL):
        return name
    path = full_path(name)
    return str(path) if exists(path) else name


def function_from_the_root(where: str) -> str:
    """`path/to/file.py:function`; `package.module:function` stays."""
    place, colon, name = where.rpartition(":")
    return f"{path_from_the_root(place)}{colon}{name}" if is_file_name(place) else where


def policy_from_the_root(text: str) -> str:
    """`path/to/file.py:Class(parameter=value)`, or a policy with a file of query centers, with an absolute path."""
    place = own_place(policy_text(text))
    if place is None:
        return with_full_path(text)
    return text.replace(place, path_from_the_root(place), 1) if is_file_name(place) else text


@contextmanager
def only_process(directory: Path) -> Iterator[None]:
    """Locks the directory of a run until the process ends. Warns if the file system has no locks.

    Raises:
      UserError: another process has locked it.
    """
    if jax.process_index() > 0:  # the first process of the run locks it for all
        yield
        return
    with written(directory / LOCK):
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / LOCK).open("w")
    with file:
        with written(directory / LOCK):
            _lock(file, directory)
        yield


def _lock(file: TextIO, directory: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(
            f"expected no other process that trains in {directory}; got one. Wait for it, or choose another "
            "--output-dir"
        ) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        print_box(
            "look at this",
            f"expected a file system with locks at {directory}; got {error.strerror}. Make sure that no second process "
            "trains there",
        )
