"""Faults around a run: names of its directory, file handles, signals, the current folder, the output, the user."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from breaking.plain import PlainLoop, plain_result, run_captured, unbroken_result
from breaking.run_result import Fault, Outcome, refusal, same
from smd_jax.learner.state import TrainState

MISREAD = ("sweep[lr=1]", "[", "a*", "a?", "back\\slash", "\udcff")  # names that orbax misreads
UNUSUAL = ("a b", "new\nline", "'\"", "~", "{a,b}", "%s", "$HOME", "a]", "#;&|", "-x", "ünï 日本", " ", "x" * 200)

FAILING_SAVE = """
import os, resource, sys
import jax.numpy as jnp, numpy as np
from smd_jax.runs import checkpoint
state = {f"w{i}": jnp.asarray(np.random.default_rng(i).normal(size=20_000)) for i in range(30)}
with checkpoint.Writer(sys.argv[1]) as writer:
    writer.save(1, state, config=None)
    writer.wait()
    limit, value = {"size": (resource.RLIMIT_FSIZE, 20_000), "files": (resource.RLIMIT_NOFILE, 8)}[sys.argv[2]]
    resource.setrlimit(limit, (value + len(os.listdir("/proc/self/fd")), resource.getrlimit(limit)[1]))
    try:
        writer.save(2, state, config=None)
        writer.wait()
    except OSError as error:
        print(error)
"""


def misread_directories(folder: Path, rng: random.Random) -> Iterator[Outcome]:
    for name in MISREAD:
        message = refusal(lambda name=name: run_captured(folder / name), ValueError)
        yield Outcome("for checkpoints; got" in message and not (folder / name / "checkpoints").exists())


def unusual_directories(folder: Path, rng: random.Random) -> Iterator[Outcome]:
    """A run in a directory with an unusual name resumes, and ends like one elsewhere."""
    whole = unbroken_result(folder)
    for name in UNUSUAL:
        run_captured(folder / name, 4)
        run_captured(folder / name)
        left = plain_result(folder / name)
        yield Outcome(same(left, whole), 0, left.unreadable)


def failing_save(limit: str, says: str) -> Fault:
    """A save fails with one line and no traceback, and the checkpoint before it stays."""

    def fault(folder: Path, rng: random.Random) -> Iterator[Outcome]:
        words = [sys.executable, "-c", FAILING_SAVE, str(folder / "run"), limit]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300)
        one_line = done.returncode == 0 and not done.stderr and done.stdout.count("\n") == 1
        yield Outcome(one_line and says in done.stdout and "Earlier checkpoints are unchanged" in done.stdout)

    return fault


@dataclass(frozen=True)
class SignalledLoop(PlainLoop):
    """Gets a signal in its third rollout."""

    number: int = signal.SIGINT

    def step(
        self, state: TrainState, follows: Callable[[], bool] = lambda: True
    ) -> tuple[TrainState, dict[str, float]]:
        if int(state.step) == 2:
            os.kill(os.getpid(), self.number)
        return super().step(state, follows)


def ignored_signals(folder: Path, rng: random.Random) -> Iterator[Outcome]:
    """A signal that the shell ignores for a job in the background does not stop the run."""
    whole = unbroken_result(folder)
    for number in (signal.SIGINT, signal.SIGTERM):
        before = signal.signal(number, signal.SIG_IGN)
        try:
            run_captured(folder / number.name, loop=SignalledLoop(number=number))
            left = plain_result(folder / number.name)
            yield Outcome(same(left, whole) and signal.getsignal(number) == signal.SIG_IGN, 0, left.unreadable)
        finally:
            signal.signal(number, before)


def command(name: str, *words: str) -> list[str]:
    return [sys.executable, "-c", f"from smd_jax.commands.console_scripts import {name}; {name}()", *words]


def removed_folder(folder: Path, rng: random.Random) -> Iterator[Outcome]:
    """Commands whose current folder was removed end with one error message."""
    for name in ("smd_plot", "smd_train"):
        removed = folder / name
        removed.mkdir()
        words = ["sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh", *command(name, "runs")]
        done = subprocess.run(words, cwd=removed, capture_output=True, text=True)
        fine = done.returncode == 2 and "one that was removed" in done.stderr and "Traceback" not in done.stderr
        yield Outcome(fine)


def closed_output(folder: Path, rng: random.Random) -> Iterator[Outcome]:
    """`--help` into a closed pipe, a closed descriptor or a full device prints no traceback."""
    for name in ("smd_plot", "smd_train"):
        for redirection in ("| true", ">&-", ">/dev/full"):
            words = ["sh", "-c", f'"$@" {redirection}', "sh", *command(name, "--help")]
            done = subprocess.run(words, capture_output=True, text=True)
            yield Outcome("Traceback" not in done.stderr and done.stderr.count("\n") <= 5)


def without_home(folder: Path, rng: random.Random) -> Iterator[Outcome]:
    """`--help` works for a user without a home and without an entry in the password database, as in a container."""
    variables = {name: value for name, value in os.environ.items() if name not in ("HOME", "USER", "LOGNAME")}
    unknown = "import pwd\ndef unknown(user): raise KeyError(user)\npwd.getpwuid = unknown\n"
    for name in ("smd_plot", "smd_train"):
        python, option, code, *words = command(name, "--help")
        done = subprocess.run([python, option, unknown + code, *words], env=variables, capture_output=True, text=True)
        # matplotlib says in one line that it has no folder for its cache.
        yield Outcome(done.returncode == 0 and "usage:" in done.stdout and done.stderr.count("\n") <= 1)


KINDS: dict[str, Fault] = {
    "run directory that orbax misreads": misread_directories,
    "run directory of an unusual name": unusual_directories,
    "too few file handles in a save": failing_save("files", "expected 32 free file handles"),
    "files that may not grow in a save": failing_save("size", "File too large"),
    "signal that the shell ignores": ignored_signals,
    "current folder removed": removed_folder,
    "output that nobody reads": closed_output,
    "no home and no entry of the user": without_home,
}
