"""Where reward functions run: in this process, or each in a process that is killed when a call takes too long.

In its own process a function has the main thread, the only one in which math-verify can set a timer, and several
functions run at the same time. The process is a new Python, so it must find the function by import.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.machinery
import io
import pickle
import sys
import time
import types
import weakref
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from smd_jax.tasks import reward_calls
from smd_jax.tasks.reward_calls import Outcome
from smd_jax.text.child_process import ChildEndedError, ChildProcess, pickled_value

START_SECONDS = 300.0  # for the imports of a function, which no limit of the user covers


class UnloadableRewardError(RuntimeError):
    """A reward function that this process can import and its own process cannot."""


class CallsHere:
    """Calls a function in this process and thread, without a limit: closures and state stay as they are."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._pending: tuple[Mapping[str, Any], int] | None = None

    def start(self) -> None:
        """Does nothing."""

    def begin(self, arguments: Mapping[str, Any], rows: int) -> None:
        """Keeps the arguments for `finish`, which must get `rows` rewards."""
        self._pending = arguments, rows

    def finish(self) -> Outcome:
        """Calls the function."""
        assert self._pending is not None, "begin comes first"
        (arguments, rows), self._pending = self._pending, None
        return reward_calls.call(self._function, arguments, rows, self._wait)

    def _wait(self, awaitable: Awaitable[Any]) -> Any:
        # In another thread, because that of a notebook already runs an event loop.
        thread, loop = self._loop
        return thread.submit(lambda: loop.run_until_complete(reward_calls.awaited(awaitable))).result()

    @functools.cached_property
    def _loop(self) -> tuple[ThreadPoolExecutor, asyncio.AbstractEventLoop]:
        """One event loop for all calls, because an async function may keep a client that belongs to it."""
        loop = asyncio.new_event_loop()
        weakref.finalize(self, loop.close)
        return ThreadPoolExecutor(1), loop


class CallsInProcess:
    """Calls a function in its own process, which is replaced after a call that took too long.

    Args:
      name: of the function, for messages.
      function: one of a module or a file, or an object of a class there.
      seconds: wall-clock limit of one call.

    Raises:
      ValueError: another process cannot import the function.
    """

    def __init__(self, name: str, function: Callable[..., Any], seconds: float) -> None:
        self._name = name
        self._function = function
        self._seconds = seconds
        self._process: ChildProcess | None = None
        self._loaded = False
        self._waiting = False  # for an answer
        self._deadline = 0.0
        self._rows = 0
        pickled_function(name, function)  # raises its error before anything is sampled

    def start(self) -> None:
        """Starts the process unless it runs, and does not wait for it."""
        if self._process is not None and self._process.is_running:
            return
        self.close()
        files, pickled = pickled_function(self._name, self._function)
        # A reward that uses JAX must not take the accelerator's memory a second time.
        self._process = ChildProcess(reward_calls.__file__, {"JAX_PLATFORMS": "cpu"})
        self._process.send((sys.path, files, pickled))
        self._loaded = False

    def begin(self, arguments: Mapping[str, Any], rows: int) -> None:
        """Begins a call. Its time starts when the process has loaded the function.

        Raises:
          UnloadableRewardError: the process cannot load the function.
          ValueError: arguments that cannot be sent.
        """
        try:
            pickled = pickled_value(dict(arguments))
        except ValueError as error:
            raise ValueError(
                f"expected columns that can be sent to the process of reward {self._name!r}, or seconds=None, which "
                f"runs it in this one without a time limit; {error}"
            ) from error
        # An error of another function ended the last batch: the answer that is still due belongs to that batch.
        if self._waiting:
            self.close()
        self.start()
        assert self._process is not None
        if not self._loaded:
            outcome = self._answer(START_SECONDS, rows=0)
            if isinstance(outcome, tuple):
                self.close()
                raise UnloadableRewardError(
                    f"expected a reward {self._name!r} that its own process can load; got {outcome[1]}"
                )
            self._loaded = True
        self._deadline = time.monotonic() + self._seconds
        self._rows = rows
        self._waiting = True
        self._process.send((self._seconds, rows, pickled))

    def finish(self) -> Outcome:
        """Waits for the result of the call, at most until its time is over."""
        return self._answer(self._deadline - time.monotonic(), self._rows)

    def _answer(self, seconds: float, rows: int) -> Outcome:
        assert self._process is not None, "begin comes first"
        self._waiting = False
        try:
            return reward_calls.unpacked(self._process.receive(seconds), rows)
        except TimeoutError:
            return "time", f"took longer than {self._seconds:g} s"
        except ChildEndedError as error:
            return "end of its process", str(error)
        except ValueError as error:  # the function itself wrote into the pipe
            self.close()
            return "no answer", str(error)

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.close()
            self._process = None


Caller = CallsHere | CallsInProcess


def pickled_function(
    name: str, function: Callable[..., Any], what: str = "a reward"
) -> tuple[list[tuple[str, str]], bytes]:
    """Pickles a function for a new Python: the files to load first, as (module, path), and the pickle.

    Args:
      name, what: of the function, and its kind, for messages.

    Raises:
      ValueError: the function cannot be imported, or something that it holds cannot be pickled.
    """
    buffer = io.BytesIO()
    pickler = _FunctionPickler(buffer)
    try:
        pickler.dump(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"expected {what} {name!r} that a process of its own can load: a function at the top of a module or of a "
            f"file, or an object of a class there. Move it into a file, or give seconds=None, which runs it in this "
            f"process without a time limit; got {error}"
        ) from error
    return sorted(pickler.files.items()), buffer.getvalue()


class _FunctionPickler(pickle.Pickler):
    """Pickles functions and classes by name, and collects the files that a new Python would not find."""

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
    """Whether importing the module by its name would not find its file."""
    if module.__spec__ is None or not module.__spec__.has_location or module.__file__ is None:
        return False  # built into Python, or made by hand
    parent = module.__name__.rpartition(".")[0]
    if parent and parent not in sys.modules:
        return True
    found = importlib.machinery.PathFinder.find_spec(module.__name__, sys.modules[parent].__path__ if parent else None)
    return found is None or found.origin != module.__spec__.origin
