"""Reward functions for tests of separate reward processes, which import this file: it must not import JAX."""

import asyncio
import os
import re
import subprocess
import time
from dataclasses import dataclass


def length(completions):
    """Takes no other columns."""
    return [len(completion) for completion in completions]


def matches(prompts, completions, answer, **columns):
    return [float(completion == gold) for completion, gold in zip(completions, answer, strict=True)]


def tokens(completion_ids):
    return [len(ids) for ids in completion_ids]


def content(completions):
    """As TRL's functions read chat completions."""
    return [float("yes" in completion[0]["content"]) for completion in completions]


async def slow_length(completions):
    await asyncio.sleep(0)
    return [len(completion) for completion in completions]


def only_digits(completions):
    """None for other completions."""
    return [float(completion) if completion.isdigit() else None for completion in completions]


def never_an_opinion(completions):
    return [None for _ in completions]


def as_number(completions):
    """Raises ValueError unless all are numbers."""
    return [float(completion) for completion in completions]


async def slow_as_number(completions):
    await asyncio.sleep(0)
    return as_number(completions)


def not_finite(completions):
    return [float("nan") if completion == "bad" else 1.0 for completion in completions]


def as_text(completions):
    return ["1.0" if completion == "bad" else 1.0 for completion in completions]


def sleeps(completions):
    if "bad" in completions:
        time.sleep(3600)
    return [1.0 for _ in completions]


def spins_in_c(completions):
    """Backtracks forever and keeps the GIL: no other thread of its process runs."""
    return [
        float(re.fullmatch("(a+)+", "a" * 60 + "b" if completion == "bad" else "aa") is not None)
        for completion in completions
    ]


def leaves_a_program(completions, file):
    """Starts a program and exits without waiting for it."""
    program = subprocess.Popen(["sleep", "1000"])
    with open(file[0], "w") as opened:
        opened.write(str(program.pid))
    os._exit(3)


def ends_its_process(completions):
    """Like a crash in C."""
    if "bad" in completions:
        os._exit(7)
    return [1.0 for _ in completions]


def afraid_of_company(completions):
    """Fails on a batch, but not on single completions."""
    if len(completions) > 1:
        raise RuntimeError("one at a time, please")
    return [1.0]


def speaks(completions):
    print("rewarding", len(completions))
    return [1.0 for _ in completions]


@dataclass(frozen=True)
class Scaled:
    """A callable object with state, as in TRL."""

    factor: float

    def __call__(self, completions):
        return [self.factor * len(completion) for completion in completions]
