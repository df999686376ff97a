"""CRC-32 of the files of a checkpoint: orbax keeps no checksum of array data, and a flipped bit would be trained on."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path

CHECKSUMS = "checksums.json"


def write_checksums(folder: Path, items: Sequence[str]) -> None:
    """Writes `checksums.json` into `folder`: of every file in the folders `items`."""
    # Renamed when whole: half a list would make good files look damaged.
    temporary = folder / f"{CHECKSUMS}.tmp"
    temporary.write_text(json.dumps(_checksums(folder, items)), encoding="utf-8")
    temporary.replace(folder / CHECKSUMS)


def check_files(folder: Path, items: Sequence[str], left_out: Sequence[str] = ()) -> None:
    """Raises ValueError, which names every file that is not as it was written.

    A run killed between the rename of the checkpoint and the list of its checksums leaves a whole one without: it
    passes.

    Args:
      items: folders whose files are read.
      left_out: folders whose files are in the list, and are not looked at.
    """
    expected = {name: value for name, value in _listed(folder).items() if name.partition("/")[0] not in left_out}
    if not expected:
        return
    found = _checksums(folder, items)
    damaged = [name for name in expected if expected[name] != found.get(name)]
    if damaged:
        lines = [f"{name} (CRC-32 expected {expected[name]}, got {found.get(name, 'no file')})" for name in damaged]
        raise ValueError(f"{len(lines)} of {len(expected)} files are damaged: {', '.join(lines)}")


def names_in(folder: Path, items: Sequence[str]) -> list[str]:
    """Relative paths of all files in the items, and of the list of checksums where there is one."""
    return [file.relative_to(folder).as_posix() for file in _files(folder, items)] + [CHECKSUMS] * bool(_listed(folder))


def check_there(folder: Path, names: Sequence[str]) -> None:
    """Raises ValueError, which tells every file that is not to be seen; reads none of them."""
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{len(missing)} files are not there: {', '.join(missing)}")


def _listed(folder: Path) -> dict[str, int]:
    """The list; empty where none was written."""
    file = folder / CHECKSUMS
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _checksums(folder: Path, items: Sequence[str]) -> dict[str, int]:
    """Relative path -> CRC-32 of every file in the items."""
    return {file.relative_to(folder).as_posix(): _crc32(file) for file in _files(folder, items)}


def _files(folder: Path, items: Sequence[str]) -> list[Path]:
    return [file for item in items for file in sorted((folder / item).rglob("*")) if file.is_file()]


def _crc32(file: Path) -> int:
    value = 0
    with open(file, "rb") as stream:
        # 16 MiB at a time: a file may be larger than the memory that is left.
        while chunk := stream.read(1 << 24):
            value = zlib.crc32(chunk, value)
    return value
