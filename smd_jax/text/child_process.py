"""A Python process that answers requests, and can be killed when an answer takes too long.

It runs foreign code: reward functions, environments and chat templates. A thread is not enough: a loop in C that holds
the GIL stops every thread of its process, and no thread can be killed from outside.

The process is a new Python, because a fork would copy locks that JAX's threads hold. `multiprocessing` with spawn would
import the user's script first, which then needs its `if __name__ == "__main__"`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Set
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any


class ChildEndedError(RuntimeError):
    """The process ended before it answered.

    Attributes:
      exit_code: exit code of the process; -N if signal N ended it.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"its process ended with exit code {exit_code}")
        self.exit_code = exit_code


class ChildProcess:
    """One process that runs a script. The script's only argument is the file descriptor of a socket.

    Requests are pickled, and answers are bytes: nothing that the process sends is unpickled.

    Args:
      script: path of a Python file.
      environment: variables to set in addition to those of this process.
      quiet: discard the output of the process.

    Attributes:
      groups: further process groups that end with the process, such as those of its forks.
    """

    def __init__(self, script: str, environment: Mapping[str, str], *, quiet: bool = False) -> None:
        ours, theirs = multiprocessing.Pipe()
        # Its output goes to standard error: our own output may be read by a program.
        output = subprocess.DEVNULL if quiet else 2
        with theirs:
            self._process = subprocess.Popen(
                # -P: keeps the script's folder off the import path, where our modules would hide installed packages.
                # -u: nothing printed waits in a buffer that is lost when the process is killed.
                [sys.executable, "-P", "-u", script, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                # Fixes the order of sets: a restarted process answers the same.
                env={"PYTHONHASHSEED": "0"} | os.environ | dict(environment),
                start_new_session=True,  # Ctrl-C reaches only this process, which then ends the child
            )
        self._connection = ours
        self.groups = set[int]()
        self.close = weakref.finalize(self, _end, os.getpid(), self._process, ours, self.groups)

    @property
    def is_running(self) -> bool:
        return self.close.alive and self._process.poll() is None

    def send(self, message: Any) -> None:
        """Sends a request. If the process has ended, `receive` raises the error.

        Raises:
          ValueError: the request cannot be pickled.
        """
        pickled = pickled_value(message)
        if self.close.alive:
            with contextlib.suppress(ConnectionError):
                self._connection.send_bytes(pickled)

    def send_handle(self, handle: int) -> None:
        """Sends an open file, for `multiprocessing.reduction.recv_handle`."""
        if self.close.alive:
            with contextlib.suppress(ConnectionError):
                reduction.send_handle(self._connection, handle, self._process.pid)

    def receive(self, seconds: float) -> bytes:
        """Waits for the next answer. After an error, Ctrl-C included, the process is ended.

        Raises:
          TimeoutError: no answer within `seconds`.
          ChildEndedError: the process ended first, or was ended by `close` or an earlier error.
        """
        if not self.close.alive:
            raise ChildEndedError(self._process.wait())
        answered = False
        try:
            if not self._connection.poll(max(seconds, 0.0)):
                raise TimeoutError(f"no answer within {seconds:g} s")
            answer = self._connection.recv_bytes()
            answered = True
            return answer
        except (EOFError, ConnectionError) as error:
            raise ChildEndedError(self._process.wait()) from error
        finally:
            # A late answer must not be taken for the answer to the next request.
            if not answered:
                self.close()


def pickled_value(value: Any) -> bytes:
    """Pickles a value; raises ValueError with the reason where that is impossible."""
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"expected values that can be pickled; got {error}") from error


def _end(owner: int, process: subprocess.Popen[bytes], connection: Connection, groups: Set[int]) -> None:
    """Ends the process and the processes that it started. In a fork of its owner it only closes the connection."""
    connection.close()
    if os.getpid() != owner:
        return
    # Groups first: while the process lives, the PIDs of its children are not reused.
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    # If it has ended, too: programs that it started may still run.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
