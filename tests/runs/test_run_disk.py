"""Disk checks before a run, and full or read-only disks during it."""

import os
from collections import namedtuple
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from breaking.disks import files_end_at
from smd_jax import disk
from smd_jax.config import ModelConfig
from smd_jax.disk import write_safetensors
from smd_jax.message.gate import LinearGate, add_gate
from smd_jax.model.gate_format import save_gate
from smd_jax.model.lora import LoraConfig, add_lora
from smd_jax.model.peft_format import save_peft
from smd_jax.model.weights import check_export, save_checkpoint
from smd_jax.runs.run_config import Objective, RunConfig
from smd_jax.runs.run_folder import check_directory, check_room
from smd_jax.testing import random_params, tiny_model_config
from tests.bitwise import assert_bitwise_equal
from tests.plain_loop import PlainLoop, new_state
from tests.plain_runs import never, rows, saved, start

Usage = namedtuple("Usage", "total used free")


def test_a_disk_without_room_is_refused_before_the_first_rollout(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(2**30, 0, 3000))
    state = new_state(size=250)  # 1,000 bytes, the step and the key
    assert disk.stored_bytes(jax.eval_shape(lambda: state)) == disk.stored_bytes(state) == 1000 + 4 + 8
    assert disk.stored_bytes({"a": np.zeros((2, 3), np.int64)}) == 48
    with pytest.raises(
        OSError, match=r"expected 3.95 KiB free on the disk of .*run, for 4 checkpoints of 1012 B; got 2"
    ):
        start(tmp_path / "run", 9, PlainLoop(begins=never), state, checkpoint_every=1)
    assert not (tmp_path / "run").exists()
    start(tmp_path / "run", 9, state=state, checkpoint_every=1, keep=1)


@pytest.mark.parametrize(
    ("options", "checkpoints"),
    [
        ({"steps": 9}, 1),
        ({"steps": 9, "checkpoint_every": 4}, 3),
        ({"steps": 9, "checkpoint_every": 1}, 4),
        ({"steps": 9, "checkpoint_every": 1, "keep": 5}, 6),
        ({"steps": 9, "objective": Objective("reward")}, 5),
    ],
)
def test_check_room_counts_the_checkpoints_kept_at_once(tmp_path, monkeypatch, options, checkpoints):
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(2**30, 0, checkpoints * 100))
    check_room(tmp_path, 100, RunConfig(**options))
    with pytest.raises(OSError, match="free on the disk"):
        check_room(tmp_path, 101, RunConfig(**options))


def test_existing_checkpoints_need_no_extra_room(tmp_path, monkeypatch):
    start(tmp_path, 5, checkpoint_every=1)
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(2**30, 0, 100))
    check_room(tmp_path, 100, RunConfig(steps=9, checkpoint_every=1))
    with pytest.raises(OSError, match="for one checkpoint; got 100 B"):
        check_room(tmp_path, 101, RunConfig(steps=9, checkpoint_every=1))
    check_room(tmp_path, 101, RunConfig(steps=5))  # the run is finished


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("collected")
def test_a_disk_that_fills_up_leaves_the_last_good_checkpoint(tmp_path, caplog):
    state = new_state(size=100_000)
    whole = start(tmp_path / "whole", 4, state=state)
    run = tmp_path / "run"
    start(run, 2, state=state)
    with files_end_at(100_000), pytest.raises(OSError) as caught:
        start(run, 4, state=state, resume=True)
    message = str(caught.value)
    assert message.startswith(f"checkpoint 4 in {run / 'checkpoints'} could not be written (")
    assert message.endswith(" free on the disk): File too large. Earlier checkpoints are unchanged")
    assert not caplog.records, "expected no traceback in the log"
    assert saved(run) == [2]
    assert_bitwise_equal(start(run, 4, state=state, resume=True), whole)
    # TensorStore's threads may write after the partial checkpoint is deleted; the next save removes those files.
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["2", "4"]
    assert rows(run) == rows(tmp_path / "whole")


def test_a_metrics_row_on_a_full_disk_stops_the_run(tmp_path):
    loop = PlainLoop(metrics=lambda number: {"reward": 0.1} | {f"metric {i}": 1 / 3 for i in range(100)})
    with (
        files_end_at(5000),
        pytest.raises(OSError, match=r"metrics.jsonl could not be written \(.* free on the disk\): .*too large"),
    ):
        start(tmp_path, 4, loop)
    assert len(rows(tmp_path)) == 1  # the second row was cut off


def test_an_unwritable_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError, match=r"expected a directory, or nothing, at .*run; got the file .*file"):
        check_directory(tmp_path / "file" / "run", resume=False)
    # Not even root creates files there.
    with pytest.raises(PermissionError, match="expected a directory that can be written at /proc/runs; got "):
        check_directory(Path("/proc/runs"), resume=False)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_export_that_would_fail_is_refused(tmp_path, monkeypatch):
    check_export(tmp_path / "model", 100)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="it also holds notes.txt"):
        check_export(tmp_path / "model", 100)
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(2**30, 0, 100))
    with pytest.raises(OSError, match="expected 101 B free on the disk of .*for the exported model; got 100 B"):
        check_export(tmp_path / "other", 101)
    with pytest.raises(PermissionError, match="can be written"):
        check_export("/proc/model", 1)


@pytest.fixture(scope="module")
def tiny_model() -> tuple[ModelConfig, dict[str, Any]]:
    config = tiny_model_config(num_layers=1)
    return config, random_params(config)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_exported_files_have_the_mode_of_the_umask(tmp_path, tiny_model, umask, mode):
    config, params = tiny_model
    sizes = {"num_layers": config.num_layers, "num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    gate = LinearGate()
    before = os.umask(umask)
    try:
        save_checkpoint(tmp_path / "model", params, config)
        save_peft(tmp_path / "adapter", add_lora(params, LoraConfig(rank=2), jax.random.key(0)), config)
        save_gate(tmp_path / "gate", add_gate(params, gate, **sizes), gate)
        write_safetensors(tmp_path / "gate" / "refused_0.safetensors", {"x": np.zeros(2)}, {})
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 6 and {path.stat().st_mode & 0o777 for path in files} == {mode}


def test_a_failed_export_keeps_the_earlier_one(tmp_path, tiny_model):
    config, params = tiny_model
    save_checkpoint(tmp_path / "model", params, config)
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    with files_end_at(2000), pytest.raises(OSError, match="model.safetensors could not be written: .*too large"):
        save_checkpoint(tmp_path / "model", params, config, dtype="float32")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before
