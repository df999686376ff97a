"""Rows of JSON files, with the types that JSON gives them, and errors that name the line."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from smd_jax.tasks.compressed import open_data
from smd_jax.tasks.task import Row
from smd_jax.text.visible_text import one_line

MAX_DEPTH = 64  # of lists and objects in a row: chat messages with the schemas of tools have 10
LINES = (".jsonl", ".ndjson")


def load_jsonl(path: str | Path, required: Sequence[str] = ("question", "answer")) -> list[Row]:
    """Reads one JSON object per line; blank lines are skipped.

    Args:
      path: a UTF-8 file.
      required: fields that every row must have, as strings.

    Raises:
      ValueError: a malformed row (file and line number, what was expected, what came), or a file without rows.
    """
    return [row for _, row in numbered_rows(Path(path), required)]


def numbered_rows(path: Path, required: Sequence[str]) -> list[tuple[int, Row]]:
    """The rows of `load_jsonl`, each with the number of its line, from 1."""
    with open_data(path) as file:
        rows = list(_lines(file, path))
    if not rows:
        raise ValueError(f"{path}: expected at least one JSON object; got an empty file")
    for number, row in rows:
        _check_strings(row, required, f"{path}, line {number}")
    return rows


def json_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """The rows of a file one after the other, each with its place: an object a line, or in a file named *.json also one
    list of objects."""
    with open_data(path) as file:
        if any(suffix in LINES for suffix in path.suffixes) or not _begins_list(file):
            for number, row in _lines(file, path):
                yield f"{path}, line {number}", row
            return
        for number, row in enumerate(_parsed(file.read(), str(path), "a list of JSON objects")):
            yield f"{path}, row {number}", _object_row(row, f"{path}, row {number}")


def _lines(file: io.BufferedReader, path: Path) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(file, start=1):  # bytes: only \n ends a line, and U+2028 inside a string does not
        if line.strip():
            where = f"{path}, line {number}"
            yield number, _object_row(_parsed(line, where), where)


def _begins_list(file: io.BufferedReader) -> bool:
    """Whether the first character is that of a list; white space and a byte order mark aside."""
    return file.peek().removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _parsed(text: bytes, where: str, expected: str = "a JSON object") -> Any:
    """The value of a JSON text.

    Args:
      expected: in errors.

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
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise ValueError(f"{where}: expected JSON nested at most {MAX_DEPTH} deep; got more")
    if b"\\ud" in text.lower():
        _check_characters(value, where)
    return value


class _TwiceError(ValueError):
    """A field that an object has twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise _TwiceError(one_line(repr(name), 80))
    return found


def _depth(value: Any) -> int:
    """Levels of lists and objects, of which it counts one more than are allowed."""
    level = [value]
    for depth in range(MAX_DEPTH + 1):
        inside = [
            outer.values() if isinstance(outer, dict) else outer for outer in level if isinstance(outer, dict | list)
        ]
        if not inside:
            return depth
        level = [inner for values in inside for inner in values]
    return MAX_DEPTH + 1


def _check_characters(value: Any, where: str) -> None:
    """Raises ValueError for halves of characters, which JSON can write as `\\ud83d` and no tokenizer takes."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        got = repr(error.object[error.start : error.end])[:40]
        raise ValueError(f"{where}: expected whole characters; got half of one, {got}") from error


def _object_row(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object; got {type(row).__name__} {one_line(repr(row), 60)}")
    return row


def _check_strings(row: Row, required: Sequence[str], where: str) -> None:
    for name in required:
        if name not in row:
            there = one_line(repr(sorted(row)), 200)
            raise ValueError(f"{where}: expected the fields {list(required)}; got {there}, without {name!r}")
        if not isinstance(row[name], str):
            got = f"{type(row[name]).__name__} {one_line(repr(row[name]), 60)}"
            raise ValueError(f"{where}: expected a string in {name!r}; got {got}")
