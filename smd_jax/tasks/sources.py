"""Rows from wherever they lie: the Hugging Face Hub, files, folders. No code that comes with a data set is ever run.

    load_rows(DataSource("openai/gsm8k", config="main", split="train"))      the Hub, or its cache
    load_rows(DataSource("problems.parquet"))                                .jsonl .json .csv .tsv .parquet .arrow
    load_rows(DataSource("folder", split="test"))                            files in the Hub's layout; `save_to_disk`
    load_rows(DataSource("folder", streaming=True))                          one after the other, nothing is copied

`datasets` does the work; this module finds out what a name stands for, and says what is wrong with it.
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

import numpy as np

from smd_jax.tasks.datasets import numbered_rows
from smd_jax.tasks.file_formats import check_content, format_of, is_json_lines, looks_like_a_path
from smd_jax.tasks.task import Row, missing_extra

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
FILE_SPLIT = "train"  # of what has no splits of its own, as `datasets` has it


@dataclass(frozen=True)
class DataSource:
    """Where rows come from.

    Attributes:
      name: a data set of the Hub such as "openai/gsm8k"; a file; or a folder, in the Hub's layout or as
        `datasets.save_to_disk` writes it. What exists as a path is taken for one.
      config: which of several configurations (subsets); None where there is one.
      split: "train", or a part such as "train[:1000]", "train[90%:]", "train+validation". None: the only split, or else
        "train". A file has the one split "train".
      streaming: read rows one after the other, in place of all of them before the start.
    """

    name: str
    config: str | None = None
    split: str | None = None
    streaming: bool = False


@runtime_checkable
class Rows(Protocol):
    """Rows by number: a list, or a `datasets.Dataset`, which leaves them on disk."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row: ...


@runtime_checkable
class RowStream(Protocol):
    """Rows one after the other, as often as asked: what we use of `datasets.IterableDataset`."""

    def __iter__(self) -> Iterator[Row]: ...

    def shuffle(
        self, *, generator: np.random.Generator, buffer_size: int, max_buffer_input_shards: int
    ) -> RowStream: ...


def load_rows(source: DataSource, columns: Sequence[str] = ()) -> Rows | RowStream:
    """The rows of a source: by number, or with `streaming` one after the other.

    Args:
      columns: those that the rows must have.

    Raises:
      FileNotFoundError: no such file or folder, none with data in it, or no such data set on the Hub.
      ConnectionError: the Hub cannot be reached, and its cache doesn't have the data set.
      ValueError: a file of another kind than its name says; an unknown configuration, split or column (listing those
        that there are); no rows; rows that cannot be read (naming the line of a JSONL file).
    """
    path = Path(source.name).expanduser()
    # An empty name would be the working directory.
    if not source.name or not path.exists():
        check_hub_id(source.name)
        return _of_builder(_hub_builder(source), source, columns)
    if path.is_file():
        return _of_file(path.resolve(), source, columns)
    return _of_folder(path.resolve(), source, columns)


def check_hub_id(name: str) -> None:
    """Raises FileNotFoundError for what must have been meant as a path, ValueError for what is no data set's name."""
    if looks_like_a_path(name):
        path = Path(name).expanduser().absolute()
        folder = next(parent for parent in path.parents if parent.is_dir())
        raise FileNotFoundError(
            f"expected a file or a folder at {path}; got nothing there ({folder} has {_entries(folder)})"
        )
    if not HUB_ID.fullmatch(name):
        raise ValueError(
            f"expected a data set of the Hub as 'owner/name', or a file or a folder; got {name!r}, which is neither"
        )


def _of_file(path: Path, source: DataSource, columns: Sequence[str]) -> Rows | RowStream:
    if source.config is not None:
        raise ValueError(f"expected no configuration with a file, which has none; got {source.config!r} with {path}")
    kind = format_of(path)
    check_content(path)
    if is_json_lines(path):
        return _of_json_lines(path, source, columns)
    files = {FILE_SPLIT: [glob.escape(str(path))]}
    builder = _library().load_dataset_builder(kind.builder, data_files=files, **dict(kind.options))
    return _of_builder(builder, source, columns)


def _of_json_lines(path: Path, source: DataSource, columns: Sequence[str]) -> Rows | RowStream:
    """Through our own reader, whose errors name the line."""
    if source.streaming:
        # A tuple: of a list `datasets` makes one stream per member.
        lines = {"path": str(path), "columns": tuple(columns)}
        stream = _library().IterableDataset.from_generator(_json_lines, gen_kwargs=lines)
        return _stream_of({FILE_SPLIT: stream}, source, columns)
    rows = list(_json_lines(str(path), columns))
    if _chosen_split([FILE_SPLIT], source) == FILE_SPLIT:
        return rows  # without `datasets`, which takes a second to import
    return _rows_of({FILE_SPLIT: rows}, source, columns)


def _of_folder(path: Path, source: DataSource, columns: Sequence[str]) -> Rows | RowStream:
    datasets = _library()
    # What `save_to_disk` writes: a data set without splits, or one with them.
    one, several = (path / "state.json").is_file(), (path / "dataset_dict.json").is_file()
    if not one and not several:
        return _of_builder(_hub_builder(source), source, columns)
    if source.config is not None:
        raise ValueError(f"expected no configuration with {path}, which has none; got {source.config!r}")
    saved = datasets.load_from_disk(str(path))
    splits: Mapping[str, Any] = {str(name): rows for name, rows in saved.items()} if several else {FILE_SPLIT: saved}
    if source.streaming:
        return _stream_of({name: rows.to_iterable_dataset() for name, rows in splits.items()}, source, columns)
    return _rows_of(splits, source, columns)


def _hub_builder(source: DataSource) -> Any:
    """The `datasets.DatasetBuilder` of a data set on the Hub, or of a folder in its layout."""
    datasets = _library()
    folder = Path(source.name).expanduser()
    name = str(folder.resolve()) if folder.is_dir() else source.name
    try:
        return datasets.load_dataset_builder(name, source.config)
    except ConnectionError as error:
        raise ConnectionError(
            f"expected to reach the Hub, or to have {name!r} in its cache; got neither ({error}). "
            f"There is no file or folder {folder.absolute()} either"
        ) from error
    except FileNotFoundError as error:
        if folder.is_dir():
            raise _no_data(source) from error
        raise FileNotFoundError(
            f"expected a data set of the Hub that you may read; got {name!r} ({error}). "
            f"There is no file or folder {folder.absolute()} either"
        ) from error
    except RuntimeError as error:
        raise ValueError(
            f"expected a data set that consists of data; got {name!r}, whose rows are made by a program of its "
            f"authors, which is never run ({error})"
        ) from error
    except ValueError as error:
        configs = datasets.get_dataset_config_names(name)
        if len(configs) > 1 and source.config not in configs:
            raise ValueError(
                f"expected a configuration of {name!r}, one of {configs}; got {source.config!r}"
            ) from error
        if source.config not in (None, *configs):
            raise ValueError(f"expected the configuration {configs[0]!r} of {name!r}; got {source.config!r}") from error
        raise ValueError(f"expected a data set that can be read; got {name!r}: {error}") from error


def _of_builder(builder: Any, source: DataSource, columns: Sequence[str]) -> Rows | RowStream:
    """The rows of a `datasets.DatasetBuilder`."""
    if source.streaming:
        with _read_errors(source):
            streams = builder.as_streaming_dataset()
        stream = _chosen_stream(streams, source)
        with _read_errors(source):
            first = next(iter(stream), None)
        return _checked_stream(stream, first, source, columns)
    with _read_errors(source):
        builder.download_and_prepare()
    wanted = _chosen_split([*builder.info.splits], source)
    # Before the rows are asked for: `datasets` refuses splits that are empty in words of its own.
    _ranges(wanted, {name: split.num_examples for name, split in builder.info.splits.items()}, source)
    rows = builder.as_dataset(split=wanted)
    check_columns(rows.column_names, columns, source.name)
    return rows


def _rows_of(splits: Mapping[str, Any], source: DataSource, columns: Sequence[str]) -> Rows:
    """The wanted part, of lists or of `datasets.Dataset`s."""
    wanted = _chosen_split([*splits], source)
    ranges = _ranges(wanted, {name: len(rows) for name, rows in splits.items()}, source)
    if any(isinstance(splits[name], list) for name, _ in ranges):
        return [splits[name][number] for name, numbers in ranges for number in numbers]
    chosen = _library().concatenate_datasets([splits[name].select(numbers) for name, numbers in ranges])
    check_columns(chosen.column_names, columns, source.name)
    return chosen


def _ranges(wanted: str, lengths: Mapping[str, int], source: DataSource) -> list[tuple[str, range]]:
    """The split and the numbers of the rows that each part of `wanted` stands for."""
    try:
        instruction = _library().ReadInstruction.from_spec(wanted)
    except (ValueError, AssertionError) as error:
        raise ValueError(
            f"expected a split such as 'train[:1000]' or 'train[90%:]'; got {wanted!r} ({error})"
        ) from error
    parts = [(part.splitname, range(part.from_, part.to)) for part in instruction.to_absolute(dict(lengths))]
    if not any(numbers for _, numbers in parts):
        raise ValueError(f"expected at least one row in split {wanted!r} of {source.name}; got none")
    return parts


def _stream_of(splits: Mapping[str, Any], source: DataSource, columns: Sequence[str]) -> RowStream:
    stream = _chosen_stream(splits, source)
    return _checked_stream(stream, next(iter(stream), None), source, columns)


def _chosen_stream(splits: Mapping[Any, Any], source: DataSource) -> Any:
    named = {str(name): stream for name, stream in splits.items()}
    wanted = _chosen_split([*named], source)
    if wanted not in named:
        raise ValueError(f"expected a whole split of {source.name} to stream, one of {[*named]}; got {wanted!r}")
    return named[wanted]


def _checked_stream(stream: Any, first: Row | None, source: DataSource, columns: Sequence[str]) -> RowStream:
    if first is None:
        raise ValueError(f"expected at least one row in {source.name}; got none")
    check_columns(first, columns, source.name)
    return stream


@contextmanager
def _read_errors(source: DataSource) -> Iterator[None]:
    """Says in our words what `datasets`, pyarrow and pandas raise for data that they cannot read."""
    datasets = _library()
    try:
        yield
    except datasets.exceptions.DataFilesNotFoundError as error:
        raise _no_data(source) from error
    except (datasets.exceptions.DatasetBuildError, OSError, ValueError) as error:
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
    """Rows without a column that they must have."""


def check_columns(there: Sequence[str] | Mapping[str, Any], wanted: Sequence[str], where: str) -> None:
    """Raises MissingColumnError for a column that rows don't have, listing those that they have."""
    missing = [name for name in wanted if name not in there]
    if missing:
        raise MissingColumnError(f"{where}: expected the columns {list(wanted)}; got {[*there]}, without {missing}")


def _json_lines(path: str, columns: Sequence[str]) -> Iterator[Row]:
    for number, row in numbered_rows(Path(path), ()):
        check_columns(row, columns, f"{path}, line {number}")
        yield row


def _no_data(source: DataSource) -> FileNotFoundError:
    folder = Path(source.name).expanduser()
    there = _entries(folder) if folder.is_dir() else "none"
    return FileNotFoundError(f"expected files of data in {source.name}; got {there}")


def _entries(folder: Path, most: int = 8) -> list[str]:
    names = sorted(entry.name for entry in itertools.islice(folder.iterdir(), 1000))
    return names[:most] + ["…"] * (len(names) > most)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _library() -> Any:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise missing_extra("datasets") from error
    return datasets
