"""The nearest existing name to one that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

LONGEST = 200  # characters that are compared
MOST = 2000  # names that are compared


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A sentence with the nearest of some names, to append to a message; empty if none is near."""
    return _sentence(_near(name, names))


def nearest_file(path: str | Path, ending: str = "") -> str:
    """`did_you_mean` with the files of the path's folder, written as the path is; empty if there is no such folder.

    Args:
      ending: of the file names to consider.
    """
    path = Path(path)
    try:
        names = [file.name for file in path.expanduser().parent.iterdir() if file.name.endswith(ending)]
    except (OSError, ValueError, RuntimeError):
        return ""
    return _sentence([str(path.parent / name) for name in _near(path.name, names)])


def _near(name: str, names: Iterable[str]) -> list[str]:
    known = {other.lower(): other for other in list(names)[:MOST]}
    return [known[other] for other in difflib.get_close_matches(name[:LONGEST].lower(), known, n=3, cutoff=0.65)]


def _sentence(near: list[str]) -> str:
    return f". Did you mean {' or '.join(near)}?" if near else ""
