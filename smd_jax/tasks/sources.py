"""Rows of the Hugging Face Hub, of files and of folders. Code that comes with a data set is never run.

    load_rows(DataSource("openai/gsm8k", config="main", split="train"))      the Hub, or its cache
    load_rows(DataSource("problems.parquet"))                                .jsonl .json .csv .tsv .parquet .arrow
    load_rows(DataSource("folder", split="test"))                            files in the Hub's layout

`datasets` finds files and splits (`smd_jax.tasks.folders`) and reads Parquet and Arrow. `smd_jax.tasks.text_files`
reads CSV and JSON, and keeps their values as they are.
"""

from __future__ import annotations

import glob
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from smd_jax.tasks.data_files import (
    builder_name,
    check_beginning,
    check_unpacked,
    is_compressed,
    is_text,
    looks_like_a_path,
)
from smd_jax.tasks.folders import (
    builder_of,
    fetch_files,
    fetched_folder,
    files_of_folder,
    is_text_builder,
    library,
    module_of,
)
from smd_jax.tasks.task import Row
from smd_jax.tasks.text_files import text_rows
from smd_jax.text.visible_text import one_line

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# `datasets` raises these for files whose values have other types than it expects.
DATA_ERRORS = (OSError, ValueError, TypeError, LookupError, AttributeError)
FILE_SPLIT = "train"  # of data without splits, as in `datasets`


@dataclass(frozen=True)
class DataSource:
    """Where rows come from.

    Attributes:
      name: a data set of the Hub such as "openai/gsm8k"; a file; or a folder in the Hub's layout. A path that exists
        comes first.
      config: one of several configurations (subsets); None if there is only one.
      split: "train", or a part such as "train[:1000]", "train[90%:]", "train+validation". None: the only split, or else
        "train". A file has the one split "train".
    """

    name: str
    config: str | None = None
    split: str | None = None


@runtime_checkable
class Rows(Protocol):
    """Rows by number: a list, or a `datasets.Dataset`, whose rows stay on disk."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row: ...


def load_rows(source: DataSource, columns: Sequence[str] = ()) -> Rows:
    """Loads the rows of a source.

    Args:
      columns: columns that the rows must have.

    Raises:
      FileNotFoundError: no such file, folder or data set on the Hub, or a folder without data.
      ConnectionError: the Hub cannot be reached, and its cache doesn't have the data set.
      ValueError: a file of another format than its name says; an unknown configuration, split or column (listing the
        known ones); no rows; rows that cannot be read (naming the line of a JSONL file).
    """
    path = _path_of(source.name)
    if path is None:
        check_hub_id(source.name)
        return _of_hub(source, columns)
    if path.is_file():
        return _of_file(path.resolve(), source, columns)
    return _of_folder(path.resolve(), source, columns)


def _path_of(name: str) -> Path | None:
    """The file or folder of this name, or None."""
    if not name:
        return None  # and not the working directory
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError) as error:  # longer than names can be, a NUL in it, an unknown ~user
        said = one_line(str(error), 80)
        raise ValueError(f"expected the name of a file or a folder; got {name[:80]!r} ({said})") from error


def check_hub_id(name: str) -> None:
    """Raises FileNotFoundError for a name that must mean a path, ValueError for one that no data set can have."""
    if looks_like_a_path(name):
        path = Path(name).expanduser().absolute()
        folder = next(parent for parent in path.parents if parent.is_dir())
        raise FileNotFoundError(
            f"expected a file or a folder at {one_line(str(path))}; got nothing there ({folder} has {_entries(folder)})"
        )
    if not HUB_ID.fullmatch(name):
        raise ValueError(
            "expected a data set of the Hub as 'owner/name', or a file or a folder; "
            f"got {name[:80]!r}, which is neither"
        )


def _of_file(path: Path, source: DataSource, columns: Sequence[str]) -> Rows:
    if source.config is not None:
        raise ValueError(f"expected no configuration with a file, which has none; got {source.config!r} with {path}")
    builder = builder_name(path)
    check_beginning(path)
    if is_text(path):
        return _of_text_files({FILE_SPLIT: [path]}, source, columns)
    if is_compressed(path):
        check_unpacked(path)
    files = {FILE_SPLIT: [glob.escape(str(path))]}
    return _of_builder(library().load_dataset_builder(builder, data_files=files), source, columns)


def _of_text_files(
    splits: Mapping[str, Sequence[Path]],
    source: DataSource,
    columns: Sequence[str],
    separator: str | None = None,
) -> Rows:
    """The rows of CSV or JSON files."""
    wanted = _chosen_split([*splits], source)
    named = {part.partition("[")[0].strip() for part in wanted.split("+")}
    read = {name: [*_checked_rows([*map(str, splits[name])], columns, separator)] for name in named}
    if wanted in read:
        return read[wanted]  # without `datasets`, whose import takes a second
    ranges = _ranges(wanted, {name: len(rows) for name, rows in read.items()}, source)
    return [read[name][number] for name, numbers in ranges for number in numbers]


def _checked_rows(paths: Sequence[str], columns: Sequence[str], separator: str | None) -> Iterator[Row]:
    for path in paths:
        for where, row in text_rows(Path(path), separator):
            check_columns(row, columns, where)
            yield row


def _of_folder(path: Path, source: DataSource, columns: Sequence[str]) -> Rows:
    """The rows of files in the Hub's layout."""
    try:
        builder, splits = files_of_folder(path, source.config)
    except FileNotFoundError as error:
        raise _no_data(source) from error
    if not is_text_builder(builder):
        return _of_builder(builder, source, columns)
    for file in itertools.chain(*splits.values()):
        check_beginning(file)
    separator = str(builder.config.sep) if module_of(builder) == "csv" else None
    return _of_text_files(splits, source, columns, separator)


def _of_hub(source: DataSource, columns: Sequence[str]) -> Rows:
    name, here = source.name, Path(source.name).expanduser().absolute()
    try:
        builder = builder_of(name, source.config)
    except ConnectionError as error:
        fetched = fetched_folder(name)
        if fetched is not None:
            return _of_folder(fetched, source, columns)
        raise ConnectionError(
            f"expected to reach the Hub, or to have {name!r} in its cache; got neither ({_first_line(error)}). "
            f"There is no file or folder {here} either"
        ) from error
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"expected a data set of the Hub that you may read; got {name!r} ({_first_line(error)}). "
            f"There is no file or folder {here} either"
        ) from error
    if not is_text_builder(builder):
        return _of_builder(builder, source, columns)
    # As files, because `datasets` would change their values on the way into its tables.
    return _of_folder(fetch_files(name, builder), source, columns)


def _of_builder(builder: Any, source: DataSource, columns: Sequence[str]) -> Rows:
    """The rows of a `datasets.DatasetBuilder`."""
    with _read_errors(source):
        builder.download_and_prepare()
    wanted = _chosen_split([*builder.info.splits], source)
    # Raises our error for an empty split, before `datasets` raises its own.
    _ranges(wanted, {name: split.num_examples for name, split in builder.info.splits.items()}, source)
    rows = builder.as_dataset(split=wanted)
    check_columns(rows.column_names, columns, source.name)
    return rows


def _ranges(wanted: str, lengths: Mapping[str, int], source: DataSource) -> list[tuple[str, range]]:
    """The split and the row numbers of each part of `wanted`."""
    try:
        instruction = library().ReadInstruction.from_spec(wanted)
    except (ValueError, AssertionError) as error:
        raise ValueError(
            f"expected a split such as 'train[:1000]' or 'train[90%:]'; got {wanted!r} ({error})"
        ) from error
    parts = [(part.splitname, range(part.from_, part.to)) for part in instruction.to_absolute(dict(lengths))]
    if not any(numbers for _, numbers in parts):
        raise ValueError(f"expected at least one row in split {wanted!r} of {source.name}; got none")
    return parts


@contextmanager
def _read_errors(source: DataSource) -> Iterator[None]:
    """Replaces the errors of `datasets` and pyarrow about unreadable data by ours."""
    datasets = library()
    try:
        yield
    except datasets.exceptions.DataFilesNotFoundError as error:
        raise _no_data(source) from error
    except (datasets.exceptions.DatasetBuildError, *DATA_ERRORS) as error:
        reason = error.__cause__ or error
        raise ValueError(f"expected data that can be read in {source.name}; got {_first_line(reason)}") from error


def _chosen_split(there: Sequence[str], source: DataSource) -> str:
    names = [str(name) for name in there]
    if source.split is None:
        if len(names) > 1 and "train" not in names:
            raise ValueError(f"expected a split of {source.name}, one of {names}; got None")
        return names[0] if len(names) == 1 else "train"
    for part in source.split.split("+"):
        if part.partition("[")[0].strip() not in names:
            raise ValueError(f"expected a split of {source.name}, one of {names}; got {source.split!r}")
    return source.split


class MissingColumnError(ValueError):
    """Rows lack a column."""


def check_columns(there: Sequence[str] | Mapping[str, Any], wanted: Sequence[str], where: str) -> None:
    """Raises MissingColumnError for a missing column, listing the present ones."""
    missing = [name for name in wanted if name not in there]
    if missing:
        got = one_line(repr([*there]), 300)
        raise MissingColumnError(f"{where}: expected the columns {list(wanted)}; got {got}, without {missing}")


def _no_data(source: DataSource) -> FileNotFoundError:
    folder = Path(source.name).expanduser()
    there = _entries(folder) if folder.is_dir() else "none"
    return FileNotFoundError(f"expected files of data in {source.name}; got {there}")


def _entries(folder: Path, most: int = 8) -> list[str]:
    names = sorted(entry.name for entry in itertools.islice(folder.iterdir(), 1000))
    return names[:most] + ["…"] * (len(names) > most)


def _first_line(error: BaseException) -> str:
    return one_line(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}", 300)
