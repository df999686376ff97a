"""Rows of the Hugging Face Hub, of files and of folders. Code that comes with a data set is never run.

    load_rows(DataSource("openai/gsm8k", config="main", split="train"))      the Hub, or its cache
    load_rows(DataSource("problems.parquet"))                                .jsonl .json .csv .tsv .parquet .arrow
    load_rows(DataSource("folder", split="test"))                            the Hub's layout, or `save_to_disk`

`datasets` finds files and splits, and reads Parquet and Arrow. `smd_jax.tasks.text_files` reads CSV and JSON, and keeps
their values unchanged.
"""

from __future__ import annotations

import dataclasses
import glob
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import yaml

from smd_jax.tasks.task import Row, missing_extra
from smd_jax.tasks.text_files import FORMATS, FileRow, check_first_bytes, data_format, text_rows
from smd_jax.text.visible_text import one_line
from smd_jax.text.yaml_limits import load_yaml

# Errors of `datasets` for data that it cannot read.
_DATA_ERRORS = (OSError, ValueError, TypeError, LookupError, AttributeError, AssertionError, RuntimeError)
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILE = re.compile(r"hf://datasets/[^@]+@(?P<revision>[^/]+)/(?P<file>.+)")
TEXT_NAME = re.compile(r"\.(jsonl|ndjson|json|csv|tsv)(\.(gz|bz2|xz))?$")
SAVED = ("dataset_dict.json", "state.json")  # files of a DatasetDict and of a Dataset that `save_to_disk` wrote
CARDS = ("README.md", ".huggingface.yaml")
FRONT_MATTER = re.compile(r"\s*---[ \t]*\r?\n(.*?)\r?\n---", re.DOTALL)
OF_EVERY_FORMAT = ("name", "version", "data_dir", "data_files", "description")  # settings of a `BuilderConfig`
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
        rows = _of_hub(source, columns)
    elif path.is_dir() and any((path / name).is_file() for name in SAVED):
        rows = _of_saved(path, source)
    elif path.is_dir():
        rows = _of_folder(path, source, columns)
    else:
        rows = _of_file(path, source, columns)
    if not len(rows):
        raise ValueError(f"expected at least one row in split {source.split!r} of {source.name}; got none")
    _check_columns(rows[0], columns, source.name)
    return rows


def _path_of(name: str) -> Path | None:
    """The existing file or folder of this name; None for a data set of the Hub. Raises FileNotFoundError for a path
    that does not exist, and ValueError for a name that neither can have."""
    try:
        path = Path(name).expanduser().absolute()
        if name and path.exists():
            return path.resolve()
    except (OSError, ValueError, RuntimeError) as error:  # longer than names can be, a NUL in it, an unknown ~user
        said = one_line(str(error), 80)
        raise ValueError(f"expected the name of a file or a folder; got {name[:80]!r} ({said})") from error
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or path.suffix.lower() in FORMATS:
        folder = next(parent for parent in path.parents if parent.is_dir())
        there = sorted(entry.name for entry in folder.iterdir())[:8]
        raise FileNotFoundError(
            f"expected a file or a folder at {one_line(str(path))}; got nothing there ({folder} has {there})"
        )
    if not HUB_ID.fullmatch(name):
        raise ValueError(
            "expected a data set of the Hub as 'owner/name', or a file or a folder; "
            f"got {name[:80]!r}, which is neither"
        )
    return None


def _of_file(path: Path, source: DataSource, columns: Sequence[str]) -> Rows:
    _check_no_config(path, source)
    kind = data_format(path)
    if kind in ("csv", "json"):
        return _of_text_files({FILE_SPLIT: [path]}, source, columns)
    with path.open("rb") as file:
        check_first_bytes(path, file.read(32))
    return _load(kind, source, {FILE_SPLIT: [glob.escape(str(path))]})


def _check_no_config(path: Path, source: DataSource) -> None:
    if source.config is not None:
        raise ValueError(f"expected no configuration with {path}, which has none; got {source.config!r}")


def _of_saved(path: Path, source: DataSource) -> Rows:
    """The rows of a folder that `save_to_disk` wrote: `load_dataset` would guess the splits from names of files."""
    _check_no_config(path, source)
    with _one_error(source.name) as datasets:
        saved = datasets.load_from_disk(str(path)).with_format(None)  # all columns, as Python objects
        splits = saved if isinstance(saved, datasets.DatasetDict) else {FILE_SPLIT: saved}
    wanted = source.split or _default_split([*splits], source.name)
    with _one_error(source.name) as datasets:
        parts = _parts(datasets, wanted, splits)
        return datasets.concatenate_datasets([splits[name].select(rows) for name, rows in parts])


def _parts(datasets: Any, wanted: str, splits: Mapping[str, Rows]) -> list[tuple[str, range]]:
    """The splits and rows that a split such as "train[:100]+test" names."""
    found = datasets.ReadInstruction.from_spec(wanted).to_absolute({name: len(splits[name]) for name in splits})
    return [(part.splitname, range(part.from_, part.to)) for part in found]


def _of_folder(path: Path, source: DataSource, columns: Sequence[str]) -> Rows:
    """The rows of files in the Hub's layout."""
    if glob.escape(str(path)) != str(path):
        raise ValueError(
            f"expected a folder without *, ? and [ in its path, which `datasets` takes for a pattern; got {path}"
        )
    for name in CARDS:
        _check_card(path / name)
    with _one_error(source.name) as datasets:
        config = datasets.load_dataset_builder(str(path), source.config).config
    splits = {str(name): [*map(Path, files)] for name, files in (config.data_files or {}).items()}
    if is_text(config):
        return _of_text_files(splits, source, columns)
    return _load(str(path), source)


def _of_hub(source: DataSource, columns: Sequence[str]) -> Rows:
    """The rows of a data set of the Hub. CSV and JSON files are downloaded, or taken from the cache, and read like
    those of a folder, because `datasets` would guess types."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        with _one_error(source.name) as datasets:
            config = datasets.load_dataset_builder(source.name, source.config).config
    except ConnectionError:
        with suppress(LocalEntryNotFoundError):
            fetched = snapshot_download(source.name, repo_type="dataset", local_files_only=True)
            return _of_folder(Path(fetched), source, columns)
        raise
    found = [HUB_FILE.fullmatch(str(file)) for files in (config.data_files or {}).values() for file in files]
    matches = [match for match in found if match is not None]
    if not matches or len(matches) < len(found) or not is_text(config):
        return _load(source.name, source)
    patterns = [*CARDS, *(glob.escape(match["file"]) for match in matches)]
    with _one_error(source.name):
        folder = snapshot_download(
            source.name, repo_type="dataset", revision=matches[0]["revision"], allow_patterns=patterns
        )
    return _of_folder(Path(folder), source, columns)


def is_text(config: Any) -> bool:
    """Whether a builder's configuration names only CSV and JSON that `text_rows` reads, without settings of its own."""
    names = [str(file).lower() for files in (config.data_files or {}).values() for file in files]
    if not all(TEXT_NAME.search(name) for name in names):
        return False
    usual = type(config)()
    settings = {field.name for field in dataclasses.fields(config)} - {*OF_EVERY_FORMAT, "sep"}
    separators = {"\t" if ".tsv" in name else "," for name in names}
    has_separator = getattr(config, "sep", None) in (None, *separators)
    return has_separator and all(getattr(config, name) == getattr(usual, name) for name in settings)


def _check_card(path: Path) -> None:
    """Raises ValueError for a card whose YAML `datasets` would read for minutes, or that would fill the memory."""
    if not path.is_file():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix != ".yaml":
        front = FRONT_MATTER.match(text)
        text = "" if front is None else front[1]
    try:
        load_yaml(text, characters=2**20, depth=50, allow_aliases=True)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _of_text_files(splits: Mapping[str, Sequence[Path]], source: DataSource, columns: Sequence[str]) -> Rows:
    rows = dict[str, list[Row]]()
    for name, files in splits.items():
        found = [row for file in files for row in text_rows(file)]
        for row in found:
            _check_columns(row, columns, row.place)
        names = dict.fromkeys(column for row in found for column in row)
        # None for a column that a row lacks, as in `datasets`: a reward gets the same columns in every batch.
        rows[name] = [FileRow({column: row.get(column) for column in names}, row.place) for row in found]
    wanted = source.split or _default_split([*rows], source.name)
    if wanted in rows:
        return rows[wanted]  # without `datasets`, whose import takes a second
    with _one_error(source.name) as datasets:
        return [rows[name][index] for name, part in _parts(datasets, wanted, rows) for index in part]


def _load(name: str, source: DataSource, files: Mapping[str, list[str]] | None = None) -> Rows:
    """Loads rows with `datasets`."""
    with _one_error(source.name) as datasets:
        rows = datasets.load_dataset(name, source.config, data_files=files, split=source.split)
    return rows[_default_split([*rows], source.name)] if isinstance(rows, dict) else rows


def _default_split(splits: Sequence[str], name: str) -> str:
    if len(splits) > 1 and "train" not in splits:
        raise ValueError(f"expected a split of {name}, one of {splits}; got None")
    return splits[0] if len(splits) == 1 else "train"


def _check_columns(row: Row, wanted: Sequence[str], where: str) -> None:
    missing = [name for name in wanted if name not in row]
    if missing:
        got = one_line(repr([*row]), 300)
        raise ValueError(f"{where}: expected the columns {list(wanted)}; got {got}, without {missing}")


@contextmanager
def _one_error(name: str) -> Iterator[Any]:
    """Yields the package `datasets`, imported here because that takes a second, and shortens its errors to one line."""
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ModuleNotFoundError as error:
        raise missing_extra("datasets") from error
    try:
        yield datasets
    except ConnectionError as error:
        raise ConnectionError(
            f"expected to reach the Hub, or to have {name!r} in its cache; got neither ({_shortened(error)})"
        ) from error
    except FileNotFoundError as error:
        raise FileNotFoundError(f"expected data that you may read in {name!r}; got {_shortened(error)}") from error
    except (DatasetsError, yaml.YAMLError, *_DATA_ERRORS) as error:
        reason = error.__cause__ or error
        raise ValueError(f"expected data that can be read in {name!r}; got {_shortened(reason)}") from error


def _shortened(error: BaseException) -> str:
    return one_line(f"{type(error).__name__}: {' '.join(str(error).split())}", 300)
