"""What a run writes, that a run which stops anywhere and resumes is the run that did not stop, and used directories."""

from __future__ import annotations

from pathlib import Path

import pytest

from smd_jax.monitor.metrics_log import read_metrics
from smd_jax.runs import checkpoint
from smd_jax.runs.run_folder import check_directory
from tests.bitwise import assert_bitwise_equal
from tests.plain_loop import CONFIG, PlainLoop, new_state
from tests.plain_runs import DENSE, DiedError, Evaluations, Recorder, dies_at, never, rows, saved, start


def test_rows_and_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    state = start(tmp_path, 5, checkpoint_every=2, label="toy")
    assert [(row["step"], row["reward"]) for row in rows(tmp_path)] == [(step, step) for step in range(5)]
    assert saved(tmp_path)[-1] == 5 and int(state.step) == 5
    restored = checkpoint.restore(tmp_path / "checkpoints", new_state(), config=CONFIG)
    assert_bitwise_equal(restored.state, state)
    assert "toy 5/5 reward" in capsys.readouterr().out


def test_loggers_get_every_row_and_none_stops_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sound = Recorder()
    start(tmp_path, 3, loggers=[Recorder(fails_at=1), sound])
    # Loggers count finished rollouts; rows are numbered from 0.
    assert [row | {"step": step - 1} for step, row in sound.rows] == read_metrics(tmp_path / "metrics.jsonl")
    assert len(sound.rows) == 3 and sound.closed == 1
    assert all({"memory/host_bytes"} <= row.keys() for _, row in sound.rows)
    assert "Recorder failed and gets no more metrics of this run" in capsys.readouterr().err


def test_loggers_get_the_evaluation_before_training(tmp_path: Path):
    logger = Recorder()
    start(tmp_path, 2, evaluate_every=1, evaluate=Evaluations({0: 0.5, 1: 0.25, 2: 1.0}), loggers=[logger])
    evaluations = [(step, row[DENSE]) for step, row in logger.rows if DENSE in row]
    assert evaluations == [(0, 0.5), (1, 0.25), (2, 1.0)]
    assert [step for step, _ in logger.rows] == [0, 1, 1, 2, 2], "a rollout, then its evaluation"


def test_rows_after_the_last_checkpoint_are_written_again(tmp_path: Path):
    whole, parts = start(tmp_path / "whole", 6), tmp_path / "parts"
    with pytest.raises(DiedError):
        start(parts, 6, PlainLoop(begins=dies_at(5)), checkpoint_every=2)
    assert [row["step"] for row in rows(parts)] == [0, 1, 2, 3, 4] and saved(parts)[-1] == 4
    with open(parts / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 5, "rew')  # the machine went down in the middle of a line
    assert_bitwise_equal(start(parts, 6, checkpoint_every=2, resume=True), whole)
    assert rows(parts) == rows(tmp_path / "whole")


def test_a_finished_run_stays_as_it_is(tmp_path: Path):
    finished, before = start(tmp_path, 2), rows(tmp_path)
    state = start(tmp_path, 2, PlainLoop(begins=never), resume=True)
    assert rows(tmp_path) == before and saved(tmp_path) == [2]
    assert_bitwise_equal(state, finished)


def test_a_new_run_in_a_used_directory(tmp_path: Path):
    start(tmp_path / "run", 1)
    (tmp_path / "rows").mkdir()
    (tmp_path / "run" / "metrics.jsonl").rename(tmp_path / "rows" / "metrics.jsonl")
    for used in ("run", "rows"):  # only checkpoints here, only metrics there
        with pytest.raises(FileExistsError, match=rf"{used}; got one\. Continue it with resume=True"):
            start(tmp_path / used, 1)
        check_directory(tmp_path / used, resume=True)


def test_what_is_no_earlier_run(tmp_path: Path):
    check_directory(tmp_path / "absent", resume=False)
    (tmp_path / "metrics.jsonl").touch()  # a run that ended before its first row
    (tmp_path / "notes.txt").write_text("mine")
    check_directory(tmp_path, resume=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "notes.txt"]
