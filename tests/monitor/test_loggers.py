"""Loggers: files of TensorBoard and Weights & Biases, also after a resume; a failing logger does not stop a run."""

import importlib
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from smd_jax.monitor.loggers import Loggers, TensorBoardLogger, WandbLogger, messages
from smd_jax.monitor.metrics_log import memory_in_use
from tests.documented_metrics import documented
from tests.plain_runs import Recorder


def test_all_loggers_get_all_rows_in_order():
    one, other = Recorder(), Recorder()
    row = {"reward": 0.0}
    with Loggers([one, other]) as loggers:
        for step in range(50):
            row["reward"] = float(step)  # the same dictionary every time: a logger must not see it change
            loggers.write(step, row)
    assert one.rows == other.rows == [(step, {"reward": float(step)}) for step in range(50)]
    assert one.closed == other.closed == 1


def test_a_failing_logger_is_dropped_and_the_others_continue(capsys):
    failing, working = Recorder(fails_at=2), Recorder()
    with Loggers([failing, working]) as loggers:
        for step in range(6):
            loggers.write(step, {})
    assert [step for step, _ in failing.rows][:2] == [0, 1] and failing.closed == 1
    assert [step for step, _ in working.rows] == list(range(6))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("Recorder failed and gets no more metrics of this run; metrics.jsonl has all of them.")
    assert line.endswith("RuntimeError: no network␛[2J"), "no escape sequence reaches the terminal"


def test_a_slow_logger_does_not_block_the_run():
    release = threading.Event()

    class Slow(Recorder):
        def write(self, step: int, metrics: Mapping[str, float]) -> None:
            release.wait()
            super().write(step, metrics)

    slow = Slow()
    with Loggers([slow]) as loggers:
        for step in range(3):
            loggers.write(step, {})  # would hang if it waited
        assert slow.rows == []
        release.set()
    assert [step for step, _ in slow.rows] == [0, 1, 2]


# --- TensorBoard


def events(path: Path) -> Iterator[Any]:
    """The file's records: length, its checksum, the event, its checksum."""
    content = path.read_bytes()
    offset = 0
    while offset < len(content):
        (length,) = struct.unpack_from("<Q", content, offset)
        event = messages().Event()
        event.ParseFromString(content[offset + 12 : offset + 12 + length])
        yield event
        offset += 12 + length + 4


def displayed(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Points as TensorBoard displays them: a new session discards all points from its step on."""
    points: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.iterdir(), key=lambda path: int(path.suffix[1:])):
        for event in events(path):
            if event.session_log.status == messages().SessionLog.START:
                points = {tag: [row for row in rows if row[0] < event.step] for tag, rows in points.items()}
            for value in event.summary.value:
                points.setdefault(value.tag, []).append((event.step, value.simple_value))
    return points


def test_tensorboard_shows_every_step_once(tmp_path):
    for steps, reward in ((range(5), 0.25), (range(3, 7), 0.5)):
        logger = TensorBoardLogger(tmp_path)
        for step in steps:
            logger.write(step, {"reward": reward, "completions/mean_length": 3.0, "eval/sparse": 1.0})
        logger.close()
    points = displayed(tmp_path / "tensorboard")
    assert points["train/reward"] == [(0, 0.25), (1, 0.25), (2, 0.25), (3, 0.5), (4, 0.5), (5, 0.5), (6, 0.5)]
    assert points.keys() == {"train/reward", "train/completions/mean_length", "eval/sparse"}


def test_tensorboard_keeps_a_rollout_whose_evaluation_a_resume_adds(tmp_path):
    for rows in ([(1, {"reward": 0.25}), (2, {"reward": 0.5})], [(2, {"eval/sparse": 1.0}), (3, {"reward": 0.75})]):
        logger = TensorBoardLogger(tmp_path)
        for step, row in rows:
            logger.write(step, row)
        logger.close()
    points = displayed(tmp_path / "tensorboard")
    assert points == {"train/reward": [(1, 0.25), (2, 0.5), (3, 0.75)], "eval/sparse": [(2, 1.0)]}


def test_tensorboard_rows_are_written_during_the_run(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger.write(0, {"reward": 0.25, "kl": float("nan")})
    assert displayed(tmp_path / "tensorboard")["train/reward"] == [(0, 0.25)]
    logger.close()


def test_a_run_without_rows_leaves_no_events(tmp_path):
    TensorBoardLogger(tmp_path).close()
    assert list((tmp_path / "tensorboard").iterdir()) == []


# --- Weights & Biases


def wandb_history(path: Path) -> Iterator[dict[str, float]]:
    """Rows of an offline run. The file is LevelDB's log: blocks of 32 KiB, records of checksum, length, kind, bytes."""
    protocol = importlib.import_module("wandb.proto.wandb_internal_pb2")
    content = path.read_bytes()
    offset, data = 7, b""  # after the file's header
    while offset + 7 <= len(content):
        if 32768 - offset % 32768 < 7:
            offset += 32768 - offset % 32768
        _, length, kind = struct.unpack_from("<IHB", content, offset)
        data += content[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # a full record, or its last part
            record = protocol.Record()
            record.ParseFromString(data)
            data = b""
            if record.HasField("history"):
                items = record.history.item
                yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


OFFLINE_RUN = """
import sys
from smd_jax.monitor.loggers import Loggers, WandbLogger

directory, resume = sys.argv[1], sys.argv[2] == "resume"
# In a separate thread, as in a run.
with Loggers([WandbLogger(directory, config={"seed": 1}, mode="offline", resume=resume)]) as loggers:
    for step in range(1, 5) if resume else range(3):
        loggers.write(step, {"reward": step / 4})
        if step % 2 == 0 and (resume or step < 2):  # the resume adds that of step 2
            loggers.write(step, {"eval/sparse": step / 8})
"""


@pytest.mark.slow
def test_weights_and_biases_offline(tmp_path):
    """The resume is another process: in one process wandb may not write a second run with the same id."""
    ids = []
    for mode in ("begin", "resume"):
        command = [sys.executable, "-c", OFFLINE_RUN, str(tmp_path), mode]
        subprocess.run(command, check=True, env=os.environ | {"WANDB_API_KEY": ""})
        ids.append(json.loads((tmp_path / "wandb.json").read_text()))
    assert ids[0]["id"] == ids[1]["id"] and [run["next_step"] for run in ids] == [3, 5]
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert files and {file.stem for file in files} == {f"run-{ids[0]['id']}"}
    rows = [row for file in files for row in wandb_history(file)]
    assert [(row["_step"], row["train/reward"]) for row in rows] == [(step, step / 4) for step in range(5)]
    assert [row.get("eval/sparse") for row in rows] == [0.0, None, None, 0.25, 0.5]


def test_weights_and_biases_without_an_account_raises_one_error(tmp_path, monkeypatch: pytest.MonkeyPatch):
    import wandb
    from wandb.errors import UsageError

    def init(**options: Any) -> None:
        raise UsageError("No API key configured. Use `wandb login` to log in.")

    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(OSError, match="expected Weights & Biases to start; got No API key configured"):
        WandbLogger(tmp_path)


# --- memory


def test_memory_of_this_process(tmp_path):
    found = memory_in_use()
    assert found.keys() <= documented("Memory")
    assert 10e6 < found["memory/host_bytes"] < 1e12
    assert "memory/host_bytes" not in memory_in_use(tmp_path / "absent"), "a system without /proc"
