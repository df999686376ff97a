"""The progress bar, the live panel and the framed tables, by rich; the modules beside it import this where they can."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from smd_jax.text.visible_text import visible

TextFile = io.TextIOWrapper | io.StringIO


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
    """The first column to the left, the others to the right."""
    table = Table(title=_text(title, style="bold"))
    for index, column in enumerate(columns):
        table.add_column(_text(column), justify="right" if index else "left")
    for row in rows:
        table.add_row(*(_text(cell) for cell in row))
    Console(file=file, width=width).print(table)


@runtime_checkable
class Status(Protocol):
    """What a panel shows, as `smd_jax.monitor.panel.RunStatus` has it."""

    @property
    def name(self) -> str: ...

    @property
    def step(self) -> int: ...

    @property
    def total(self) -> int: ...

    def headline(self) -> str: ...

    def rows(self) -> list[tuple[str, str]]: ...


@contextmanager
def live_panel(status: Status, file: TextFile | None) -> Iterator[None]:
    """Keeps a panel of `status` at the bottom of the terminal; what is printed meanwhile appears above it."""
    with Live(_StatusPanel(status), console=Console(file=file), refresh_per_second=2):
        yield


class _StatusPanel:
    """Drawn anew whenever rich looks: the clocks in it go on during a step."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def __rich__(self) -> Panel:
        status = self._status
        rows = Table.grid(padding=(0, 2))
        rows.add_column(justify="right", style="dim")
        rows.add_column(overflow="ellipsis", no_wrap=True)
        for name, text in status.rows():
            rows.add_row(_text(name), _text(text))
        return Panel(
            Group(rows, ProgressBar(total=max(status.total, 1), completed=status.step)),
            title=_text(f" {status.name} "),
            title_align="left",
            subtitle=_text(f" {status.headline()} "),
            subtitle_align="right",
        )


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
    # Drawn elsewhere and printed as lines: a live panel lets lines pass above it, but not another console.
    drawn = io.StringIO()
    wide = Console(file=file, width=width).width
    Console(file=drawn, width=wide, force_terminal=target.isatty()).print(table)
    print(drawn.getvalue(), end="", file=target, flush=True)
