"""Output of a run: a progress bar on a terminal, plain lines elsewhere, and tables."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console, Group
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Column, Table
from rich.text import Text

from smd_jax.monitor.metrics_log import evaluated
from smd_jax.sampler.engine import Progress
from smd_jax.text.visible_text import visible

Report = Callable[[int, Mapping[str, float]], None]
Cell = str | float | int | None
TextFile = io.TextIOWrapper | io.StringIO

SILENCE = 30.0  # seconds after which the next step gets a plain line, even if few steps have passed
UNLIMITED = 10_000  # columns of a table in a file


# --- a training run


@contextmanager
def training_progress(
    total: int, *, start: int = 0, every: int = 10, name: str = "train", file: TextFile | None = None
) -> Iterator[Report]:
    """Gives `report(step, metrics)`, to be called after each step with the number of finished steps.

    Shows `reward`, `mismatch_kl` and the newest evaluation if `metrics` (host numbers) has them. A terminal gets one
    bar. Other outputs get plain lines: after `every` steps or `SILENCE` seconds, at every evaluation, and at the last
    step:

        train 34/200 reward 0.550 mismatch_kl 2.1e-02 eval dense 0.910 0:01:20

    Args:
      total: the last step of the run.
      start: steps that were finished before (a resumed run).
      every: steps between two plain lines.
      name: the first word.
      file: output; None: standard output.
    """
    if not (file or sys.stdout).isatty():
        yield _plain_report(file, name, total, start, every)
        return
    bar = Bar(
        TextColumn("{task.description}", markup=False),
        MofNCompleteColumn(),
        # These two share what the other columns leave; a status that is longer than its share has several lines.
        BarColumn(bar_width=None, table_column=Column(ratio=1)),
        TextColumn("{task.fields[status]}", markup=False, table_column=Column(ratio=5, min_width=16)),
        TimeElapsedColumn(),
        TextColumn("left", style="dim"),
        TimeRemainingColumn(),
        console=Console(file=file),
        expand=True,
    )
    with bar:
        task = bar.add_task(visible(name), total=total, completed=start, status="")
        shown: dict[str, float] = {}  # with the newest evaluation, which stays in the bar until the next

        def report(step: int, metrics: Mapping[str, float]) -> None:
            shown.update(metrics)
            bar.update(task, completed=step, status=visible(status(shown)))

        yield report


def _plain_report(file: TextFile | None, name: str, total: int, start: int, every: int) -> Report:
    began = last_time = time.monotonic()
    last_step = start

    def report(step: int, metrics: Mapping[str, float]) -> None:
        nonlocal last_time, last_step
        now = time.monotonic()
        # Every long step gets a line, which shows that a batch job is still running.
        due = step - last_step >= every or now - last_time >= SILENCE
        if due or step == total or any(map(evaluated, metrics)):
            last_time, last_step = now, step
            shown = [name, f"{step}/{total}", status(metrics), _clock(now - began)]
            _print_line(" ".join(filter(None, shown)), file)

    return report


def status(metrics: Mapping[str, float]) -> str:
    """`reward 0.550 mismatch_kl 2.1e-02 eval dense 0.910`, as far as `metrics` has them."""
    parts = []
    if "reward" in metrics:
        parts.append(f"reward {metrics['reward']:.3f}")
    if "mismatch_kl" in metrics:
        parts.append(f"mismatch_kl {metrics['mismatch_kl']:.1e}")
    if rewards := [f"{way} {value:.3f}" for name, value in metrics.items() if (way := evaluated(name))]:
        parts.append(f"eval {', '.join(rewards)}")
    return " ".join(parts)


def _clock(seconds: float) -> str:
    """`0:01:20`; hours may exceed 24."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


# --- a rollout


def rollout_report(*, every: float = 10.0, file: TextFile | None = None) -> Callable[[Progress], None]:
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
        if progress.seconds - last_time < every and progress.finished != progress.rows:
            return
        last_time = progress.seconds
        _print_line(
            f"rollout {progress.finished}/{progress.rows} done, {progress.live}/{progress.decode_rows} rows live, "
            f"{progress.tokens:,} tokens, {progress.tokens / max(progress.seconds, 1e-9):,.0f} tokens/s, "
            f"{_clock(progress.seconds)}",
            file,
        )

    return report


# --- tables


def summary_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    texts: int = 0,
    file: TextFile | None = None,
    width: int | None = None,
) -> None:
    """Prints a table: the first column to the left, the others to the right, floats with four significant digits.

    If it does not fit the terminal, each row becomes a block of lines. A file or a pipe has room for any table.

    Args:
      texts: number of first columns with long texts, which share the terminal's width and are folded.
      file: output; None: standard output.
      width: columns of the table; None: those of the terminal.

    Raises:
      ValueError: the number of cells in a row differs from that of the columns.
    """
    for number, row in enumerate(rows):
        if len(row) != len(columns):
            raise ValueError(f"row {number}: expected {len(columns)} cells; got {len(row)}: {list(row)}")
    target = file or sys.stdout
    # An output without an encoding, such as StringIO, takes any text.
    encoding = (target.encoding or "utf-8").lower()
    table = Table(
        expand=texts > 0,
        show_lines=texts > 0,
        box=box.HEAVY_HEAD if encoding.startswith("utf") else box.ASCII,
    )
    for index, column in enumerate(columns):
        is_text = index < texts
        table.add_column(
            _text(column, encoding),
            ratio=1 if is_text else None,
            overflow="fold",
            justify="right" if index and not is_text else "left",
            no_wrap=not is_text,
        )
    cells = [[_text(format_cell(cell), encoding) for cell in row] for row in rows]
    for row in cells:
        table.add_row(*row)
    # Rendered to a string and printed as lines: a progress bar lets lines pass above it, but no other console.
    rendered = io.StringIO()
    if width is None:
        width = Console(file=file).width if texts or target.isatty() else UNLIMITED
    console = Console(file=rendered, width=width, force_terminal=target.isatty())
    options = console.options.update(max_width=UNLIMITED)
    fits = texts > 0 or Measurement.get(console, options, table).maximum <= width
    console.print(_text(title, encoding, "bold"), soft_wrap=True)  # rich would fold it at the width of the table
    console.print(table if fits else _blocks(columns, cells, encoding))
    print(rendered.getvalue(), end="", file=target, flush=True)


def _blocks(columns: Sequence[str], rows: Sequence[Sequence[Text]], encoding: str) -> Group:
    """Name and value of every cell, below the first cell of their row."""
    blocks: list[Text | Table] = []
    for first, *others in rows:
        block = Table.grid(padding=(0, 2))
        block.add_column()
        block.add_column(overflow="fold")
        for column, cell in zip(columns[1:], others, strict=True):
            block.add_row(_text(f"  {column}", encoding), cell)
        blocks += [first, block]
    return Group(*blocks)


def format_cell(cell: Cell) -> str:
    """Text unchanged, floats with four significant digits, integers with thousands separators, None as a dash."""
    if cell is None:
        return "-"
    if isinstance(cell, str | bool):
        return str(cell)
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:.4g}"


# --- outputs


def _print_line(line: str, file: TextFile | None) -> None:
    # Looked up at every line: during a bar, rich replaces standard output with a file that prints above it.
    print(visible(line), file=file or sys.stdout, flush=True)


def _text(content: str, encoding: str, style: str = "") -> Text:
    """Text without rich's markup, without escape sequences, and without characters that the output would refuse."""
    return Text(visible(content).encode(encoding, "backslashreplace").decode(encoding), style=style)
