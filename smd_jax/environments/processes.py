"""The environments of a batch of conversations: in processes with a time limit, or in this process without one."""

from __future__ import annotations

import itertools
import json
import reprlib
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from smd_jax.environments import environment_process
from smd_jax.environments.environment_process import Conversation
from smd_jax.environments.protocol import Answer, Environment, Failure
from smd_jax.tasks import reward_calls
from smd_jax.tasks.reward_callers import START_SECONDS, pickled_function
from smd_jax.tasks.task import Row
from smd_jax.text.child_process import ChildEndedError, ChildProcess, pickled_value

LATEST = 60.0  # seconds past all limits in which a server must have said that a call was late


class UnloadableEnvironmentError(RuntimeError):
    """An environment that this process can import and its own process cannot."""


@runtime_checkable
class Environments(Protocol):
    """The environments of the conversations of one batch after the other."""

    def reset(self, rows: Sequence[Row]) -> list[Answer]:
        """Begins a conversation for each row, and gives their openings. Ends all conversations before."""
        ...

    def step(self, conversation: int, text: str) -> None:
        """Begins a call of `step`; does not wait for it."""
        ...

    def receive(self, wait: bool) -> list[tuple[int, Answer]]:
        """Answers to `step` that have come, as (conversation, answer); with `wait` at least one."""
        ...

    def close(self) -> None:
        """Ends all conversations, and their processes."""
        ...


class EnvironmentsHere:
    """Environments in this process and thread, without a time limit: for closures, notebooks and tests."""

    def __init__(self, factory: Callable[[], Environment]) -> None:
        self._factory = factory
        self._conversations: list[Conversation] = []
        self._answers: deque[tuple[int, Answer]] = deque()
        self._loop = reward_calls.EventLoop()
        self.close = self._loop.close

    def reset(self, rows: Sequence[Row]) -> list[Answer]:
        self._answers.clear()
        self._conversations = [Conversation(self._factory, self._loop.result) for _ in rows]
        return [answer_of(each.reset(row)) for each, row in zip(self._conversations, rows, strict=True)]

    def step(self, conversation: int, text: str) -> None:
        self._answers.append((conversation, answer_of(self._conversations[conversation].step(text))))

    def receive(self, wait: bool) -> list[tuple[int, Answer]]:
        answers = list(self._answers)
        assert answers or not wait, "nothing was asked"
        self._answers.clear()
        return answers


class EnvironmentsInProcesses:
    """Environments in processes of their own, one for each conversation, forked from one that loaded the environment.

    A call that raises, takes too long or ends its process is an Answer with a Failure, and harms no other conversation.

    Args:
      factory: a class or function of a module or file, or an object that pickle can write; without arguments it gives
        an Environment.
      seconds: wall-clock limit of one call.

    Raises:
      ValueError: another process cannot import the factory; a limit that is not positive.
    """

    def __init__(self, factory: Callable[[], Environment], seconds: float = 60.0) -> None:
        if not seconds > 0:
            raise ValueError(f"expected a time limit > 0 seconds; got {seconds}")
        self._pickled = pickled_function(_name(factory), factory, "an environment")
        self._factory = factory
        self._seconds = seconds
        self._process: ChildProcess | None = None
        self._loaded = False
        self._numbers = itertools.count()
        self._conversations: dict[int, int] = {}  # number in the process -> conversation of the batch
        self._by_conversation: list[int] = []
        self._due: dict[int, float] = {}  # number -> when an answer must have come

    def start(self) -> None:
        """Starts the process unless it runs, and does not wait for it."""
        if self._process is not None and self._process.is_running:
            return
        # An environment that uses JAX must not take the accelerator's memory a second time.
        self._process = ChildProcess(environment_process.__file__, {"JAX_PLATFORMS": "cpu"})
        self._process.send((sys.path, *self._pickled))
        self._loaded = False

    def reset(self, rows: Sequence[Row]) -> list[Answer]:
        process = self._ready()
        process.send(("clear",))
        self._by_conversation = [next(self._numbers) for _ in rows]
        self._conversations = {number: index for index, number in enumerate(self._by_conversation)}
        self._due.clear()
        for number, row in zip(self._by_conversation, rows, strict=True):
            # Sent as a pickle already: an error of a row that cannot be sent names it.
            pickled_value(row)
            self._ask("reset", number, dict(row))
        answers: list[Answer | None] = [None] * len(rows)
        while None in answers:
            for conversation, answer in self.receive(wait=True):
                answers[conversation] = answer
        return [answer for answer in answers if answer is not None]

    def step(self, conversation: int, text: str) -> None:
        self._ask("step", self._by_conversation[conversation], text)

    def receive(self, wait: bool) -> list[tuple[int, Answer]]:
        assert self._due or not wait, "nothing was asked"
        found: list[tuple[int, Answer]] = []
        while self._due:
            must_wait = wait and not found
            latest = max(self._due.values()) - time.monotonic()
            if not must_wait and self._process is not None and not self._process.has_answer(0.0):
                break
            try:
                if self._process is None:
                    raise ChildEndedError(0)
                number, answer = _unpacked(self._process.receive(latest if must_wait else 0.0))
            except (TimeoutError, ChildEndedError, ValueError) as error:
                # The process that forked all others: none of them is left.
                self.close()
                failure = Failure("end of its process", f"the process of all environments ended: {error}"[:300])
                found += [(self._conversations[each], Answer(None, failure=failure)) for each in self._due]
                self._due.clear()
                break
            if self._due.pop(number, None) is not None:
                found.append((self._conversations[number], answer))
        return found

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def _ask(self, method: str, number: int, argument: Any) -> None:
        self._due[number] = time.monotonic() + self._seconds + LATEST
        if self._process is not None:
            self._process.send((method, number, self._seconds, argument))

    def _ready(self) -> ChildProcess:
        self.start()
        assert self._process is not None
        if not self._loaded:
            try:
                answer = json.loads(self._process.receive(START_SECONDS))
            except (TimeoutError, ChildEndedError, ValueError) as error:
                answer = {"failed": [type(error).__name__, str(error)]}
            if "failed" in answer:
                self.close()
                raise UnloadableEnvironmentError(
                    f"expected an environment {_name(self._factory)!r} that its own process can load; got "
                    f"{': '.join(answer['failed'])[:300]}"
                )
            self._loaded = True
        return self._process


def open_environments(factory: Callable[[], Environment], seconds: float | None = 60.0) -> Environments:
    """Environments with a time limit in seconds for each call; None: in this process, without a limit."""
    return EnvironmentsHere(factory) if seconds is None else EnvironmentsInProcesses(factory, seconds)


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


def _unpacked(message: bytes) -> tuple[int, Answer]:
    number, _, rest = message.partition(b":")
    try:
        return int(number), answer_of(json.loads(rest))
    except ValueError as error:
        if not number.isdigit():
            raise
        return int(number), Answer(None, failure=Failure("no answer", str(error)[:300]))


def _name(factory: Callable[..., Any]) -> str:
    return factory.__name__ if isinstance(factory, type) else type(factory).__name__
