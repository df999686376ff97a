"""The process of an environment: it loads the environment once, and forks a process for every conversation.

    parent ─► server ─┬─► conversation 0       a call that takes too long ends the process of its conversation alone
                      └─► conversation 1

It runs this file as a script and imports nothing of smd_jax but `reward_calls`, by its path. Requests are pickled;
answers are JSON behind the number of the conversation, because nothing that foreign code sends is unpickled:

    first      (sys.path, files to load, pickled factory)    ─► {"loaded": true} or {"failed": [kind, message]}
    then       ("clear",)                                       ends all conversations; no answer
               ("reset", number, seconds, row)               ─► number:{"content": …}
               ("step", number, seconds, text)               ─► number:{"content": …, "reward": …, "done": …}
    errors                                                   ─► number:{"failed": [kind, message]}
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import inspect
import json
import math
import os
import pickle
import queue
import random
import reprlib
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    _spec = importlib.util.spec_from_file_location(
        "reward_calls", Path(__file__).parents[1] / "tasks" / "reward_calls.py"
    )
    assert _spec is not None and _spec.loader is not None
    reward_calls: Any = importlib.util.module_from_spec(_spec)
    sys.modules["reward_calls"] = reward_calls
    _spec.loader.exec_module(reward_calls)
else:
    from smd_jax.tasks import reward_calls

LONGEST = 2**20  # characters of an answer


class AnswerError(ValueError):
    """An environment returned something that is no answer."""


def checked_content(content: Any, *, opening: bool) -> Any:
    """A text, messages, or an opening; raises AnswerError for anything else."""
    expected = "a text or chat messages"
    messages = content
    if opening and isinstance(content, dict):
        expected = "an opening with messages and tools"
        if set(content) != {"messages", "tools"}:
            raise AnswerError(f"expected {expected}; got the fields {reprlib.repr(sorted(map(str, content)))}")
        messages = content["messages"]
    if isinstance(messages, str):
        if len(messages) > LONGEST:
            raise AnswerError(f"expected a text of at most {LONGEST:,} characters; got {len(messages):,}")
        return content
    if not isinstance(messages, list | tuple) or not all(isinstance(x, dict) and "role" in x for x in messages):
        raise AnswerError(f"expected {expected}; got {reprlib.repr(content)}")
    size = len(json.dumps(content))
    if size > LONGEST:
        raise AnswerError(f"expected messages of at most {LONGEST:,} characters; got {size:,}")
    return content


def checked_step(returned: Any) -> dict[str, Any]:
    """The fields of a step's answer; raises AnswerError for what is no `(text, reward, done)`."""
    if not isinstance(returned, tuple | list) or len(returned) != 3:
        raise AnswerError(f"expected (text, reward, done); got {reprlib.repr(returned)}")
    content, reward, done = returned
    number = reward_calls.value_of(reward)
    if not isinstance(number, float) or not math.isfinite(number):
        raise AnswerError(f"expected a finite number as reward; got {reprlib.repr(reward)}")
    if not isinstance(done, bool | np.bool_ | str):
        raise AnswerError(f"expected a boolean or a text as done; got {reprlib.repr(done)}")
    ends = str(done)[:200] if isinstance(done, str) else bool(done)
    return {"content": checked_content(content, opening=False), "reward": number, "done": ends}


def call(function: Callable[[], Any], check: Callable[[Any], dict[str, Any]], finish: Callable[[Any], Any]) -> Any:
    """The fields of an answer, or of the failure, of one call. `finish` gives the result of an awaitable."""
    with reward_calls.Caught(SystemExit) as caught:
        returned = function()
        fields = check(finish(returned) if inspect.isawaitable(returned) else returned)
        json.dumps(fields)  # raises for content that is no JSON
        return fields
    error = caught.error
    assert error is not None
    if isinstance(error, AnswerError):
        return {"failed": ["no answer", str(error)]}
    return {"failed": [type(error).__name__, reward_calls.described(_from_outside(error))]}


def _from_outside(error: BaseException) -> BaseException:
    """The error, with the last line of this file as the first of its traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_next.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return error.with_traceback(trace)


class Conversation:
    """The environment of one conversation, in the present process."""

    def __init__(self, factory: Callable[[], Any], finish: Callable[[Any], Any]) -> None:
        self._factory = factory
        self._finish = finish
        self._environment: Any = None

    def reset(self, row: Any) -> dict[str, Any]:
        """The fields of the answer to `reset`."""

        def begin() -> Any:
            self._environment = self._factory()
            return self._environment.reset(row)

        return call(begin, lambda x: {"content": checked_content(x, opening=True)}, self._finish)

    def step(self, text: str) -> dict[str, Any]:
        """The fields of the answer to `step`."""
        return call(lambda: self._environment.step(text), checked_step, self._finish)


def converse(connection: Connection, factory: Callable[[], Any]) -> None:
    """Answers the calls of one conversation until the other side closes the connection."""
    random.seed(0)
    np.random.seed(0)
    # One event loop for all calls, because an async environment may keep a client that belongs to it.
    with asyncio.Runner() as runner:
        conversation = Conversation(factory, lambda x: runner.run(reward_calls.awaited(x)))
        while True:
            method, argument = connection.recv()
            fields = conversation.reset(argument) if method == "reset" else conversation.step(argument)
            connection.send_bytes(json.dumps(fields).encode())


@dataclass
class _Child:
    """The process of a conversation. `deadline`: of the call that it works on; None between calls."""

    process: int
    connection: Connection
    deadline: float | None = None
    seconds: float = 0.0


class Server:
    """Forks, forwards and kills."""

    def __init__(self, parent: Connection, factory: Callable[[], Any]) -> None:
        self._parent = parent
        self._factory = factory
        self._children: dict[int, _Child] = {}
        # Sent by a thread: where both sides waited for the other to read, neither would go on.
        self._answers = queue.SimpleQueue[bytes]()
        threading.Thread(target=self._send_answers, daemon=True).start()

    def _send_answers(self) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                self._parent.send_bytes(self._answers.get())

    def run(self) -> None:
        """Serves until the parent closes the connection."""
        while True:
            due = [child.deadline for child in self._children.values() if child.deadline is not None]
            timeout = max(min(due) - time.monotonic(), 0.0) if due else None
            ready = wait([self._parent, *(child.connection for child in self._children.values())], timeout)
            numbers = {id(child.connection): number for number, child in self._children.items()}
            for connection in ready:
                if connection is not self._parent:
                    self._take_answer(numbers[id(connection)])
            self._end_late()
            if self._parent in ready:
                self._take_request(self._parent.recv())

    def _take_request(self, request: tuple[Any, ...]) -> None:
        if request[0] == "clear":
            for number in list(self._children):
                self._end(number)
            return
        method, number, seconds, argument = request
        if method == "reset":
            self._children[number] = self._fork()
        child = self._children.get(number)
        if child is None:  # it ended after its last answer
            self._fail(number, "end of its process", "its process ended")
            return
        child.seconds, child.deadline = seconds, time.monotonic() + seconds
        with contextlib.suppress(ConnectionError):  # it has ended, which `_take_answer` finds
            child.connection.send((method, argument))

    def _fork(self) -> _Child:
        ours, theirs = Pipe()
        process = os.fork()
        if process:
            theirs.close()
            return _Child(process, ours)
        ours.close()
        self._parent.close()
        for child in self._children.values():
            child.connection.close()
        with contextlib.suppress(EOFError, ConnectionError):
            converse(theirs, self._factory)
        os._exit(0)

    def _take_answer(self, number: int) -> None:
        child = self._children[number]
        try:
            answer = child.connection.recv_bytes(8 * LONGEST)
        except (EOFError, OSError):
            code = self._end(number)
            self._fail(number, "end of its process", f"its process ended with exit code {code}")
            return
        if child.deadline is None:
            return  # the environment itself wrote into the pipe
        child.deadline = None
        self._answers.put(b"%d:%b" % (number, answer))

    def _end_late(self) -> None:
        now = time.monotonic()
        late = [n for n, child in self._children.items() if child.deadline is not None and child.deadline <= now]
        for number in late:
            seconds = self._children[number].seconds
            self._end(number)
            self._fail(number, "time", f"took longer than {seconds:g} s")

    def _end(self, number: int) -> int:
        child = self._children.pop(number)
        child.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.process, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(child.process, 0)[1])

    def _fail(self, number: int, kind: str, message: str) -> None:
        self._answers.put(f"{number}:{json.dumps({'failed': [kind, message]})}".encode())


def serve(connection: Connection) -> None:
    """Loads the factory and serves."""
    path, files, pickled = connection.recv()
    sys.path[:] = path
    with reward_calls.Caught(SystemExit) as caught:
        for name, file in files:
            reward_calls.load_file(name, file)
        factory = pickle.loads(pickled)
    if caught.error is not None:
        failed = [type(caught.error).__name__, reward_calls.described(caught.error)]
        connection.send_bytes(json.dumps({"failed": failed}).encode())
        return
    connection.send_bytes(b'{"loaded": true}')
    # The only other thread writes to the parent, which no conversation does.
    warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
    Server(connection, factory).run()


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as _connection, contextlib.suppress(EOFError, ConnectionError):
        serve(_connection)
