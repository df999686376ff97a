"""The environments of a batch of conversations: in processes with a time limit, or in this process without one."""

from __future__ import annotations

import contextlib
import json
import math
import os
import reprlib
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe, connection
from multiprocessing.connection import Connection
from typing import Any, Protocol, runtime_checkable

from smd_jax.config import check_time_limit
from smd_jax.environments import environment_process
from smd_jax.environments.environment_process import Conversation
from smd_jax.environments.protocol import Answer, Environment, Failure
from smd_jax.tasks import reward_calls
from smd_jax.tasks.reward_callers import START_SECONDS, pickled_function
from smd_jax.tasks.task import Row
from smd_jax.text.child_process import ChildEndedError, ChildProcess, pickled_value

OTHER_FILES = 512  # for the rest of the run, with some to spare
LONGEST_BYTES = 12 * environment_process.LONGEST + 4096  # of an answer: JSON writes a character in up to 12 bytes


class UnloadableEnvironmentError(RuntimeError):
    """An environment that this process can import and its own process cannot, or whose `prepare` failed."""


@runtime_checkable
class Environments(Protocol):
    """The environments of a batch of conversations; each `reset` begins a new batch."""

    def reset(self, rows: Sequence[Row]) -> list[Answer]:
        """Begins a conversation for each row and returns their openings. Ends all earlier conversations."""
        ...

    def step(self, conversation: int, text: str) -> None:
        """Begins a call of `step`; does not wait for it."""
        ...

    def receive(self, wait: bool) -> list[tuple[int, Answer]]:
        """Answers to `step` that have arrived, as (conversation, answer); with `wait` at least one."""
        ...

    def close(self) -> None:
        """Ends all conversations, and their processes."""
        ...


class EnvironmentsHere:
    """Environments in this process and thread, one call at a time, without a time limit: for closures, notebooks."""

    def __init__(self, factory: Callable[[], Environment]) -> None:
        check_factory(factory)
        self._factory = factory
        self._conversations: list[Conversation] = []
        self._asked: list[tuple[int, str]] = []
        self._prepared = False
        self._loop = reward_calls.EventLoop()

    def reset(self, rows: Sequence[Row]) -> list[Answer]:
        self._asked.clear()
        if not self._prepared:
            with reward_calls.Caught(SystemExit) as caught:
                environment_process.prepare(self._factory)
            if caught.error is not None:
                said = f"{type(caught.error).__name__}: {reward_calls.described(caught.error)}"
                raise UnloadableEnvironmentError(
                    f"expected an environment {_name(self._factory)!r} that can be prepared; got {said[:300]}"
                ) from caught.error
            self._prepared = True
        if not self._loop.close.alive:
            self._loop = reward_calls.EventLoop()
        self._conversations = [Conversation(self._factory, self._loop.result) for _ in rows]
        return [answer_of(each.reset(row)) for each, row in zip(self._conversations, rows, strict=True)]

    def step(self, conversation: int, text: str) -> None:
        self._asked.append((conversation, text))

    def receive(self, wait: bool) -> list[tuple[int, Answer]]:
        asked, self._asked = self._asked, []
        assert asked or not wait, "nothing was asked"
        return [(number, answer_of(self._conversations[number].step(text))) for number, text in asked]

    def close(self) -> None:
        self._loop.close()


@dataclass
class _Process:
    """The process of a conversation.

    Attributes:
      number: its process number. deadline: of the current call; infinite between calls.
      failure: why it ended; None while it runs.
    """

    number: int
    connection: Connection
    deadline: float = math.inf
    failure: Failure | None = None


class EnvironmentsInProcesses:
    """Environments in one process per conversation, forked from a process that loaded the environment.

    A call that raises, takes too long or ends its process gives an Answer with a Failure, and affects no other
    conversation.

    Args:
      factory: a class or function of a module or file, or an object that pickle can write; without arguments it gives
        an Environment.
      seconds: wall-clock limit of one call.

    Raises:
      ValueError: another process cannot import the factory; a limit that is not positive; an object in place of a
        class; a class without `reset` or `step`.
    """

    def __init__(self, factory: Callable[[], Environment], seconds: float = 60.0) -> None:
        check_time_limit(seconds)
        check_factory(factory)
        self._pickled = pickled_function(_name(factory), factory, "an environment", "None as its time limit")
        self._factory = factory
        self._seconds = seconds
        self._too_late = Failure("time", f"took longer than {seconds:g} s")
        self._server: ChildProcess | None = None
        self._conversations: list[_Process] = []

    def reset(self, rows: Sequence[Row]) -> list[Answer]:
        for each in self._conversations:
            self._end(each)
        if self._server is None or not self._server.is_running:
            self.close()
            self._server = self._started()
        allow_open_files(len(rows))
        self._conversations = [self._begun(self._server) for _ in rows]
        for conversation, row in enumerate(rows):
            self._ask(conversation, "reset", dict(row))
        answers = dict[int, Answer]()
        while len(answers) < len(rows):
            answers |= self.receive(wait=True)
        return [answers[conversation] for conversation in range(len(rows))]

    def step(self, conversation: int, text: str) -> None:
        self._ask(conversation, "step", text)

    def receive(self, wait: bool) -> list[tuple[int, Answer]]:
        asked = {number: each for number, each in enumerate(self._conversations) if each.deadline < math.inf}
        assert asked or not wait, "nothing was asked"
        running = [each.connection for each in asked.values() if each.failure is None]
        must_wait = wait and len(running) == len(asked)
        first = min((each.deadline for each in asked.values()), default=0.0)
        ready = connection.wait(running, max(first - time.monotonic(), 0.0) if must_wait else 0.0)
        now = time.monotonic()
        answers = []
        for number, each in asked.items():
            if each.failure is None and each.connection not in ready:
                if each.deadline > now:
                    continue
                self._end(each, self._too_late)
            each.deadline = math.inf
            answers.append((number, self._answer(each)))
        return answers

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for each in self._conversations:
            each.connection.close()
        self._server, self._conversations = None, []

    def _started(self) -> ChildProcess:
        """The process that has loaded the environment."""
        # An environment that uses JAX must not take the accelerator's memory a second time.
        server = ChildProcess(environment_process.__file__, {"JAX_PLATFORMS": "cpu"})
        server.send((sys.path, *self._pickled))
        try:
            error = server.receive(START_SECONDS).decode()
        except (TimeoutError, ChildEndedError) as caught:
            error = f"{type(caught).__name__}: {caught}"
        if error:
            server.close()
            raise UnloadableEnvironmentError(
                f"expected an environment {_name(self._factory)!r} that its own process can load; got {error[:300]}"
            )
        return server

    def _begun(self, server: ChildProcess) -> _Process:
        """The process of a new conversation."""
        ours, theirs = Pipe()
        with theirs:
            server.send(None)
            server.send_handle(theirs.fileno())
        process = _Process(int(server.receive(START_SECONDS)), ours)
        server.groups.add(process.number)
        return process

    def _ask(self, conversation: int, method: str, argument: Any) -> None:
        each = self._conversations[conversation]
        each.deadline = time.monotonic() + self._seconds
        if each.failure is None:
            with contextlib.suppress(ConnectionError):  # it has ended, which `_answer` finds
                each.connection.send_bytes(pickled_value((method, argument)))

    def _answer(self, each: _Process) -> Answer:
        if each.failure is None:
            try:
                fields = json.loads(each.connection.recv_bytes(LONGEST_BYTES))
                answer = answer_of(fields)
                if fields.get("seconds", math.inf) <= self._seconds:
                    return answer
                self._end(each, self._too_late)
            except (EOFError, OSError):
                self._end(each)
            except ValueError as error:  # the environment itself wrote into the connection
                return Answer(None, failure=Failure("no answer", str(error)[:300]))
        return Answer(None, failure=each.failure)

    def _end(self, each: _Process, failure: Failure | None = None) -> None:
        """Kills a conversation; `failure` says why, unless it ended by itself."""
        if each.failure is not None or self._server is None:
            return
        each.connection.close()
        self._server.send(each.number)
        try:
            code = int(self._server.receive(START_SECONDS))
            self._server.groups.discard(each.number)
        except (TimeoutError, ChildEndedError) as error:
            message = f"the process of all environments ended: {error}"[:300]
        else:
            message = f"its process ended with exit code {code}"
        each.failure = failure or Failure("end of its process", message)


def allow_open_files(more: int) -> None:
    """Raises this process's limit of open files by this number, as far as the system allows.

    Each conversation has a connection, and the usual limit is 1,024. Other sets of environments may be open, such as
    that of the evaluation, so the open files count too.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = more + len(os.listdir("/dev/fd")) + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def open_environments(factory: Callable[[], Environment], seconds: float | None = 60.0) -> Environments:
    """Environments with a time limit in seconds for each call; None: in this process, without a limit.

    Raises:
      ValueError: an object in place of a class; a class without `reset` or `step`, unless it has an `__init__`
        or `__new__`; others as EnvironmentsInProcesses.
    """
    return EnvironmentsHere(factory) if seconds is None else EnvironmentsInProcesses(factory, seconds)


def check_factory(factory: Any) -> None:
    """Raises ValueError for an object in place of a class, and for a class whose objects lack `reset` or `step`.

    An object may get its methods when it is made, so a conversation looks again.
    """
    if not callable(factory):
        raise ValueError(
            f"expected a class or function that makes an environment; got an object of {_name(factory)}: give the "
            "class, not an object"
        )
    made = getattr(factory, "func", factory)  # the class of a partial
    is_plain = isinstance(made, type) and made.__init__ is object.__init__ and made.__new__ is object.__new__
    # A class with __getattr__ may get its methods from another object.
    if is_plain and not hasattr(made, "__getattr__") and (missing := environment_process.missing_methods(made)):
        raise ValueError(
            f"expected an environment with the methods reset and step; got {_name(made)} without "
            f"{' and '.join(missing)}"
        )


def answer_of(fields: Any) -> Answer:
    """Reads the fields of `environment_process`; raises ValueError for others."""
    match fields:
        case {"failed": [str(kind), str(message)]}:
            return Answer(None, failure=Failure(kind, message))
        case {"content": content, "reward": float() | int() as reward, "done": bool() | str() as done}:
            return Answer(content, float(reward), bool(done), done if isinstance(done, str) and done else None)
        case {"content": content}:
            return Answer(content)
        case _:
            raise ValueError(f"expected an answer of an environment; got {reprlib.repr(fields)}")


def _name(factory: Any) -> str:
    return getattr(factory, "__name__", type(factory).__name__)
