"""The progress bar and the framed table, by rich; `smd_jax.monitor.progress` imports this module where it can."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

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

TextFile = io.TextIOWrapper | io.StringIO


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
        task = bar.add_task(name, total=total, completed=start, status="")

        def update(step: int, status: str) -> None:
            bar.update(task, completed=step, status=status)

        yield update


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], file: TextFile | None, width: int | None
) -> None:
    """The first column to the left, the others to the right."""
    # Text objects, so that brackets in a title or cell are not taken for rich's markup.
    table = Table(title=Text(title, style="bold"))
    for index, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if index else "left")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(file=file, width=width).print(table)
