"""What kind of data a file holds: what its name says, checked against its first bytes."""

from __future__ import annotations

import contextlib
import csv
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class FileFormat:
    """A kind of data file.

    Attributes:
      builder: what `datasets` calls it.
      options: how its builder is told to read it, as (name, value) pairs.
      begins_with: the bytes that every such file begins with; empty for text, which may begin with anything.
    """

    builder: str
    options: tuple[tuple[str, Any], ...] = ()
    begins_with: bytes = b""


JSON_LINES = FileFormat("json")
PARQUET = FileFormat("parquet", begins_with=b"PAR1")
# A file of either layout: a stream, as `save_to_disk` writes it, or with a footer, which begins with this.
ARROW = FileFormat("arrow")

FORMATS: Mapping[str, FileFormat] = MappingProxyType(
    {
        ".jsonl": JSON_LINES,
        ".ndjson": JSON_LINES,
        ".json": FileFormat("json"),
        ".csv": FileFormat("csv"),
        ".tsv": FileFormat("csv", options=(("sep", "\t"),)),
        ".parquet": PARQUET,
        ".arrow": ARROW,
    }
)

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")

# What a file that is named as text, or as another format, may really be.
FOREIGN_BEGINNINGS: Mapping[bytes, str] = MappingProxyType(
    {
        b"PAR1": "a parquet file: name it *.parquet",
        b"ARROW1": "an arrow file: name it *.arrow",
        b"\x1f\x8b": "a file compressed by gzip: name it *.gz, behind its own suffix",
        b"PK\x03\x04": "a zip archive: unpack it",
        b"version https://git-lfs": "a pointer of Git LFS, without the data: get it with `git lfs pull`",
    }
)


def format_of(path: Path) -> FileFormat:
    """The format that the file's name says.

    Raises:
      ValueError: a name without any suffix that we know.
    """
    suffix = _data_suffix(path)
    if suffix not in FORMATS:
        raise ValueError(f"expected a file of data, named {', '.join('*' + known for known in FORMATS)}; got {path}")
    return FORMATS[suffix]


def is_json_lines(path: Path) -> bool:
    """Whether every line of the file is an object of its own, and it can be read as it lies."""
    return path.suffix.lower() in (".jsonl", ".ndjson")


def check_content(path: Path) -> None:
    """Raises ValueError if the file begins as one of another format does, or holds nothing."""
    expected = format_of(path)
    with path.open("rb") as file:
        beginning = file.read(32)
    if not beginning:
        raise ValueError(f"{path}: expected data; got an empty file")
    if path.suffix.lower() in COMPRESSED:
        return
    found = next((what for start, what in FOREIGN_BEGINNINGS.items() if beginning.startswith(start)), None)
    if expected.begins_with and not beginning.startswith(expected.begins_with):
        raise ValueError(
            f"{path}: expected a {expected.builder} file, which begins with {expected.begins_with!r}; "
            f"got {found or repr(beginning)}"
        )
    if not expected.begins_with and found is not None and not _may_begin(expected, beginning):
        raise ValueError(f"{path}: expected {_data_suffix(path)[1:]} data; got {found}")
    if expected.builder == "csv":
        _check_header(path, str(dict(expected.options).get("sep", ",")))


def looks_like_a_path(name: str) -> bool:
    """Whether a name can't be a data set of the Hub, and so must have been meant as a path."""
    return (
        name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1 or _data_suffix(Path(name)) in FORMATS
    )


def _check_header(path: Path, separator: str) -> None:
    """Raises ValueError if the first row has more fields than the header: pandas, which reads the file, would take the
    first column for row labels then, and give every other one the name of its neighbour."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file, contextlib.suppress(csv.Error):
        first = list(itertools.islice(csv.reader(file, delimiter=separator), 2))
        if len(first) == 2 and len(first[1]) > len(first[0]):
            raise ValueError(
                f"{path}: expected {len(first[0])} fields in every row, as in the header {first[0]}; got "
                f"{len(first[1])} in the first row. Put quotes around text that has {separator!r} in it"
            )


def _may_begin(expected: FileFormat, beginning: bytes) -> bool:
    return expected is ARROW and beginning.startswith(b"ARROW1")


def _data_suffix(path: Path) -> str:
    """The suffix that names the format: ".csv" of rows.csv.gz."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if len(suffixes) == 2 and suffixes[1] in COMPRESSED:
        return suffixes[0]
    return suffixes[-1] if suffixes else ""
