"""The benchmark as a program reads it: a JSON object a line and implementation, after a check against the reference."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

pytestmark = pytest.mark.study

SCRIPT = ROOT / "experiments" / "bench" / "attention.py"
FIELDS = {"device", "impl", "T", "budget", "buffer", "heads", "head_dim", "dtype"}
FIELDS |= {"fwd_ms", "fwd_bwd_ms", "temp_bytes", "speedup_vs_mask", "temp_vs_mask"}


def test_lines_of_json(tmp_path: Path):
    sizes = ["--device", "cpu", "--lengths", "256", "--budgets", "32", "--buffer", "32", "--rounds", "1", "--check"]
    out = tmp_path / "rows.json"
    command = [sys.executable, str(SCRIPT), "--out", str(out), *sizes]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    checks, rows = ([line for line in lines if ("check" in line) == checked] for checked in (True, False))
    assert {line["check"] for line in checks} >= {"mask", "stock mask", "interval", "segments"}
    assert all(line["bitwise_again"] for line in checks)
    assert all(row.keys() >= FIELDS for row in rows)
    by_name = {row["impl"]: row for row in rows}
    assert by_name["segments"]["temp_bytes"] < by_name["mask"]["temp_bytes"]
    assert max(by_name[name]["speedup_vs_mask"] for name in ("mask", "stock mask")) == 1
    written = json.loads(out.read_text())
    assert written["rows"] == rows and written.keys() >= {"date", "device", "command"}


def test_another_device_is_refused():
    done = subprocess.run([sys.executable, str(SCRIPT), "--device", "gpu"], capture_output=True, text=True)
    assert done.returncode and "expected JAX to run on 'gpu'" in done.stderr
