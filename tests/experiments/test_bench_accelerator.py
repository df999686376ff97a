"""The accelerator benchmark: its stages, failed checks, dead and silent jobs, and a rehearsal on the CPU."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench import accelerator
from bench.engines import kernel_checks, smd_accelerator
from smd_kernels.hardware import why_not_decode, why_not_decode_codes
from tests.paths import ROOT

pytestmark = pytest.mark.study

SCRIPT = ROOT / "experiments" / "bench" / "accelerator.py"

# A worker whose jobs print a row, die or hang. Like the real one, it skips the first `--skip` jobs.
WORKER = """
import json, sys, time
jobs = sys.argv[1].split(",")[int(sys.argv[3]):]
for job in jobs:
    print(json.dumps({"begin": job}), flush=True)
    if job == "dies": sys.exit("no such kernel")
    if job == "hangs": time.sleep(60)
    print(json.dumps({"ok": job != "wrong"}), flush=True)
"""


def worker(*jobs: str) -> list[str]:
    return [sys.executable, "-c", WORKER, ",".join(jobs)]


def test_the_stages_fit_into_half_an_hour():
    assert sum(limit.stage for limit in accelerator.STAGES.values()) <= 28 * 60
    assert all(limit.job <= limit.stage <= 600 for limit in accelerator.STAGES.values())


def test_a_dead_job_is_a_row_and_the_next_one_runs():
    rows = list(accelerator.run_stage("machine", worker("good", "dies", "good"), accelerator.Limit(60, 30)))
    assert [row["job"] for row in rows] == ["good", "dies", "good"]
    assert [accelerator.is_good(row) for row in rows] == [True, False, True]
    assert rows[1]["failed"] == "exit status 1" and rows[1]["said"] == "no such kernel"


def test_a_silent_job_is_stopped_and_the_next_one_runs():
    rows = list(accelerator.run_stage("machine", worker("hangs", "good"), accelerator.Limit(40, 2)))
    assert [row["job"] for row in rows] == ["hangs", "good"]
    assert "stopped after 2 s" in rows[0]["failed"] and rows[1]["ok"]


def test_a_stage_ends_at_its_limit():
    rows = list(accelerator.run_stage("machine", worker("hangs", "hangs", "good"), accelerator.Limit(2, 30)))
    assert [row["job"] for row in rows] == ["hangs"]


def test_a_worker_that_cannot_start_is_not_started_again():
    rows = list(accelerator.run_stage("machine", [sys.executable, "-c", "import no_such"], accelerator.Limit(60, 30)))
    assert len(rows) == 1 and rows[0]["job"] is None and "no_such" in rows[0]["said"]


@pytest.mark.parametrize(("jobs", "status"), [(("good", "good"), 0), (("good", "wrong"), 1), (("dies", "good"), 1)])
def test_exit_status(tmp_path: Path, jobs: tuple[str, ...], status: int):
    out = tmp_path / "runs" / "rows.json"
    args = argparse.Namespace(stage=["correctness"], only="", rehearse=True, out=out)
    assert accelerator.run(args, lambda *_: worker(*jobs)) == status
    assert [row["job"] for row in json.loads(out.read_text())["rows"]] == list(jobs)


@pytest.mark.parametrize(
    ("error", "again", "ok"), [(0.0, 0.0, True), (0.1, 0.1, False), (np.nan, np.nan, False), (0.0, 1e-6, False)]
)
def test_a_check_fails_on_wrong_numbers_nan_and_unequal_runs(error: float, again: float, ok: bool):
    true = np.linspace(-1, 1, 11, dtype=np.float32)
    case = kernel_checks.Case("", "", "", {"out": 1e-2}, tuple, tuple, tuple)
    row = kernel_checks.compare(case, (true + np.float32(error),), [(true + np.float32(again),)], (true,))
    assert row["ok"] is ok
    assert json.loads(json.dumps(row, allow_nan=False)) == row


def test_all_kernels_are_checked():
    cases = list(kernel_checks.cases())
    assert {case.kernel for case in cases} == {"MosaicGpuKernel", "XlaKernel", "decode_gpu", "decode_codes_gpu"}
    assert {case.dtype for case in cases} == {"bfloat16", "float16"}
    assert len({(case.name, case.dtype) for case in cases}) == len(cases)
    quantized = [case.inputs() for case in cases if case.kernel == "decode_codes_gpu"]
    assert {codes.bits for _, codes, *_ in quantized} == {8, 4, 2}
    for q, codes, k, *_ in quantized:
        assert why_not_decode_codes("mosaic_gpu", q.dtype, codes, k.shape[2], q.shape[1] // k.shape[1]) is None


def test_rehearsal(tmp_path: Path):
    """Machine, the decode kernels' checks in the interpreter, and the time of one."""
    out = tmp_path / "rows.json"
    command = [sys.executable, str(SCRIPT), "--rehearse", "--out", str(out), "--stage"]
    done = subprocess.run(
        [*command, "machine", "correctness", "decode", "--only", "2x3x1x"], capture_output=True, text=True, check=True
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    written = json.loads(out.read_text())
    assert written["rows"] == rows and written["rehearsal"] and written.keys() >= {"date", "command", "cpu"}
    checks = [row for row in rows if "check" in row]
    assert {row["kernel"] for row in checks} == {"decode_gpu", "decode_codes_gpu"}
    assert all(row["ok"] and row["same_bits"] for row in checks)
    assert all(row.keys() >= {"stage", "job", "kernel", "dtype", "off", "tolerance"} for row in checks)
    times = {row["impl"]: row for row in rows if row["stage"] == "decode"}
    assert times.keys() == {"mosaic_gpu", "xla"}
    assert all(row.keys() >= {"seconds", "least_seconds", "bytes", "limit_share"} for row in times.values())


def test_both_policies_of_the_rollout_decode_with_the_kernel():
    """Otherwise the row of the dense cache would compare plain JAX with a kernel."""
    slots = smd_accelerator.ROLLOUT_PROMPT + smd_accelerator.ROLLOUT_SEGMENTS * smd_accelerator.BUFFER
    for count in (slots, smd_accelerator.BUDGET + smd_accelerator.BUFFER):
        assert why_not_decode("mosaic_gpu", "bfloat16", 128, count, group=6) is None


def test_rehearsal_of_a_whole_model(tmp_path: Path):
    """Rollouts record their decode implementation. Updates record planned memory, because the process has one peak."""
    out = tmp_path / "rows.json"
    subprocess.run(
        [sys.executable, str(SCRIPT), "--rehearse", "--out", str(out), "--stage", "whole"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = json.loads(out.read_text())["rows"]
    assert [row["decode_impl"] for row in rows if "engine" in row] == ["xla", "xla"]
    planned = {row["update"]: row["planned_bytes"] for row in rows if "update" in row}
    assert planned.keys() == {"shadow", "dense"} and len(set(planned.values())) == 2


def test_a_gpu_or_a_rehearsal_is_required():
    done = subprocess.run([sys.executable, str(SCRIPT), "--stage", "machine"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "expected a GPU, or --rehearse on a CPU" in json.loads(done.stdout)["said"]
