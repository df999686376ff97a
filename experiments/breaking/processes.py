"""Processes that are killed, or told to stop, in the middle of what they do."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from breaking.left import EVERY, Left, rollouts_done, same
from breaking.outcome import Fault, Outcome
from breaking.trained import real_left

SCRIPT = Path(__file__).resolve().parents[1] / "fault_runs.py"
ROLLOUTS = 20
# What a launcher gives the processes of a run in which one has ended, before it kills them, too.
GRACE = 10.0


@contextmanager
def begun(directory: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """A process that begins the run, or goes on with it; at the end it is no more."""
    command = [sys.executable, str(SCRIPT), str(directory), str(ROLLOUTS), *more]
    directory.parent.mkdir(exist_ok=True)
    with (directory.parent / "log").open("a") as log:
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert running.stdout is not None
        try:
            yield running
        finally:
            running.kill()
            running.wait()
            running.stdout.close()


@contextmanager
def both_begun(directory: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes that are one run."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    with ExitStack() as stack:
        yield [stack.enter_context(begun(directory, coordinator, str(index))) for index in range(2)]


def lines_until(running: subprocess.Popen[str], begin: str, count: int = 1) -> list[str]:
    """Its output up to the `count`-th line that begins so, or to its end."""
    assert running.stdout is not None
    seen = list[str]()
    for line in running.stdout:
        seen.append(line.strip())
        count -= line.startswith(begin)
        if count == 0:
            break
    return seen


def run_through(directory: Path, processes: int = 1) -> None:
    """Takes the run to its end, which nobody disturbs."""
    if processes == 1:
        with begun(directory) as running:
            lines_until(running, "done")
            running.wait()
        return
    with both_begun(directory) as pair:
        for running in pair:
            lines_until(running, "done")
        for running in pair:
            running.wait()


def whole_run(folder: Path, processes: int = 1) -> Left:
    """What the run leaves that nobody touches; made once."""
    directory = folder.parent / f"whole {processes}" / "run"
    if not directory.exists():
        run_through(directory, processes)
        assert rollouts_done(directory) == ROLLOUTS
    return real_left(directory)


def found_after(directory: Path) -> Outcome:
    """What a process that resumes finds: everything behind the newest checkpoint is taken again."""
    left = real_left(directory)
    lost = rollouts_done(directory) - max(left.steps, default=0)
    return Outcome(lost <= EVERY and left.unreadable == 0, lost, left.unreadable)


def killed(at: str, times: int) -> Fault:
    """kill -9 of a process after a line that begins with `at`, at a random moment; it is started again until the run is
    over, and so are new runs until there were `times` faults."""

    def fault(folder: Path, rng: random.Random) -> Iterator[Outcome]:
        whole = whole_run(folder)
        run, injected = 0, 0
        while injected < times:
            run += 1
            directory = folder / f"run {run}"
            outcomes = list[Outcome]()
            while injected < times and not killed_once(directory, at, rng):
                injected += 1
                outcomes.append(found_after(directory))
            run_through(directory)
            equal = same(real_left(directory), whole)
            yield from (outcome._replace(survived=outcome.survived and equal) for outcome in outcomes)

    return fault


def killed_once(directory: Path, at: str, rng: random.Random) -> bool:
    """Begins the run or goes on with it, and kills it on its way; whether it was over before."""
    with begun(directory) as running:
        seen = lines_until(running, at, rng.randint(1, 5))
        # A save takes some hundredths of a second, a rollout some tenths.
        time.sleep(rng.uniform(0, 0.05 if at == "saving" else 0.5))
        if "done" in seen or running.poll() == 0:
            return True
        running.send_signal(signal.SIGKILL)
        return False


def one_of_two_killed(times: int) -> Fault:
    """kill -9 of one of two processes, the first or the second, in a rollout or in a save. The other may end by itself;
    if it waits, it is killed, as launchers do (SLURM, JobSet). Both are started again."""

    def fault(folder: Path, rng: random.Random) -> Iterator[Outcome]:
        whole = whole_run(folder, processes=2)
        directory = folder / "run"
        outcomes = list[Outcome]()
        for number in range(times):
            with both_begun(directory) as pair:
                victim, other = pair if number % 2 == 0 else reversed(pair)
                at = "saving" if number % 4 >= 2 else "rollout"
                lines_until(victim, at, rng.randint(1, 3))
                time.sleep(rng.uniform(0, 0.05 if at == "saving" else 0.5))
                victim.send_signal(signal.SIGKILL)
                with suppress(subprocess.TimeoutExpired):
                    other.wait(GRACE)
            outcomes.append(found_after(directory))
        run_through(directory, processes=2)
        equal = same(real_left(directory), whole)
        yield from (outcome._replace(survived=outcome.survived and equal) for outcome in outcomes)

    return fault


def told(*signals: signal.Signals) -> Fault:
    """A signal, or two, in the middle of a rollout; the run goes on afterwards."""

    def fault(folder: Path, rng: random.Random) -> Iterator[Outcome]:
        whole = whole_run(folder)
        directory = folder / "run"
        with begun(directory) as running:
            lines_until(running, "rollout", 4)
            for number in signals:
                time.sleep(rng.uniform(0, 0.05))
                running.send_signal(number)
            lines_until(running, "done")  # or to the end
            code = running.wait()
        after = found_after(directory)
        run_through(directory)
        orderly = code == 128 + signals[-1] and after.unreadable == 0
        yield after._replace(survived=orderly and same(real_left(directory), whole))

    return fault
