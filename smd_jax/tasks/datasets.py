"""Rows from files of one JSON object a line, with errors that name the line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from smd_jax.tasks.task import Row


def load_jsonl(path: str | Path, required: Sequence[str] = ("question", "answer")) -> list[Row]:
    """Reads one JSON object per line; blank lines are skipped.

    The standard library in place of `datasets`: errors can name the line, and nothing is copied into a cache.

    Args:
      path: a UTF-8 file.
      required: fields that every row must have, as strings.

    Raises:
      ValueError: a malformed row (file and line number, what was expected, what came), or a file without rows.
    """
    return [row for _, row in numbered_rows(Path(path), required)]


def numbered_rows(path: Path, required: Sequence[str]) -> Iterator[tuple[int, Row]]:
    """The rows of `load_jsonl`, each with the number of its line, from 1."""
    empty = True
    with path.open("rb") as file:  # bytes: only \n ends a line here, and U+2028 inside a string does not
        for number, line in enumerate(file, start=1):
            if line.strip():
                empty = False
                yield number, _parse_row(line, required, f"{path}, line {number}")
    if empty:
        raise ValueError(f"{path}: expected at least one JSON object; got an empty file")


def _parse_row(line: bytes, required: Sequence[str], where: str) -> Row:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        hint = ". A file that is one list of objects is named *.json" if line.lstrip().startswith(b"[") else ""
        raise ValueError(f"{where}: expected a JSON object; got {_excerpt(line)} ({error}){hint}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object; got {type(row).__name__} {_excerpt(line)}")
    for name in required:
        if name not in row:
            raise ValueError(f"{where}: expected the fields {list(required)}; got {sorted(row)}, without {name!r}")
        if not isinstance(row[name], str):
            raise ValueError(f"{where}: expected a string in {name!r}; got {type(row[name]).__name__} {row[name]!r}")
    return row


def _excerpt(line: bytes) -> str:
    return repr(line.strip()[:60].decode("utf-8", errors="replace"))
