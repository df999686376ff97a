"""What a folder must hold to count as a checkpoint of this library."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Checkpoints from before there was a number have this format, without notes and machine.
FORMAT = 1

ITEMS = ("state", "meta")
CHECKSUMS = "checksums.json"
# Files that an interrupted deletion or write may leave, and that do not tell which library wrote them.
_REMAINS = {"_CHECKPOINT_METADATA", f"{CHECKSUMS}.tmp"}


class OtherFormatError(ValueError):
    """Another library, or a later version of this one, wrote the checkpoint."""


def check_ours(folder: Path, others: Iterable[Path]) -> None:
    """Raises OtherFormatError for a step's folder that has neither item.

    An emptied folder passes if a folder of another step is a checkpoint of ours: then it is a damaged one.
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
    """Raises ValueError for a folder that an interrupted deletion or a power cut has emptied."""
    if not _is_ours(folder):
        raise ValueError(f"expected {' and '.join(ITEMS)}; got {_names_in(folder)}")


def read_meta_file(folder: Path) -> dict[str, Any]:
    """The JSON of the item `meta`. Raises OSError or ValueError if it cannot be read."""
    return json.loads((folder / "meta" / "metadata").read_text(encoding="utf-8"))


def check_format(meta: dict[str, Any], folder: Path) -> None:
    """Raises OtherFormatError for a checkpoint that another version wrote."""
    if meta.get("format", FORMAT) != FORMAT:
        raise OtherFormatError(
            f"expected a checkpoint of format {FORMAT} at {folder}; got format {meta['format']!r}, which another "
            "version of smd_jax wrote"
        )


def check_keys(meta: dict[str, Any]) -> None:
    """Raises ValueError if a key is missing that every version writes."""
    expected = {"leaves", "data_position", "config"}
    # Older checkpoints have only these; a later format may have more.
    if not expected <= set(meta):
        raise ValueError(f"meta: expected the keys {sorted(expected)}; got {sorted(meta)}")
