"""Paths that orbax and TensorStore misread: found out by name, before anything is written or read."""

from __future__ import annotations

from pathlib import Path

# Orbax merges the files of a checkpoint by a glob over its whole path.
GLOB = "*?["
# TensorStore reads a backslash as a slash.
BACKSLASH = "\\"


def check_writable_path(directory: str | Path) -> None:
    """Raises ValueError for a directory in which checkpoints would be empty: orbax reads its path as a pattern."""
    _check_characters(directory, GLOB + BACKSLASH, "orbax reads it as a pattern and would write empty checkpoints")


def check_readable_path(directory: str | Path) -> None:
    """Raises ValueError for a directory whose checkpoints TensorStore would look for elsewhere."""
    _check_characters(directory, BACKSLASH, "TensorStore would look for checkpoints elsewhere")


def _check_characters(directory: str | Path, refused: str, why: str) -> None:
    path = str(Path(directory).resolve())
    if found := sorted(set(path) & set(refused)):
        raise ValueError(
            f"expected a path without {' '.join(refused)} for checkpoints; got {' '.join(found)} in {path:.300}: "
            f"{why}. Choose or rename the directory"
        )
    if any("\ud800" <= character <= "\udfff" for character in path):
        raise ValueError(f"expected a path in UTF-8 for checkpoints; got {path!r:.300}")
