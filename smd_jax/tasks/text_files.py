"""Rows of CSV, TSV and JSON files, with every value as the file has it.

A field of CSV is text: "007", "NA" and "None" stay as they are. A value of JSON has the type that JSON gives it. Files
that would lose something are refused: two columns of one name, a row of another length, halves of characters.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smd_jax.tasks.data_files import UNPACKING_ERRORS, builder_name, data_suffix, open_data
from smd_jax.tasks.task import Row
from smd_jax.text.visible_text import one_line

MAX_DEPTH = 64  # of lists and objects in a row; chat messages with schemas of tools have 10
MAX_FIELD = 2**26  # characters of a field of CSV
LINES = (".jsonl", ".ndjson")


def text_rows(path: Path, separator: str | None = None) -> Iterator[tuple[str, Row]]:
    """Reads the rows of a file one by one, each with its place, such as "rows.jsonl, line 3".

    Args:
      separator: of the fields of a CSV file; None: a tab for *.tsv, else a comma.

    Raises:
      ValueError: a file that is damaged, of another form, or without rows.
    """
    try:
        if builder_name(path) == "csv":
            yield from _csv_rows(path, separator or ("\t" if data_suffix(path) == ".tsv" else ","))
        else:
            yield from _json_rows(path)
    except (*UNPACKING_ERRORS, csv.Error, UnicodeDecodeError) as error:
        said = one_line(f"{type(error).__name__}: {error}", 300)
        raise ValueError(f"expected data that can be read in {path}; got {said}") from error


def _csv_rows(path: Path, delimiter: str) -> Iterator[tuple[str, Row]]:
    csv.field_size_limit(MAX_FIELD)
    with io.TextIOWrapper(open_data(path), encoding="utf-8-sig", newline="") as file:
        rows = filter(None, csv.reader(file, delimiter=delimiter))  # csv gives [] for an empty line
        header = next(rows, [])
        twice = [name for name, count in Counter(header).items() if count > 1]
        if twice:
            got = one_line(repr(twice), 200)
            raise ValueError(f"{path}: expected columns of different names; got {got} more than once")
        number = 0
        for number, row in enumerate(rows, start=1):
            if len(row) != len(header):
                hint = ". Put quotes around text that has a separator in it" if len(row) > len(header) else ""
                got = f"{len(row)}: {one_line(delimiter.join(row), 80)}"
                raise ValueError(
                    f"{path}: expected {len(header)} fields in every row, as in the header; got {got}{hint}"
                )
            yield f"{path}, row {number}", dict(zip(header, row, strict=True))
        if not number:
            raise ValueError(f"expected at least one row in {path}; got none")


def _json_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """An object per line; in a file named *.json also one list of objects."""
    where = ""
    with open_data(path) as file:
        start = file.peek().removeprefix(b"\xef\xbb\xbf").lstrip()
        if start.startswith(b"[") and not any(suffix in LINES for suffix in path.suffixes):
            for number, row in enumerate(_parsed(file.read(), str(path), "a list of JSON objects")):
                where = f"{path}, row {number}"
                yield where, _checked_object(row, where)
        else:
            for number, line in enumerate(file, start=1):  # bytes, because U+2028 ends no line
                if line.strip():
                    where = f"{path}, line {number}"
                    yield where, _checked_object(_parsed(line, where, "a JSON object"), where)
    if not where:
        raise ValueError(f"{path}: expected at least one JSON object; got an empty file")


def _parsed(text: bytes, where: str, expected: str) -> Any:
    """Parses a JSON text.

    Raises:
      ValueError: no JSON; an object with two fields of one name; nested deeper than `MAX_DEPTH`; halves of characters.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except _TwiceError as error:
        raise ValueError(f"{where}: expected fields of different names; got {error} twice") from error
    except RecursionError as error:
        raise ValueError(f"{where}: expected JSON nested at most {MAX_DEPTH} deep; got more") from error
    except ValueError as error:  # also a number of thousands of digits
        listed = text.lstrip().startswith(b"[") and expected == "a JSON object"
        hint = ". A file that is one list of objects is named *.json" if listed else ""
        got = text.strip()[:60].decode("utf-8", errors="replace")
        raise ValueError(f"{where}: expected {expected}; got {got!r} ({one_line(str(error), 200)}){hint}") from error
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH and _is_deep(value):
        raise ValueError(f"{where}: expected JSON nested at most {MAX_DEPTH} deep; got more")
    if b"\\ud" in text.lower():
        _check_characters(value, where)
    return value


class _TwiceError(ValueError):
    """An object has a field twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise _TwiceError(one_line(repr(name), 80))
    return found


def _is_deep(value: Any) -> bool:
    """Whether lists and objects are nested deeper than `MAX_DEPTH`."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inside = [x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list)]
        if not inside:
            return False
        level = [inner for values in inside for inner in values]
    return True


def _check_characters(value: Any, where: str) -> None:
    """Raises ValueError for halves of characters, which JSON can write as `\\ud83d` and no tokenizer takes."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        got = repr(error.object[error.start : error.end])[:40]
        raise ValueError(f"{where}: expected whole characters; got half of one, {got}") from error


def _checked_object(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object; got {type(row).__name__} {one_line(repr(row), 60)}")
    return row
