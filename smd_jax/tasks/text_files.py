"""Rows of CSV, TSV and JSON files, with every value as the file has it.

A field of CSV is text: "007", "NA" and "None" are unchanged. A value of JSON has the type that JSON gives it. Files
that would lose something are refused: two columns of one name, a row of another length, lone surrogates, text after a
closing quote, an unclosed quote.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from smd_jax.tasks.task import Row
from smd_jax.text.visible_text import one_line

FORMATS: Mapping[str, str] = {
    **{".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".tsv": "csv"},
    **{".parquet": "parquet", ".arrow": "arrow"},
}
UNPACKERS: Mapping[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
FIRST_BYTES: Mapping[bytes, str] = {
    b"PAR1": "a parquet file: name it *.parquet",
    b"ARROW1": "an arrow file: name it *.arrow",
    b"\x1f\x8b": "a file compressed by gzip: name it *.gz, after its own suffix",
    b"PK\x03\x04": "a zip archive: unpack it",
    b"version https://git-lfs": "a pointer of Git LFS, without the data: get it with `git lfs pull`",
}

# Limit of an unpacked file: the larger of this size and ratio. Rows compress 5 to 50 times, zeros 1,000 times.
FREE_BYTES, MAX_RATIO = 2**26, 200
MAX_DEPTH = 64  # of lists and objects in a row; chat messages with schemas of tools have 10
MAX_FIELD = 2**26  # characters of a field of CSV


class FileRow(dict[str, Any]):
    """A row of a file. `place`: where it is, such as "rows.jsonl, line 3", for errors."""

    __slots__ = ("place",)

    def __init__(self, fields: Row, place: str) -> None:
        super().__init__(fields)
        self.place = place


def data_format(path: Path) -> str:
    """The format by a file's name: "json", "csv", "parquet" or "arrow"; only text may be compressed. Raises ValueError
    for another name."""
    plain = path.with_suffix("") if path.suffix.lower() in UNPACKERS else path
    found = FORMATS.get(plain.suffix.lower())
    if found is None or (plain != path and found not in ("json", "csv")):
        raise ValueError(f"expected a file of data, named {', '.join('*' + known for known in FORMATS)}; got {path}")
    return found


def check_first_bytes(path: Path, beginning: bytes) -> None:
    """Raises ValueError for an empty file, or one that begins like a file of another format."""
    if not beginning:
        raise ValueError(f"{path}: expected data; got an empty file")
    wanted = data_format(path)
    got = next((what for start, what in FIRST_BYTES.items() if beginning.startswith(start)), "")
    if wanted == "parquet" and not beginning.startswith(b"PAR1"):
        raise ValueError(f"{path}: expected a parquet file, which begins with 'PAR1'; got {got or repr(beginning)}")
    if got and wanted not in got:
        raise ValueError(f"{path}: expected {wanted} data; got {got}")


def text_rows(path: Path) -> list[FileRow]:
    """Reads the rows of a CSV or JSON file. Raises ValueError for a file that is damaged, of another form, or without
    rows."""
    try:
        content = _content(path)
        check_first_bytes(path, content[:32])
        rows = [*(_csv_rows if data_format(path) == "csv" else _json_rows)(path, content)]
    except (OSError, EOFError, zlib.error, lzma.LZMAError, csv.Error, UnicodeDecodeError) as error:
        said = one_line(f"{type(error).__name__}: {error}", 300)
        raise ValueError(f"expected data that can be read in {path}; got {said}") from error
    if not rows:
        raise ValueError(f"expected at least one row in {path}; got none")
    for where, row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"{where}: expected a JSON object; got {type(row).__name__} {one_line(repr(row), 60)}")
    return [FileRow(row, where) for where, row in rows]


def _content(path: Path) -> bytes:
    """Reads and unpacks a file, up to a limit."""
    unpacker = UNPACKERS.get(path.suffix.lower())
    if unpacker is None:
        return path.read_bytes()
    size = path.stat().st_size
    most = max(FREE_BYTES, MAX_RATIO * size)
    with unpacker(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path}: expected {size:,} bytes to unpack to at most {most:,}; got more")
    return content


def _csv_rows(path: Path, content: bytes) -> Iterator[tuple[str, Row]]:
    csv.field_size_limit(MAX_FIELD)
    delimiter = "\t" if ".tsv" in path.name.lower() else ","
    rows = _fields(content.decode("utf-8-sig"), delimiter)
    header = next(rows, [])
    if len(set(header)) < len(header):
        got = one_line(repr([name for name in dict.fromkeys(header) if header.count(name) > 1]), 200)
        raise ValueError(f"{path}: expected columns of different names; got {got} more than once")
    for number, row in enumerate(rows, start=1):
        if len(row) != len(header):
            got = f"{len(row)}: {one_line(delimiter.join(row), 80)}"
            raise ValueError(f"{path}: expected {len(header)} fields in every row, as in the header; got {got}")
        yield f"{path}, row {number}", dict(zip(header, row, strict=True))


def _fields(text: str, delimiter: str) -> Iterator[list[str]]:
    """The fields of every row but the empty ones. Raises csv.Error, which names the row's first line, for misplaced
    quotes."""
    # Unless strict, the parser drops the quotes of `"Hello" she said`, and reads the rest of a file as one field.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    begins = 1  # a row may have several lines
    try:
        for row in reader:
            begins = reader.line_num + 1
            if row:  # csv gives [] for an empty line
                yield row
    except csv.Error as error:
        raise csv.Error(f"{error}, in the row that begins in line {begins}") from error


def _json_rows(path: Path, content: bytes) -> Iterator[tuple[str, Row]]:
    """Rows of a JSON file: one list of objects, or one object per line."""
    if content.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        listed = _parsed(content, str(path))
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(listed, start=1))
        return
    for number, line in enumerate(io.BytesIO(content), start=1):  # bytes, because U+2028 ends no line
        if line.strip():
            where = f"{path}, line {number}"
            yield where, _parsed(line, where)


def _parsed(text: bytes, where: str) -> Any:
    """Parses a JSON text. Refuses lone surrogates, which JSON can write as `\\ud83d` and no tokenizer takes."""
    try:
        value = json.loads(text, object_pairs_hook=_object)
        is_deep = _depth(value) > MAX_DEPTH
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        is_deep = True
    except ValueError as error:
        got = text.strip()[:60].decode("utf-8", errors="replace")
        raise ValueError(f"{where}: expected JSON; got {got!r} ({one_line(str(error), 200)})") from error
    if is_deep:
        raise ValueError(f"{where}: expected JSON nested at most {MAX_DEPTH} deep; got more")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"expected fields of different names; got {[name for name, _ in pairs]}")
    return found


def _depth(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(_depth, value.values() if isinstance(value, dict) else value), default=0)
