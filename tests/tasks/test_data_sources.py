"""Rows from files, folders and the Hub's cache; and what is said about names, files and columns that are wrong."""

from __future__ import annotations

import bz2
import csv
import gc
import gzip
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from smd_jax.tasks.sources import DataSource, Rows, load_rows
from tests.hub_files import no_hub, questions, write_hub_folder, write_lines, write_parquet

__all__ = ["no_hub"]
pytestmark = [
    pytest.mark.usefixtures("no_hub"),
    # `datasets` leaves a CSV file open whose stream is not read to its end.
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
]

ROWS = questions(6)


def read(source: DataSource) -> list[dict[str, Any]]:
    """All rows."""
    rows = load_rows(source, ("question",))
    assert isinstance(rows, Rows)
    return [rows[i] for i in range(len(rows))]


def write_csv(path: Path, delimiter: str) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["question", "answer"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(ROWS)
    return path


def write_file(folder: Path, kind: str) -> Path:
    """The six rows in a file of this kind."""
    path = folder / f"rows.{kind}"
    match kind:
        case "jsonl" | "ndjson":
            return write_lines(path, ROWS)
        case "json":
            path.write_text(json.dumps(ROWS))
        case "csv" | "tsv":
            return write_csv(path, {"csv": ",", "tsv": "\t"}[kind])
        case "parquet":
            return write_parquet(path, ROWS)
        case "arrow":
            datasets.Dataset.from_list(ROWS).save_to_disk(str(folder / "saved"))
            (folder / "saved" / "data-00000-of-00001.arrow").rename(path)
        case "jsonl.gz":
            path.write_bytes(gzip.compress(write_lines(folder / "plain.jsonl", ROWS).read_bytes()))
        case "csv.bz2":
            path.write_bytes(bz2.compress(write_csv(folder / "plain.csv", ",").read_bytes()))
    return path


@pytest.fixture(autouse=True)
def closed_files(request: pytest.FixtureRequest) -> Iterator[None]:
    """Files that nobody holds are closed while the test still ignores it."""
    yield
    if "sv-" in request.node.name:
        gc.collect()


@pytest.mark.parametrize("kind", ["jsonl", "ndjson", "json", "csv", "tsv", "parquet", "arrow", "jsonl.gz", "csv.bz2"])
def test_a_file_of_every_kind(tmp_path: Path, kind: str):
    assert read(DataSource(str(write_file(tmp_path, kind)))) == ROWS


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_part_of_a_file(tmp_path: Path, kind: str):
    path = str(write_file(tmp_path, kind))
    assert read(DataSource(path, split="train")) == ROWS
    assert read(DataSource(path, split="train[:2]")) == ROWS[:2]
    assert read(DataSource(path, split="train[50%:]")) == ROWS[3:]
    assert read(DataSource(path, split="train[-1:]+train[:1]")) == [ROWS[5], ROWS[0]]


def test_a_name_with_brackets_and_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_parquet(tmp_path / "rows [1].parquet", ROWS)
    monkeypatch.chdir(tmp_path)
    assert read(DataSource("rows [1].parquet")) == ROWS


def test_a_folder_in_the_layout_of_the_hub(tmp_path: Path):
    splits = {"train": questions(4), "test": questions(2, first=4)}
    name = str(write_hub_folder(tmp_path / "gsm8k", {"main": splits, "socratic": {"train": questions(3, first=9)}}))
    assert read(DataSource(name, "main")) == splits["train"]
    assert read(DataSource(name, "main", "test")) == splits["test"]
    assert read(DataSource(name, "socratic")) == questions(3, first=9)
    assert read(DataSource(name, "main", "train[1:2]+test")) == [splits["train"][1], *splits["test"]]


def test_a_folder_of_files_without_a_card(tmp_path: Path):
    write_parquet(tmp_path / "data" / "train-00000-of-00002.parquet", ROWS[:3])
    write_parquet(tmp_path / "data" / "train-00001-of-00002.parquet", ROWS[3:])
    write_parquet(tmp_path / "data" / "test-00000-of-00001.parquet", ROWS[:1])
    assert read(DataSource(str(tmp_path))) == ROWS
    assert read(DataSource(str(tmp_path), split="test")) == ROWS[:1]


def test_rows_on_disk_stay_there(tmp_path: Path):
    assert isinstance(load_rows(DataSource(str(write_file(tmp_path, "parquet")))), datasets.Dataset)


# --- what is wrong


def expect(kind: type[Exception], message: str, name: str | Path, **options: Any) -> None:
    columns = options.pop("columns", ())
    with pytest.raises(kind, match=message):
        load_rows(DataSource(str(name), **options), columns)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_missing_columns_are_named_beside_those_that_are_there(tmp_path: Path, kind: str):
    path = write_file(tmp_path, kind)
    message = r"expected the columns \['answer', 'prompt'\]; got \['question', 'answer'\], without \['prompt'\]"
    where = "rows.jsonl, line 1: " if kind == "jsonl" else ""
    expect(ValueError, where + message, path, columns=("answer", "prompt"))


def test_a_list_named_as_lines_and_a_byte_order_mark(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('[\n{"prompt": "a"}\n]\n')
    with pytest.raises(ValueError, match=r"line 1: expected a JSON object; .*one list of objects is named \*.json"):
        load_rows(DataSource(str(tmp_path / "rows.jsonl")))
    (tmp_path / "marked.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n')
    assert load_rows(DataSource(str(tmp_path / "marked.jsonl"))) == [{"prompt": "a"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", b"PAR1\x15\x04", "expected jsonl data; got a parquet file: name it"),
        ("rows.csv", b"PAR1\x15\x04", "expected csv data; got a parquet file"),
        ("rows.json", b"ARROW1\0\0", "expected json data; got an arrow file"),
        (
            "rows.jsonl",
            gzip.compress(b"{}", mtime=0),
            r"expected jsonl data; got a file compressed by gzip: name it \*\.gz",
        ),
        ("rows.csv", b"PK\x03\x04", "got a zip archive"),
        ("rows.parquet", b'{"question": "?"}', "expected a parquet file, which begins with b'PAR1'; got .*question"),
        ("rows.parquet", b"version https://git-lfs.github.com/spec/v1\n", "got a pointer of Git LFS"),
        (
            "rows.jsonl",
            b"version https://git-lfs.github.com/spec/v1\n",
            "expected jsonl data; got a pointer of Git LFS",
        ),
        (
            "rows.parquet",
            b"PAR1 and then nothing",
            "expected data that can be read in .*rows.parquet; got ArrowInvalid",
        ),
        ("rows.json", b'[{"a": 1}, {"a"', "rows.json: expected a list of JSON objects; got "),
        ("rows.csv", b"", "expected data; got an empty file"),
        ("rows.csv", b"question,answer\n", "expected at least one row in .*rows.csv; got none"),
        ("rows.jsonl", b" \n", "expected at least one JSON object; got an empty file"),
        ("rows.xlsx", b"PK\x03\x04", r"expected a file of data, named \*\.jsonl.*; got .*rows.xlsx"),
        ("rows", b"x", "expected a file of data"),
    ],
)
def test_files_that_are_not_what_they_are_called(tmp_path: Path, name: str, content: bytes, message: str):
    (tmp_path / name).write_bytes(content)
    expect(ValueError, message, tmp_path / name)


def test_splits_and_configurations_that_are_not_there(tmp_path: Path):
    splits = {"train": ROWS, "test": ROWS}
    two = write_hub_folder(tmp_path / "two", {"main": splits, "socratic": splits})
    expect(ValueError, r"expected a configuration of .*one of \['main', 'socratic'\]; got None", two)
    expect(ValueError, r"one of \['main', 'socratic'\]; got 'other'", two, config="other")
    there = r"expected a split of .*one of \['train', 'test'\]; got "
    expect(ValueError, there + "'validation'", two, config="main", split="validation")
    expect(ValueError, there + r"'train\+dev\[:1\]'", two, config="main", split="train+dev[:1]")
    expect(ValueError, "expected a split such as", two, config="main", split="train[:x]")
    expect(ValueError, r"expected at least one row in split 'train\[9:\]'", two, config="main", split="train[9:]")
    one = write_hub_folder(tmp_path / "one", {"main": {"dev": ROWS, "test": ROWS}})
    expect(ValueError, "expected the configuration 'main' of .* got 'other'", one, config="other")
    expect(ValueError, r"expected a split of .*one of \['dev', 'test'\]; got None", one)


def test_files_have_no_configurations_and_one_split(tmp_path: Path):
    for kind in ("jsonl", "parquet"):
        path = write_file(tmp_path, kind)
        expect(ValueError, "expected no configuration with a file", path, config="main")
        expect(ValueError, r"expected a split of .*one of \['train'\]; got 'test'", path, split="test")


def test_paths_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "there.jsonl", ROWS)
    for name in ("rows.jsonl", "./rows", "data/train/rows", "~/no/such/place", str(tmp_path / "rows.parquet")):
        expect(FileNotFoundError, "expected a file or a folder at /.*; got nothing there", name)
    expect(FileNotFoundError, re.escape(f"({tmp_path} has ['there.jsonl'])"), "rows.jsonl")


def test_a_folder_without_data(tmp_path: Path):
    for name, entries in (("empty", []), ("notes", ["notes.md"])):
        (tmp_path / name).mkdir()
        for entry in entries:
            (tmp_path / name / entry).write_text("nothing")
        expect(FileNotFoundError, re.escape(f"{name}; got {entries}"), tmp_path / name)


def test_names_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    expect(ConnectionError, "expected to reach the Hub, or to have 'nobody/nothing' in its cache", "nobody/nothing")
    expect(ConnectionError, f"There is no file or folder {tmp_path}/data/train either", "data/train")
    for name in ("gsm8k", "json", "", "who is this"):
        expect(ValueError, "expected a data set of the Hub as 'owner/name', or a file or a folder; got", name)


def test_a_data_set_that_is_a_program(tmp_path: Path):
    (tmp_path / "tricks").mkdir()
    (tmp_path / "tricks" / "tricks.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    expect(ValueError, "expected a data set that consists of data; .*never run", tmp_path / "tricks")
    assert not (tmp_path / "ran").exists()


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    path = write_file(tmp_path, "parquet")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"needs datasets.*pip install -e '\.\["):
        load_rows(DataSource(str(path)))
