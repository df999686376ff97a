"""The benchmark of rollouts as a program reads it, in tiny sizes and without the peers; times of single steps."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.engines import generation
from tests.paths import ROOT

pytestmark = pytest.mark.study

SCRIPT = ROOT / "experiments" / "bench" / "rollout.py"
FIELDS = {"device", "temp_bytes", "peak_bytes", "versions", "ms_per_step_late"}


def test_lines_of_json(tmp_path: Path):
    out = tmp_path / "rows.json"
    # There is no interpreter for hf, so it is left out.
    command = [sys.executable, str(SCRIPT), "--quick", "--engine", "ours", "hf", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    row = json.loads(done.stdout)
    assert row.keys() >= FIELDS
    assert (row["engine"], row["batch"], row["prompt"], row["new_tokens"]) == ("ours", 4, 8, 48)
    # 2 · layers · KV heads · (budget + buffer) · head_dim · bytes · rows
    assert row["expected_cache_bytes"] == 2 * 4 * 2 * (16 + 8) * 32 * 4 * 4
    assert row["expected_cache_bytes"] <= row["cache_bytes"] <= 1.05 * row["expected_cache_bytes"]
    assert 0 < row["max_abs_dlogp"] < 2e-5 and row["limit_share"] > 0
    assert row["tokens_per_s"] > 0 and row["ms_per_step_early"] > 0
    written = json.loads(out.read_text())
    assert written.keys() >= {"date", "command"} and written["rows"] == [row]


def marks_of(turn: list[tuple[int, float]]) -> generation.Marks:
    marks = generation.Marks()
    marks.turns = [[(n, seconds, seconds / 2) for n, seconds in turn]]
    return marks


def test_early_and_late_steps():
    # Steps of 2 ms up to token 1,000 and of 5 ms after it, seen in segments of 32.
    turn = [(n, 0.002 * min(n, 1000) + 0.005 * max(n - 1000, 0)) for n in range(32, 4097, 32)]
    assert generation.early_and_late(marks_of(turn), 4096) == pytest.approx((2, 5))
    assert generation.early_and_late(marks_of(turn), 4096, cpu=True) == pytest.approx((1, 2.5))
    short = [(n, seconds) for n, seconds in turn if n <= 512]
    assert generation.early_and_late(marks_of(short), 512) == pytest.approx((2, 2))
    assert generation.early_and_late(marks_of([]), 512) == (None, None)


def test_one_slow_segment_does_not_count():
    turn, seconds = [], 0.0
    for n in range(32, 1025, 32):
        seconds += 32 * (0.1 if n == 416 else 0.002)
        turn.append((n, seconds))
    assert generation.early_and_late(marks_of(turn), 1024) == pytest.approx((2, 2))


def test_prompts_are_the_same_in_all_engines():
    first, again = (generation.prompts(3, 5, 1024) for _ in range(2))
    assert first == again and [len(row) for row in first] == [5, 5, 5]
    assert all(1 <= token < 1024 for row in first for token in row)
