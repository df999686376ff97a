"""The progress bar and the framed tables, with rich; the other modules import this one only where rich is installed."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.cells import cell_len
from rich.console import Console, Group
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

from smd_jax.text.visible_text import visible

TextFile = io.TextIOWrapper | io.StringIO


UNLIMITED = 10_000  # columns of a table in a file
CELL_FRAME = 3  # columns of a border and of the spaces around a cell
MIN_FIRST = 10  # columns of the first cell and the table's last border, at least


def _text(content: str, style: str = "") -> Text:
    """Somebody's text: brackets in it are no markup of rich's, and it holds no escape sequence."""
    return Text(visible(content), style=style)


@contextmanager
def progress_bar(name: str, total: int, start: int, file: TextFile | None) -> Iterator[Callable[[int, str], None]]:
    """Gives `update(step, status)`, which moves the bar and changes the text beside it."""
    bar = Progress(
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

        def update(step: int, status: str) -> None:
            bar.update(task, completed=step, status=visible(status))

        yield update


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], file: TextFile | None, width: int | None
) -> None:
    """Prints the first column to the left, and the others to the right and never cut off.

    A terminal that is too narrow for the other columns gets a block of lines for each row. A file or a pipe has room
    for any table.
    """
    console = Console(file=file, width=width)
    others = sum(max(map(cell_len, column)) + CELL_FRAME for column in list(zip(columns, *rows, strict=True))[1:])
    table = Table(title=_text(title, style="bold"), title_justify="left")
    for index, column in enumerate(columns):
        if index:
            table.add_column(_text(column), justify="right", no_wrap=True)
        else:
            table.add_column(_text(column), overflow="fold")
    for row in rows:
        table.add_row(*(_text(cell) for cell in row))
    if width is None and not console.is_terminal:
        whole = console.measure(table, options=console.options.update(max_width=UNLIMITED)).maximum
        console.width = max(console.width, whole)
    if len(columns) == 1 or others + MIN_FIRST <= console.width:
        console.print(table)
    else:
        console.print(_blocks(title, columns, rows))


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


def print_texts(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    texts: int,
    file: TextFile | None,
    width: int | None,
) -> None:
    """A table whose first `texts` columns share the width and are folded; the others are numbers."""
    table = Table(title=_text(title, style="bold"), expand=True, show_lines=True)
    for index, column in enumerate(columns):
        if index < texts:
            table.add_column(_text(column), ratio=1, overflow="fold")
        else:
            table.add_column(_text(column), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(_text(cell) for cell in row))
    target = file or sys.stdout
    # Drawn elsewhere and printed as lines: a progress bar lets lines pass above it, but not another console.
    drawn = io.StringIO()
    wide = Console(file=file, width=width).width
    Console(file=drawn, width=wide, force_terminal=target.isatty()).print(table)
    print(drawn.getvalue(), end="", file=target, flush=True)
