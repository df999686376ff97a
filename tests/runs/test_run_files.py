"""Files of a run: rows, checkpoints, resumes after a stop or an error, and used directories."""

import errno
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from breaking.disks import files_end_at
from smd_jax.monitor.metrics_log import read_metrics
from smd_jax.runs import checkpoint
from smd_jax.runs.checkpoint import writing
from smd_jax.runs.checkpoint.writing import Writer
from smd_jax.runs.lock import DirectoryInUseError, reserve_directory
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
    working, values = Recorder(), {0: 0.5, 1: 0.25, 2: 1.0}
    start(tmp_path, 2, evaluate_every=1, evaluate=Evaluations(values), loggers=[Recorder(fails_at=1), working])
    assert [step for step, _ in working.rows] == [0, 1, 1, 2, 2], "a rollout, then its evaluation"
    assert {step: row[DENSE] for step, row in working.rows if DENSE in row} == values
    rollout_rows = [(step, row) for step, row in working.rows if DENSE not in row]
    # Loggers count finished rollouts; rows are numbered from 0.
    assert [row | {"step": step - 1} for step, row in rollout_rows] == read_metrics(tmp_path / "metrics.jsonl")
    assert working.closed == 1 and all({"memory/host_bytes"} <= row.keys() for _, row in rollout_rows)
    assert "Recorder failed and gets no more metrics of this run" in capsys.readouterr().err


def test_rows_after_the_last_checkpoint_are_written_again(tmp_path: Path):
    whole, parts = start(tmp_path / "whole", 6), tmp_path / "parts"
    with pytest.raises(DiedError):
        start(parts, 6, PlainLoop(begins=dies_at(5)), checkpoint_every=2)
    assert [row["step"] for row in rows(parts)] == [0, 1, 2, 3, 4] and saved(parts)[-1] == 4
    with open(parts / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 5, "rew')  # a crash in the middle of a line
    assert_bitwise_equal(start(parts, 6, checkpoint_every=2, resume=True), whole)
    assert rows(parts) == rows(tmp_path / "whole")


def test_a_resume_of_a_finished_run_changes_nothing(tmp_path: Path):
    finished, before = start(tmp_path, 2), rows(tmp_path)
    state = start(tmp_path, 2, PlainLoop(begins=never), resume=True)
    assert rows(tmp_path) == before and saved(tmp_path) == [2]
    assert_bitwise_equal(state, finished)


def test_a_new_run_in_a_used_directory_is_refused(tmp_path: Path):
    start(tmp_path / "run", 1)
    (tmp_path / "rows").mkdir()
    (tmp_path / "run" / "metrics.jsonl").rename(tmp_path / "rows" / "metrics.jsonl")
    for used in ("run", "rows"):  # with only checkpoints; with only metrics
        with pytest.raises(FileExistsError, match=rf"{used}; got one\. Continue it with resume=True"):
            start(tmp_path / used, 1)
        check_directory(tmp_path / used, resume=True)


def test_two_runs_do_not_share_a_directory(tmp_path: Path):
    def begins(number: int) -> None:
        if number == 1:
            with pytest.raises(DirectoryInUseError, match="expected no other process that trains in .*; got one"):
                start(tmp_path, 9, PlainLoop(begins=never), resume=True)

    # A command locks the directory before it reads the weights, and only its own run trains there.
    with reserve_directory(tmp_path):
        start(tmp_path, 3, PlainLoop(begins=begins), checkpoint_every=1)
        with pytest.raises(DirectoryInUseError):
            start(tmp_path, 9, PlainLoop(begins=never), resume=True)
    start(tmp_path, 4, resume=True)
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3]


def test_an_empty_metrics_file_is_not_an_earlier_run(tmp_path: Path):
    check_directory(tmp_path / "absent", resume=False)
    (tmp_path / "metrics.jsonl").touch()  # a run that ended before its first row
    (tmp_path / "notes.txt").write_text("mine")
    check_directory(tmp_path, resume=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "notes.txt"]


# --- errors during a run


def test_an_error_saves_the_finished_rollouts(tmp_path):
    whole = start(tmp_path / "whole", 6)
    parts = tmp_path / "parts"
    with pytest.raises(ConnectionError, match="503") as caught:
        start(parts, 6, PlainLoop(begins=dies_at(4, ConnectionError("503"))))
    assert caught.value.__notes__ == [f"saved after 4 of 6 rollouts in {parts}; resume continues the run"]
    assert saved(parts) == [4] and [row["step"] for row in rows(parts)] == [0, 1, 2, 3]
    # The resume fails at its first rollout: there is nothing new to save.
    with pytest.raises(ConnectionError) as caught:
        start(parts, 6, PlainLoop(begins=dies_at(4, ConnectionError("503"))), resume=True)
    assert caught.value.__notes__ == ["after 4 of 6 rollouts; nothing is lost but the rollout that failed"]
    assert_bitwise_equal(start(parts, 6, resume=True), whole)
    assert rows(parts) == rows(tmp_path / "whole")


def test_a_failing_evaluation_loses_no_rollout(tmp_path):
    def evaluate(state: Any) -> dict[str, float]:
        return {DENSE: {0: 0.4, 2: 0.5}[int(state.step)]}

    with pytest.raises(KeyError) as caught:
        start(tmp_path, 6, evaluate_every=2, evaluate=evaluate)
    assert saved(tmp_path) == [4]
    assert "saved after 4 of 6 rollouts" in caught.value.__notes__[0]
    assert len(rows(tmp_path)) == 4


def test_a_state_donated_to_a_failing_update_is_not_saved(tmp_path):
    class Donating(PlainLoop):
        def step(self, state: Any, follows: Callable[[], bool] = lambda: True) -> Any:
            if int(state.step) == 3:
                state.params["w"].delete()
                raise RuntimeError("RESOURCE_EXHAUSTED")
            return super().step(state, follows)

    with pytest.raises(RuntimeError, match="EXHAUSTED") as caught:
        start(tmp_path, 6, Donating())
    (note,) = caught.value.__notes__
    assert note == "the failed update has donated the state: the last 3 rollouts are not saved"
    assert saved(tmp_path) == []


# TensorStore's other writes fail too and may report that to a closed event loop.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize(
    ("last", "every", "error", "message", "lost"),
    [
        pytest.param(4, 0, ConnectionError, "503", "4", id="save after an error"),
        pytest.param(9, 2, OSError, "checkpoint 2 in", "[23]", id="asynchronous save"),
        pytest.param(2, 2, ConnectionError, "503", "2", id="error during an asynchronous save"),
    ],
)
def test_a_failed_save_names_the_lost_rollouts(tmp_path, last, every, error, message, lost):
    with files_end_at(3000), pytest.raises(error, match=message) as caught:
        start(
            tmp_path,
            6,
            PlainLoop(begins=dies_at(last, ConnectionError("503"))),
            new_state(size=100_000),
            checkpoint_every=every,
        )
    assert re.match(f"the last {lost} rollouts could not be saved: checkpoint {lost} in .*", caught.value.__notes__[0])
    assert saved(tmp_path) == []


@pytest.mark.parametrize(
    ("opt_state", "options", "error", "message"),
    [
        ((), {"config": {"tags": {"a"}}}, TypeError, r"config\.tags: expected .*; got set"),
        ((), {"metadata": {"tags": {"a"}}}, TypeError, r"metadata\.tags: expected .*; got set"),
        ((np.zeros(0),), {}, ValueError, "at least one element in state leaf 'opt_state/0'"),
        ((0.5,), {}, TypeError, "expected an array as state leaf 'opt_state/0'; got float"),
    ],
)
def test_unsupported_values_are_refused_before_the_first_rollout(tmp_path, opt_state, options, error, message):
    with pytest.raises(error, match=message):
        start(tmp_path / "run", 5, PlainLoop(begins=never), new_state().replace(opt_state=opt_state), **options)
    assert not (tmp_path / "run").exists()


def test_a_failed_save_loses_no_row(tmp_path, monkeypatch):
    """The first save fails in the background; the rollout after it is saved with the error, so no resume repeats it."""
    write, failures = writing.write_checksums, iter([OSError(errno.EIO, "Input/output error")])

    def write_or_fail(folder: Path) -> None:
        for error in failures:
            raise error
        write(folder)

    monkeypatch.setattr(writing, "write_checksums", write_or_fail)
    with pytest.raises(OSError, match="checkpoint 2 in .*Input/output error") as caught:
        start(tmp_path, 6, checkpoint_every=2)
    assert caught.value.__notes__[0].startswith("saved after 3 of 6 rollouts")
    start(tmp_path, 6, checkpoint_every=2, resume=True)
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("every", "reason"), [(0, "RuntimeError: orbax"), (2, "ValueError: expected a step later")])
def test_a_failed_save_does_not_hide_the_error_of_the_run(tmp_path, monkeypatch, every, reason):
    def finish(self: Writer, manager: Any, *_: Any) -> None:
        manager.wait_until_finished()
        raise RuntimeError("orbax")

    monkeypatch.setattr(Writer, "_finish", finish)
    with pytest.raises(ConnectionError, match="503") as caught:
        start(tmp_path, 6, PlainLoop(begins=dies_at(2, ConnectionError("503"))), checkpoint_every=every)
    (note,) = caught.value.__notes__
    assert note.startswith(f"the last 2 rollouts could not be saved: {reason}")
