"""Shared by the engines of `bench/step.py`: prompts, and a reward that separates rollout from update.

Standard library only, because it runs in several environments.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Sequence
from types import SimpleNamespace

import common

os.environ["HF_HUB_OFFLINE"] = "1"


def questions(args: SimpleNamespace) -> list[str]:
    """One prompt per group, the same in all engines."""
    draw = random.Random(0)
    terms = [[str(draw.randrange(10, 1000)) for _ in range(12)] for _ in range(args.completions // args.group)]
    return [f"Add these numbers. Write every partial sum, then the total: {', '.join(row)}." for row in terms]


class Reward:
    """Grades by the share of even characters, and records when it was last called."""

    def __init__(self) -> None:
        self.called_at = 0.0

    def __call__(self, completions: Sequence[str]) -> list[float]:
        self.called_at = time.perf_counter()
        return [sum(ord(c) % 2 == 0 for c in text) / max(len(text), 1) for text in completions]


class StepClock(common.Clock):
    """Times whole steps and their rollouts; the first step is not measured."""

    def __init__(self, args: SimpleNamespace, reward: Reward) -> None:
        super().__init__(args, warmup=1)
        self.reward = reward
        self.rollouts: list[float] = []

    def end(self) -> None:
        super().end()
        if self.seconds:
            self.rollouts.append(self.reward.called_at - self.start)

    def report_steps(self, engine: str, parameters: int, packages: list[str], more: dict | None = None) -> None:
        """Prints the result as one JSON object."""
        args = self.args
        row = {"engine": engine, "device": "cpu", "dtype": "float32", "threads": 1, "completions": args.completions}
        row |= {"group": args.group, "new_tokens": args.new_tokens, "microbatch": args.microbatch}
        row |= {"rollout_seconds": statistics.median(self.rollouts)}
        self.say(row | (more or {}) | self.measured(parameters, packages))
