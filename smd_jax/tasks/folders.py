"""The data files of a folder, or of a data set on the Hub, and their splits, as `datasets` finds them.

A folder's card is checked before `datasets` reads it.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from smd_jax.tasks.task import missing_extra
from smd_jax.text.visible_text import one_line
from smd_jax.text.yaml_limits import CARD, check_yaml

CARDS = ("README.md", ".huggingface.yaml")
FRONT_MATTER = re.compile(r"\s*---[ \t]*\r?\n(.*?)\r?\n---", re.DOTALL)
HUB_FILE = re.compile(r"hf://datasets/[^@]+@(?P<revision>[^/]+)/(?P<file>.+)")

# `datasets` raises these for a card whose values have other types than it expects.
_CARD_ERRORS = (ValueError, TypeError, AttributeError, LookupError, AssertionError, RecursionError, yaml.YAMLError)


class FoundFiles(NamedTuple):
    """The data files of a folder.

    Attributes:
      builder: the `datasets.DatasetBuilder` that reads them.
      splits: the files of each split.
    """

    builder: Any
    splits: Mapping[str, Sequence[Path]]


def files_of_folder(folder: Path, config: str | None) -> FoundFiles:
    """The data files of a local folder in the Hub's layout.

    Raises:
      ValueError: a card that cannot be read; an unknown configuration; a folder that `save_to_disk` wrote; a path with
        `*`, `?` or `[` in it.
      FileNotFoundError: no data files.
    """
    if glob.escape(str(folder)) != str(folder):
        raise ValueError(
            f"expected a folder without *, ? and [ in its path, which `datasets` takes for a pattern; got {folder}"
        )
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        raise ValueError(
            f"expected files of data in {folder}; got a data set that `save_to_disk` wrote. Write it with `to_parquet`"
        )
    for name in CARDS:
        if (folder / name).is_file():
            _check_card(folder / name)
    builder = builder_of(str(folder), config)
    return FoundFiles(builder, {str(split): [*map(Path, names)] for split, names in _data_files(builder)})


def builder_of(name: str, config: str | None) -> Any:
    """The `datasets.DatasetBuilder` of a folder, or of a data set on the Hub.

    Raises:
      ValueError: a data set that is a program; an unknown configuration; a card that cannot be read.
      FileNotFoundError, ConnectionError: as `datasets.load_dataset_builder`.
    """
    datasets = library()
    try:
        return datasets.load_dataset_builder(name, config)
    except (FileNotFoundError, ConnectionError):
        raise
    except _CARD_ERRORS as error:
        raise _config_error(name, config, error) from error
    except RuntimeError as error:
        raise ValueError(
            f"expected a data set that consists of data; got {name!r}, whose rows are made by a program of its "
            f"authors, which is never run ({one_line(str(error), 200)})"
        ) from error


def module_of(builder: Any) -> str:
    """The module of `datasets` that defines the builder or its base class, such as "csv"."""
    names = [kind.__module__.split(".") for kind in type(builder).__mro__]
    return next((name[2] for name in names if name[:2] == ["datasets", "packaged_modules"]), "")


def is_text_builder(builder: Any) -> bool:
    """Whether the builder would read CSV or JSON."""
    return module_of(builder) in ("csv", "json")


def fetch_files(name: str, builder: Any) -> Path:
    """Fetches the data files and the card of a data set on the Hub; returns their folder."""
    from huggingface_hub import snapshot_download

    matches = [HUB_FILE.fullmatch(str(file)) for _, files in _data_files(builder) for file in files]
    found = [match for match in matches if match is not None]
    patterns = [*CARDS, *(glob.escape(match["file"]) for match in found)]
    revision = found[0]["revision"] if found else None
    return Path(snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=patterns))


def fetched_folder(name: str) -> Path | None:
    """The folder of a data set that `fetch_files` fetched before, or None."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, repo_type="dataset", local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def library() -> Any:
    """The package `datasets`, imported late because that takes a second."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise missing_extra("datasets") from error
    return datasets


def _data_files(builder: Any) -> list[tuple[Any, Sequence[str]]]:
    files = builder.config.data_files
    return [*files.items()] if isinstance(files, Mapping) else []


def _check_card(path: Path) -> None:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected text in UTF-8; got {error}") from error
    front = FRONT_MATTER.match(text) if path.suffix == ".md" else None
    if front is not None or path.suffix != ".md":
        try:
            check_yaml(text if front is None else front[1], CARD)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _config_error(name: str, config: str | None, error: Exception) -> ValueError:
    """The error about the configuration, or else about the data set."""
    datasets = library()
    try:
        configs = datasets.get_dataset_config_names(name)
    except _CARD_ERRORS:
        configs = []
    if len(configs) > 1 and config not in configs:
        return ValueError(
            f"expected a configuration of {name!r}, one of {one_line(repr(configs), 300)}; got {config!r}"
        )
    if configs and config not in (None, *configs):
        return ValueError(f"expected the configuration {configs[0]!r} of {name!r}; got {config!r}")
    said = one_line(f"{type(error).__name__}: {error}", 300)
    return ValueError(f"expected a data set that can be read; got {name!r}: {said}")
