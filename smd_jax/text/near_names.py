"""The nearest existing name to one that does not exist."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A sentence with the nearest of some names, to append to a message; empty if none is near."""
    known = {other.lower(): other for other in names}
    near = [known[other] for other in difflib.get_close_matches(name[:200].lower(), known, cutoff=0.65)]
    return f". Did you mean {' or '.join(near)}?" if near else ""


def nearest_file(path: str | Path) -> str:
    """`did_you_mean` with the files in the path's folder; empty without such a folder."""
    path = Path(path)
    try:
        names = os.listdir(path.expanduser().parent)
    except (OSError, ValueError, RuntimeError):  # no folder, a NUL in its name, an unknown ~user
        return ""
    return did_you_mean(path.name, names[:2000])
