"""Calls reward functions in this process, or each in its own process, which is killed when a call takes too long.

In its own process a function has the main thread, the only one in which math-verify can set a timer, and several
functions run at the same time. The process is a new Python, so it must find the function by import.
"""

from __future__ import annotations

import copy
import functools
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from smd_jax.tasks import reward_calls
from smd_jax.tasks.functions import FILE_MODULE
from smd_jax.tasks.reward_calls import EventLoop, Outcome
from smd_jax.text.child_process import ChildEndedError, ChildProcess, pickled_value

START_SECONDS = 300.0  # for the imports of a function, which the user's time limit does not cover


class UnloadableRewardError(RuntimeError):
    """A reward function that this process can import and its own process cannot."""


class CallsHere:
    """Calls a function in this process and thread, without a limit: closures and state persist."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._pending: tuple[Mapping[str, Any], int] = {}, 0

    def start(self) -> None:
        """Does nothing."""

    def begin(self, arguments: Mapping[str, Any], rows: int) -> None:
        """Keeps a copy of the arguments for `finish`, which must get `rows` rewards: a function may change them."""
        self._pending = {name: _copied(values) for name, values in arguments.items()}, rows

    def finish(self) -> Outcome:
        """Calls the function."""
        return reward_calls.call(self._function, *self._pending, lambda returned: self._loop.result(returned))

    @functools.cached_property
    def _loop(self) -> EventLoop:
        return EventLoop()


def _copied(values: Any) -> Any:
    """A deep copy; of what has none, such as a client or a lock, a list of the same objects."""
    with reward_calls.Caught() as caught:
        return copy.deepcopy(values)
    assert caught.error is not None
    return list(values)


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
        self._pickled = pickled_function(name, function)
        self._seconds = seconds
        self._process: ChildProcess | None = None
        self._loaded = False
        self._due: tuple[float, int] | None = None  # deadline and number of rewards of the running call

    def start(self) -> None:
        """Starts the process unless it runs, and does not wait for it."""
        if self._process is not None and self._process.is_running:
            return
        self.close()
        # A reward that uses JAX must not take the accelerator's memory a second time.
        self._process = ChildProcess(reward_calls.__file__, {"JAX_PLATFORMS": "cpu"})
        self._process.send((sys.path, *self._pickled))

    def begin(self, arguments: Mapping[str, Any], rows: int) -> None:
        """Begins a call. Its time starts when the process has loaded the function. Raises UnloadableRewardError if it
        cannot load the function, and ValueError for arguments that cannot be sent."""
        # An error of another function ended the last batch; the pending answer belongs to it.
        if self._due is not None:
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
        try:
            self._process.send((self._seconds, rows, dict(arguments)))
        except ValueError as error:
            raise ValueError(
                f"expected columns that can be sent to the process of reward {self._name!r}, or seconds=None, which "
                f"runs it in this one without a time limit; {error}"
            ) from error
        self._due = time.monotonic() + self._seconds, rows

    def finish(self) -> Outcome:
        """Waits for the result of the call, at most until its time is over."""
        assert self._due is not None, "begin comes first"
        (deadline, rows), self._due = self._due, None
        return self._answer(deadline - time.monotonic(), rows)

    def _answer(self, seconds: float, rows: int) -> Outcome:
        assert self._process is not None
        try:
            return reward_calls.unpacked(self._process.receive(seconds), rows)
        except TimeoutError:
            limit = self._seconds if self._loaded else START_SECONDS
            return "time", f"took longer than {limit:g} s"
        except ChildEndedError as error:
            return "end of its process", str(error)
        except ValueError as error:  # the function itself wrote into the pipe
            self.close()
            return "no answer", str(error)

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.close()
        self._process, self._loaded, self._due = None, False, None


def pickled_function(
    name: str, function: Callable[..., Any], what: str = "a reward", no_limit: str = "seconds=None"
) -> tuple[list[tuple[str, str]], bytes]:
    """Pickles a function for a new Python: the files to load first, as (module, path), and the pickle.

    Raises ValueError, which calls it `what` and advises `no_limit`, if it cannot be imported, or something that it
    holds cannot be pickled.
    """
    try:
        pickled = pickled_value(function)
        if b"\x08__main__" in pickled:  # after its length: the name of the module, not a part of a text
            raise ValueError("one of the script or notebook that runs")
    except ValueError as error:
        raise ValueError(
            f"expected {what} {name!r} that a separate process can load: a function at the top of a module or of a "
            f"file, or an object of a class there. Move it into a file, or give {no_limit}, which runs it in this "
            f"process without a time limit; got {error}"
        ) from error
    # A pickle names modules; those of `import_function` are on no path.
    files = [(name, str(module.__file__)) for name, module in sys.modules.items() if name.startswith(FILE_MODULE)]
    return [(name, file) for name, file in files if name.encode() in pickled], pickled
