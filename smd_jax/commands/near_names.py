"""Names and paths of users: of any length and in any encoding, and the nearest one for one that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from smd_jax.commands.errors import UserError


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


def nearest_hint(path: Path) -> str:
    """A sentence with the files of the folder whose names are near the path's; empty where there are none."""
    try:
        names = [file.name for file in path.parent.iterdir()]
    except (OSError, ValueError):
        return ""
    return did_you_mean(path.name[:200], names)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A sentence with the nearest of some names; empty where none is near."""
    near = difflib.get_close_matches(name, list(names), n=3, cutoff=0.7)
    return f". Did you mean {' or '.join(near)}?" if near else ""
