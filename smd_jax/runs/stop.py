"""Ctrl-C, SIGTERM and SIGHUP: the first stops a run after the current rollout, the second ends the process at once.

A second SIGHUP does nothing, because a closed terminal may send it twice. Nor does a second signal within `SAME_EVENT`:
under `timeout` one Ctrl-C arrives twice, from the terminal and forwarded.

                     1st SIGINT or SIGTERM                          2nd
    ─ rollout 7 ───────┬────────────────────────┐  checkpoint         exit status 128 + number of the signal,
                       └ printed at once        └─ RunStoppedError    without any checkpoint

Python runs a signal's handler on the main thread, between two instructions: not while that thread waits for a compiled
program, which may take minutes. But Python writes the signal's number to a file descriptor at once
(`signal.set_wakeup_fd`); a thread reads from it and answers.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STDOUT, STDERR = 1, 2
SAME_EVENT = 1.0  # seconds after the first signal


class RunStoppedError(RuntimeError):
    """A signal stopped a run, which can be resumed from its newest checkpoint.

    Attributes:
      done: finished rollouts.
      exit_code: 128 plus the number of the signal, as shells expect.
    """

    def __init__(self, number: signal.Signals, done: int, steps: int, directory: Path) -> None:
        self.done = done
        self.exit_code = 128 + number
        kept = f"saved in {directory}" if done else f"nothing to save in {directory} yet"
        super().__init__(f"{number.name} stopped the run after {done} of {steps} rollouts; {kept}")


class StopSignals:
    """Listens to SIGINT, SIGTERM and SIGHUP while it is open, except to those that are ignored.

    In other threads than the main one, where Python allows no handlers, it does nothing. After SIGHUP the output of
    this process is discarded.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def __enter__(self) -> StopSignals:
        self._listens = threading.current_thread() is threading.main_thread()
        if not self._listens:
            return self
        # Now: the system does not report a closed terminal as a terminal.
        self._terminals = [descriptor for descriptor in (STDOUT, STDERR) if os.isatty(descriptor)]
        # Now: a handler must not fail for lack of a descriptor.
        self._nowhere = os.open(os.devnull, os.O_WRONLY)
        self._read, self._write = os.pipe()
        # Python writes to it in its signal handler, which must never wait.
        os.set_blocking(self._write, False)
        self._descriptor = signal.set_wakeup_fd(self._write)
        # Python writes the number only for signals with a handler.
        # A shell ignores SIGINT for background jobs, nohup ignores SIGHUP: ignored signals stay ignored.
        heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        self._handlers = {number: signal.signal(number, self._heard) for number in heard}
        self._thread = threading.Thread(target=self._answer, name="stop signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if not self._listens:
            return
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._descriptor)
        # The thread reads the end of the pipe and ends.
        os.close(self._write)
        self._thread.join()
        os.close(self._read)
        os.close(self._nowhere)

    def _answer(self) -> None:
        first = 0.0  # when the first signal arrived
        while numbers := os.read(self._read, 64):
            for number in numbers:
                if number not in SIGNALS:
                    continue
                if number == signal.SIGHUP:
                    self._leave_terminal()
                if self.received is None:
                    self.received, first = signal.Signals(number), time.monotonic()
                    name = self.received.name
                    _say(f"{name}: stops when this rollout is finished and saved; a second one ends at once")
                elif number != signal.SIGHUP and time.monotonic() - first >= SAME_EVENT:
                    self._end(number)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            # The thread does it, too, but this thread may print first.
            self._leave_terminal()

    def _leave_terminal(self) -> None:
        """Discards all later output: a write to a closed terminal fails (EIO) and would end the current rollout."""
        for descriptor in self._terminals:
            os.dup2(self._nowhere, descriptor)

    def _end(self, number: int) -> None:
        # Shows the cursor again, which a progress bar hides.
        _say("\x1b[?25hended without saving" if sys.stderr.isatty() else "ended without saving")
        # The main thread may be inside a compiled program, where an exception would not reach it soon.
        os._exit(128 + number)


def _say(line: str) -> None:
    # After SIGHUP there may be no terminal.
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)
