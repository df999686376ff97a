"""What a person sees while a run goes on: a progress bar on a terminal, plain lines elsewhere, a table at the end.

The bar and the table's frame need `rich`. Without it there are plain lines and a table of plain text.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from smd_jax.monitor.metrics_log import evaluated
from smd_jax.text.visible_text import visible

Report = Callable[[int, Mapping[str, float]], None]
Cell = str | float | int | None
TextFile = io.TextIOWrapper | io.StringIO

SILENCE = 30.0  # seconds after which the next step has a plain line, however few there were since the last one

_REWARD = "reward"
_MISMATCH = "sampling/sampling_logp_difference/mean"


@contextmanager
def training_progress(
    total: int,
    *,
    start: int = 0,
    every: int = 10,
    name: str = "train",
    file: TextFile | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Report]:
    """Gives `report(step, metrics)`, to be called after each step with the number of finished steps.

    Shows `reward`, the mean mismatch |Δ log p| and the newest evaluation when `metrics` (host numbers) has them. On a
    terminal this is one bar, if rich is installed. Otherwise one plain line is printed where `every` steps or `SILENCE`
    seconds have passed since the last one, at every evaluation, and at the last step:

        train 34/200 reward 0.550 |Δlogp| 2.1e-06 eval dense 0.910 0:01:20

    Args:
      total: the last step of the run.
      start: steps that were finished before (a resumed run).
      every: distance of two plain lines, in steps.
      name: the word in front.
      file: where to print, standard output when None.
      clock: seconds.

    Raises:
      ValueError: `every` below 1 or `start` outside 0 … `total`.
    """
    if every < 1:
        raise ValueError(f"every must be at least 1 step; got {every}")
    if not 0 <= start <= total:
        raise ValueError(f"start must lie in 0 … total = {total}; got {start}")
    label = _mismatch_label(file)
    if on_terminal(file):
        try:
            from smd_jax.monitor.rich_output import progress_bar
        except ImportError:
            pass  # rich is an extra: plain lines do as well
        else:
            with progress_bar(name, total, start, file) as update:
                evaluations: dict[str, float] = {}  # the newest, which stay in the bar until others come

                def report(step: int, metrics: Mapping[str, float]) -> None:
                    evaluations.update(evaluations_in(metrics))
                    update(step, status(evaluations | dict(metrics), label))

                yield report
            return
    yield _plain_report(file, name, total, start, every, label, clock)


def status(metrics: Mapping[str, float], mismatch_label: str = "|Δlogp|") -> str:
    """`reward 0.550 |Δlogp| 2.1e-06 eval dense 0.910`, without what `metrics` lacks."""
    parts = []
    if _REWARD in metrics:
        parts.append(f"reward {metrics[_REWARD]:.3f}")
    if _MISMATCH in metrics:
        parts.append(f"{mismatch_label} {metrics[_MISMATCH]:.1e}")
    rewards = [f"{evaluated(name)} {value:.3f}" for name, value in evaluations_in(metrics).items()]
    if rewards:
        parts.append(f"eval {', '.join(rewards)}")
    return " ".join(parts)


def evaluations_in(metrics: Mapping[str, float]) -> dict[str, float]:
    """The mean rewards of an evaluation among these metrics."""
    return {name: value for name, value in metrics.items() if evaluated(name)}


@runtime_checkable
class RolloutState(Protocol):
    """What `rollout_report` shows, as `smd_jax.sampler.engine.Progress` has it."""

    @property
    def tokens(self) -> int: ...

    @property
    def seconds(self) -> float: ...

    @property
    def live(self) -> int: ...

    @property
    def decode_rows(self) -> int: ...

    @property
    def finished(self) -> int: ...

    @property
    def rows(self) -> int: ...

    @property
    def eta_seconds(self) -> float | None: ...


def rollout_report(
    *, every: float = 10.0, name: str = "rollout", file: TextFile | None = None
) -> Callable[[RolloutState], None]:
    """For `Engine.run` and `Loop.report`, which call it after every segment: a plain line every `every` seconds and
    at a rollout's end, above the bar of a training run if there is one.

        rollout 96/128 done, 28/32 rows live, 41,210 tokens, 5,127 tokens/s, 0:00:08, 0:00:03 left
    """
    said = -every

    def report(progress: RolloutState) -> None:
        nonlocal said
        if progress.seconds < said:  # another rollout has begun
            said = -every
        # The last segment is always reported, so that every rollout leaves at least one line.
        if progress.seconds - said >= every or progress.finished == progress.rows:
            said = progress.seconds
            _print_line(rollout_line(name, progress), file)

    return report


def rollout_line(name: str, progress: RolloutState) -> str:
    """One line about a rollout."""
    parts = [
        f"{name} {progress.finished}/{progress.rows} done",
        f"{progress.live}/{progress.decode_rows} rows live",
        f"{progress.tokens:,} tokens",
        f"{progress.tokens / max(progress.seconds, 1e-9):,.0f} tokens/s",
        clock_text(progress.seconds),
    ]
    return ", ".join(parts) + ("" if progress.eta_seconds is None else f", {clock_text(progress.eta_seconds)} left")


def summary_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    file: TextFile | None = None,
    width: int | None = None,
) -> None:
    """Prints a table: first column to the left, the others to the right, floats with four significant digits.

    Args:
      file: where to print, standard output when None.
      width: columns of a framed table; None: as the terminal has them.

    Raises:
      ValueError: a row has another number of cells than there are columns.
    """
    for number, row in enumerate(rows):
        if len(row) != len(columns):
            raise ValueError(f"row {number}: expected {len(columns)} cells; got {len(row)}: {list(row)}")
    texts = [[format_cell(cell) for cell in row] for row in rows]
    try:
        from smd_jax.monitor.rich_output import print_table
    except ImportError:
        _print_plain_table(title, columns, texts, file)
    else:
        print_table(title, columns, texts, file, width)


def format_cell(cell: Cell) -> str:
    """Text as it is, floats with four significant digits, integers with thousands separators, None as a dash."""
    if cell is None:
        return "-"
    if isinstance(cell, str | bool):
        return str(cell)
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:.4g}"


def _plain_report(
    file: TextFile | None, name: str, total: int, start: int, every: int, label: str, clock: Callable[[], float]
) -> Report:
    began = said = clock()
    said_step = start

    def report(step: int, metrics: Mapping[str, float]) -> None:
        nonlocal said, said_step
        now = clock()
        # A log file gets a line now and then, the evaluations and the last step. Where steps take minutes, each has a
        # line, which shows that a batch job is still running.
        due = step - said_step >= every or now - said >= SILENCE
        if due or step == total or evaluations_in(metrics):
            said, said_step = now, step
            parts = [name, f"{step}/{total}", status(metrics, label), clock_text(now - began)]
            _print_line(" ".join(filter(None, parts)), file)

    return report


def _print_line(line: str, file: TextFile | None) -> None:
    # Standard output is looked up at every line: while there is a bar, rich puts a file in its place that prints above.
    print(visible(line), file=file or sys.stdout, flush=True)


def _print_plain_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], file: TextFile | None
) -> None:
    widths = [max(len(text) for text in column) for column in zip(columns, *rows, strict=True)]
    lines = [title]
    for first, *others in [columns, *rows]:
        aligned = [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *aligned]))
    _print_line("\n".join(lines), file)


def _mismatch_label(file: TextFile | None) -> str:
    return "|Δlogp|" if speaks_unicode(file) else "|dlogp|"


def on_terminal(file: TextFile | None) -> bool:
    """Whether a person looks at it; None stands for standard output."""
    return (file or sys.stdout).isatty()


def speaks_unicode(file: TextFile | None) -> bool:
    """Whether it takes Greek letters and bars: a terminal or file that is not Unicode would fail on them."""
    # One without an encoding, such as StringIO, takes any text.
    return ((file or sys.stdout).encoding or "utf-8").lower().startswith("utf")


def clock_text(seconds: float) -> str:
    """`0:01:20`"""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
