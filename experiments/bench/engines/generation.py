"""Shared by all engines of `bench/rollout.py`: sizes, prompts, times of single steps, the row.

Standard library only, because it runs in several environments.
"""

from __future__ import annotations

import random
import statistics
import time
from types import SimpleNamespace

# In new tokens: where steps are timed, and how many.
EARLY = 400
LATE = 4000
WINDOW = 160


def prompts(batch: int, prompt: int, vocabulary: int) -> list[list[int]]:
    """Random token ids, the same in all engines."""
    numbers = random.Random(0)
    return [[numbers.randrange(1, vocabulary) for _ in range(prompt)] for _ in range(batch)]


class Marks:
    """Clock and CPU times at which a number of response tokens was sampled."""

    def __init__(self) -> None:
        self.turns: list[list[tuple[int, float, float]]] = []

    def begin(self) -> None:
        """Begins a turn."""
        self.turns.append([])

    def forget(self) -> None:
        """Drops the warm-up turns."""
        self.turns = []

    def mark(self, tokens: int) -> None:
        """Records that `tokens` of every response are sampled."""
        self.turns[-1].append((tokens, time.perf_counter(), time.process_time()))

    def milliseconds(self, around: int, cpu: bool) -> float | None:
        """Median time of a step over `WINDOW` tokens around a place, over all turns; None without marks there."""
        which = 2 if cpu else 1
        first = around - WINDOW // 2
        last = around + WINDOW // 2
        steps = []
        for turn in self.turns:
            for before, after in zip(turn, turn[1:], strict=False):
                if first <= before[0] and after[0] <= last:
                    steps.append((after[which] - before[which]) / (after[0] - before[0]) * 1e3)
        return statistics.median(steps) if steps else None


def early_and_late(marks: Marks, new_tokens: int, cpu: bool = False) -> tuple[float | None, float | None]:
    """Milliseconds of a step around token 400 and around token 4,000, or at the end of a shorter response."""
    late = min(LATE, new_tokens - WINDOW // 2)
    return marks.milliseconds(min(EARLY, late), cpu), marks.milliseconds(late, cpu)


def row(engine: str, args: SimpleNamespace, seconds: list[float], marks: Marks | None = None) -> dict:
    """The first fields of every engine's row; fields that an engine does not measure stay null.

    Args:
      seconds: of each measured turn.
    """
    marks = marks or Marks()
    (early, late), cpu = (early_and_late(marks, args.new_tokens, cpu) for cpu in (False, True))
    tokens_per_s = args.batch * args.new_tokens / statistics.median(seconds)
    found = {"engine": engine, "device": "cpu", "batch": args.batch, "prompt": args.prompt}
    found |= {"new_tokens": args.new_tokens, "budget": None, "buffer": None, "tokens_per_s": tokens_per_s}
    found |= {"ms_per_step_early": early, "ms_per_step_late": late}
    found |= {"cpu_ms_per_step_early": cpu[0], "cpu_ms_per_step_late": cpu[1]}  # better on a shared machine
    return found | {"cache_bytes": None, "expected_cache_bytes": None, "max_abs_dlogp": None, "limit_share": None}
