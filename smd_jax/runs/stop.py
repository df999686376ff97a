"""Ctrl-C, SIGTERM and SIGHUP: the first asks a run to stop after the rollout under way, the second ends the process at
once; but for SIGHUP, which a terminal that is closed may send twice.

                     1st SIGINT or SIGTERM                          2nd
    ─ rollout 7 ───────┬────────────────────────┐  checkpoint         exit status 128 + number of the signal,
                       └ said at once           └─ RunStoppedError    without any checkpoint

Python runs a signal's handler on the main thread, between two instructions: not while that thread waits for a compiled
program, which may take minutes. What Python does at once is write the signal's number to a file descriptor
(`signal.set_wakeup_fd`); a thread that reads from the other end answers.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STDOUT, STDERR = 1, 2


class RunStoppedError(RuntimeError):
    """A signal stopped a run, which can go on from its newest checkpoint.

    Attributes:
      signal: which one.
      done, steps: rollouts that are finished, and those in all.
      directory: of the run.
      exit_code: what a shell expects of a command that this signal ended, 128 and its number.
    """

    def __init__(self, number: signal.Signals, done: int, steps: int, directory: Path) -> None:
        self.signal = number
        self.done = done
        self.steps = steps
        self.directory = directory
        self.exit_code = 128 + number
        kept = f"saved in {directory}" if done else f"nothing to save in {directory} yet"
        super().__init__(f"{number.name} stopped the run after {done} of {steps} rollouts; {kept}")


class StopSignals:
    """Listens to SIGINT, SIGTERM and SIGHUP, but for those that are ignored, while it is open. Beside the main thread,
    where Python allows no handlers, it opens and hears nothing. After SIGHUP what this process prints goes nowhere."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def __enter__(self) -> StopSignals:
        self._listens = threading.current_thread() is threading.main_thread()
        if not self._listens:
            return self
        # Asked now: of a terminal that is closed the system says that it is none.
        self._terminals = [descriptor for descriptor in (STDOUT, STDERR) if os.isatty(descriptor)]
        # Opened now: a handler must not fail because there is no descriptor left.
        self._nowhere = os.open(os.devnull, os.O_WRONLY)
        self._read, self._write = os.pipe()
        # Python writes to it inside of a signal's handler, which must never wait.
        os.set_blocking(self._write, False)
        self._descriptor = signal.set_wakeup_fd(self._write)
        # Handlers that do next to nothing: without one Python would not write the number either.
        # A shell ignores SIGINT for background jobs, nohup ignores SIGHUP: what is ignored stays ignored.
        heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        self._handlers = {number: signal.signal(number, self._heard) for number in heard}
        self._thread = threading.Thread(target=self._answer, name="stop signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        while numbers := os.read(self._read, 64):
            for number in numbers:
                if number not in SIGNALS:
                    continue
                if number == signal.SIGHUP:
                    self._leave_terminal()
                if self.received is None:
                    self.received = signal.Signals(number)
                    _say(f"{self.received.name}: stops when this rollout is finished and saved; once more ends at once")
                elif number != signal.SIGHUP:
                    self._end(number)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            # The thread does it, too; but this thread may be about to print before that one has its turn.
            self._leave_terminal()

    def _leave_terminal(self) -> None:
        """What is printed from now on goes nowhere. Every write to a terminal that is closed fails (EIO), and a line of
        progress would end the rollout that is still to be saved."""
        for descriptor in self._terminals:
            os.dup2(self._nowhere, descriptor)

    def _end(self, number: int) -> None:
        # A progress bar hides the cursor, and nobody else will bring it back.
        _say("\x1b[?25hended without saving" if sys.stderr.isatty() else "ended without saving")
        # The main thread may be deep inside a compiled program: nothing that asks it to leave would be at once.
        os._exit(128 + number)


def _say(line: str) -> None:
    # The terminal may be gone, which is what SIGHUP says.
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)
