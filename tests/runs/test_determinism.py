"""Determinism: equal seeds give equal runs, and resumed runs equal uninterrupted ones."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from breaking.run_result import start
from breaking.trained import real_loop, real_result, real_state
from tests.paths import ROOT
from tests.toy_loop import CONFIG, new_loop, new_state, run

EXPERIMENTS = ROOT / "experiments"


@pytest.mark.multiprocess
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(tmp_path: Path):
    """In every metric and every byte of the state; the resume is in another process."""
    command = [sys.executable, str(EXPERIMENTS / "fault_runs.py"), str(tmp_path / "parts"), "20"]
    path = os.pathsep.join([str(ROOT), str(EXPERIMENTS)])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}) as process:
        # Rollouts 0 to 9 are finished, and the last save may still run.
        assert process.stdout is not None
        for line in process.stdout:
            if line == "rollout 10\n":
                process.send_signal(signal.SIGKILL)
                break
        assert process.wait() == -signal.SIGKILL
    killed = real_result(tmp_path / "parts")
    assert killed.unreadable == 0 and killed.steps[-1] in (8, 10) and len(killed.rows) == 10
    loop = real_loop()
    start(loop, real_state(), tmp_path / "parts", 20)
    start(loop, real_state(), tmp_path / "whole", 20)
    parts, whole = (real_result(tmp_path / name) for name in ("parts", "whole"))
    assert parts.rows == whole.rows and len(whole.rows) == 20
    assert parts.newest == whole.newest and parts.steps[-1] == 20
    assert all(row["grad_norm"] > 0 for row in whole.rows), "every rollout must change the parameters"


@pytest.mark.slow
@pytest.mark.parametrize(("config", "seed"), [(CONFIG, 4), (replace(CONFIG, seed=1), 3)], ids=["PRNG key", "row order"])
def test_another_seed_gives_another_run(config: Any, seed: int):
    _, rows = run(new_loop(), new_state(3), 1)
    _, others = run(new_loop(config), new_state(seed), 1)
    assert rows[0]["entropy"] != others[0]["entropy"]


def test_the_page_names_existing_tests():
    page = (ROOT / "docs" / "determinism.md").read_text(encoding="utf-8")
    named = re.findall(r"`tests/([\w/]+\.py)::(\w+)`", page)
    assert len(named) >= 8
    for file, test in named:
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), f"{file} has no {test}"


def test_all_committed_faults_were_survived():
    rows = json.loads((EXPERIMENTS / "results" / "faults.json").read_text(encoding="utf-8"))
    assert len({row["fault"] for row in rows}) == len(rows) >= 15
    assert sum(row["injected"] for row in rows) >= 40
    for row in rows:
        assert row["injected"] >= 1 and row["survived"] == row["injected"], row["fault"]
        assert row["unreadable_checkpoints"] == 0, row["fault"]
        # Checkpoints are two rollouts apart. A failed asynchronous save is noticed one rollout later.
        most_lost = 3 if row["fault"] == "disk full in a save" else 2
        assert row["max_steps_lost"] <= most_lost, row["fault"]
