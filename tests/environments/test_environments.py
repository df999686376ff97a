"""Environments in separate processes and in this one: answers, failures of single conversations, and limits."""

import contextlib
import functools
import os
import random
import resource
import subprocess
import time
from collections.abc import Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smd_jax.commands.errors import with_flags
from smd_jax.environments import environment_process, processes
from smd_jax.environments.processes import (
    Environments,
    EnvironmentsInProcesses,
    UnloadableEnvironmentError,
    open_environments,
)

ROWS = [{"prompt": f"row {number}"} for number in range(3)]


class Echo:
    """Repeats the text of a turn; some texts trigger a failure."""

    def __init__(self) -> None:
        self.turns = 0

    def reset(self, row: dict[str, Any]) -> str:
        return row["prompt"]

    def step(self, text: str) -> Any:
        self.turns += 1
        match text:
            case "raise":
                raise KeyError("the shelf is empty")
            case "hang":
                while True:
                    time.sleep(0.01)
            case "exit":
                os._exit(7)
            case "fork":
                os.fork()
            case "nothing":
                return None
            case "10 MB":
                return "x" * 10_000_000, 0.0, False
            case "no number":
                return "a", float("nan"), False
            case "a surrogate":
                return "a file \udc80", 0.0, False
            case "a surrogate in messages":
                return [{"role": "tool", "content": [{"type": "text", "text": "\ud800"}]}], 0.0, False
            case "a surrogate at the end":
                return "\udc80", 1.0, True
            case "a set":
                return {"a"}, 0.0, False
            case "messages":
                return [{"role": "tool", "content": "4"}], 0, np.False_
            case "over":
                return "", np.float32(1.5), "solved"
        return f"{self.turns}: {text}", 0.25, False


class EndlessProgram:
    """Opens with the process id of an endless program, and then waits for it."""

    def reset(self, row: dict[str, Any]) -> str:
        self.program = subprocess.Popen(["sleep", "1000"])
        return str(self.program.pid)

    def step(self, text: str) -> tuple[str, float, bool]:
        self.program.wait()
        return "", 0.0, True


class Prepared:
    prepared_by: int | None = None

    def prepare(self) -> None:
        if Prepared.prepared_by is not None:
            raise ValueError("prepared twice")
        Prepared.prepared_by = os.getpid()

    def reset(self, row: dict[str, Any]) -> str:
        return f"{self.prepared_by} {os.getppid()}"

    def step(self, text: str) -> tuple[str, float, bool]:
        return "", 0.0, True


class AsyncPrepared(Echo):
    async def prepare(self) -> None:
        pass


class FailsToPrepare(Echo):
    def prepare(self) -> None:
        raise OSError("no such index")


class AsyncEnvironment:
    async def reset(self, row: dict[str, Any]) -> str:
        return row["prompt"] + " awaited"

    async def step(self, text: str) -> tuple[str, float, bool]:
        return text.upper(), 1.0, True


class Opener:
    def reset(self, row: dict[str, Any]) -> str:
        return row["prompt"]


class JoinsSet(Opener):
    def reset(self, row: dict[str, Any]) -> str:
        return " ".join({"red", "green", "blue", "black"})

    def step(self, text: str) -> tuple[str, float, bool]:
        return "", 0.0, True


class Late(Opener):
    """Gets `step` in its constructor if `complete`."""

    def __init__(self, *, complete: bool = True):
        if complete:
            self.step = Echo().step


class Forwarding:
    def __getattr__(self, name: str) -> Any:
        return getattr(Echo(), name)


class RandomNumbers:
    def reset(self, row: dict[str, Any]) -> str:
        return f"{random.random()} {np.random.rand()}"

    def step(self, text: str) -> tuple[str, float, bool]:
        return str(random.random()), 0.0, False


@pytest.fixture(scope="module", params=["processes", "here"])
def echoes(request: pytest.FixtureRequest) -> Iterator[Environments]:
    environments = open_environments(Echo, 20.0 if request.param == "processes" else None)
    yield environments
    environments.close()


def answer_to(environments: Environments, conversation: int, text: str) -> Any:
    environments.step(conversation, text)
    ((number, answer),) = environments.receive(wait=True)
    assert number == conversation
    return answer


def test_each_conversation_has_its_own_environment(echoes: Environments):
    assert [answer.content for answer in echoes.reset(ROWS)] == ["row 0", "row 1", "row 2"]
    assert answer_to(echoes, 1, "a").content == "1: a" and answer_to(echoes, 1, "b").content == "2: b"
    assert answer_to(echoes, 0, "c") == ("1: c", 0.25, False, None, None)
    assert answer_to(echoes, 2, "over") == ("", 1.5, True, "solved", None)
    assert answer_to(echoes, 2, "messages").content == [{"role": "tool", "content": "4"}]
    assert echoes.receive(wait=False) == []
    echoes.reset(ROWS)
    assert answer_to(echoes, 1, "a").content == "1: a"


BAD_ANSWERS = {
    "raise": ("KeyError", r"the shelf is empty.*test_environments\.py"),
    "nothing": ("no answer", r"expected \(text, reward, done\); got None"),
    "10 MB": ("no answer", "at most 1,048,576 characters; got 10,000,000"),
    "no number": ("no answer", "expected a finite number as reward; got nan"),
    "a surrogate": ("no answer", r"expected text that UTF-8 can encode; got '\\udc80'"),
    "a surrogate in messages": ("no answer", r"expected text that UTF-8 can encode; got '\\ud800'"),
    "a set": ("no answer", "expected a text or chat messages; got {'a'}"),
}


@pytest.mark.parametrize("text", BAD_ANSWERS)
def test_a_bad_answer_is_a_failure(echoes: Environments, text: str):
    kind, message = BAD_ANSWERS[text]
    echoes.reset(ROWS)
    failure = answer_to(echoes, 1, text).failure
    assert failure.kind == kind
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(failure.message)
    assert len(failure.message) < 500
    assert answer_to(echoes, 0, "go on").content == "1: go on"


@pytest.mark.parametrize(
    "content",
    ["a \udc80", [{"role": "user", "content": "\udc80"}], {"messages": "a", "tools": [{"description": "\udc80"}]}],
)
def test_an_opening_with_a_lone_surrogate_is_a_failure(content: Any):
    with pytest.raises(environment_process.AnswerError, match=r"expected text that UTF-8 can encode; got '\\udc80'"):
        environment_process.checked_opening(content)


def test_long_messages_are_counted_by_characters():
    half, whole = ([{"role": "tool", "content": size * "字"}] for size in (2**19, 2**20))
    assert environment_process.checked_content(half, opening=False) is half
    with pytest.raises(environment_process.AnswerError, match="expected messages of at most 1,048,576 characters; got"):
        environment_process.checked_content(whole, opening=False)


def test_a_last_answer_that_no_tokenizer_accepts_keeps_its_reward(echoes: Environments):
    """The policy does not read it."""
    echoes.reset(ROWS)
    assert answer_to(echoes, 0, "a surrogate at the end") == ("\udc80", 1.0, True, None, None)


def test_a_call_that_hangs_or_exits_ends_only_its_own_process():
    environments = EnvironmentsInProcesses(Echo, seconds=0.5)
    environments.reset(ROWS)
    environments.step(0, "hang")
    environments.step(1, "exit")
    environments.step(2, "go on")
    answers = dict[int, Any]()
    while len(answers) < 3:
        answers |= dict(environments.receive(wait=True))
    assert answers[0].failure == ("time", "took longer than 0.5 s")
    assert answers[1].failure == ("end of its process", "its process ended with exit code 7")
    assert answers[2].content == "1: go on"
    assert answer_to(environments, 0, "again").failure == answers[0].failure
    assert [answer.content for answer in environments.reset(ROWS)] == ["row 0", "row 1", "row 2"]
    environments.close()


def test_a_late_answer_is_late_also_if_it_came_before_anybody_looked():
    """Otherwise it would depend on what the sampler does meanwhile."""
    environments = EnvironmentsInProcesses(Echo, seconds=20.0)
    environments.reset(ROWS)
    environments._seconds = 1e-9
    environments.step(0, "go on")
    connection.wait([environments._conversations[0].connection])
    [(_, answer)] = environments.receive(wait=False)
    assert answer.failure is not None and answer.failure.kind == "time"
    environments.close()


@pytest.mark.multiprocess
@pytest.mark.parametrize("when", ["between rollouts", "during a rollout"])
def test_a_dead_server_is_replaced_at_the_next_reset(when: str):
    environments = EnvironmentsInProcesses(Echo, seconds=20.0)
    environments.reset(ROWS)
    assert environments._server is not None
    environments._server._process.kill()
    environments._server._process.wait()
    if when == "during a rollout":
        for conversation in (0, 1):
            failure = answer_to(environments, conversation, "exit").failure
            assert failure.kind == "end of its process"
            assert failure.message.startswith("the process of all environments ended")
    assert [answer.content for answer in environments.reset(ROWS)] == ["row 0", "row 1", "row 2"]
    assert answer_to(environments, 2, "go on").content == "1: go on"
    environments.close()


def is_running(pid: str) -> bool:
    """False for a zombie, which its parent has not reaped yet."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def ends(pid: str) -> bool:
    """Waits up to ten seconds for a killed process."""
    for _ in range(200):
        if not is_running(pid):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("how", ["late", "next reset", "close"])
def test_programs_end_with_their_conversation(how: str):
    environments = EnvironmentsInProcesses(EndlessProgram, seconds=0.5 if how == "late" else 20.0)
    pid = environments.reset(ROWS[:1])[0].content
    assert is_running(pid)
    if how == "late":
        assert answer_to(environments, 0, "wait").failure.kind == "time"
    elif how == "next reset":
        environments.reset(ROWS[:1])
    else:
        environments.close()
    assert ends(pid)
    environments.close()


@pytest.mark.multiprocess
def test_prepare_is_called_once_before_the_forks():
    environments = EnvironmentsInProcesses(Prepared, seconds=20.0)
    for _ in range(2):
        for answer in environments.reset(ROWS):
            prepared, parent = answer.content.split()
            assert prepared == parent
    environments.close()
    with pytest.raises(UnloadableEnvironmentError, match=r"OSError: no such index \(.*test_environments.py, line"):
        EnvironmentsInProcesses(FailsToPrepare, seconds=20.0).reset(ROWS)
    with pytest.raises(UnloadableEnvironmentError, match="expected a `prepare` without async"):
        EnvironmentsInProcesses(AsyncPrepared, seconds=20.0).reset(ROWS)


def test_prepare_is_called_once_in_this_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Prepared, "prepared_by", None)
    environments = open_environments(Prepared, None)
    for _ in range(2):
        assert [answer.content.split()[0] for answer in environments.reset(ROWS)] == [str(os.getpid())] * len(ROWS)

    with pytest.raises(UnloadableEnvironmentError, match="can be prepared; got .*no such index"):
        open_environments(FailsToPrepare, None).reset(ROWS)


def test_a_fork_by_an_environment_gives_one_answer():
    environments = EnvironmentsInProcesses(Echo, seconds=20.0)
    environments.reset(ROWS[:1])
    assert [answer_to(environments, 0, text).content for text in ("fork", "a", "b")] == ["1: fork", "2: a", "3: b"]
    environments.close()


@pytest.mark.multiprocess
def test_sets_have_the_same_order_in_every_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    orders = set[str]()
    for _ in range(4):
        environments = EnvironmentsInProcesses(JoinsSet, seconds=20.0)
        orders.add(environments.reset(ROWS[:1])[0].content)
        environments.close()
    assert len(orders) == 1


def test_the_limit_of_open_files_is_raised_for_many_conversations():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as files:
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[0], 512), before[1]))
        for _ in range(100):  # as other environments have open
            files.enter_context(Path(os.devnull).open())
        processes.allow_open_files(300)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(100 + 300 + processes.OTHER_FILES, before[1])


@pytest.mark.parametrize("seconds", [20.0, None])
def test_async_environments_can_be_used_again_after_close(seconds: float | None):
    environments = open_environments(AsyncEnvironment, seconds)
    for _ in range(2):
        assert environments.reset(ROWS[:1])[0].content == "row 0 awaited"
        assert answer_to(environments, 0, "a") == ("A", 1.0, True, None, None)
        environments.close()


def test_global_random_state_is_the_same_in_every_conversation():
    environments = open_environments(RandomNumbers, 20.0)
    first = environments.reset(ROWS)
    assert len({answer.content for answer in (*first, *environments.reset(ROWS))}) == 1
    environments.close()


def test_a_class_that_cannot_be_loaded_is_refused():
    class Local(Echo):
        pass

    with pytest.raises(ValueError, match="expected an environment 'Local' that a separate process can load"):
        open_environments(Local)
    with pytest.raises(ValueError, match="expected an environment '<lambda>' that a separate process") as error:
        open_environments(lambda: Echo())
    flag = "In flags: None as its time limit is --environment-timeout."
    assert with_flags(str(error.value)).endswith(flag), "not --reward-timeout"
    with pytest.raises(ValueError, match="expected a time limit > 0 seconds, at most 1,000,000; got 0"):
        open_environments(Echo, 0.0)


@pytest.mark.parametrize("seconds", [20.0, None])
def test_invalid_environments_are_refused(seconds: float | None):
    with pytest.raises(ValueError, match="got an object of Echo: give the class, not an object"):
        processes.check_factory(Echo())
    for without_step in (Opener, functools.partial(Opener)):
        with pytest.raises(ValueError, match="with the methods reset and step; got Opener without step"):
            open_environments(without_step, seconds)  # pyright: ignore[reportArgumentType]
    forwarding: Any = Forwarding  # its methods come from another object
    open_environments(forwarding, seconds).close()
    late: Any = Late
    environments = open_environments(late, seconds)
    assert environments.reset(ROWS[:1])[0].content == ROWS[0]["prompt"]
    environments.close()
    environments = open_environments(functools.partial(late, complete=False), seconds)
    failure = environments.reset(ROWS[:1])[0].failure
    assert failure is not None and failure.message == "expected the methods reset and step; got Late without step"
    environments.close()


def test_a_file_that_fails_to_load_is_reported(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "only_here.py").write_text(
        "import os\nif os.environ.get('ONLY') is None:\n    raise OSError('no licence')\nclass E:\n"
        "    def reset(self, row):\n        pass\n\n    def step(self, text):\n        pass\n"
    )
    from smd_jax.tasks.functions import import_function

    monkeypatch.setenv("ONLY", "1")
    factory = import_function(f"{tmp_path}/only_here.py:E")
    monkeypatch.delenv("ONLY")
    with pytest.raises(UnloadableEnvironmentError, match="OSError: no licence"):
        open_environments(factory, 20.0).reset(ROWS)
