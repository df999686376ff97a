"""Runs the engines of a benchmark as processes that take turns, and writes their rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.provenance import provenance

Row = dict[str, Any]
ENGINES = Path(__file__).parent / "engines"


def engine(name: str, settings: Row, python: str = sys.executable) -> list[str]:
    """The command line of an engine, a script in `bench/engines`."""
    return [python, str(ENGINES / f"{name}.py"), json.dumps(settings)]


@dataclass
class Worker:
    """A running engine. It writes a JSON line when it is ready, after every turn, and with its result."""

    command: list[str]
    process: subprocess.Popen[str] = field(init=False)

    def __enter__(self) -> Worker:
        pipe = subprocess.PIPE
        # A peer must not import our packages.
        hidden = () if self.command[0] == sys.executable else ("PYTHONPATH", "VIRTUAL_ENV")
        own = {name: value for name, value in os.environ.items() if name not in hidden}
        self.process = subprocess.Popen(self.command, stdin=pipe, stdout=pipe, text=True, env=own)
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()

    def turn(self) -> None:
        """Runs one turn (an update or a generation) and waits for it."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.read()

    def read(self) -> Row:
        """Returns the next JSON line of its output; raises SystemExit if the output has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"expected a line of JSON; got the end of the output of {' '.join(self.command)}")
        return json.loads(line)


def take_turns(repeats: int, engines: Iterable[list[str]]) -> list[Row]:
    """One row per engine, given as a command line. Turns alternate, so that noise hits all engines alike."""
    with ExitStack() as stack:
        workers = []
        for command in engines:
            workers.append(stack.enter_context(Worker(command)))
            workers[-1].read()  # it is compiled and warm before the next one starts
        for _ in range(repeats):
            for worker in workers:
                worker.turn()
        rows = [worker.read() for worker in workers]
    if len(models := {row["parameters"] for row in rows}) > 1:
        raise SystemExit(f"expected one model in all engines; got models of {sorted(models)} parameters")
    return rows


def keep(rows: list[Row], out: Path | None) -> None:
    """Prints each row as JSON and, given `out`, writes all rows to it with their provenance."""
    for row in rows:
        print(json.dumps(row), flush=True)
    if out is not None:
        write(out, rows)


def write(path: Path, rows: list[Row], more: Row | None = None) -> None:
    """Writes the rows with their provenance."""
    result = provenance(packages=()) | (more or {}) | {"rows": rows}
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
