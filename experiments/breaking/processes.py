"""Processes that are killed or get a signal during a rollout or a save."""

from __future__ import annotations

import math
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np

from breaking.run_result import EVERY, Fault, Outcome, RunResult, rollouts_done, same
from breaking.trained import AHEAD, CONFIG, real_params, real_result
from smd_jax.monitor.metrics_log import read_metrics
from smd_jax.train.grpo import GRPOConfig

SCRIPT = Path(__file__).resolve().parents[1] / "fault_runs.py"
ROLLOUTS = 20
GRACE = 10.0  # seconds that the other process gets to end by itself, before it is killed as a launcher would
# A run continues with fewer devices: eight, four, one (data, fsdp, tensor).
MESHES = ((2, 2, 2), (1, 2, 2), (1, 1, 1))
MESHES_ROLLOUTS = 6
# Bounds on rounding after six rollouts of four steps at a learning rate of 1e-2: parameters within a tenth of one step;
# entropies, relative. Rewards must be equal.
PARAMS_APART, ENTROPY_APART = 1e-3, 1e-5


@contextmanager
def started(directory: Path, *more: str, rollouts: int = ROLLOUTS) -> Iterator[subprocess.Popen[str]]:
    """A process that starts or resumes the run; killed on exit."""
    command = [sys.executable, str(SCRIPT), str(directory), str(rollouts), *more]
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
def all_started(directory: Path, processes: int, *more: str) -> Iterator[list[subprocess.Popen[str]]]:
    """The processes of one run, one or two."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    options = [("--coordinator", coordinator, "--index", str(index)) for index in range(processes)]
    with ExitStack() as stack:
        yield [stack.enter_context(started(directory, *more, *(own if processes > 1 else ()))) for own in options]


def lines_until(running: subprocess.Popen[str], begin: str, count: int = 1) -> list[str]:
    """Reads the output of `running` up to the `count`-th line that starts with `begin`, or to its end."""
    assert running.stdout is not None
    seen = list[str]()
    for line in running.stdout:
        seen.append(line.strip())
        count -= line.startswith(begin)
        if count == 0:
            break
    return seen


def flags(config: GRPOConfig) -> list[str]:
    return ["--ahead"] if config.rollouts_ahead else []


def run_through(directory: Path, processes: int = 1, config: GRPOConfig = CONFIG) -> None:
    """Starts or resumes the run and waits until it ends, without faults."""
    with all_started(directory, processes, *flags(config)) as everyone:
        for running in everyone:
            lines_until(running, "done")
        for running in everyone:
            running.wait()


def whole_run(folder: Path, processes: int = 1, config: GRPOConfig = CONFIG) -> RunResult:
    """The result of a run without faults; cached in the parent folder."""
    directory = folder.parent / f"whole {processes} {' '.join(flags(config))}" / "run"
    if not directory.exists():
        run_through(directory, processes, config)
        assert rollouts_done(directory) == ROLLOUTS
    return real_result(directory, config)


def outcome_after_fault(directory: Path, config: GRPOConfig = CONFIG) -> Outcome:
    """The outcome so far: the rollouts after the newest checkpoint are lost."""
    left = real_result(directory, config)
    lost = rollouts_done(directory) - max(left.steps, default=0)
    return Outcome(lost <= EVERY and left.unreadable == 0, lost, left.unreadable)


def killed(at: str, times: int, config: GRPOConfig = CONFIG) -> Fault:
    """kill -9 at a random moment after an output line that starts with `at`.

    Each process is resumed until its run ends; new runs start until there were `times` faults.
    """

    def fault(folder: Path, rng: random.Random) -> Iterator[Outcome]:
        whole = whole_run(folder, config=config)
        run, injected = 0, 0
        while injected < times:
            run += 1
            directory = folder / f"run {run}"
            outcomes = list[Outcome]()
            while injected < times and kill_once(directory, at, rng, config):
                injected += 1
                outcomes.append(outcome_after_fault(directory, config))
            if not outcomes:
                raise RuntimeError(f"expected {directory} to be killed at {at!r}; got a run that ended first")
            run_through(directory, config=config)
            equal = same(real_result(directory, config), whole)
            yield from (outcome._replace(survived=outcome.survived and equal) for outcome in outcomes)

    return fault


def kill_once(directory: Path, at: str, rng: random.Random, config: GRPOConfig) -> bool:
    """Starts or resumes the run and kills it; returns False if the run ended first."""
    with started(directory, *flags(config)) as running:
        seen = lines_until(running, at, rng.randint(1, 5))
        # A save takes some hundredths of a second, a rollout some tenths.
        time.sleep(rng.uniform(0, 0.05 if at == "saving" else 0.5))
        if "done" in seen or running.poll() == 0:
            return False
        running.send_signal(signal.SIGKILL)
        return True


def killed_and_moved(folder: Path, rng: random.Random) -> Iterator[Outcome]:
    """kill -9 on eight fake devices, then on four; the run ends on one device.

    The result must equal that of a run on one device up to rounding.
    """
    directory, whole = folder / "run", folder / "whole" / "run"
    outcomes = list[Outcome]()
    with started(whole, "--mesh", *map(str, MESHES[-1]), rollouts=MESHES_ROLLOUTS) as running:
        lines_until(running, "done")
        running.wait()
    for number, sizes in enumerate(MESHES):
        with started(directory, "--mesh", *map(str, sizes), rollouts=MESHES_ROLLOUTS) as running:
            # At the fourth line the save after the first two rollouts is complete, so each process advances the run.
            seen = lines_until(running, "rollout", 4)
            if number > 0:
                said = any(line.startswith("resumed with another setting, machine.mesh") for line in seen)
                outcomes[-1] = outcomes[-1]._replace(survived=outcomes[-1].survived and said)
            if sizes == MESHES[-1]:
                running.wait()
                break
            time.sleep(rng.uniform(0, 0.5))
            running.send_signal(signal.SIGKILL)
        outcomes.append(outcome_after_fault(directory))
    near = within_rounding(directory, whole)
    yield from (outcome._replace(survived=outcome.survived and near) for outcome in outcomes)


def within_rounding(directory: Path, whole: Path) -> bool:
    rows, others = (read_metrics(run / "metrics.jsonl") for run in (directory, whole))
    pairs = zip(rows, others, strict=False)
    params = zip(real_params(directory), real_params(whole), strict=True)
    return (
        len(rows) == len(others) == MESHES_ROLLOUTS
        and all(
            a["reward"] == b["reward"] and math.isclose(a["entropy"], b["entropy"], rel_tol=ENTROPY_APART)
            for a, b in pairs
        )
        and all(np.allclose(ours, theirs, rtol=0, atol=PARAMS_APART) for ours, theirs in params)
    )


def one_of_two_killed(times: int) -> Fault:
    """kill -9 of one of two processes, the first or the second, in a rollout or in a save.

    The other may end by itself; if it waits, it is killed, as launchers do (SLURM, JobSet). Then both resume.
    """

    def fault(folder: Path, rng: random.Random) -> Iterator[Outcome]:
        whole = whole_run(folder, processes=2)
        directory = folder / "run"
        outcomes = list[Outcome]()
        for number in range(times):
            with all_started(directory, 2) as pair:
                victim, other = pair if number % 2 == 0 else reversed(pair)
                at = "saving" if number % 4 >= 2 else "rollout"
                lines_until(victim, at, rng.randint(1, 3))
                time.sleep(rng.uniform(0, 0.05 if at == "saving" else 0.5))
                victim.send_signal(signal.SIGKILL)
                with suppress(subprocess.TimeoutExpired):
                    other.wait(GRACE)
            outcomes.append(outcome_after_fault(directory))
        run_through(directory, processes=2)
        equal = same(real_result(directory), whole)
        yield from (outcome._replace(survived=outcome.survived and equal) for outcome in outcomes)

    return fault


def signalled(*signals: signal.Signals) -> Fault:
    """Sends the signals during a rollout; the process must exit with the last one's status, and the run resumes."""

    def fault(folder: Path, rng: random.Random) -> Iterator[Outcome]:
        whole = whole_run(folder)
        directory = folder / "run"
        with started(directory) as running:
            lines_until(running, "rollout", 4)
            for number in signals:
                time.sleep(rng.uniform(0, 0.05))
                running.send_signal(number)
            lines_until(running, "done")  # or to the end
            code = running.wait()
        after = outcome_after_fault(directory)
        run_through(directory)
        orderly = code == 128 + signals[-1] and after.unreadable == 0
        yield after._replace(survived=orderly and same(real_result(directory), whole))

    return fault


KINDS: dict[str, Fault] = {
    "kill -9 at a random moment": killed("rollout", 20),
    "kill -9 during a save": killed("saving", 8),
    "kill -9 of one of two processes": one_of_two_killed(4),
    "kill -9 with a rollout ahead": killed("rollout", 6, AHEAD),
    "kill -9, and on with fewer devices": killed_and_moved,
    "SIGTERM in a rollout": signalled(signal.SIGTERM),
    "Ctrl-C in a rollout": signalled(signal.SIGINT),
    "Ctrl-C twice": signalled(signal.SIGINT, signal.SIGINT),
}
