"""Whose a checkpoint is: which files and keys one of this library has, of which format, and what is left of one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from smd_jax.runs.checkpoint.checksums import CHECKSUMS

# Of what a checkpoint holds, and where. Those from before there was a number have this one, without notes and machine.
FORMAT = 1

ITEMS = ("state", "meta")
# What a delete or a write that was cut off may leave of a checkpoint, and that does not say whose it was.
_REMAINS = {"_CHECKPOINT_METADATA", f"{CHECKSUMS}.tmp"}


class OtherFormatError(ValueError):
    """What lies there was not written by this library, or by a later version of it."""


def check_ours(folder: Path, others: Iterable[Path]) -> None:
    """Raises OtherFormatError for a step's directory that has neither item: somebody else's checkpoint.

    One that was emptied passes if one of the other steps' is ours: then it was, too, and is damaged.
    """
    if _is_ours(folder):
        return
    found = _names_in(folder)
    if _REMAINS.issuperset(found) and any(_is_ours(other) for other in others):
        return
    raise OtherFormatError(f"expected a checkpoint of smd_jax at {folder}, with {' and '.join(ITEMS)}; got {found}")


def _is_ours(folder: Path) -> bool:
    return any((folder / name).exists() for name in (*ITEMS, CHECKSUMS))


def _names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def check_not_emptied(folder: Path) -> None:
    """Raises ValueError for what a process leaves that was killed while it deleted, or a power cut."""
    if not _is_ours(folder):
        raise ValueError(f"expected {' and '.join(ITEMS)}; got {_names_in(folder)}")


def check_format(meta: dict[str, Any], folder: Path) -> None:
    """Raises OtherFormatError for a checkpoint that another version wrote."""
    if meta.get("format", FORMAT) != FORMAT:
        raise OtherFormatError(
            f"expected a checkpoint of format {FORMAT} at {folder}; got format {meta['format']!r}, which another "
            "version of smd_jax wrote"
        )


def check_keys(meta: dict[str, Any]) -> None:
    """Raises ValueError where a key is missing that every version writes."""
    expected = {"leaves", "data_position", "config"}
    # Older checkpoints have no others; those of a later format may have more.
    if not expected <= set(meta):
        raise ValueError(f"meta: expected the keys {sorted(expected)}; got {sorted(meta)}")
