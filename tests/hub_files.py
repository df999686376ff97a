"""Data sets in the Hub's layout, written into a test's folder; nothing is downloaded."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

Row = dict[str, Any]


@pytest.fixture
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns off the network, and moves the cache of `datasets` into the test's folder."""
    import datasets
    from datasets import config

    # Both libraries read the environment at import, which may be long before this test.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def questions(count: int, first: int = 0) -> list[Row]:
    """Rows of two columns, all different."""
    return [{"question": f"{i} + 1?", "answer": f"so #### {i + 1}"} for i in range(first, first + count)]


def write_parquet(path: Path, rows: Sequence[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def write_lines(path: Path, rows: Sequence[Row]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def write_hub_folder(folder: Path, configs: Mapping[str, Mapping[str, Sequence[Row]]]) -> Path:
    """A folder as `push_to_hub` makes it: config/split-00000-of-00001.parquet, and a README.md that lists them."""
    card = ["---", "configs:"]
    for config, splits in configs.items():
        card += [f"- config_name: {config}", "  data_files:"]
        for split, rows in splits.items():
            card += [f"  - split: {split}", f"    path: {config}/{split}-*"]
            write_parquet(folder / config / f"{split}-00000-of-00001.parquet", rows)
    (folder / "README.md").write_text("\n".join([*card, "---", ""]))
    return folder
