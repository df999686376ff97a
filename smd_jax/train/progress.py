"""What a person sees while a run goes on: a progress bar on a terminal, plain lines elsewhere, a table at the end.

Needs `rich`: `pip install smd_jax[experiments]`. Of the library only `smd_jax.train.run` imports this module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

try:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Table
    from rich.text import Text
except ImportError as error:
    raise ImportError("smd_jax.train.progress needs rich; install it with: pip install smd_jax[experiments]") from error

Report = Callable[[int, Mapping[str, float]], None]
Cell = str | float | int | None

_REWARD = "reward"
_MISMATCH = "sampling/sampling_logp_difference/mean"


@contextmanager
def training_progress(
    total: int, *, start: int = 0, every: int = 10, name: str = "train", console: Console | None = None
) -> Iterator[Report]:
    """Gives `report(step, metrics)`, to be called after each step with the number of finished steps.

    Shows `reward` and the mean mismatch |Δ log p| when `metrics` (host numbers) has them. On a terminal this is one
    bar, otherwise one plain line every `every` steps and at the last one:

        train 34/200 reward 0.550 |Δlogp| 2.1e-06 0:01:20

    Args:
      total: the last step of the run. start: steps that were finished before (a resumed run).
      every: distance of two plain lines, in steps. name: the word in front.
      console: where to print, standard output when None.

    Raises:
      ValueError: `every` below 1 or `start` outside 0 … `total`.
    """
    if every < 1:
        raise ValueError(f"every must be at least 1 step; got {every}")
    if not 0 <= start <= total:
        raise ValueError(f"start must lie in 0 … total = {total}; got {start}")
    console = console or Console()
    if not console.is_terminal:
        yield _plain_report(console, name, total, every)
        return
    with _progress_bar(console) as bar:
        task = bar.add_task(name, total=total, completed=start, status="")
        yield lambda step, metrics: bar.update(task, completed=step, status=status(metrics, _label(console)))


def status(metrics: Mapping[str, float], mismatch_label: str = "|Δlogp|") -> str:
    """`reward 0.550 |Δlogp| 2.1e-06`, without what `metrics` lacks."""
    parts = []
    if _REWARD in metrics:
        parts.append(f"reward {metrics[_REWARD]:.3f}")
    if _MISMATCH in metrics:
        parts.append(f"{mismatch_label} {metrics[_MISMATCH]:.1e}")
    return " ".join(parts)


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
    *, every: float = 10.0, name: str = "rollout", console: Console | None = None
) -> Callable[[RolloutState], None]:
    """For `Engine.run` and `Loop.report`, which call it after every segment: a plain line every `every` seconds and
    at a rollout's end, above the bar of a training run if there is one.

        rollout 96/128 done, 28/32 rows live, 41,210 tokens, 5,127 tokens/s, 0:00:08, 0:00:03 left
    """
    console, said = console or Console(), -every

    def report(progress: RolloutState) -> None:
        nonlocal said
        if progress.seconds < said:  # another rollout has begun
            said = -every
        if progress.seconds - said >= every or progress.finished == progress.rows:
            said = progress.seconds
            console.print(Text(rollout_line(name, progress)), soft_wrap=True)

    return report


def rollout_line(name: str, progress: RolloutState) -> str:
    """One line about a rollout."""
    parts = [
        f"{name} {progress.finished}/{progress.rows} done",
        f"{progress.live}/{progress.decode_rows} rows live",
        f"{progress.tokens:,} tokens",
        f"{progress.tokens / max(progress.seconds, 1e-9):,.0f} tokens/s",
        _clock(progress.seconds),
    ]
    return ", ".join(parts) + ("" if progress.eta_seconds is None else f", {_clock(progress.eta_seconds)} left")


def summary_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], console: Console | None = None
) -> None:
    """Prints a table: first column to the left, the others to the right, floats with four significant digits.

    Raises:
      ValueError: a row has another number of cells than there are columns.
    """
    table = Table(title=Text(title, style="bold"))
    for index, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if index else "left")
    for number, row in enumerate(rows):
        if len(row) != len(columns):
            raise ValueError(f"row {number}: expected {len(columns)} cells; got {len(row)}: {list(row)}")
        table.add_row(*(Text(format_cell(cell)) for cell in row))
    (console or Console()).print(table)


def format_cell(cell: Cell) -> str:
    """Text as it is, floats with four significant digits, integers with thousands separators, None as a dash."""
    if cell is None:
        return "-"
    if isinstance(cell, str | bool):
        return str(cell)
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:.4g}"


def _plain_report(console: Console, name: str, total: int, every: int) -> Report:
    began = time.monotonic()

    def report(step: int, metrics: Mapping[str, float]) -> None:
        if step % every == 0 or step == total:
            parts = [name, f"{step}/{total}", status(metrics, _label(console)), _clock(time.monotonic() - began)]
            # Not wrapped and not coloured: these lines go to files and to other programs.
            console.print(Text(" ".join(filter(None, parts))), soft_wrap=True)

    return report


def _progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[status]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("left", style="dim"),
        TimeRemainingColumn(),
        console=console,
        expand=True,
    )


def _label(console: Console) -> str:
    # A terminal that is not Unicode would fail on the Greek letter.
    return "|Δlogp|" if console.encoding.startswith("utf") else "|dlogp|"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
