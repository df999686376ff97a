"""Reward functions in processes of their own: what hangs, crashes or cannot be sent. No test looks at the clock."""

import functools
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from smd_jax.tasks import reward_callers, reward_calls
from smd_jax.tasks.functions import import_function
from smd_jax.tasks.reward_callers import CallsInProcess, UnloadableRewardError, pickled_function
from smd_jax.tasks.rewards import Rewards, RewardWarning, TooManyFailures
from smd_jax.text import child_process
from tests import reward_cases
from tests.environments.test_environments import ends
from tests.tasks.test_reward_rules import graded, numbers

LONG = 300.0  # a limit that nothing here reaches


def test_functions_of_every_kind_in_processes_of_their_own():
    functions = (reward_cases.matches, reward_cases.tokens, reward_cases.slow_length, reward_cases.Scaled(0.5))
    rewards = Rewards(functions, seconds=LONG)
    rewards.prepare(["answer"])
    for completions in (["ab", "abcd"], ["ab"]):  # the second call goes to the same processes
        got = graded(rewards, completions, answer=["ab"] * len(completions))
        lengths = [len(completion) for completion in completions]
        parts = {name: part.tolist() for name, part in got.parts.items()}
        assert parts == {
            "matches": [float(completion == "ab") for completion in completions],
            "tokens": lengths,
            "slow_length": lengths,
            "Scaled": [0.5 * n for n in lengths],
        }


def test_chat_and_what_a_function_prints(capfd: pytest.CaptureFixture[str]):
    rewards = Rewards((reward_cases.content, reward_cases.speaks), seconds=LONG)
    chat = [{"role": "user", "content": "Well?"}]
    assert graded(rewards, ["yes", "no"], prompts=[chat, chat]).rewards.tolist() == [2, 1]
    assert capfd.readouterr().err == "rewarding 2\n", "at once, not when its process ends"


@pytest.mark.slow
@pytest.mark.parametrize("function", [reward_cases.sleeps, reward_cases.spins_in_c], ids=lambda f: f.__name__)
def test_a_hang_costs_its_row(function):
    rewards = Rewards((function,), seconds=1.0, max_failed=0.5)
    with pytest.warns(RewardWarning, match=f"'{function.__name__}' failed on completion 1: took longer than 1 s"):
        got = graded(rewards, ["ok", "bad", "ok"])
    assert numbers(got.rewards) == [1, None, 1]
    assert graded(rewards, ["ok", "ok"]).rewards.tolist() == [1, 1], "the next call finds a new process"


def test_where_every_row_hangs_the_search_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("smd_jax.tasks.rewards.SEARCH_LIMITS", 0)
    with (
        pytest.warns(RewardWarning, match="took longer than 0.5 s; not reached within 0 s, row by row"),
        pytest.raises(TooManyFailures, match="got 5 of 5. The most frequent: reward 'sleeps'"),
    ):
        graded(Rewards((reward_cases.sleeps,), seconds=0.5), ["bad"] * 5)


def test_a_crash_costs_its_row():
    rewards = Rewards((reward_cases.ends_its_process,), seconds=LONG, max_failed=0.5)
    with pytest.warns(RewardWarning, match="failed on completion 0: its process ended with exit code 7"):
        got = graded(rewards, ["bad", "ok"])
    assert numbers(got.rewards) == [None, 1]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_programs_of_a_process_that_ended_end_with_it(tmp_path: Path):
    rewards = Rewards((reward_cases.leaves_a_program,), seconds=LONG, max_failed=1.0)
    with pytest.warns(RewardWarning, match="its process ended with exit code 3"):
        graded(rewards, ["ok"], file=[str(tmp_path / "number")])
    assert ends((tmp_path / "number").read_text())


@pytest.mark.parametrize("function", [reward_cases.as_number, reward_cases.slow_as_number])
def test_what_was_raised_there_is_said_here(function):
    rewards = Rewards((function,), seconds=LONG, max_failed=0.5)
    message = r"ValueError: could not convert string to float: 'bad' \(.*reward_cases.py, line \d+\)"
    with pytest.warns(RewardWarning, match=message):
        assert numbers(graded(rewards, ["1", "bad"]).rewards) == [1, None]


def test_an_error_while_the_file_loads_there_names_its_line(tmp_path):
    file = tmp_path / "needs_a_token.py"
    file.write_text("import sys\nif 'reward_calls' in sys.argv[0]:\n    raise KeyError('token')\ndef f(): pass\n")
    rewards = Rewards((import_function(f"{file}:f"),), seconds=LONG)
    with pytest.raises(UnloadableRewardError, match=rf"KeyError: 'token' \({file}, line 3\)"):
        graded(rewards, ["1"])


def test_a_function_that_takes_too_long_to_load(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reward_callers, "START_SECONDS", 0.0)
    with pytest.raises(UnloadableRewardError, match="'length' that its own process can load; got took longer than 0 s"):
        graded(Rewards((reward_cases.length,), seconds=LONG), ["a"])


def local_function():
    def reward(completions):
        return [0.0]

    return reward


@pytest.mark.parametrize("function", [lambda completions: [0.0], local_function()], ids=["lambda", "local"])
def test_what_another_process_cannot_find_is_refused_at_once(function):
    with pytest.raises(ValueError, match="a separate process can load.*Move it into a file, or give seconds=None"):
        Rewards((function,))


def test_a_function_of_a_script_is_refused_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reward_cases.length, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "length", reward_cases.length, raising=False)
    with pytest.raises(ValueError, match="one of the script or notebook that runs"):
        Rewards((reward_cases.length,))


def test_a_text_about_a_script_is_none():
    path, pickled = pickled_function("mine", functools.partial(reward_cases.length, 'if __name__ == "__main__":'))
    assert path == [] and b"__main__" in pickled


FILE = """
from __future__ import annotations
from dataclasses import dataclass

def halves(completions):
    return [len(completion) / 2 for completion in completions]

@dataclass(frozen=True)
class Times:
    factor: float

    def __call__(self, completions):
        return [self.factor * x for x in halves(completions)]
"""


def test_functions_of_a_file_that_lies_anywhere(tmp_path: Path):
    path = tmp_path / "my rewards.py"
    path.write_text(FILE, encoding="utf-8")
    functions = (import_function(f"{path}:halves"), import_function(f"{path}:Times")(4.0))
    assert graded(Rewards(functions, seconds=LONG), ["abc"]).rewards.tolist() == [1.5 + 6.0]


def test_columns_that_cannot_be_sent():
    rewards = Rewards((reward_cases.matches,), seconds=LONG)
    with pytest.raises(
        ValueError, match="columns that can be sent to the process of reward 'matches', or seconds=None"
    ):
        graded(rewards, ["a"], answer=[lambda: 0])


def test_columns_that_cannot_be_copied_are_taken_here():
    locks = [threading.Lock(), threading.Lock()]

    def same(completions, lock):
        return [float(one is two) for one, two in zip(lock, locks, strict=True)]

    rewards = Rewards((same,), seconds=None)
    assert graded(rewards, ["a", "b"], lock=locks).rewards.tolist() == [1, 1]


def test_a_fork_of_the_owner_leaves_its_process_alone():
    process = child_process.ChildProcess(reward_calls.__file__, {})
    ours, _ = multiprocessing.Pipe()
    child_process._end(os.getpid() + 1, process._process, ours, set())
    assert process.is_running
    process.close()
    assert not process.is_running


def test_the_process_imports_nothing_of_the_library():
    """It would take seconds that most reward functions don't need."""
    program = f"import runpy, sys; runpy.run_path({reward_calls.__file__!r}); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert "numpy" in loaded and not loaded & {"jax", "smd_jax"}


def test_a_process_that_nobody_waits_for_ends_itself():
    """Its caller is gone, and it spins in C."""
    files, pickled = pickled_function("spins_in_c", reward_cases.spins_in_c)
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        command = [sys.executable, "-P", reward_calls.__file__, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True)
        ours.send((sys.path, files, pickled))
        # So that its grace is over in half a second.
        ours.send((0.5 - reward_calls.GRACE_SECONDS, 1, {"completions": ["bad"]}))
        _, said = process.communicate()
    assert process.returncode == 1
    assert "in spins_in_c" in said, "where it was"


def test_a_process_ends_with_whoever_asks():
    calls = CallsInProcess("length", reward_cases.length, LONG)
    calls.begin({"completions": ["abc"]}, 1)  # of a batch that an error of another function ended
    calls.begin({"completions": ["a"]}, 1)
    assert calls.finish() == [1.0]
    assert calls._process is not None
    process = calls._process._process
    del calls
    assert process.returncode is not None
