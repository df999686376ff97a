"""Reward functions that raise, hang, crash or return nonsense: only the completion that they fail on has no reward."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from breaking.run_result import Fault, Outcome
from smd_jax.tasks.functions import import_function
from smd_jax.tasks.rewards import Rewards, RewardWarning

SECONDS = 5.0  # time limit of a call
HEADER = "import ctypes, os, re, signal, sys, threading, time\nimport numpy as np\n\n\n"
FUNCTION = """def reward(completions, **columns):
    def instead(value):
        return [value if completion == "bad" else 1.0 for completion in completions]

    if "bad" in completions:
        {}
    return [1.0 for _ in completions]
"""
# Kind of fault -> statements that the function runs for the completion "bad".
ACTS: dict[str, tuple[str, ...]] = {
    "reward that raises": (
        "raise ValueError('x' * 10 ** 6)",
        "raise KeyboardInterrupt",
        "raise MemoryError",
        "return reward(completions)",  # infinite recursion
        "assert False",
        "raise type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})()",
        "sys.exit(0)",
    ),
    "reward that hangs": (
        "time.sleep(3600)",
        "while True: pass",
        "re.fullmatch('(a+)+', 'a' * 60 + 'b')",  # holds the GIL
        "threading.Event().wait()",
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32)); time.sleep(3600)",
    ),
    "reward that ends its process": (
        "os._exit(7)",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "os.abort()",
        "ctypes.string_at(0)",
        "os.closerange(3, 100)",
        "[os.write(number, b'x' * 100) for number in range(3, 20)]",
    ),
    "reward that returns nonsense": (
        "return instead(float('nan'))",
        "return instead(float('inf'))",
        "return instead(10**400)",
        "return instead('1.0')",
        "return instead([1.0])",
        "return instead(1j)",
        "return instead(np.datetime64('now'))",
        "return instead(lambda: 1.0)",
        "return instead({1.0})",
    ),
}


def hostile(acts: tuple[str, ...]) -> Fault:
    """Grades a bad completion with each act: it gets NaN and one short warning, and the next call works."""

    def fault(folder: Path, rng: random.Random) -> Iterator[Outcome]:
        for number, act in enumerate(acts):
            file = folder / f"rewards_{number}.py"
            file.write_text(HEADER + FUNCTION.format(act))
            rewards = Rewards((import_function(f"{file}:reward"),), seconds=SECONDS, max_failed=0.5)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                graded = rewards.grade(["p"] * 3, ["ok", "bad", "ok"], [[1]] * 3, {})
                again = rewards.grade(["p"] * 2, ["ok", "ok"], [[1]] * 2, {})
            said = [str(warning.message) for warning in caught if warning.category is RewardWarning]
            fine = np.array_equal(graded.rewards, [1.0, np.nan, 1.0], equal_nan=True) and (again.rewards == 1.0).all()
            yield Outcome(bool(fine) and len(said) == 1 and len(said[0]) < 1000)

    return fault


KINDS: dict[str, Fault] = {name: hostile(acts) for name, acts in ACTS.items()}
