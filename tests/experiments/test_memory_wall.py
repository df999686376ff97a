"""The table of rows that fit: the search for their number, and the study on a tiny model."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

import memory_wall
from lib.files import read_rows
from memory_wall import CACHES, most_rows, rows_of, stored_shapes, table, workload
from smd_jax.byte_sizes import parse_bytes
from smd_jax.testing import tiny_model_config

pytestmark = pytest.mark.study

TINY = tiny_model_config(num_layers=2, max_positions=512)


@pytest.mark.parametrize("ways", (1, 4))
@pytest.mark.parametrize("each, rest", ((1, 0), (7, 13), (7, 5_000)))
def test_the_most_rows_of_a_line_with_a_kink(each: int, rest: int, ways: int):
    def needed(rows: int) -> int:
        return max(each * rows, rest)  # few rows of a rollout need less than the update does

    expected = 0 if max(each * ways, rest) > 1_003 else 1_003 // each // ways * ways
    assert most_rows(1_003, needed, ways) == expected


def test_one_more_row_would_not_fit():
    with mock.patch.object(memory_wall, "CACHES", CACHES[:3]):
        rows = list(rows_of("tiny", TINY, "full", "32MiB", (96, 384)))
    params = stored_shapes(TINY, "full")
    for row in rows:
        cache = next(cache for cache in CACHES if cache.name == row["cache"])
        work = workload(TINY, "full", cache, row["length"], row["prompt"])
        fits, over = (memory_wall.bytes_of(work, params, row["rows"] + more) for more in (0, 1))
        assert fits <= parse_bytes("32MiB") < over, row
    assert [row["ratio"] for row in rows if row["cache"] == "dense"] == [1, 1]
    short, long = (row["rows"] for row in rows if row["cache"] == "dense")
    assert short > long > 0


def test_a_table_is_made_of_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    args = memory_wall.Args(
        models=("0.5B",),
        learners=("lora", "full, fsdp 8"),
        lengths=(96,),
        memory="32MiB",
        out=tmp_path / "rows.json",
        table=tmp_path / "table.md",
    )
    with mock.patch.dict(memory_wall.MODELS, {"0.5B": TINY}):
        memory_wall.main(args)
    rows = read_rows(tmp_path / "rows.json")
    assert len(rows) == 2 * len(CACHES) and all(row["commit"] and row["command"] for row in rows)
    eight = [row["rows"] for row in rows if row["learner"] == "full, fsdp 8"]
    assert all(count % 8 == 0 for count in eight) and max(eight) > 0
    written = (tmp_path / "table.md").read_text()
    assert table(rows) in written and table(rows) in capsys.readouterr().out
    assert f"| 0.5B | lora | dense | {rows[0]['rows']:,} |" in written
