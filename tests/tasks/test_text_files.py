"""Values of text files arrive as the file has them; what would lose or hide something is refused, whatever its size."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from smd_jax.tasks import data_files, folders
from smd_jax.tasks.sources import DataSource, load_rows
from smd_jax.tasks.text_files import MAX_DEPTH
from tests.hub_files import no_hub, write_lines

__all__ = ["no_hub"]
pytestmark = pytest.mark.usefixtures("no_hub")

# What readers that guess types make None, numbers, booleans or days of.
WORDS = ["None", "NA", "N/A", "null", "nan", "007", "7", "1e3", "1.50", "true", "TRUE", "", "2024-01-31 10:00:00", "+5"]
# What a column of a table cannot hold as it is: values of several types, whole numbers beyond int64.
VALUES = ["007", 3, "1e3", 2.5, None, True, 2**70, [1, "x"], {"a": [None]}, "2024-01-31 10:00:00", 0.1 + 0.2]


def read(name: str | Path, split: str | None = None) -> list[dict[str, Any]]:
    rows = load_rows(DataSource(str(name), split=split))
    return [rows[i] for i in range(len(rows))]


def refused(name: str | Path, message: str, columns: tuple[str, ...] = ()) -> None:
    """In one short message."""
    with pytest.raises(ValueError, match=message) as error:
        load_rows(DataSource(str(name)), columns)
    assert len(str(error.value).replace(str(name), "")) < 700


@pytest.mark.parametrize(("suffix", "separator"), [("csv", ","), ("tsv", "\t")])
def test_a_field_of_csv_is_text(tmp_path: Path, suffix: str, separator: str):
    path = tmp_path / f"rows.{suffix}"
    path.write_text(f"prompt{separator}answer\n" + "".join(f"q{separator}{word}\n" for word in WORDS))
    assert [row["answer"] for row in read(path)] == WORDS
    numbers = tmp_path / f"numbers.{suffix}"
    numbers.write_text(f"prompt{separator}answer\nq{separator}12\nq{separator}7\n")
    assert [row["answer"] for row in read(numbers)] == ["12", "7"]


def test_quotes_and_line_ends_of_csv(tmp_path: Path):
    path = tmp_path / "rows.csv"
    path.write_bytes(b'\xef\xbb\xbfprompt,answer\r\n"two\nlines, and ""quotes""",NA\r\n\r\n5" pipe,"  x "\r\n')
    assert read(path) == [
        {"prompt": 'two\nlines, and "quotes"', "answer": "NA"},
        {"prompt": '5" pipe', "answer": "  x "},
    ]


def test_a_long_field_of_csv(tmp_path: Path):
    path = tmp_path / "rows.csv"
    path.write_text("prompt,answer\n" + "".join(f"{letter * 3_000_000},1\n" for letter in "abc"))
    assert [len(row["prompt"]) for row in read(path)] == [3_000_000] * 3


@pytest.mark.parametrize("kind", ["json", "lines.json", "jsonl", "jsonl.gz", "json.gz", "jsonl.xz", "jsonl.zst"])
def test_json_gives_the_same_values_in_every_file(tmp_path: Path, kind: str):
    rows = [{"prompt": "q", "answer": value} | ({"more": 1} if value == 3 else {}) for value in VALUES]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = tmp_path / f"rows.{kind}"
    match kind:
        case "json":
            path.write_text("\n " + json.dumps(rows, indent=1))
        case "json.gz":
            path.write_bytes(gzip.compress(json.dumps(rows).encode()))
        case "jsonl.gz":
            path.write_bytes(gzip.compress(lines))
        case "jsonl.xz":
            path.write_bytes(lzma.compress(lines))
        case "jsonl.zst":
            path.write_bytes(pa.compress(lines, codec="zstd", asbytes=True))
        case _:
            path.write_bytes(lines)
    got = read(path)
    assert got == rows
    assert [type(row["answer"]) for row in got] == [type(value) for value in VALUES]


def test_files_of_a_folder_keep_their_values_too(tmp_path: Path):
    for split in ("train", "test"):
        (tmp_path / "csv").mkdir(exist_ok=True)
        (tmp_path / "csv" / f"{split}.csv").write_text("prompt,answer\nq,007\nq,NA\n")
        (tmp_path / "json").mkdir(exist_ok=True)
        (tmp_path / "json" / f"{split}.json").write_text(json.dumps([{"answer": "007"}, {"answer": 3}]))
    for split in ("train", "test"):
        assert [row["answer"] for row in read(tmp_path / "csv", split)] == ["007", "NA"]
        assert [row["answer"] for row in read(tmp_path / "json", split)] == ["007", 3]
    assert [row["answer"] for row in read(tmp_path / "csv", split="test[1:]+train[:1]")] == ["NA", "007"]
    assert [row["answer"] for row in read(tmp_path / "json", split="test[1:]+train[:1]")] == [3, "007"]


def test_a_separator_of_the_card(tmp_path: Path):
    (tmp_path / "README.md").write_text('---\nconfigs:\n- config_name: a\n  data_files: "*.csv"\n  sep: ";"\n---\n')
    (tmp_path / "rows.csv").write_text("prompt;answer\nq, r;007\n")
    assert read(tmp_path) == [{"prompt": "q, r", "answer": "007"}]


def test_text_files_of_the_hub_are_read_as_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With the Hub played by a folder: found by `datasets`, fetched as they are, and found again without a network."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "train.csv").write_text("answer\n007\nNA\n")
    asked = []

    def fetch(name: str, **options: Any) -> str:
        asked.append((name, options))
        return str(snapshot)

    builder = datasets.load_dataset_builder(str(snapshot))
    url = "hf://datasets/owner/name@c0ffee/train.csv"
    monkeypatch.setattr(builder.config, "data_files", {"train": [url]})
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    online = {"owner/name": builder}
    load = datasets.load_dataset_builder
    monkeypatch.setattr(
        "datasets.load_dataset_builder",
        lambda name, *rest, **options: online[name] if name in online else load(name, *rest, **options),
    )
    assert read("owner/name") == [{"answer": "007"}, {"answer": "NA"}]
    files = [*folders.CARDS, "train.csv"]
    assert asked == [("owner/name", {"repo_type": "dataset", "revision": "c0ffee", "allow_patterns": files})]
    online.clear()
    assert read("owner/name") == [{"answer": "007"}, {"answer": "NA"}]
    assert asked[1:] == [("owner/name", {"repo_type": "dataset", "local_files_only": True})]


# --- refused


# Without the time of writing: both workers must collect the same tests.
CUT_GZIP = gzip.compress(b'{"a": 1}\n' * 999, mtime=0)[:40]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.csv", "a,b,a\n1,2,3\n", r"expected columns of different names; got \['a'\] more than once"),
        ("rows.csv", "a,b\n1,2\n3\n", "rows.csv: expected 2 fields in every row, as in the header; got 1: 3"),
        ("rows.csv", "a,b\n1,2\n3,4,5\n", "expected 2 fields in every row, .*; got 3: 3,4,5. Put quotes"),
        ("rows.csv", f"a,b\n1,2\n{'3,' * 5000}\n", "expected 2 fields in every row, as in the header; got 5001: 3,3"),
        ("rows.csv", 'a,b\n1,2\n"3,4\n5,6\n', "rows.csv: expected 2 fields in every row"),
        ("rows.csv", b"a,b\n\xff,2\n", "expected data that can be read in .*(UTF8|utf-8)"),
        ("rows.jsonl", '{"a": 1, "b": 2, "a": 3}', "line 1: expected fields of different names; got 'a' twice"),
        ("rows.json", '[{"x": {"a": 1, "a": 3}}]', "expected fields of different names; got 'a' twice"),
        ("rows.jsonl", f'{{"{"k" * 5000}": 1, "{"k" * 5000}": 2}}', "expected fields of different names; got 'kkk"),
        ("rows.jsonl", '{"a": ' + "[" * 100_000, "line 1: expected JSON nested at most 64 deep"),
        ("rows.json", "[" * 100_000, "expected JSON nested at most 64 deep"),
        ("rows.jsonl", '{"a": ' * 80 + "1" + "}" * 80, "line 1: expected JSON nested at most 64 deep"),
        ("rows.jsonl", '{"a": "\\ud83d"}', r"line 1: expected whole characters; got half of one, '\\ud83d'"),
        ("rows.json", '[{"a": ["\\uDE00x"]}]', "expected whole characters; got half of one"),
        ("rows.jsonl", '{"\\ud83d": 1}', "line 1: expected whole characters; got half of one"),
        ("rows.jsonl", '{"a": ' + "9" * 5000 + "}", "line 1: expected a JSON object; got .*4300 digits"),
        ("rows.jsonl", "7", "line 1: expected a JSON object; got int 7"),
        ("rows.json", "[1, 2]", "row 0: expected a JSON object; got int 1"),
        ("rows.json", '{"a": {"b": 1}', "expected a JSON object; got "),
        ("rows.json", json.dumps(["x" * 5000]), "row 0: expected a JSON object; got str 'xxx"),
        ("rows.jsonl.gz", b"no gzip at all", "expected data that can be read in .*BadGzipFile"),
        ("rows.jsonl.gz", CUT_GZIP, "expected data that can be read in .*EOFError"),
        ("rows.csv.bz2", b"BZh9 and then nothing", "expected data that can be read in"),
        ("rows.jsonl.xz", b"\xfd7zXZ\x00 and", "expected data that can be read in"),
        ("rows.parquet.gz", b"no gzip at all", "expected a file that can be unpacked; got BadGzipFile"),
    ],
)
def test_what_would_be_lost_or_hidden(tmp_path: Path, name: str, content: str | bytes, message: str):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(path, message)


def test_pairs_of_halves_are_whole_characters(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": "\\ud83d\\ude00"}\n{"b": "' + "[" * 200 + '"}\n')
    assert read(path) == [{"a": "\N{GRINNING FACE}"}, {"b": "[" * 200}]
    deep: Any = 1
    for _ in range(MAX_DEPTH - 1):
        deep = [deep]
    assert read(write_lines(path, [{"a": deep}])) == [{"a": deep}]


@pytest.mark.parametrize("suffix", ["jsonl.gz", "json.gz", "csv.gz", "jsonl.bz2", "jsonl.xz", "csv.zst", "parquet.gz"])
def test_a_small_file_that_unpacks_to_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str):
    monkeypatch.setattr(data_files, "FREE_BYTES", 2**20)
    packs = {
        "gz": gzip.compress,
        "bz2": bz2.compress,
        "xz": lzma.compress,
        "zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
    }
    path = tmp_path / f"rows.{suffix}"
    path.write_bytes(packs[suffix.rpartition(".")[2]](b'{"prompt": "' + b"0" * 20_000_000))
    refused(path, "rows.* expected [0-9,]+ bytes to unpack to at most [0-9,]+; got more")


@pytest.mark.slow
def test_many_rows_that_repeat_themselves_are_data(tmp_path: Path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "Count to 3.", "answer": "1 2 3"}\n' * 100_000))
    assert len(read(path)) == 100_000


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_column_of_two_names_in_a_folder(tmp_path: Path, kind: str):
    folder = tmp_path / "data"
    folder.mkdir()
    match kind:
        case "jsonl":
            (folder / "rows.jsonl").write_text('{"a": 1, "a": 2}')
        case "csv":
            (folder / "rows.csv").write_text("a,a\n1,2\n")
        case "parquet":
            table = pa.table([pa.array([1]), pa.array([2])], names=["a", "a"])
            pq.write_table(table, folder / "rows.parquet")
    refused(folder, "of different names|Multiple matches|expected data that can be read")


LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))


@pytest.mark.parametrize(
    ("card", "message"),
    [
        (
            "configs: !!python/object/apply:os.system [echo]",
            "expected a data set that can be read; got .*ConstructorError",
        ),
        ("!unknown {a: b}", "expected a data set that can be read; got .*ConstructorError"),
        ("a: [", "README.md: expected YAML; got"),
        (LAUGHS, "README.md: expected YAML of at most 100,000 values"),
        ("a: " + "[" * 500, "README.md: expected YAML of at most 50 levels"),
        ("a: " + "x" * 2**20, "README.md: expected YAML of at most 1,048,576 characters"),
        ("configs: 5", "expected a data set that can be read"),
        ("configs: [5]", "expected a data set that can be read"),
        ("- a", "expected a data set that can be read"),
    ],
)
def test_cards_of_strangers(tmp_path: Path, card: str, message: str):
    folder = tmp_path / "data"
    folder.mkdir()
    write_lines(folder / "train.jsonl", [{"a": 1}])
    (folder / "README.md").write_text(f"---\n{card}\n---\n")
    refused(folder, message)


def test_folders_that_datasets_cannot_read(tmp_path: Path):
    (tmp_path / "fold[3]").mkdir()
    write_lines(tmp_path / "fold[3]" / "train.jsonl", [{"a": 1}])
    refused(tmp_path / "fold[3]", r"expected a folder without \*, \? and \[ in its path.*; got .*fold\[3\]")
    saved = datasets.Dataset.from_list([{"a": 1}])
    saved.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": saved}).save_to_disk(str(tmp_path / "splits"))
    for name in ("saved", "splits"):
        refused(tmp_path / name, "expected files of data in .*; got a data set that `save_to_disk` wrote. .*to_parquet")


def test_names_that_are_no_paths(tmp_path: Path):
    for name in ("x" * 5000, "x/" * 2000, "nul\0byte", f"{tmp_path}/\udcff", "a" * 300 + ".jsonl"):
        with pytest.raises((ValueError, FileNotFoundError), match="expected") as error:
            load_rows(DataSource(name))
        assert len(str(error.value)) < 1000
