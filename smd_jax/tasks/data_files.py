"""Data files: the format that a name promises, checked against the first bytes, and decompression with a limit."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

# Rows repeat themselves 5 to 50 times, zeros 1,000 times: a higher ratio is no data.
MAX_RATIO = 200
FREE_BYTES = 64 * 2**20
UNPACKING_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError)

# The builder of `datasets` for each suffix.
FORMATS: Mapping[str, str] = MappingProxyType(
    {
        ".jsonl": "json",
        ".ndjson": "json",
        ".json": "json",
        ".csv": "csv",
        ".tsv": "csv",
        ".parquet": "parquet",
        ".arrow": "arrow",
    }
)
PARQUET_MAGIC = b"PAR1"
ARROW_MAGIC = b"ARROW1"  # of Arrow files with a footer; those that `save_to_disk` writes have none
FOREIGN_BEGINNINGS: Mapping[bytes, str] = MappingProxyType(
    {
        PARQUET_MAGIC: "a parquet file: name it *.parquet",
        ARROW_MAGIC: "an arrow file: name it *.arrow",
        b"\x1f\x8b": "a file compressed by gzip: name it *.gz, behind its own suffix",
        b"PK\x03\x04": "a zip archive: unpack it",
        b"version https://git-lfs": "a pointer of Git LFS, without the data: get it with `git lfs pull`",
    }
)


def _open_zst(path: Path) -> Any:
    import pyarrow

    return pyarrow.input_stream(str(path), compression="zstd")


OPENERS: Mapping[str, Callable[[Path], Any]] = MappingProxyType(
    {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zst}
)


def builder_name(path: Path) -> str:
    """The builder of `datasets` that reads the file, by its suffix.

    Raises:
      ValueError: an unknown suffix.
    """
    suffix = data_suffix(path)
    if suffix not in FORMATS:
        raise ValueError(f"expected a file of data, named {', '.join('*' + known for known in FORMATS)}; got {path}")
    return FORMATS[suffix]


def is_text(path: Path) -> bool:
    """Whether the file is CSV or JSON."""
    return builder_name(path) in ("csv", "json")


def check_beginning(path: Path) -> None:
    """Raises ValueError for an empty file, or one that begins like a file of another format."""
    builder = builder_name(path)
    with path.open("rb") as file:
        beginning = file.read(32)
    if not beginning:
        raise ValueError(f"{path}: expected data; got an empty file")
    if is_compressed(path):
        return
    found = next((what for start, what in FOREIGN_BEGINNINGS.items() if beginning.startswith(start)), None)
    if builder == "parquet":
        if not beginning.startswith(PARQUET_MAGIC):
            raise ValueError(
                f"{path}: expected a parquet file, which begins with {PARQUET_MAGIC!r}; got {found or repr(beginning)}"
            )
    elif found is not None and not (builder == "arrow" and beginning.startswith(ARROW_MAGIC)):
        raise ValueError(f"{path}: expected {data_suffix(path)[1:]} data; got {found}")


def looks_like_a_path(name: str) -> bool:
    """Whether a name must mean a path, because the Hub has no such names."""
    return name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1 or data_suffix(Path(name)) in FORMATS


def data_suffix(path: Path) -> str:
    """The suffix that names the format: ".csv" of rows.csv.gz."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if len(suffixes) == 2 and suffixes[1] in OPENERS:
        return suffixes[0]
    return suffixes[-1] if suffixes else ""


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in OPENERS


def open_data(path: Path) -> io.BufferedReader:
    """Opens a file and unpacks it, if its name ends in .gz, .bz2, .xz or .zst.

    Reading raises ValueError for a file that unpacks to more than 64 MiB and `MAX_RATIO` times its size, and one of
    `UNPACKING_ERRORS` for a damaged file.
    """
    if not is_compressed(path):
        return path.open("rb")
    most = max(FREE_BYTES, MAX_RATIO * path.stat().st_size)
    return io.BufferedReader(_Limited(OPENERS[path.suffix.lower()](path), most, path), buffer_size=2**20)


def check_unpacked(path: Path) -> None:
    """Unpacks a compressed file, for its errors, before another library does."""
    try:
        with open_data(path) as file:
            while file.read(2**24):
                pass
    except UNPACKING_ERRORS as error:
        raise ValueError(
            f"{path}: expected a file that can be unpacked; got {type(error).__name__}: {error}"
        ) from error


class _Limited(io.RawIOBase):
    """A stream that raises ValueError after `most` bytes."""

    def __init__(self, stream: Any, most: int, path: Path) -> None:
        self._stream, self._left, self._most, self._path = stream, most, most, path

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        found = self._stream.read(len(buffer))
        self._left -= len(found)
        if self._left < 0:
            size = self._path.stat().st_size
            raise ValueError(f"{self._path}: expected {size:,} bytes to unpack to at most {self._most:,}; got more")
        buffer[: len(found)] = found
        return len(found)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()
