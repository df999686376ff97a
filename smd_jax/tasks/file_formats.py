"""What kind of data a file holds: what its name says, checked against its first bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from smd_jax.tasks.compressed import OPENERS


@dataclass(frozen=True)
class FileFormat:
    """A kind of data file.

    Attributes:
      builder: what `datasets` calls it.
      begins_with: the bytes that every such file begins with; empty for text, which may begin with anything.
    """

    builder: str
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
        ".tsv": FileFormat("csv"),
        ".parquet": PARQUET,
        ".arrow": ARROW,
    }
)

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


def is_text(path: Path) -> bool:
    """Whether the file is CSV or JSON."""
    return format_of(path).builder in ("csv", "json")


def is_csv(path: Path) -> bool:
    """Whether the file is CSV or TSV."""
    return format_of(path).builder == "csv"


def separator_of(path: Path) -> str:
    """What separates the fields of a CSV or TSV file."""
    return "\t" if _data_suffix(path) == ".tsv" else ","


def check_content(path: Path) -> None:
    """Raises ValueError if the file begins as one of another format does, or holds nothing."""
    expected = format_of(path)
    with path.open("rb") as file:
        beginning = file.read(32)
    if not beginning:
        raise ValueError(f"{path}: expected data; got an empty file")
    if path.suffix.lower() in OPENERS:
        return
    found = next((what for start, what in FOREIGN_BEGINNINGS.items() if beginning.startswith(start)), None)
    if expected.begins_with and not beginning.startswith(expected.begins_with):
        raise ValueError(
            f"{path}: expected a {expected.builder} file, which begins with {expected.begins_with!r}; "
            f"got {found or repr(beginning)}"
        )
    if not expected.begins_with and found is not None and not _may_begin(expected, beginning):
        raise ValueError(f"{path}: expected {_data_suffix(path)[1:]} data; got {found}")


def looks_like_a_path(name: str) -> bool:
    """Whether a name can't be a data set of the Hub, and so must have been meant as a path."""
    return (
        name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1 or _data_suffix(Path(name)) in FORMATS
    )


def _may_begin(expected: FileFormat, beginning: bytes) -> bool:
    return expected is ARROW and beginning.startswith(b"ARROW1")


def _data_suffix(path: Path) -> str:
    """The suffix that names the format: ".csv" of rows.csv.gz."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if len(suffixes) == 2 and suffixes[1] in OPENERS:
        return suffixes[0]
    return suffixes[-1] if suffixes else ""
