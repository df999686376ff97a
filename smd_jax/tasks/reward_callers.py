"""Where reward functions run: in this process, or each in one of its own that a hang cannot outlive.

A thread would not do. Code that loops in C and keeps Python's lock (a regular expression that backtracks for ever)
stops every thread of its process, the one that looks at the clock included; and no thread can be killed from outside. A
process can. In it the function also has the main thread, the only one in which math-verify can set a clock of its own,
and several functions run beside each other.

The process is a new Python rather than a fork: JAX has threads, and what a thread held at the moment of a fork stays
locked for ever in the child. So a function must be found by import there. `multiprocessing` would do the same, but
import the user's script first, which then needs its `if __name__ == "__main__"`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.machinery
import io
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
import types
import weakref
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from smd_jax.tasks import reward_calls
from smd_jax.tasks.reward_calls import Outcome

START_SECONDS = 300.0  # to import what a function needs, which may be much: it is no call, and no limit of the user's


class UnloadableRewardError(RuntimeError):
    """A reward function that is found here, and not by the process that is to call it."""


class CallsHere:
    """Calls in this process, in the thread that asks: closures and state are as they are, and nothing is limited."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._begun: tuple[Mapping[str, Any], int] | None = None

    def start(self) -> None:
        """Nothing to prepare."""

    def begin(self, arguments: Mapping[str, Any], rows: int) -> None:
        """Begins a call with these arguments, of which `rows` rewards must come back."""
        self._begun = arguments, rows

    def finish(self) -> Outcome:
        """What came of the call that was begun."""
        assert self._begun is not None, "begin comes first"
        (arguments, rows), self._begun = self._begun, None
        return reward_calls.call(self._function, arguments, rows, self._wait)

    def _wait(self, awaitable: Awaitable[Any]) -> Any:
        # In a thread of its own, because in a notebook this one has an event loop already.
        thread, loop = self._loop
        return thread.submit(lambda: loop.run_until_complete(reward_calls.awaited(awaitable))).result()

    @functools.cached_property
    def _loop(self) -> tuple[ThreadPoolExecutor, asyncio.AbstractEventLoop]:
        """One event loop for all calls: an async function may keep a client that belongs to it."""
        loop = asyncio.new_event_loop()
        weakref.finalize(self, loop.close)
        return ThreadPoolExecutor(1), loop


class CallsInProcess:
    """Calls in a process of its own, which is killed when a call takes too long, and started again for the next one.

    Args:
      name: of the function, for messages.
      function: one that another process finds: of a module or a file, or an object of a class there.
      seconds: wall clock of one call.

    Raises:
      ValueError: a function that no other process can find.
    """

    def __init__(self, name: str, function: Callable[..., Any], seconds: float) -> None:
        self._name = name
        self._function = function
        self._seconds = seconds
        self._child: tuple[subprocess.Popen[bytes], Connection] | None = None
        self._ready = False
        self._waiting = False  # for an answer
        self._deadline = 0.0
        self._rows = 0
        pickled_function(name, function)  # for its error, before anything is sampled

    def start(self) -> None:
        """Starts the process, if there is none, and does not wait for it."""
        if self._child is not None and self._child[0].poll() is None:
            return
        self.close()
        files, pickled = pickled_function(self._name, self._function)
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            process = subprocess.Popen(
                # -P: the folder of that file must not be on its import path, where `datasets` would be our module.
                # -u: what a function prints must not wait in a buffer that is lost when the process is killed.
                [sys.executable, "-P", "-u", reward_calls.__file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # A reward that uses JAX must not take the accelerator's memory a second time.
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
                # Ctrl-C is for this process, which then ends that one.
                start_new_session=True,
            )
        self._child = process, ours
        self._ready = False
        self._finalizer = weakref.finalize(self, _end, process, ours)
        # A process that does not even start is found by the first call.
        with contextlib.suppress(ConnectionError):
            ours.send((sys.path, files, pickled))

    def begin(self, arguments: Mapping[str, Any], rows: int) -> None:
        """Begins a call; the clock starts when the process is there and has loaded the function.

        Raises:
          UnloadableRewardError: the process cannot load the function.
          ValueError: arguments that cannot be sent.
        """
        pickled = _pickled_arguments(self._name, arguments)
        # Another function ended the last batch before this one was asked: its answer would be taken for the next.
        if self._waiting:
            self.close()
        self.start()
        assert self._child is not None
        if not self._ready:
            outcome = self._answer(START_SECONDS, rows=0)
            if isinstance(outcome, tuple):
                self.close()
                raise UnloadableRewardError(
                    f"expected a reward {self._name!r} that its own process can load; got {outcome[1]}"
                )
            self._ready = True
        self._deadline = time.monotonic() + self._seconds
        self._rows = rows
        self._waiting = True
        # A process that has ended meanwhile is found by `finish`.
        with contextlib.suppress(ConnectionError):
            self._child[1].send((self._seconds, rows, pickled))

    def finish(self) -> Outcome:
        """What came of the call that was begun, once it is there or its time is over."""
        return self._answer(max(self._deadline - time.monotonic(), 0.0), self._rows)

    def _answer(self, seconds: float, rows: int) -> Outcome:
        assert self._child is not None, "begin comes first"
        process, connection = self._child
        answered = False
        try:
            if not connection.poll(seconds):
                return "time", f"took longer than {self._seconds:g} s"
            answer = reward_calls.unpacked(connection.recv_bytes(), rows)
            answered = True
            return answer
        except ValueError as error:  # the function itself wrote into the pipe
            return "no answer", str(error)
        except (EOFError, ConnectionError):
            return "end of its process", f"its process ended with exit code {process.wait()}"
        finally:
            self._waiting = False
            # Also after Ctrl-C: an answer that comes late must not be taken for that of the next call.
            if not answered:
                self.close()

    def close(self) -> None:
        """Ends the process, if there is one."""
        if self._child is not None:
            self._finalizer()
            self._child = None


Caller = CallsHere | CallsInProcess


def pickled_function(name: str, function: Callable[..., Any]) -> tuple[list[tuple[str, str]], bytes]:
    """What a new Python needs to have the function: files to load as (module, path), and the pickled function.

    Raises:
      ValueError: the function is not found by import, or something that it holds cannot be pickled.
    """
    buffer = io.BytesIO()
    pickler = _FunctionPickler(buffer)
    try:
        pickler.dump(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"expected a reward {name!r} that a process of its own can load: a function at the top of a module or of a "
            f"file, or an object of a class there. Move it into a file, or give seconds=None, which runs it in this "
            f"process without a time limit; got {error}"
        ) from error
    return sorted(pickler.files.items()), buffer.getvalue()


class _FunctionPickler(pickle.Pickler):
    """Pickles functions and classes by name, as pickle does, and notes which files a new Python would not find."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.files: dict[str, str] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | types.FunctionType):
            module = sys.modules.get(obj.__module__)
            if obj.__module__ == "__main__":
                raise pickle.PicklingError(f"{obj.__qualname__} of the script or notebook that runs")
            if isinstance(module, types.ModuleType) and _is_hidden(module):
                assert module.__file__ is not None
                self.files[module.__name__] = module.__file__
        return NotImplemented


def _is_hidden(module: types.ModuleType) -> bool:
    """Whether the module came from a file that its name does not lead to."""
    if module.__spec__ is None or not module.__spec__.has_location or module.__file__ is None:
        return False  # built into Python, or made by hand
    parent = module.__name__.rpartition(".")[0]
    if parent and parent not in sys.modules:
        return True
    found = importlib.machinery.PathFinder.find_spec(module.__name__, sys.modules[parent].__path__ if parent else None)
    return found is None or found.origin != module.__spec__.origin


def _pickled_arguments(name: str, arguments: Mapping[str, Any]) -> bytes:
    try:
        return pickle.dumps(dict(arguments), protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"expected columns that can be sent to the process of reward {name!r}, or seconds=None, which runs it in "
            f"this one without a time limit; got {error}"
        ) from error


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    """Ends the process, and what it has started itself, such as a program that it was to judge."""
    connection.close()
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
