"""One call of a reward function and its outcome; also the script of the process that makes such calls.

The script imports nothing of smd_jax, which would take seconds. Answers are JSON: a completion may exploit a reward
function, so nothing that its process sends is unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import importlib.util
import inspect
import json
import math
import os
import pickle
import reprlib
import sys
import sysconfig
import traceback
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from itertools import dropwhile
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import numpy as np

Failed = tuple[str, str]  # kind and message
Value = float | None | Failed  # a reward; None: does not apply; or a failure
Outcome = list[Value] | Failed  # one value per completion, or why the call failed as a whole

ANOTHER_NUMBER = "another number of rewards"  # kind of a call that returned more or fewer than there are completions
LONGEST_MESSAGE = 400  # characters of an exception

THIS_LIBRARY = Path(__file__).parents[1]
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
INSTALLED = {"site-packages", "dist-packages"}  # folders within it that do not belong to it

GRACE_SECONDS = 5.0  # after the limit; then this process ends itself, if the caller has not ended it


class Caught:
    """`with Caught() as caught:` catches the exception that its body raises: foreign code may raise any class.

    Args:
      others: further classes to catch, such as SystemExit. Without them Ctrl-C and `sys.exit` propagate.
    """

    def __init__(self, *others: type[BaseException]) -> None:
        self.error: BaseException | None = None
        self._kept = (Exception, *others)

    def __enter__(self) -> Caught:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, self._kept):
            self.error = error
        return self.error is not None


def call(
    function: Callable[..., Any], arguments: Mapping[str, Any], rows: int, wait: Callable[[Awaitable[Any]], Any]
) -> Outcome:
    """Calls the function once, which must return `rows` rewards; `wait` gives the result of an async function."""
    with Caught(asyncio.CancelledError) as caught:
        returned = function(**arguments)
        return outcome_of(wait(returned) if inspect.isawaitable(returned) else returned, rows)
    assert caught.error is not None
    return type(caught.error).__name__, described(caught.error)


def outcome_of(returned: Any, rows: int) -> Outcome:
    """Checks the return value of a function: one value per completion."""
    # Texts, mappings and sets are iterable, but they are no rewards in the order of the completions.
    if not isinstance(returned, Iterable) or isinstance(returned, str | bytes | Mapping | Set):
        return "no list", f"expected a list of {rows} rewards, one per completion; got {reprlib.repr(returned)}"
    rewards = list(returned)
    if len(rewards) != rows:
        return ANOTHER_NUMBER, f"expected {rows} rewards, one per completion; got {len(rewards)}"
    return [value_of(reward) for reward in rewards]


def value_of(reward: Any) -> Value:
    """Rounds a reward to float32, keeps None, or describes why it is invalid."""
    if reward is None:
        return None
    number = _number(reward)
    if number is None:
        return "no number", f"expected a number or None; got {reprlib.repr(reward)}"
    # Too large numbers become infinite and are refused below, so numpy need not warn.
    with np.errstate(over="ignore"):
        rounded = float(np.float32(number))
    if not math.isfinite(rounded):
        return "not finite", f"expected a finite float32 or None; got {reprlib.repr(reward)}"
    return rounded


def _number(reward: Any) -> float | None:
    """A scalar of Python, NumPy, JAX, ml_dtypes or torch, or anything else with `__float__`; None for other values."""
    if isinstance(reward, str | bytes | bytearray) or getattr(reward, "ndim", 0):
        return None
    try:
        return float(reward)
    except OverflowError:  # whole numbers and fractions beyond float64
        return math.inf
    except (TypeError, ValueError):
        return None


def described(error: BaseException) -> str:
    """Describes an error with the line of the user's file: `KeyError: 'answer' (my_rewards.py, line 12)`."""
    text = "".join(traceback.format_exception_only(error)).strip()
    if len(text) > LONGEST_MESSAGE:  # it may quote a whole completion
        text = f"{text[:LONGEST_MESSAGE]}…"
    # The first frames are our call, and the import of a file or the wait for a coroutine.
    own = list(dropwhile(_is_ours, traceback.extract_tb(error.__traceback__)))
    if not own:
        return text
    last = [frame for frame in own if frame.filename == own[0].filename][-1]
    return f"{text} ({last.filename}, line {last.lineno})"


def _is_ours(frame: traceback.FrameSummary) -> bool:
    """Whether a line is of this library, of the standard library or of the interpreter's importer."""
    folders = Path(frame.filename).parents
    is_standard = STANDARD_LIBRARY in folders and not INSTALLED & {folder.name for folder in folders}
    return is_standard or THIS_LIBRARY in folders or frame.filename.startswith("<frozen ")


def packed(outcome: Outcome) -> bytes:
    """Writes an outcome as JSON: `{"values": [0.5, null, [kind, message]]}` or `{"failed": [kind, message]}`."""
    return json.dumps({"failed": outcome} if isinstance(outcome, tuple) else {"values": outcome}).encode()


def unpacked(message: bytes, rows: int) -> Outcome:
    """Reads an outcome that `packed` wrote. Raises ValueError for something else, or not `rows` rewards."""
    match json.loads(message):
        case {"failed": [str(kind), str(said)]}:
            return kind, said
        case {"values": list(values)} if len(values) == rows:
            return [_unpacked_value(value) for value in values]
        case content:
            raise ValueError(f"expected {rows} rewards or why there are none; got {reprlib.repr(content)}")


def _unpacked_value(value: Any) -> Value:
    match value:
        case None | int() | float() if value is None or math.isfinite(value):
            return value
        case [str(kind), str(said)]:
            return kind, said
        case _:
            raise ValueError(f"expected a reward; got {reprlib.repr(value)}")


async def awaited(awaitable: Awaitable[Any]) -> Any:
    """Makes a coroutine of an awaitable, because event loops run coroutines only."""
    return await awaitable


def when_ready(value: Any, use: Callable[[Any], Any]) -> Any:
    """`use(value)`; for an awaitable, a coroutine that gives `use` of its result."""

    async def later() -> Any:
        return use(await value)

    return later() if inspect.isawaitable(value) else use(value)


class EventLoop:
    """One event loop for all calls, because an async function may keep a client that belongs to it.

    It runs in another thread, because that of a notebook already runs one.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = ThreadPoolExecutor(1)
        self.close = weakref.finalize(self, _close, self._loop, self._thread)

    def result(self, awaitable: Awaitable[Any]) -> Any:
        """Waits for the result of an awaitable."""
        return self._thread.submit(lambda: self._loop.run_until_complete(awaited(awaitable))).result()


def _close(loop: asyncio.AbstractEventLoop, thread: ThreadPoolExecutor) -> None:
    thread.shutdown()
    loop.close()


def load_file(name: str, path: str) -> ModuleType:
    """Loads a file outside the import path as module `name`."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"expected a file of Python code, named *.py; got {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module while it loads
    spec.loader.exec_module(module)
    return module


def serve(connection: Connection) -> None:
    """Loads a function and answers calls of it until the other side closes the connection.

    The first request is (import path, files as (name, path), pickled function); the answer is an empty list or an
    error. Every other request is (seconds, rows, pickled arguments); the answer is an Outcome.
    """
    path, files, pickled = connection.recv()
    sys.path[:] = path
    with Caught() as caught:
        for name, file in files:
            load_file(name, file)
        function = pickle.loads(pickled)
    if caught.error is not None:
        connection.send_bytes(packed((type(caught.error).__name__, described(caught.error))))
        return
    connection.send_bytes(packed([]))
    # One event loop for all calls, because an async function may keep a client that belongs to it.
    process = os.getpid()
    with asyncio.Runner() as runner:
        while True:
            seconds, rows, arguments = connection.recv()
            # A timer in a thread of C, which works even if the function never releases Python's lock.
            faulthandler.dump_traceback_later(seconds + GRACE_SECONDS, exit=True, file=2)
            outcome = call(function, arguments, rows, lambda returned: runner.run(awaited(returned)))
            if os.getpid() != process:  # a fork by the function must not answer, too
                os._exit(0)
            faulthandler.cancel_dump_traceback_later()
            connection.send_bytes(packed(outcome))


def main(arguments: Sequence[str]) -> None:
    with Connection(int(arguments[0])) as connection, contextlib.suppress(EOFError, ConnectionError):
        serve(connection)


if __name__ == "__main__":
    main(sys.argv[1:])
