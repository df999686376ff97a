"""What a person sees during a run: a progress bar on a terminal, plain lines elsewhere, tables at the end."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.cells import cell_len
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from smd_jax.monitor.metrics_log import evaluated
from smd_jax.sampler.engine import Progress
from smd_jax.text.visible_text import visible

Report = Callable[[int, Mapping[str, float]], None]
Cell = str | float | int | None
TextFile = io.TextIOWrapper | io.StringIO

SILENCE = 30.0  # seconds after which the next step gets a plain line, even if few steps have passed
UNLIMITED = 10_000  # columns of a table in a file
CELL_FRAME = 3  # columns of a border and of the spaces around a cell
MIN_FIRST = 10  # minimum columns of the first cell and the table's last border

_REWARD = "reward"
_MISMATCH = "sampling/sampling_logp_difference/mean"

# --- a training run


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

    Shows `reward`, the mean mismatch |Δ log p| and the newest evaluation when `metrics` (host numbers) has them. A
    terminal gets one bar. Other outputs get plain lines: after `every` steps or `SILENCE` seconds, at every evaluation,
    and at the last step:

        train 34/200 reward 0.550 |Δlogp| 2.1e-06 eval dense 0.910 0:01:20

    Args:
      total: the last step of the run.
      start: steps that were finished before (a resumed run).
      every: steps between two plain lines.
      name: the first word.
      file: output; None: standard output.
      clock: seconds.

    Raises:
      ValueError: `every` below 1 or `start` outside 0 … `total`.
    """
    if every < 1:
        raise ValueError(f"every must be at least 1 step; got {every}")
    if not 0 <= start <= total:
        raise ValueError(f"start must lie in 0 … total = {total}; got {start}")
    label = "|Δlogp|" if speaks_unicode(file) else "|dlogp|"
    if not on_terminal(file):
        yield _plain_report(file, name, total, start, every, label, clock)
        return
    bar = Bar(
        TextColumn("{task.description}", markup=False),
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[status]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("left", style="dim"),
        TimeRemainingColumn(),
        console=Console(file=file),
        expand=True,
    )
    with bar:
        task = bar.add_task(visible(name), total=total, completed=start, status="")
        evaluations: dict[str, float] = {}  # the newest, which stay in the bar until the next

        def report(step: int, metrics: Mapping[str, float]) -> None:
            evaluations.update(evaluations_in(metrics))
            bar.update(task, completed=step, status=visible(status(evaluations | dict(metrics), label)))

        yield report


def _plain_report(
    file: TextFile | None, name: str, total: int, start: int, every: int, label: str, clock: Callable[[], float]
) -> Report:
    began = last_time = clock()
    last_step = start

    def report(step: int, metrics: Mapping[str, float]) -> None:
        nonlocal last_time, last_step
        now = clock()
        # Where steps take minutes each gets a line, which shows that a batch job is still running.
        due = step - last_step >= every or now - last_time >= SILENCE
        if due or step == total or evaluations_in(metrics):
            last_time, last_step = now, step
            parts = [name, f"{step}/{total}", status(metrics, label), clock_text(now - began)]
            _print_line(" ".join(filter(None, parts)), file)

    return report


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


# --- a rollout


def rollout_report(
    *, every: float = 10.0, name: str = "rollout", file: TextFile | None = None
) -> Callable[[Progress], None]:
    """For `Engine.run` and `Loop.report`, which call it after every segment.

    Prints a plain line every `every` seconds and at a rollout's end, above the bar of a training run:

        rollout 96/128 done, 28/32 rows live, 41,210 tokens, 5,127 tokens/s, 0:00:08
    """
    last_time = -every

    def report(progress: Progress) -> None:
        nonlocal last_time
        if progress.seconds < last_time:  # another rollout has begun
            last_time = -every
        # The last segment is always reported, so that every rollout prints at least one line.
        if progress.seconds - last_time >= every or progress.finished == progress.rows:
            last_time = progress.seconds
            _print_line(rollout_line(name, progress), file)

    return report


def rollout_line(name: str, progress: Progress) -> str:
    """One line about a rollout."""
    parts = [
        f"{name} {progress.finished}/{progress.rows} done",
        f"{progress.live}/{progress.decode_rows} rows live",
        f"{progress.tokens:,} tokens",
        f"{progress.tokens / max(progress.seconds, 1e-9):,.0f} tokens/s",
        clock_text(progress.seconds),
    ]
    return ", ".join(parts)


# --- tables


def summary_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    file: TextFile | None = None,
    width: int | None = None,
) -> None:
    """Prints a table: the first column to the left, the others to the right, floats with four significant digits.

    If the other columns do not fit the terminal, each row becomes a block of lines. A file or a pipe has room for any
    table.

    Args:
      file: output; None: standard output.
      width: columns of the table; None: those of the terminal.

    Raises:
      ValueError: the number of cells in a row differs from that of the columns.
    """
    for number, row in enumerate(rows):
        if len(row) != len(columns):
            raise ValueError(f"row {number}: expected {len(columns)} cells; got {len(row)}: {list(row)}")
    texts = [[format_cell(cell) for cell in row] for row in rows]
    console = Console(file=file, width=width)
    others = sum(max(map(cell_len, column)) + CELL_FRAME for column in list(zip(columns, *texts, strict=True))[1:])
    table = Table(title=_text(title, style="bold"), title_justify="left")
    for index, column in enumerate(columns):
        if index:
            table.add_column(_text(column), justify="right", no_wrap=True)
        else:
            table.add_column(_text(column), overflow="fold")
    for row in texts:
        table.add_row(*(_text(cell) for cell in row))
    if width is None and not console.is_terminal:
        whole = console.measure(table, options=console.options.update(max_width=UNLIMITED)).maximum
        console.width = max(console.width, whole)
    fits = len(columns) == 1 or others + MIN_FIRST <= console.width
    console.print(table if fits else _blocks(title, columns, texts))


def _blocks(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Group:
    """Name and value of every cell, below the first cell of their row."""
    blocks: list[Text | Table] = [_text(title, style="bold")]
    for first, *others in rows:
        block = Table.grid(padding=(0, 2))
        block.add_column()
        block.add_column(overflow="fold")
        for column, cell in zip(columns[1:], others, strict=True):
            block.add_row(_text(f"  {column}"), _text(cell))
        blocks += [_text(first), block]
    return Group(*blocks)


def text_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    texts: int,
    file: TextFile | None,
    width: int | None,
) -> None:
    """Prints a table whose first `texts` columns share the width and are folded; the others are numbers."""
    table = Table(title=_text(title, style="bold"), expand=True, show_lines=True)
    for index, column in enumerate(columns):
        if index < texts:
            table.add_column(_text(column), ratio=1, overflow="fold")
        else:
            table.add_column(_text(column), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(_text(cell) for cell in row))
    target = file or sys.stdout
    # Rendered to a string and printed as lines: a progress bar lets lines pass above it, but no other console.
    rendered = io.StringIO()
    wide = Console(file=file, width=width).width
    Console(file=rendered, width=wide, force_terminal=target.isatty()).print(table)
    print(rendered.getvalue(), end="", file=target, flush=True)


def format_cell(cell: Cell) -> str:
    """Text unchanged, floats with four significant digits, integers with thousands separators, None as a dash."""
    if cell is None:
        return "-"
    if isinstance(cell, str | bool):
        return str(cell)
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:.4g}"


def _text(content: str, style: str = "") -> Text:
    """Text without rich's markup and without escape sequences."""
    return Text(visible(content), style=style)


# --- outputs


def _print_line(line: str, file: TextFile | None) -> None:
    # Looked up at every line: during a bar, rich replaces standard output with a file that prints above it.
    print(visible(line), file=file or sys.stdout, flush=True)


def on_terminal(file: TextFile | None) -> bool:
    """Whether the output is a terminal; None is standard output."""
    return (file or sys.stdout).isatty()


def speaks_unicode(file: TextFile | None) -> bool:
    """Whether the output takes Greek letters and box characters, which other encodings refuse."""
    # An output without an encoding, such as StringIO, takes any text.
    return ((file or sys.stdout).encoding or "utf-8").lower().startswith("utf")


def clock_text(seconds: float) -> str:
    """`0:01:20`"""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
