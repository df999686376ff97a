"""Files that may be compressed, read as a stream and with a limit on what they unpack to."""

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

# A file that is larger than all of its text explains is no data: rows repeat themselves 5 to 50 times, zeros 1,000.
MAX_RATIO = 200
FREE_BYTES = 64 * 2**20

UNPACKING_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError)


def _open_zst(path: Path) -> Any:
    import pyarrow

    return pyarrow.input_stream(str(path), compression="zstd")


OPENERS: Mapping[str, Callable[[Path], Any]] = MappingProxyType(
    {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zst}
)


def open_data(path: Path) -> io.BufferedReader:
    """The bytes of a file, unpacked where its name ends in .gz, .bz2, .xz or .zst.

    Reading raises ValueError where a small file unpacks to more than `MAX_RATIO` times its size and 64 MiB, and one of
    `UNPACKING_ERRORS` where it is damaged.
    """
    opener = OPENERS.get(path.suffix.lower())
    if opener is None:
        return path.open("rb")
    most = max(FREE_BYTES, MAX_RATIO * path.stat().st_size)
    return io.BufferedReader(_Limited(opener(path), most, path), buffer_size=2**20)


def check_unpacked(path: Path) -> None:
    """Raises ValueError for a compressed file that is damaged, or unpacks to too much: to be called before another
    library unpacks it."""
    try:
        with open_data(path) as file:
            while file.read(2**24):
                pass
    except UNPACKING_ERRORS as error:
        raise ValueError(
            f"{path}: expected a file that can be unpacked; got {type(error).__name__}: {error}"
        ) from error


class _Limited(io.RawIOBase):
    """A stream that raises ValueError behind its `most` bytes."""

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
