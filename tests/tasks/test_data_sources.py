"""Rows from files, folders and the Hub's cache: values as the file has them, and one error for what cannot be read."""

import bz2
import csv
import gzip
import itertools
import json
import lzma
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from smd_jax.tasks import text_files
from smd_jax.tasks.dataset_task import DatasetTask
from smd_jax.tasks.sources import DataSource, Rows, load_rows
from tests.hub_files import no_hub, questions, write_hub_folder, write_lines, write_parquet

__all__ = ["no_hub"]
pytestmark = pytest.mark.usefixtures("no_hub")

ROWS = questions(6)
# What readers that guess types make None, numbers, booleans or days of.
WORDS = ["None", "NA", "N/A", "null", "nan", "007", "7", "1e3", "1.50", "true", "TRUE", "", "2024-01-31 10:00:00", "+5"]
# What a column of a table cannot hold as it is: values of several types, whole numbers beyond int64.
VALUES = ["007", 3, "1e3", 2.5, None, True, 2**70, [1, "x"], {"a": [None]}, "2024-01-31 10:00:00", 0.1 + 0.2]


def read(name: str | Path, *where: str | None) -> list[dict[str, Any]]:
    """All rows."""
    rows = load_rows(DataSource(str(name), *where))
    assert isinstance(rows, Rows)
    return [rows[i] for i in range(len(rows))]


def write_file(folder: Path, kind: str) -> Path:
    """The six rows in a file of this kind."""
    path = folder / f"rows.{kind}"
    match kind:
        case "jsonl" | "ndjson":
            return write_lines(path, ROWS)
        case "json":
            path.write_text(json.dumps(ROWS))
        case "csv" | "tsv":
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, ["question", "answer"], delimiter={"csv": ",", "tsv": "\t"}[kind])
                writer.writeheader()
                writer.writerows(ROWS)
        case "parquet":
            return write_parquet(path, ROWS)
        case "arrow":
            datasets.Dataset.from_list(ROWS).save_to_disk(str(folder / "saved"))
            (folder / "saved" / "data-00000-of-00001.arrow").rename(path)
        case "jsonl.gz":
            path.write_bytes(gzip.compress(write_file(folder, "jsonl").read_bytes()))
        case "csv.bz2":
            path.write_bytes(bz2.compress(write_file(folder, "csv").read_bytes()))
        case "json.xz":
            path.write_bytes(lzma.compress(write_file(folder, "json").read_bytes()))
    return path


@pytest.mark.parametrize(
    "kind", ["jsonl", "ndjson", "json", "csv", "tsv", "parquet", "arrow", "jsonl.gz", "csv.bz2", "json.xz"]
)
def test_a_file_of_every_kind(tmp_path: Path, kind: str):
    assert read(write_file(tmp_path, kind)) == ROWS


def test_endings_in_capitals(tmp_path: Path):
    assert read(write_file(tmp_path, "tsv").rename(tmp_path / "ROWS.TSV")) == ROWS


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_part_of_a_file(tmp_path: Path, kind: str):
    path = write_file(tmp_path, kind)
    assert read(path, None, "train") == ROWS
    assert read(path, None, "train[:2]") == ROWS[:2]
    assert read(path, None, "train[50%:]") == ROWS[3:]
    assert read(path, None, "train[-1:]+train[:1]") == [ROWS[5], ROWS[0]]


def test_a_name_with_brackets_and_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_parquet(tmp_path / "rows [1].parquet", ROWS)
    monkeypatch.chdir(tmp_path)
    assert read("rows [1].parquet") == ROWS


def test_a_folder_in_the_layout_of_the_hub(tmp_path: Path):
    splits = {"train": questions(4), "test": questions(2, first=4)}
    name = write_hub_folder(tmp_path / "gsm8k", {"main": splits, "socratic": {"train": questions(3, first=9)}})
    assert read(name, "main") == splits["train"]
    assert read(name, "main", "test") == splits["test"]
    assert read(name, "socratic") == questions(3, first=9)
    assert read(name, "main", "train[1:2]+test") == [splits["train"][1], *splits["test"]]


def test_a_folder_of_save_to_disk(tmp_path: Path):
    """Names of its files and folders say nothing about splits."""
    splits = {"rl": questions(3), "train_sft": questions(2, first=3), "test_sft": questions(1, first=5)}
    saved: Any = {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
    datasets.DatasetDict(saved).save_to_disk(str(tmp_path / "several"))
    for name, rows in splits.items():
        assert read(tmp_path / "several", None, name) == rows
    assert read(tmp_path / "several", None, "rl[:1]+test_sft") == [splits["rl"][0], *splits["test_sft"]]
    refused(ValueError, r"expected a split of .*, one of \['rl', 'train_sft', 'test_sft'\]", tmp_path / "several")
    refused(ValueError, "expected no configuration with", tmp_path / "several", "main", "rl")
    saved["rl"].save_to_disk(str(tmp_path / "one"))
    assert read(tmp_path / "one") == read(tmp_path / "one", None, "train") == splits["rl"]
    saved["rl"].with_format("numpy", columns=[]).save_to_disk(str(tmp_path / "formatted"))
    assert read(tmp_path / "formatted") == splits["rl"]


def test_a_folder_of_files_without_a_card(tmp_path: Path):
    write_parquet(tmp_path / "data" / "train-00000-of-00002.parquet", ROWS[:3])
    write_parquet(tmp_path / "data" / "train-00001-of-00002.parquet", ROWS[3:])
    write_parquet(tmp_path / "data" / "test-00000-of-00001.parquet", ROWS[:1])
    assert read(tmp_path) == ROWS
    assert read(tmp_path, None, "test") == ROWS[:1]
    assert isinstance(load_rows(DataSource(str(tmp_path))), datasets.Dataset)  # which stays on disk


# --- values


def test_a_field_of_csv_is_text(tmp_path: Path):
    (tmp_path / "rows.csv").write_text("prompt,answer\n" + "".join(f"q,{word}\n" for word in WORDS))
    assert [row["answer"] for row in read(tmp_path / "rows.csv")] == WORDS
    quoted = b'\xef\xbb\xbfprompt,answer\r\n"two\nlines, and ""quotes""",NA\r\n\r\n5" pipe,"  x "\r\n'
    (tmp_path / "quoted.csv").write_bytes(quoted)
    assert read(tmp_path / "quoted.csv") == [
        {"prompt": 'two\nlines, and "quotes"', "answer": "NA"},
        {"prompt": '5" pipe', "answer": "  x "},
    ]
    (tmp_path / "long.csv").write_text("prompt,answer\n" + f"{'a' * 3_000_000},1\n")
    assert len(read(tmp_path / "long.csv")[0]["prompt"]) == 3_000_000


@pytest.mark.parametrize("kind", ["json", "jsonl", "list.jsonl"])
def test_a_value_of_json_keeps_its_type(tmp_path: Path, kind: str):
    rows = [{"prompt": "q", "answer": value} | ({"more": 1} if value == 3 else {}) for value in VALUES]
    path = tmp_path / f"rows.{kind}"
    lines = "\ufeff" + "".join(json.dumps(row) + "\r\n\r\n" for row in rows)
    path.write_text(lines if kind == "jsonl" else "\n " + json.dumps(rows, indent=1))
    got = read(path)
    assert got == [{"more": None} | row for row in rows], "a missing field is None, as in `datasets`"
    assert [type(row["answer"]) for row in got] == [type(value) for value in VALUES]


def test_characters_and_depth_of_json(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": "\\ud83d\\ude00"}\n{"b": "' + "[" * 200 + '"}\n{"c": "one\u2028line"}', encoding="utf-8")
    values = {"a": "\N{GRINNING FACE}", "b": "[" * 200, "c": "one\u2028line"}
    assert read(path) == [{name: values[name] if name == own else None for name in values} for own in values]
    deep: Any = 1
    for _ in range(text_files.MAX_DEPTH - 1):
        deep = [deep]
    assert read(write_lines(path, [{"a": deep}])) == [{"a": deep}]


def test_text_files_of_a_folder_keep_their_values_too(tmp_path: Path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.json").write_text(json.dumps([{"answer": "007"}, {"answer": 3}]))
    assert [row["answer"] for row in read(tmp_path, None, "test")] == ["007", 3]
    assert [row["answer"] for row in read(tmp_path, None, "test[1:]+train[:1]")] == [3, "007"]


# --- what is wrong


def refused(kind: type[Exception], message: str, name: str | Path, *where: str | None, columns: tuple = ()) -> None:
    with pytest.raises(kind, match=message) as error:
        load_rows(DataSource(str(name), *where), columns)
    assert len(str(error.value).replace(str(name), "")) < 700


LFS = b"version https://git-lfs.github.com/spec/v1\n"
CUT_GZIP = gzip.compress(b'{"a": 1}\n' * 999, mtime=0)[:40]  # without the time, so that all workers have one name


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.csv", b"PAR1\x15\x04", "expected csv data; got a parquet file: name it"),
        ("rows.json", b"ARROW1\0\0", "expected json data; got an arrow file"),
        ("rows.jsonl", gzip.compress(b"{}", mtime=0), r"json data; got a file compressed by gzip: name it \*\.gz"),
        ("rows.parquet", b'{"question": "?"}', "expected a parquet file, which begins with 'PAR1'; got .*question"),
        ("rows.parquet", LFS, "got a pointer of Git LFS"),
        ("rows.jsonl", LFS, "got a pointer of Git LFS"),
        ("rows.parquet", b"PAR1 and then nothing", "expected data that can be read in .*rows.parquet'; got ArrowInv"),
        ("rows.parquet.gz", b"PAR1", r"expected a file of data, named \*\.jsonl.*; got .*rows.parquet.gz"),
        ("rows.xlsx", b"PK\x03\x04", r"expected a file of data, named \*\.jsonl.*; got .*rows.xlsx"),
        ("rows.csv", b"", "expected data; got an empty file"),
        ("rows.csv", "question,answer\n", "expected at least one row in .*rows.csv; got none"),
        ("rows.jsonl", " \n", "expected at least one row"),
        ("rows.csv", "a,b,a\n1,2,3\n", r"expected columns of different names; got \['a'\] more than once"),
        ("rows.csv", "a,b\n1,2\n3\n", "rows.csv: expected 2 fields in every row, as in the header; got 1: 3"),
        ("rows.csv", f"a,b\n1,2\n{'3,' * 5000}\n", "expected 2 fields in every row, as in the header; got 5001: 3,3"),
        ("rows.csv", 'a,b\n1,"2\n3,4\n', "rows.csv; got Error: unexpected end.*, in the row that begins in line 2"),
        (
            "rows.tsv",
            'a\tb\n1\t"2" she said\n3\t4\n',
            "rows.tsv; got Error: .* expected after '\"', in the row .* line 2",
        ),
        ("rows.csv", b"a,b\n\xff,2\n", "expected data that can be read in .*utf-8"),
        ("rows.jsonl", '{"x": [{"a": 1, "b": 2, "a": 3}]}', r"line 1: .* of different names; got \['a', 'b', 'a'"),
        ("rows.jsonl", f'{{"{"k" * 5000}": 1, "{"k" * 5000}": 2}}', "expected fields of different names; got"),
        ("rows.jsonl", '{"a": ' + "[" * 100_000, "line 1: expected JSON"),
        ("rows.json", "[" * 5000 + "]" * 5000, "expected JSON nested at most 64 deep"),
        ("rows.jsonl", '{"a": ' * 80 + "1" + "}" * 80, "line 1: expected JSON nested at most 64 deep"),
        ("rows.jsonl", '{"a": 1}\n\n{"\\ud83d": 1}', "line 3: expected JSON; got .*surrogates not allowed"),
        ("rows.jsonl", b'{"a": 1}\n{"question": "\xff"}', "line 2: expected JSON; got .*utf-8"),
        ("rows.jsonl", '{"a": ' + "9" * 5000 + "}", "line 1: expected JSON; got .*4300 digits"),
        ("rows.jsonl", '{"a": 1}\n7', "line 2: expected a JSON object; got int 7"),
        ("rows.json", json.dumps(["x" * 5000]), "rows.json, row 1: expected a JSON object; got str 'xxx"),
        ("rows.json", b'[{"a": 1}, {"a"', "rows.json: expected JSON; got "),
        ("rows.jsonl.gz", b"no gzip at all", "expected data that can be read in .*BadGzipFile"),
        ("rows.jsonl.gz", CUT_GZIP, "expected data that can be read in .*EOFError"),
        ("rows.jsonl.xz", b"\xfd7zXZ\x00 and", "expected data that can be read in"),
    ],
)
def test_files_that_cannot_be_read_or_would_be_changed(tmp_path: Path, name: str, content: str | bytes, message: str):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(ValueError, message, tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("rows.jsonl", '{"prompt": "a"}\n\n{"prompt": 7}\n', "rows.jsonl, line 3"),
        ("rows.json", '[{"prompt": "a"}, {"prompt": 7}]', "rows.json, row 2"),
    ],
)
@pytest.mark.parametrize("split", [None, "train[1:]"])
def test_a_row_that_is_no_prompt_is_named_by_its_place(
    tmp_path: Path, name: str, content: str, where: str, split: str | None
):
    (tmp_path / name).write_text(content)
    rows = load_rows(DataSource(str(tmp_path / name), split=split))
    with pytest.raises(ValueError, match=f"{where}: expected text, or chat messages .*; got 7"):
        DatasetTask(rows)[len(rows) - 1]


@pytest.mark.parametrize(("suffix", "pack"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)])
def test_a_small_file_that_unpacks_to_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, pack: Any):
    path = tmp_path / f"rows.jsonl.{suffix}"
    path.write_bytes(pack(b'{"prompt": "Count to 3."}\n' * 1000))
    assert len(read(path)) == 1000
    monkeypatch.setattr(text_files, "FREE_BYTES", 2**20)
    path.write_bytes(pack(b'{"prompt": "' + b"0" * 20_000_000))
    refused(ValueError, "rows.* expected [0-9,]+ bytes to unpack to at most [0-9,]+; got more", path)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_missing_columns_are_named_beside_those_that_are_there(tmp_path: Path, kind: str):
    path = write_file(tmp_path, kind)
    message = r"expected the columns \['answer', 'prompt'\]; got \['question', 'answer'\], without \['prompt'\]"
    where = "rows.jsonl, line 1: " if kind == "jsonl" else ""
    refused(ValueError, where + message, path, columns=("answer", "prompt"))


def test_splits_and_configurations_that_are_not_there(tmp_path: Path):
    splits = {"train": ROWS, "test": ROWS}
    two = write_hub_folder(tmp_path / "two", {"main": splits, "socratic": splits})
    refused(ValueError, r"Config name is missing.*\['main', 'socratic'\]", two)
    refused(ValueError, r"'other' not found. Available: \['main', 'socratic'\]", two, "other")
    one = write_hub_folder(tmp_path / "one", {"main": {"dev": ROWS, "test": ROWS}})
    refused(ValueError, r"expected a split of .*one of \['dev', 'test'\]; got None", one)
    for name, where in ((two, "main"), (write_file(tmp_path, "jsonl"), None), (write_file(tmp_path, "parquet"), None)):
        refused(ValueError, r"Unknown split .*(dev|validation).* \['train'", name, where, "validation")
        refused(ValueError, r"got ValueError: Unrecognized instruction", name, where, "train[:x]")
        refused(ValueError, "expected", name, where, "train[9:]")
    refused(ValueError, "expected no configuration with .*rows.jsonl, which has none", tmp_path / "rows.jsonl", "main")


def test_names_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("rows.jsonl", "./rows", "data/train/rows", "~/no/such/place", str(tmp_path / "rows.parquet")):
        refused(FileNotFoundError, "expected a file or a folder at /.*; got nothing there .* has", name)
    refused(ConnectionError, "expected to reach the Hub, or to have 'nobody/nothing' in its cache", "nobody/nothing")
    for name in ("gsm8k", "json", "", "who is this"):
        refused(ValueError, "expected a data set of the Hub as 'owner/name', or a file or a folder; got", name)
    for name in ("x" * 5000, "x/" * 2000, "nul\0byte", f"{tmp_path}/\udcff", "a" * 300 + ".jsonl"):
        with pytest.raises((ValueError, FileNotFoundError), match="expected"):
            load_rows(DataSource(name))


LAUGHS = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in itertools.pairwise("abcdefghijklmnopqrstu"))


@pytest.mark.parametrize(
    ("card", "said"),
    [
        ("a: !unknown {b: c}", "README.md: expected YAML; got"),
        ("a: [", "README.md: expected YAML; got"),
        ("a: " + "[" * 500, "README.md: expected YAML of at most 50 levels"),
        ("a: " + "x" * 2**20, "README.md: expected YAML of at most 1,048,576 characters"),
        (LAUGHS, "README.md: expected YAML of at most 100,000 values with aliases written out"),
        ("configs: 5", "expected data that can be read in"),
        ("- a", "expected data that can be read in"),
    ],
)
def test_cards_that_cannot_be_read(tmp_path: Path, card: str, said: str):
    write_lines(tmp_path / "train.jsonl", [{"a": 1}])
    (tmp_path / "README.md").write_text(f"---\n{card}\n---\n")
    refused(ValueError, said, tmp_path)


def test_a_card_with_aliases(tmp_path: Path):
    write_lines(tmp_path / "train.jsonl", [{"a": 1}])
    (tmp_path / "README.md").write_text("---\ntags: &one [x]\nlanguage: *one\n---\n")
    assert len(load_rows(DataSource(str(tmp_path)))) == 1


def test_a_folder_that_another_one_matches(tmp_path: Path):
    """`datasets` takes the path for a pattern, and would read the rows of fold3."""
    for name in ("fold[3]", "fold3"):
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name / "train.jsonl", [{"a": name}])
    refused(ValueError, r"expected a folder without \*, \? and \[ in its path.*; got .*fold\[3\]", tmp_path / "fold[3]")


def test_text_files_of_the_hub_are_read_as_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With the Hub played by a folder: found by `datasets`, fetched as they are, and found again without a network."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "train.csv").write_text("answer\n007\nNA\n")
    asked = []

    def fetch(name: str, **options: Any) -> str:
        asked.append((name, options))
        return str(snapshot)

    load = datasets.load_dataset_builder
    builder = load(str(snapshot))
    online = {"owner/name": builder}
    monkeypatch.setattr(builder.config, "data_files", {"train": ["hf://datasets/owner/name@c0ffee/train.csv"]})
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    monkeypatch.setattr("datasets.load_dataset_builder", lambda name, *rest: online.get(name) or load(name, *rest))
    rows = [{"answer": "007"}, {"answer": "NA"}]
    assert load_rows(DataSource("owner/name")) == rows
    files = ["README.md", ".huggingface.yaml", "train.csv"]
    assert asked == [("owner/name", {"repo_type": "dataset", "revision": "c0ffee", "allow_patterns": files})]
    online.clear()
    assert load_rows(DataSource("owner/name")) == rows
    assert asked[1:] == [("owner/name", {"repo_type": "dataset", "local_files_only": True})]


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ('sep: ";"', "prompt;answer\nq, r;x\n"),
        ('sep: "\\t"', "prompt\tanswer\nq, r\tx\n"),
        ("column_names: [prompt, answer]", '"q, r",x\n'),
        ('comment: "#"', 'prompt,answer\n# no row\n"q, r",x\n'),
        ('quotechar: "\'"', "prompt,answer\n'q, r',x\n"),
        ("skiprows: 1", 'made by hand\nprompt,answer\n"q, r",x\n'),
    ],
)
def test_settings_of_the_card(tmp_path: Path, setting: str, text: str):
    (tmp_path / "README.md").write_text(f'---\nconfigs:\n- config_name: a\n  data_files: "*.csv"\n  {setting}\n---\n')
    (tmp_path / "rows.csv").write_text(text)
    assert [*load_rows(DataSource(str(tmp_path)))] == [{"prompt": "q, r", "answer": "x"}]


def test_folders_without_data(tmp_path: Path):
    refused(FileNotFoundError, "expected data that you may read in .*; got EmptyDatasetError", tmp_path)
    (tmp_path / "tricks").mkdir()
    (tmp_path / "tricks" / "tricks.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    refused(ValueError, "scripts are no longer supported", tmp_path / "tricks")
    assert not (tmp_path / "ran").exists()


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    path = write_file(tmp_path, "parquet")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"needs datasets.*pip install 'smd_jax\["):
        load_rows(DataSource(str(path)))
