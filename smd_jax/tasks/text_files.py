"""Rows of CSV, TSV and JSON files, with every value as the file has it.

A field of CSV is text: "007", "NA" and "None" stay what they are. A value of JSON has the type that JSON gives it.
Files that would lose something are refused: two columns of one name, a row of another length, halves of characters.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from smd_jax.tasks.compressed import UNPACKING_ERRORS, open_data
from smd_jax.tasks.datasets import json_rows
from smd_jax.tasks.file_formats import is_csv, separator_of
from smd_jax.tasks.task import Row, missing_extra
from smd_jax.text.visible_text import one_line

CSV_BLOCK = 64 * 2**20  # bytes that are parsed at once, and so the longest row


def text_rows(path: Path, separator: str | None = None) -> Iterator[tuple[str, Row]]:
    """The rows of a file one after the other, each with its place in the file, such as "rows.jsonl, line 3".

    Args:
      separator: of the fields of a CSV file; None: by the name of the file.

    Raises:
      ValueError: a file that is damaged, of another form, or without rows.
      MissingExtraError: CSV without pyarrow.
    """
    with _read_errors(path):
        rows = _csv_rows(path, separator) if is_csv(path) else json_rows(path)
        first = next(rows, None)
        if first is None:
            raise ValueError(f"{path}: expected at least one JSON object; got an empty file")
        yield first
        yield from rows


def csv_table(path: Path, separator: str | None = None) -> Any:
    """The `pyarrow.Table` of a CSV file, whose columns are text; arguments and errors as `text_rows`."""
    with _read_errors(path), _csv_reader(path, separator) as reader:
        return reader.read_all()


def _csv_rows(path: Path, separator: str | None) -> Iterator[tuple[str, Row]]:
    number = itertools.count(1)
    with _csv_reader(path, separator) as reader:
        for batch in reader:
            for row in batch.to_pylist():
                yield f"{path}, row {next(number)}", row


@contextmanager
def _csv_reader(path: Path, separator: str | None) -> Iterator[Any]:
    """A `pyarrow.csv.CSVStreamingReader` for which every field is text."""
    try:
        import pyarrow
        from pyarrow import csv as arrow_csv
    except ModuleNotFoundError as error:
        raise missing_extra("pyarrow") from error
    delimiter = separator or separator_of(path)
    text = dict.fromkeys(_header(path, delimiter), pyarrow.string())
    with open_data(path) as file:
        reader = arrow_csv.open_csv(
            file,
            read_options=arrow_csv.ReadOptions(block_size=CSV_BLOCK, use_threads=False),
            parse_options=arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=arrow_csv.ConvertOptions(column_types=text, strings_can_be_null=False),
        )
        if reader.schema.names != [*text]:
            got = one_line(repr(reader.schema.names), 200)
            raise ValueError(f"{path}: expected a header of plain names; got {got}")
        yield reader


def _header(path: Path, delimiter: str) -> list[str]:
    """The names of the columns.

    Raises:
      ValueError: two of one name; no row behind them.
    """
    with io.TextIOWrapper(open_data(path), encoding="utf-8-sig", newline="") as file:
        names = next((row for row in csv.reader(file, delimiter=delimiter) if row), [])
        rows = any(line.strip() for line in file)
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        got = one_line(repr(twice), 200)
        raise ValueError(f"{path}: expected columns of different names; got {got} more than once")
    if not rows:
        raise ValueError(f"expected at least one row in {path}; got none")
    return names


@contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    """Names the file where what unpacks, decodes or parses it raises."""
    try:
        yield
    except (*UNPACKING_ERRORS, csv.Error, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error
    except ValueError as error:
        # pyarrow's own, which cannot be named without importing it.
        if type(error).__module__.partition(".")[0] != "pyarrow":
            raise
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ValueError:
    # What pyarrow says of a row of CSV, which it quotes.
    fields = re.search(r"Expected (\d+) columns, got (\d+): (.*)", str(error), re.DOTALL)
    if fields is None:
        said = one_line(f"{type(error).__name__}: {error}", 300)
        return ValueError(f"expected data that can be read in {path}; got {said}")
    there, got, row = int(fields[1]), int(fields[2]), one_line(fields[3], 80)
    hint = ". Put quotes around text that has a separator in it" if got > there else ""
    return ValueError(f"{path}: expected {there} fields in every row, as in the header; got {got}: {row}{hint}")
