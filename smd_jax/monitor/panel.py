"""What a terminal shows of a training run while it goes on: one panel that is drawn anew in its place.

    ╭─ grpo ──────────────────────────────────────── 34/200 · 0:01:20 · 0:06:40 left ─╮
    │   reward  0.550 ± 0.31  ▁▁▂▃▃▄▅▆▆▇█                                             │
    │   length  112 tokens, 3 % truncated                                             │
    │ mismatch  |Δ log p| 2.1e-06 mean, 3.3e-05 max                                   │
    │    speed  rollout 5,127 tokens/s, update 3,020 tokens/s, step 2.3 s             │
    │   memory  1.2 GiB host                                                          │
    │ ━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ │
    ╰─────────────────────────────────────────────────────────────────────────────────╯

It needs a terminal and `rich`. Elsewhere there are plain lines, as `training_progress` prints them.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from smd_jax.monitor.metrics_log import evaluated
from smd_jax.monitor.progress import Report, TextFile, clock_text, on_terminal, speaks_unicode, training_progress

BARS = "▁▂▃▄▅▆▇█"
SPARKS = 40  # characters of the sparkline
RECENT = 20  # steps whose pace says how long the others will take


@contextmanager
def training_panel(
    total: int,
    *,
    start: int = 0,
    every: int = 10,
    name: str = "train",
    file: TextFile | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Report]:
    """Gives `report(step, metrics)` as `training_progress` does, with the same arguments; on a terminal with rich it
    moves a panel, otherwise plain lines are printed.

    Raises:
      ValueError: as `training_progress`.
    """
    if on_terminal(file) and 0 <= start <= total:
        try:
            from smd_jax.monitor.rich_output import live_panel
        except ImportError:
            pass  # rich is an extra: plain lines do as well
        else:
            status = RunStatus(name, total, start, unicode=speaks_unicode(file), clock=clock)
            with live_panel(status, file):
                yield status.add
            return
    with training_progress(total, start=start, every=every, name=name, file=file, clock=clock) as report:
        yield report


class RunStatus:
    """What the panel shows.

    Args:
      name: of the run.
      total: the last step. start: steps that were finished before.
      unicode: whether Greek letters and bars can be shown.
      clock: seconds.
    """

    def __init__(
        self, name: str, total: int, start: int = 0, unicode: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self.total = total
        self.step = start
        self._unicode = unicode
        self._clock = clock
        self._began = self._reported = clock()
        self._paces: deque[float] = deque(maxlen=RECENT)
        self._reports = 0
        self._rewards: list[float] = []
        self._metrics: Mapping[str, float] = {}

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a step, with the number of finished steps."""
        now = self._clock()
        self._reports += 1
        # The first step compiles. Once there is another one, it says nothing about those to come.
        if self._reports == 2:
            self._paces.clear()
        self._paces.append((now - self._reported) / max(step - self.step, 1))
        self._reported = now
        self.step = step
        self._metrics = metrics
        # Without any completion that has a reward it is NaN, which has no height.
        if math.isfinite(metrics.get("reward", math.nan)):
            self._rewards.append(metrics["reward"])

    @property
    def elapsed(self) -> float:
        """Seconds since this process began with the run."""
        return self._clock() - self._began

    @property
    def remaining(self) -> float | None:
        """Seconds to the end at the pace of the newest steps; None before the first one."""
        if not self._paces:
            return None
        pace = sum(self._paces) / len(self._paces)
        return max(pace * (self.total - self.step) - (self._clock() - self._reported), 0.0)

    def headline(self) -> str:
        """`34/200 · 0:01:20 · 0:06:40 left`"""
        parts = [f"{self.step}/{self.total}", clock_text(self.elapsed)]
        if self.remaining is not None and self.step < self.total:
            parts.append(f"{clock_text(self.remaining)} left")
        return (" · " if self._unicode else ", ").join(parts)

    def rows(self) -> list[tuple[str, str]]:
        """Name and text of every line for which there are metrics."""
        texts = {
            "reward": self._reward(),
            "length": self._length(),
            "mismatch": self._mismatch(),
            "speed": self._speed(),
            "memory": self._memory(),
        }
        return [(name, text) for name, text in texts.items() if text]

    def _reward(self) -> str:
        metrics = self._metrics
        if "reward" not in metrics:
            return ""
        text = f"{metrics['reward']:.3f}"
        if "reward_std" in metrics:
            text += f" {'±' if self._unicode else '+-'} {metrics['reward_std']:.2f}"
        found = {what: value for name, value in metrics.items() if (what := evaluated(name))}
        evaluations = [f"{what} {value:.3f}" for what, value in found.items()]
        if self._unicode:
            text += f"  {sparkline(self._rewards, SPARKS)}"
        return f"{text}  {', '.join(evaluations)}" if evaluations else text

    def _length(self) -> str:
        if "completions/mean_length" not in self._metrics:
            return ""
        text = f"{self._metrics['completions/mean_length']:.0f} tokens"
        if "completions/clipped_ratio" in self._metrics:
            text += f", {100 * self._metrics['completions/clipped_ratio']:.0f} % truncated"
        return text

    def _mismatch(self) -> str:
        name = "sampling/sampling_logp_difference"
        parts = [
            f"{self._metrics[f'{name}/{kind}']:.1e} {kind}"
            for kind in ("mean", "max")
            if f"{name}/{kind}" in self._metrics
        ]
        delta = "|Δ log p|" if self._unicode else "|d log p|"
        return f"{delta} {', '.join(parts)}" if parts else ""

    def _speed(self) -> str:
        kinds = [kind for kind in ("rollout", "update") if f"{kind}/tokens_per_second" in self._metrics]
        parts = [f"{kind} {self._metrics[f'{kind}/tokens_per_second']:,.0f} tokens/s" for kind in kinds]
        if "step_time" in self._metrics:
            parts.append(f"step {self._metrics['step_time']:.1f} s")
        return ", ".join(parts)

    def _memory(self) -> str:
        named = {
            "memory/host_bytes": "host",
            "memory/device_bytes": "device",
            "memory/device_peak_bytes": "device at most",
        }
        parts = [
            f"{self._metrics[name] / 2**30:.1f} GiB {what}" for name, what in named.items() if name in self._metrics
        ]
        return ", ".join(parts)


def sparkline(values: Sequence[float], width: int) -> str:
    """A bar a value, lowest to highest, such as `▁▃▂▅▇█`; more than `width` values are averaged over equal parts."""
    if len(values) > width:
        ends = [len(values) * number // width for number in range(width + 1)]
        values = [sum(values[first:end]) / (end - first) for first, end in zip(ends[:-1], ends[1:], strict=True)]
    if not values:
        return ""
    low, high = min(values), max(values)
    span = high - low
    # Values that are all equal stand in the middle: they neither rise nor fall.
    levels = [round((value - low) / span * (len(BARS) - 1)) if span else len(BARS) // 2 for value in values]
    return "".join(BARS[level] for level in levels)
