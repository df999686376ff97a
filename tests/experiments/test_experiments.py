"""The quickstart rejects bad flags early, and results record their origin."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Literal
from unittest import mock

import pytest

import identity
from lib import provenance
from tests.paths import ROOT

pytestmark = pytest.mark.study

EXPERIMENTS = ROOT / "experiments"
RESULTS = sorted((EXPERIMENTS / "results").rglob("*.json"))
# Deleted scripts of finished measurements; commits b191876, d6de491, 71ba418, a38d692 and 84e2370 have them.
DELETED = {
    *("choices", "collectives", "compile_update", "first_run", "foreign_sampler", "gradients", "kvpress_parity"),
    *("memory_wall", "mismatch", "parity", "predict_kernels", "readable_text", "sharding"),
    *("bench/ahead", "bench/packing", "bench/depth", "bench/tree", "bench/growth", "bench/startup"),
    *("collectives_experts", "eviction_action", "engine_records", "folds", "horizon", "map"),
}


def test_the_quickstart_refuses_bad_flags_before_the_warm_start(tmp_path: Path):
    (tmp_path / "file").write_text("")
    command = [sys.executable, str(EXPERIMENTS / "quickstart.py"), "--runs", str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and "directory is --runs" in " ".join(done.stderr.replace("│", " ").split())


INTEL = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 207
model name\t: Intel(R) Xeon(R) Processor
stepping\t: 2

processor\t: 1
model name\t: another
"""


def test_describe_cpu():
    describe = provenance.describe_cpu
    assert describe(INTEL, 2) == "2 x Intel(R) Xeon(R) Processor (family 6, model 207, stepping 2)"
    with mock.patch("platform.machine", lambda: "aarch64"):
        assert describe("processor\t: 0\nBogoMIPS\t: 50.00\n", 4) == "4 x aarch64"


def test_a_recorded_command_has_no_local_paths():
    script = str(EXPERIMENTS / "bench" / "update.py")
    with mock.patch.object(sys, "argv", [script, "--torch-python", "/home/me/torch/bin/python", "--json"]):
        command = provenance.command_line()
    assert command == "python experiments/bench/update.py --torch-python python --json"


def test_changed_scripts_mark_the_commit_and_changed_results_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script, result = tmp_path / "experiments" / "study.py", tmp_path / "experiments" / "results" / "rows.json"
    for file in (script, result):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("[]")
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for words in (("init", "-q"), ("add", "."), (*author, "commit", "-qm", "all")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    result.write_text("[1]")
    clean = provenance.commit()
    script.write_text("[1]")
    assert len(clean) >= 7 and "+" not in clean and provenance.commit() == f"{clean}+"


@pytest.mark.parametrize("bits", [None, 4])
def test_identity_is_exact_only_under_the_shadow_mask(bits: Literal[4] | None):
    row = identity.compare("h2o", bits, identity.Args(length=40, budget=16, buffer=8, layers=1))
    assert row["bits"] == bits and row["max_abs_dlogp"] < 2e-5 < 0.1 < row["dense_max_abs_dlogp"]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_committed_results_record_their_origin(path: Path):
    content = json.loads(path.read_text())
    rows = content if isinstance(content, list) else [content]
    for row in rows:
        assert row["cpu"]
        assert row["date"] and row["commit"]
        script = row["command"].split()[1]
        name = script.removeprefix("experiments/").removesuffix(".py")
        assert (ROOT / script).is_file() != (name in DELETED), f"expected the script of {row['command']!r} at {script}"
