"""Loggers: what TensorBoard and Weights & Biases find in their files, after a stop, too; and that none stops a run."""

from __future__ import annotations

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

from smd_jax.monitor.loggers import Loggers, TensorBoardLogger, WandbLogger, dashboard_name, messages
from smd_jax.monitor.metrics_log import MEMORY_METRICS, memory_in_use
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


def test_a_logger_that_raises_is_left_out_and_the_others_go_on(capsys):
    broken, sound = Recorder(fails_at=2), Recorder()
    with Loggers([broken, sound]) as loggers:
        for step in range(6):
            loggers.write(step, {})
    assert [step for step, _ in broken.rows][:2] == [0, 1] and broken.closed == 1
    assert [step for step, _ in sound.rows] == list(range(6))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("Recorder failed and gets no more metrics of this run; metrics.jsonl has all of them.")
    assert line.endswith("RuntimeError: no network␛[2J"), "no escape sequence reaches the terminal"


def test_a_slow_logger_does_not_hold_the_run():
    gate = threading.Event()

    class Slow(Recorder):
        def write(self, step: int, metrics: Mapping[str, float]) -> None:
            gate.wait()
            super().write(step, metrics)

    slow = Slow()
    with Loggers([slow]) as loggers:
        for step in range(3):
            loggers.write(step, {})  # would never return if it waited
        assert slow.rows == []
        gate.set()
    assert [step for step, _ in slow.rows] == [0, 1, 2]


def test_names_are_those_of_transformers_trainer():
    assert dashboard_name("completions/mean_length") == "train/completions/mean_length"
    assert dashboard_name("eval/sparse") == "eval/sparse"


# --- TensorBoard


def events(path: Path) -> Iterator[Any]:
    """The file's records: length, its checksum, the event, its checksum."""
    content = path.read_bytes()
    place = 0
    while place < len(content):
        (length,) = struct.unpack_from("<Q", content, place)
        event = messages().Event()
        event.ParseFromString(content[place + 12 : place + 12 + length])
        yield event
        place += 12 + length + 4


def shown(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows: a session that starts takes back everything from its step on."""
    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.iterdir(), key=lambda path: int(path.suffix[1:])):
        for event in events(path):
            if event.session_log.status == messages().SessionLog.START:
                found = {tag: [row for row in rows if row[0] < event.step] for tag, rows in found.items()}
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def test_tensorboard_shows_every_step_once(tmp_path):
    for steps, reward in ((range(5), 0.25), (range(3, 7), 0.5)):
        logger = TensorBoardLogger(tmp_path)
        for step in steps:
            logger.write(step, {"reward": reward, "eval/sparse": 1.0})
        logger.close()
    found = shown(tmp_path / "tensorboard")
    assert found["train/reward"] == [(0, 0.25), (1, 0.25), (2, 0.25), (3, 0.5), (4, 0.5), (5, 0.5), (6, 0.5)]
    assert found.keys() == {"train/reward", "eval/sparse"}


def test_tensorboard_keeps_the_rollout_of_an_evaluation_that_a_resume_makes_up(tmp_path):
    for rows in ([(1, {"reward": 0.25}), (2, {"reward": 0.5})], [(2, {"eval/sparse": 1.0}), (3, {"reward": 0.75})]):
        logger = TensorBoardLogger(tmp_path)
        for step, row in rows:
            logger.write(step, row)
        logger.close()
    found = shown(tmp_path / "tensorboard")
    assert found == {"train/reward": [(1, 0.25), (2, 0.5), (3, 0.75)], "eval/sparse": [(2, 1.0)]}


def test_tensorboard_rows_are_there_while_the_run_goes_on(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger.write(0, {"reward": 0.25, "kl": float("nan")})
    assert shown(tmp_path / "tensorboard")["train/reward"] == [(0, 0.25)]
    logger.close()


def test_a_run_without_rows_leaves_no_events(tmp_path):
    TensorBoardLogger(tmp_path).close()
    assert list((tmp_path / "tensorboard").iterdir()) == []


# --- Weights & Biases


def wandb_history(path: Path) -> Iterator[dict[str, float]]:
    """Rows of an offline run. The file is LevelDB's log: blocks of 32 KiB, records of checksum, length, kind, bytes."""
    protocol = importlib.import_module("wandb.proto.wandb_internal_pb2")
    content = path.read_bytes()
    place, whole = 7, b""  # behind the file's own header
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
        _, length, kind = struct.unpack_from("<IHB", content, place)
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part of one
            record = protocol.Record()
            record.ParseFromString(whole)
            whole = b""
            if record.HasField("history"):
                items = record.history.item
                yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


OFFLINE_RUN = """
import sys
from smd_jax.monitor.loggers import Loggers, WandbLogger

directory, resume = sys.argv[1], sys.argv[2] == "resume"
# In a thread of its own, as in a run.
with Loggers([WandbLogger(directory, config={"seed": 1}, mode="offline", resume=resume)]) as loggers:
    for step in range(1, 5) if resume else range(3):
        loggers.write(step, {"reward": step / 4})
        if step % 2 == 0 and (resume or step < 2):  # a stop leaves that of step 2 to the resume
            loggers.write(step, {"eval/sparse": step / 8})
"""


@pytest.mark.slow
def test_weights_and_biases_offline(tmp_path):
    """A run that resumes is another process: within one, wandb may not write out a second run of the same id."""
    ids = []
    for words in (["begin"], ["resume"]):
        command = [sys.executable, "-c", OFFLINE_RUN, str(tmp_path), *words]
        subprocess.run(command, check=True, env=os.environ | {"WANDB_API_KEY": ""})
        ids.append(json.loads((tmp_path / "wandb.json").read_text()))
    assert ids[0]["id"] == ids[1]["id"] and [known["next_step"] for known in ids] == [3, 5]
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert files and {file.stem for file in files} == {f"run-{ids[0]['id']}"}
    rows = [row for file in files for row in wandb_history(file)]
    assert [(row["_step"], row["train/reward"]) for row in rows] == [(step, step / 4) for step in range(5)]
    assert [row.get("eval/sparse") for row in rows] == [0.0, None, None, 0.25, 0.5]


def test_weights_and_biases_without_an_account_is_one_error(tmp_path, monkeypatch: pytest.MonkeyPatch):
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
    assert found.keys() <= MEMORY_METRICS.keys()
    assert 10e6 < found["memory/host_bytes"] < 1e12
    assert "memory/host_bytes" not in memory_in_use(tmp_path / "absent"), "a system without /proc"
