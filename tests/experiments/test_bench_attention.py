"""The benchmark as a program reads it: a JSON object a line and implementation, after a check against the reference."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import attention
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


def test_the_exponent_is_of_one_budget():
    """Time is T times budget here: an exponent of one, and of two between other budgets."""
    found = [
        {"impl": impl, "T": tokens, "budget": budget, "fwd_bwd_ms": tokens * budget / 1e3}
        for budget in (512, 256)
        for tokens in (4096, 8192)
        for impl in ("segments", "interval")
    ]
    assert attention.exponents(found) == pytest.approx({"interval": 1.0, "segments": 1.0})
    assert attention.exponents(found[:2]) == {} and attention.exponents([]) == {}


@pytest.mark.parametrize(("device", "shapes"), [
    ("cpu", [(8 * 2, 4 * 32, 16), (8 * 2, 16, 64 + 32)]),
    ("gpu", [(1, 48, 48), (1, 48, 48)]),
    ("tpu", [(1, 48, 48), (1, 48, 48)]),
])  # fmt: skip
def test_an_accelerators_yardstick_is_a_square_product(monkeypatch: pytest.MonkeyPatch, device: Any, shapes: Any):
    """Products with a short inner axis would measure its memory."""
    monkeypatch.setattr(attention, "SQUARE", 48)
    args = attention.Args(device, buffer=32, heads=8, kv_heads=2, head_dim=16, dtype="float32")
    product, operands, flops = attention.yardstick(args, 1024, 64)
    assert [x.shape for x in operands] == shapes
    (_, rows, inner), (count, _, columns) = shapes
    assert flops == 2 * count * rows * inner * columns * len(product(*operands))
