"""The process of an environment: it loads the environment once, and forks a process for every conversation.

    parent ─► this process: None and a connection ─► number of the process of a new conversation
                            number of a process   ─► its exit code, after it was killed
    parent ─► conversation: ("reset", row)        ─► {"content": …}
                            ("step", text)        ─► {"content": …, "reward": …, "done": …}
                                                     {"failed": [kind, message]}

It runs this file as a script, and of smd_jax imports only `reward_calls`, by its path. Requests are pickled; answers
are JSON, because data from foreign code is never unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import importlib.util
import inspect
import json
import math
import os
import pickle
import random
import reprlib
import signal
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection
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
METHODS = ("reset", "step")  # of an environment


class AnswerError(ValueError):
    """An environment returned an invalid answer."""


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
    size = len(json.dumps(content, ensure_ascii=False))
    if size > LONGEST:
        raise AnswerError(f"expected messages of at most {LONGEST:,} characters; got {size:,}")
    return content


def check_encodable(content: Any) -> None:
    """Raises AnswerError for a lone surrogate in a text that the policy reads: no tokenizer accepts it."""
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise AnswerError(f"expected text that UTF-8 can encode; got {error.object[error.start]!r}") from error


def checked_step(returned: Any) -> dict[str, Any]:
    """The fields of a step's answer; raises AnswerError for anything but `(text, reward, done)`."""
    if not isinstance(returned, tuple | list) or len(returned) != 3:
        raise AnswerError(f"expected (text, reward, done); got {reprlib.repr(returned)}")
    content, reward, done = returned
    number = reward_calls.value_of(reward)
    if not isinstance(number, float) or not math.isfinite(number):
        raise AnswerError(f"expected a finite number as reward; got {reprlib.repr(reward)}")
    if not isinstance(done, bool | np.bool_ | str):
        raise AnswerError(f"expected a boolean or a text as done; got {reprlib.repr(done)}")
    ends = str(done)[:200] if isinstance(done, str) else bool(done)
    content = checked_content(content, opening=False)
    if not ends:
        check_encodable(content)
    return {"content": content, "reward": number, "done": ends}


def checked_opening(content: Any) -> dict[str, Any]:
    """The fields of an opening."""
    content = checked_content(content, opening=True)
    check_encodable(content)
    return {"content": content}


def missing_methods(environment: Any) -> list[str]:
    """The methods of an environment that an object or a class lacks."""
    return [name for name in METHODS if not callable(getattr(environment, name, None))]


class Conversation:
    """The environment of one conversation, in this process. `finish` gives the result of an awaitable."""

    def __init__(self, factory: Callable[[], Any], finish: Callable[[Any], Any]) -> None:
        self._factory = factory
        self._finish = finish
        self._environment: Any = None

    def reset(self, row: Any) -> dict[str, Any]:
        """The fields of the answer to `reset`."""

        def begin() -> Any:
            self._environment = self._factory()
            if missing := missing_methods(self._environment):
                made = type(self._environment).__name__
                raise AnswerError(
                    f"expected the methods {' and '.join(METHODS)}; got {made} without {' and '.join(missing)}"
                )
            # A copy, because an environment may change its argument, and conversations of a group share the row.
            return self._environment.reset(copy.deepcopy(row))

        return self._call(begin, checked_opening)

    def step(self, text: str) -> dict[str, Any]:
        """The fields of the answer to `step`."""
        return self._call(lambda: self._environment.step(text), checked_step)

    def _call(self, function: Callable[[], Any], check: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """The fields of an answer, or of the failure, of one call."""
        with reward_calls.Caught(SystemExit, asyncio.CancelledError) as caught:
            returned = function()
            fields = check(self._finish(returned) if inspect.isawaitable(returned) else returned)
            json.dumps(fields)  # raises for content that is no JSON
            return fields
        error = caught.error
        assert error is not None
        if isinstance(error, AnswerError):
            return {"failed": ["no answer", str(error)]}
        return {"failed": [type(error).__name__, reward_calls.described(error)]}


def converse(connection: Connection, factory: Callable[[], Any]) -> None:
    """Answers the calls of one conversation until the other side closes the connection."""
    random.seed(0)
    np.random.seed(0)
    process = os.getpid()
    # One event loop for all calls, because an async environment may keep a client that belongs to it.
    with asyncio.Runner() as runner:
        conversation = Conversation(factory, lambda x: runner.run(reward_calls.awaited(x)))
        while True:
            method, argument = connection.recv()
            began = time.clock_gettime(time.CLOCK_MONOTONIC)  # an environment may replace time.monotonic
            fields = conversation.reset(argument) if method == "reset" else conversation.step(argument)
            if os.getpid() != process:  # a fork by foreign code must not answer, too
                os._exit(0)
            # The parent may look at the answer long after it came, so the time limit is that of this clock.
            timed = {**fields, "seconds": time.clock_gettime(time.CLOCK_MONOTONIC) - began}
            connection.send_bytes(json.dumps(timed).encode())


def serve(parent: Connection) -> None:
    """Loads the factory, then forks and ends conversations until the parent closes the connection."""
    path, files, pickled = parent.recv()
    sys.path[:] = path
    with reward_calls.Caught(SystemExit) as caught:
        for name, file in files:
            reward_calls.load_file(name, file)
        factory = pickle.loads(pickled)
        prepare(factory)  # forks share its imports and data
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # it would take the exit codes of conversations
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if caught.error is not None:
        parent.send_bytes(f"{type(caught.error).__name__}: {reward_calls.described(caught.error)}".encode())
        return
    parent.send_bytes(b"")
    warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)  # threads of imported libraries
    forked = set[int]()
    try:
        while True:
            ended = parent.recv()
            if ended is None:
                process = fork(parent, factory)
                forked.add(process)
                parent.send_bytes(b"%d" % process)
            else:
                forked.discard(ended)
                parent.send_bytes(b"%d" % end(ended))
    finally:  # the parent may have been killed
        for process in forked:
            end(process)


def prepare(factory: Callable[[], Any]) -> None:
    """Calls the environment's `prepare`, if its class has one."""
    method = getattr(getattr(factory, "func", factory), "prepare", None)  # `func`: the class of a partial
    if inspect.iscoroutinefunction(method):
        raise TypeError("expected a `prepare` without async, because it runs before the event loop; got an async one")
    if method is not None:
        factory().prepare()


def end(process: int) -> int:
    """Kills a conversation with the processes that it started; its exit code."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def fork(parent: Connection, factory: Callable[[], Any]) -> int:
    """The process of a new conversation, over the connection that the parent sends."""
    handle = reduction.recv_handle(parent)
    process = os.fork()
    if process:
        # Its own process group, because an environment that times out may leave a program running.
        with contextlib.suppress(OSError):
            os.setpgid(process, process)
        os.close(handle)
        return process
    parent.close()
    # After any exception, this process must not continue as a copy of its parent.
    with reward_calls.Caught(BaseException) as caught, contextlib.suppress(EOFError, ConnectionError):
        converse(Connection(handle), factory)
    if caught.error is not None:
        print(f"{type(caught.error).__name__}: {reward_calls.described(caught.error)}", file=sys.stderr, flush=True)
    os._exit(caught.error is not None)


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as _connection, contextlib.suppress(EOFError, ConnectionError):
        serve(_connection)
