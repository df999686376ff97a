"""One line chart as SVG, drawn by hand: colours are classes of the page, so that it can be read in light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from smd_jax.monitor.curves import Curve

WIDTH, HEIGHT = 440, 220
LEFT, RIGHT, TOP, BOTTOM = 58, 10, 8, 26
COLOURS = 7  # classes c0 … c6 of the page; further arms have them again, in dashes


@dataclass(frozen=True)
class Series:
    """One arm in one chart.

    Attributes:
      index: of the arm, for its colour.
      seeds: drawn thin; none for a single seed.
      mean: drawn thick, with its interval as a band.
    """

    index: int
    seeds: Sequence[Curve]
    mean: Curve


@dataclass(frozen=True)
class Scale:
    """Numbers to places on the picture, linear or logarithmic."""

    low: float | int
    high: float | int
    first: float | int
    last: float | int
    log: bool = False

    def __call__(self, values: np.ndarray | float | int) -> np.ndarray:
        low, high, x = self.low, self.high, np.asarray(values, float)
        if self.log:
            low, high, x = math.log10(low), math.log10(high), np.log10(np.maximum(x, self.low))
        return np.asarray(self.first + (x - low) / (high - low) * (self.last - self.first))


def draw_chart(
    series: Sequence[Series], label: str, log: bool = False, steps: tuple[float | int, float | int] | None = None
) -> str:
    """The chart as an `<svg>` element.

    Args:
      series: at least one.
      label: what is drawn, for those who hear the page.
      log: a logarithmic axis. Zeros stand at its lower end.
      steps: first and last of the axis, so that charts side by side have one; None: those of these curves.
    """
    x, y = scales(series, log, steps)
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}" '
        f'data-x="{_number(x.low)} {_number(x.high)} {LEFT} {WIDTH - RIGHT}">',
        *(_y_tick(y, value) for value in ticks(y)),
        *(_x_tick(x, value) for value in ticks(x, whole=True)),
    ]
    for one in series:
        lines = [_band(one.mean, x, y)] if one.mean.low is not None else []
        lines += [f'<path class="seed" d="{_path(curve, x, y)}"/>' for curve in one.seeds]
        lines.append(_mean(one.mean, x, y))
        dashed = " dashed" if one.index >= COLOURS else ""
        parts.append(f'<g class="c{one.index % COLOURS}{dashed}" data-arm="{one.index}">{"".join(lines)}</g>')
    parts.append(f'<line class="cursor" x1="0" x2="0" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>')
    return "".join(parts)


def scales(
    series: Sequence[Series], log: bool, steps: tuple[float | int, float | int] | None = None
) -> tuple[Scale, Scale]:
    """Axes that hold everything that is drawn."""
    curves = [curve for one in series for curve in (one.mean, *one.seeds)]
    values = np.concatenate([part for c in curves for part in (c.mean, c.low, c.high) if part is not None])
    drawn = np.concatenate([curve.steps for curve in curves])
    first, last = (float(drawn.min()), float(drawn.max())) if steps is None else steps
    x = Scale(first, last if last > first else first + 1, LEFT, WIDTH - RIGHT)
    if log:
        positive = values[values > 0]
        low = 10.0 ** math.floor(math.log10(positive.min())) if len(positive) else 1e-9
        high = 10.0 ** math.ceil(math.log10(positive.max())) if len(positive) else 1e-8
        # What is 0, or an interval that reaches below it, stands a decade below all else.
        low = low / 10 if (values <= 0).any() else low
        return x, Scale(low, max(high, 10 * low), HEIGHT - BOTTOM, TOP, log=True)
    low, high = float(values.min()), float(values.max())
    # Numbers that differ by rounding alone are one number, and get an axis of its size.
    size = max(abs(low), abs(high)) or 1.0
    margin = 0.06 * (high - low) if high - low > 1e-6 * size else 0.2 * size
    return x, Scale(low - margin, high + margin, HEIGHT - BOTTOM, TOP)


def ticks(scale: Scale, whole: bool = False) -> list[float | int]:
    """About five round numbers on the axis; powers of ten on a logarithmic one."""
    if scale.log:
        powers = range(round(math.log10(scale.low)), round(math.log10(scale.high)) + 1)
        stride = math.ceil(len(powers) / 6)
        return [10.0**power for power in powers if not power % stride]
    rough = (scale.high - scale.low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    stride = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    stride = max(stride, 1.0) if whole else stride
    count = range(math.ceil(scale.low / stride - 1e-9), math.floor(scale.high / stride + 1e-9) + 1)
    return [number * stride for number in count]


def _y_tick(y: Scale, value: float | int) -> str:
    place = _number(float(y(value)))
    line = f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place}" y2="{place}"/>'
    return f'{line}<text class="tick" x="{LEFT - 6}" y="{place}" dy="0.32em" text-anchor="end">{_label(value)}</text>'


def _x_tick(x: Scale, value: float | int) -> str:
    place = _number(float(x(value)))
    return f'<text class="tick" x="{place}" y="{HEIGHT - 8}" text-anchor="middle">{_label(value)}</text>'


def _mean(curve: Curve, x: Scale, y: Scale) -> str:
    if len(curve.steps) == 1:
        place = _number(float(x(curve.steps)[0])), _number(float(y(curve.mean)[0]))
        return f'<circle class="dot" cx="{place[0]}" cy="{place[1]}" r="3"/>'
    return f'<path class="mean" d="{_path(curve, x, y)}"/>'


def _path(curve: Curve, x: Scale, y: Scale) -> str:
    return "M" + "L".join(f"{_number(a)} {_number(b)}" for a, b in zip(x(curve.steps), y(curve.mean), strict=True))


def _band(curve: Curve, x: Scale, y: Scale) -> str:
    assert curve.low is not None and curve.high is not None
    steps = np.concatenate([curve.steps, curve.steps[::-1]])
    edge = Curve(steps, np.concatenate([curve.high, curve.low[::-1]]))
    return f'<path class="band" d="{_path(edge, x, y)}Z"/>'


def _number(value: float | int) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _label(value: float | int) -> str:
    """`0.25`, `1,500`, `1e-06`"""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.3g}"
    return f"{value:,.6g}".replace("-", "−")
