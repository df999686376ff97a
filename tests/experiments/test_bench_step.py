"""The benchmark of whole steps as a program reads it, on a tiny random model and without the peers; and its grading."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

from smd_jax.testing import write_random_checkpoint
from tests.paths import ROOT

pytestmark = pytest.mark.study

BENCH = ROOT / "experiments" / "bench"


@pytest.fixture(scope="module")
def whole_step() -> ModuleType:
    path = BENCH / "engines" / "whole_step.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "path", [str(path.parent), *sys.path]):
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = [{"question": f"{n} + 1?", "answer": f"One more.\n#### {n + 1:,}"} for n in (4, 1033, 17)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_lines_of_json(tmp_path: Path, data: Path):
    write_random_checkpoint(tmp_path / "model")
    command = [sys.executable, str(BENCH / "step.py"), "--data", str(data), "--model", str(tmp_path / "model")]
    command += ["--completions", "4", "--group", "2", "--microbatch", "2", "--new-tokens", "12", "--budget", "16"]
    command += ["--buffer", "4", "--repeats", "2", "--threads", "1", "--full-length", "--json"]
    command += ["--out", str(tmp_path / "rows.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ours, dense = (json.loads(line) for line in done.stdout.splitlines())  # the peers have no interpreter: left out
    assert (ours["engine"], dense["engine"]) == ("ours", "ours-dense")
    assert (ours["budget"], ours["buffer"], dense["budget"]) == (16, 4, None)
    for row in (ours, dense):
        assert (row["tokens"], row["mean_length"], row["repeats"]) == (4 * 12, 12, 2)
        parts = sum(row[f"{part}_seconds"] for part in ("rollout", "grading", "update"))
        assert parts == pytest.approx(row["seconds"], rel=1e-3)  # medians of two are means, which add up
        assert row["ms_per_token"] == pytest.approx(row["seconds"] / row["tokens"] * 1e3)
        assert 0 < row["update_limit_seconds"] < row["limit_seconds"] and 0 < row["limit_share"] < 1
        assert 0 < row["max_abs_dlogp"] < 2e-5 and row["peak_bytes"] > 0 and 0 <= row["reward"] <= 1
    # A learner that sees fewer keys has less to do.
    assert ours["update_limit_seconds"] < dense["update_limit_seconds"]
    written = json.loads((tmp_path / "rows.json").read_text())
    assert written.keys() >= {"date", "command", "cpu"} and written["rows"] == [ours, dense]


def arguments(data: Path, completions: int) -> argparse.Namespace:
    return argparse.Namespace(data=str(data), completions=completions, group=2, microbatch=2)


def test_problems_are_the_first_rows(whole_step: ModuleType, data: Path):
    rows = whole_step.problems(arguments(data, 4))
    assert [row["answer"] for row in rows] == ["5", "1034"]
    assert rows[0]["prompt"].startswith("4 + 1?\n")
    with pytest.raises(ValueError, match="expected at least 4 rows in .*; got 3"):
        whole_step.problems(arguments(data, 8))
    with pytest.raises(ValueError, match="expected completions that divide into groups of 2 .*; got 5"):
        whole_step.problems(arguments(data, 5))


def test_the_last_number_is_the_answer(whole_step: ModuleType):
    grader = whole_step.Grader()
    completions = ["3 and 4.\n#### 1,034", "it is 1034.0", "#### 1034, no: 7", "none", "1034 apples\n#### "]
    assert grader(completions, ["1034"] * 5) == [1, 1, 0, 0, 0]
    assert grader.reward == pytest.approx(2 / 5) and 0 < grader.began <= grader.ended
    assert grader(["-2"], ["-2"]) == [1]


def test_a_step_is_divided_by_its_grading(whole_step: ModuleType):
    """With a clock that is turned by hand: 3 s of rollout, 1 s of grading, 5 s of update."""
    args = argparse.Namespace(repeats=1, driven=False)
    grader = whole_step.Grader()
    clock = whole_step.StepClock.__new__(whole_step.StepClock)  # without taking standard output for itself
    clock.args, clock.grader, clock.warmup, clock.begun = args, grader, 1, 0
    clock.seconds, clock.cpu_seconds, clock.steps = [], [], []
    for begins in (0.0, 100.0):  # the first one warms up
        with mock.patch("time.perf_counter", return_value=begins):
            clock.begin()
        grader.began, grader.ended, grader.reward = begins + 3, begins + 4, 0.5
        with mock.patch("time.perf_counter", return_value=begins + 9):
            clock.end_step([(7, 2), (7, 1)])
    [step] = clock.steps
    parts = {"rollout_seconds": 3, "grading_seconds": 1, "update_seconds": 5}
    assert step == {"seconds": 9, **parts, "reward": 0.5, "tokens": [[7, 2], [7, 1]]}
