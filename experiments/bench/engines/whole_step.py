"""What all engines of `bench/step.py` share beside `common.py`: prompts, grading, the command line, times of a step.

Standard library only: it runs in three environments.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import common

os.environ["HF_HUB_OFFLINE"] = "1"  # whatever a library would like to look up there

# As in smd_jax.tasks.gsm8k.
INSTRUCTION = 'Think step by step, then give the final answer after "####".'
MARKER = "####"
MAX_GRADIENT_NORM = 1.0  # TRL's default, and Hugging Face's


def parser(description: str) -> argparse.ArgumentParser:
    """The command line of an engine; `completions` is a multiple of `group` and of `microbatch`."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--model", required=True, help="Hugging Face checkpoint directory")
    made.add_argument("--data", required=True, help="GSM8K rows, one JSON object a line")
    made.add_argument("--completions", type=int, default=64, help="of a step")
    made.add_argument("--group", type=int, default=8, help="completions of a prompt")
    made.add_argument("--new-tokens", type=int, default=256, help="longest completion")
    made.add_argument("--microbatch", type=int, default=8, help="completions of one forward and backward pass")
    made.add_argument("--full-length", action="store_true", help="no token ends a completion")
    made.add_argument("--threads", type=int, default=1)
    made.add_argument("--repeats", type=int, default=2)
    made.add_argument("--driven", action="store_true", help="every measured step waits for a line on standard input")
    return made


def problems(args: argparse.Namespace) -> list[dict[str, str]]:
    """`{"prompt": text, "answer": number}` of the first rows of the file, as many as a step has groups.

    Raises:
      ValueError: fewer rows, or sizes that do not divide.
    """
    if args.completions % args.group or args.completions % args.microbatch:
        raise ValueError(
            f"expected completions that divide into groups of {args.group} and microbatches of {args.microbatch}; "
            f"got {args.completions}"
        )
    count = args.completions // args.group
    with Path(args.data).open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in itertools.islice(lines, count)]
    if len(rows) < count:
        raise ValueError(f"expected at least {count} rows in {args.data}; got {len(rows)}")
    return [{"prompt": f"{row['question']}\n{INSTRUCTION}", "answer": gold(row["answer"])} for row in rows]


def gold(solution: str) -> str:
    """The number after the last "####" of a reference solution."""
    return solution.rpartition(MARKER)[2].strip().replace(",", "")


def last_number(completion: str) -> str | None:
    """The last number of a completion, after its last "####" if there is one."""
    after = completion.rpartition(MARKER)[2]
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", after)
    return found[-1].replace(",", "") if found else None


class Grader:
    """Gives rewards, the same in all engines, and notes when.

    What a step does before it is its rollout, prompts and decoded texts included; what it does after it is its update.
    """

    def __init__(self) -> None:
        self.began = 0.0
        self.ended = 0.0
        self.reward = 0.0  # mean of the last call

    def __call__(self, completions: Sequence[str], answers: Sequence[str]) -> list[float]:
        """1.0 where the last number of a completion is the answer, else 0.0."""
        self.began = time.perf_counter()
        rewards = []
        for completion, answer in zip(completions, answers, strict=True):
            found = last_number(completion)
            rewards.append(float(found is not None and float(found) == float(answer)))
        self.reward = statistics.mean(rewards)
        self.ended = time.perf_counter()
        return rewards


class StepClock(common.Clock):
    """Times whole steps, and what they consist of; the first is not measured."""

    def __init__(self, args: argparse.Namespace, grader: Grader) -> None:
        super().__init__(args, warmup=1)
        self.grader = grader
        self.steps: list[dict] = []

    def end_step(self, tokens: Sequence[tuple[int, int]]) -> None:
        """After a step whose results are there.

        Args:
          tokens: of every completion: of its prompt, and its own.
        """
        self.end()
        ended = self.start + self.took
        if self.seconds:
            step = {"seconds": self.took, "rollout_seconds": self.grader.began - self.start}
            step |= {"grading_seconds": self.grader.ended - self.grader.began}
            step |= {"update_seconds": ended - self.grader.ended, "reward": self.grader.reward}
            self.steps.append(step | {"tokens": [list(pair) for pair in tokens]})

    def report_steps(self, engine: str, parameters: int, packages: list[str], more: dict | None = None) -> None:
        """The result as one JSON object; `steps` of it are for the driver."""
        args = self.args
        row = {"engine": engine, "device": "cpu", "dtype": "float32", "threads": args.threads}
        row |= {"completions": args.completions, "group": args.group, "new_tokens": args.new_tokens}
        row |= {"microbatch": args.microbatch, "full_length": args.full_length, "budget": None, "buffer": None}
        self.say(row | (more or {}) | self.measured(parameters, packages) | {"steps": self.steps})
