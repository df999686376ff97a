"""Signals: a run saves and stops, and its resume equals an uninterrupted run."""

import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smd_jax.runs.stop import RunStoppedError, StopSignals
from tests.bitwise import assert_bitwise_equal
from tests.plain_loop import PlainLoop
from tests.plain_runs import CURVE, DENSE, Evaluations, rows, saved, start

pytestmark = pytest.mark.multiprocess
PLAIN_LOOP = 'runpy.run_module("tests.plain_loop", run_name="__main__")'


@contextmanager
def run_in_process(directory: Path, steps: int, same_event: float = 1.0) -> Iterator[subprocess.Popen[str]]:
    """`same_event`: seconds after the first signal in which another one does nothing."""
    code = f"import runpy, smd_jax.runs.stop as stop; stop.SAME_EVENT = {same_event}; {PLAIN_LOOP}"
    command = [sys.executable, "-c", code, str(directory), str(steps)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    """Reads the output up to a line with `text`."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return
    pytest.fail(f"expected {text!r}; got {''.join(seen)}")


def end_rollout(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_ctrl_c_saves_the_rollout_and_the_run_resumes(tmp_path):
    parts = tmp_path / "parts"
    with run_in_process(parts, 5) as process:
        wait_for(process, "rollout 0")
        end_rollout(process)
        wait_for(process, "rollout 1")
        process.send_signal(signal.SIGINT)
        # Printed during the rollout.
        wait_for(process, "SIGINT: stops when this rollout is finished and saved; a second one ends at once")
        end_rollout(process)
        wait_for(process, f"SIGINT stopped the run after 2 of 5 rollouts; saved in {parts}")
        assert process.wait() == 130
    assert saved(parts) == [2] and [row["step"] for row in rows(parts)] == [0, 1]
    state = start(parts, 5, resume=True)
    assert_bitwise_equal(state, start(tmp_path / "whole", 5))
    assert rows(parts) == rows(tmp_path / "whole")


def test_a_second_signal_ends_the_run_at_once(tmp_path):
    with run_in_process(tmp_path, 5, same_event=0.0) as process:
        wait_for(process, "rollout 0")
        process.send_signal(signal.SIGTERM)
        wait_for(process, "SIGTERM: stops")
        process.send_signal(signal.SIGINT)
        wait_for(process, "ended without saving")
        # The rollout is unfinished, and the exit code is that of the second signal.
        assert process.wait() == 130
    assert saved(tmp_path) == [] and rows(tmp_path) == []


@pytest.mark.parametrize(("number", "same_event"), [(signal.SIGHUP, 0.0), (signal.SIGINT, 1e9)])
def test_one_event_that_sends_a_signal_twice_saves_the_rollout(tmp_path, number, same_event):
    """A closed terminal may send SIGHUP twice; under `timeout` one Ctrl-C arrives twice at once."""
    with run_in_process(tmp_path, 5, same_event) as process:
        wait_for(process, "rollout 0")
        process.send_signal(number)
        wait_for(process, f"{number.name}: stops when")
        process.send_signal(number)
        end_rollout(process)
        wait_for(process, f"{number.name} stopped the run after 1 of 5 rollouts")
        assert process.wait() == 128 + number
    assert saved(tmp_path) == [1]


# The child takes the terminal itself: a preexec_fn would run after a fork, without JAX's threads.
ON_A_TERMINAL = f"import fcntl, runpy, termios; fcntl.ioctl(1, termios.TIOCSCTTY, 0); {PLAIN_LOOP}"


@pytest.mark.parametrize("first", [None, signal.SIGTERM])
def test_a_run_is_saved_when_its_terminal_closes(tmp_path: Path, first: signal.Signals | None):
    """The progress bar and all later lines are written to the closed terminal."""
    terminal, child_terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL, str(tmp_path), "1000"],
        stdin=subprocess.PIPE,
        stdout=child_terminal,
        stderr=child_terminal,
        env=os.environ | {"TERM": "xterm"},
        start_new_session=True,
        text=True,
    )
    os.close(child_terminal)
    try:
        read_up_to(terminal, "rollout 0")
        if first is not None:
            process.send_signal(first)
            read_up_to(terminal, "SIGTERM: stops when")
        os.close(terminal)  # the system sends SIGHUP
        # Finishes rollouts until the run handles the signal.
        while process.poll() is None:
            with suppress(BrokenPipeError):
                end_rollout(process)
            time.sleep(0.05)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == (129 if first is None else 143)
    done = len(rows(tmp_path))
    assert 0 < done < 1000 and saved(tmp_path) == [done]
    assert [row["step"] for row in rows(tmp_path)] == list(range(done))


def read_up_to(terminal: int, text: str) -> None:
    seen = b""
    while text.encode() not in seen:
        seen += os.read(terminal, 1024)


def test_a_run_under_nohup_ignores_sighup(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        start(tmp_path, 3, PlainLoop(begins=lambda number: os.kill(os.getpid(), signal.SIGHUP)))
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert saved(tmp_path) == [3]


def test_a_signal_before_the_first_rollout_has_nothing_to_save(tmp_path):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)

    handled = threading.Event()

    def evaluate(state: Any) -> dict[str, float]:
        signal.raise_signal(signal.SIGTERM)
        handled.wait()  # for the signal thread
        return {DENSE: 0.5}

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RunStoppedError, match="after 0 of 5.*nothing to") as e:
        patch.setattr("smd_jax.runs.stop._say", lambda line: handled.set())
        start(tmp_path, 5, evaluate_every=2, evaluate=evaluate)
    assert (e.value.exit_code, e.value.done) == (143, 0)
    assert saved(tmp_path) == [] and rows(tmp_path, "evaluations.jsonl") == [{"step": 0, DENSE: 0.5}]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_run_outside_the_main_thread_installs_no_handlers(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    handlers = list[Any]()
    loop = PlainLoop(begins=lambda number: handlers.append(signal.getsignal(signal.SIGINT)))
    thread = threading.Thread(target=start, args=(tmp_path, 2, loop))
    thread.start()
    thread.join()
    assert saved(tmp_path) == [2] and handlers == [before, before]


class FakeSignals(StopSignals):
    """Installs no handlers; tests set `received`."""

    def __enter__(self) -> "FakeSignals":
        return self

    def __exit__(self, *error: object) -> None:
        pass


def test_a_stopped_run_evaluates_after_the_resume(tmp_path, monkeypatch):
    signals = [FakeSignals()]
    monkeypatch.setattr("smd_jax.runs.run.StopSignals", lambda: signals[-1])

    def stop_in_rollout_3(number: int) -> None:
        signals[-1].received = signal.SIGTERM if number == 3 else None

    def metrics(number: int) -> dict[str, float]:
        return {"reward": float("nan") if number == 3 else float(number)}

    options: dict[str, Any] = {"evaluate_every": 2, "evaluate": Evaluations(CURVE)}
    start(tmp_path / "whole", 6, PlainLoop(metrics=metrics), **options)
    parts = tmp_path / "parts"
    evaluate = Evaluations(CURVE)
    with pytest.raises(RunStoppedError, match="after 4 of 6 rollouts; saved"):
        start(parts, 6, PlainLoop(begins=stop_in_rollout_3, metrics=metrics), **options | {"evaluate": evaluate})
    assert evaluate.asked == [0, 2] and saved(parts) == [4]
    signals.append(FakeSignals())
    start(parts, 6, PlainLoop(metrics=metrics), resume=True, **options | {"evaluate": evaluate})
    assert evaluate.asked == [0, 2, 4, 6]
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        np.testing.assert_equal(rows(parts, name), rows(tmp_path / "whole", name))
