"""The file of a run's metrics: one JSON object per step. docs/monitoring.md lists all names."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from smd_jax.disk import replaced

METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
STATM = Path("/proc/self/statm")  # Linux: sizes of this process in pages

Scalar = Array | np.ndarray | np.generic | float | int


def memory_in_use(statm: Path = STATM) -> dict[str, float]:
    """The `memory/*` metrics that are known on this machine, in bytes. Reads counters, and waits for no device."""
    found: dict[str, float] = {}
    if statm.is_file():
        # The second number is the resident memory.
        found["memory/host_bytes"] = float(int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    # A CPU has no statistics: its arrays are memory of the process.
    reports = [report for device in jax.local_devices() if (report := device.memory_stats())]
    for name, field in (("memory/device_bytes", "bytes_in_use"), ("memory/device_peak_bytes", "peak_bytes_in_use")):
        values = [float(report[field]) for report in reports if field in report]
        if values:
            found[name] = max(values)
    return found


def evaluated(name: str) -> str | None:
    """The evaluation whose mean reward this is: `dense` for `eval/dense` and `eval/dense/reward`; else None."""
    kind, _, rest = name.partition("/")
    what, _, value = rest.partition("/")
    return what if kind == "eval" and what and value in ("", "reward") else None


class MetricsWriter:
    """Appends one JSON object per step to a file, such as `{"step": 3, "reward": 0.5}`.

    Every line is flushed. Numbers are read back as the same double; NaN and infinities, which JSON lacks, become `null`
    (`read_metrics` returns NaN). With several processes only one may write a file.

    Args:
      path: the file; its directory is created if absent.
      next_step: None for a new run. For a resumed run, its first step: rows of that step and later ones are dropped, so
        that every step is in the file once, as is an incomplete last line.

    Raises:
      FileExistsError: `next_step` is None but the file holds rows.
      ValueError: a line that is not the last one cannot be read; nothing is changed then.
    """

    def __init__(self, path: str | Path, next_step: int | None = None) -> None:
        self.path = Path(path)
        rows = _read_lines(self.path)
        if next_step is None and rows:
            raise FileExistsError(
                f"expected no metrics in {self.path} for a new run; got {len(rows)} rows. Resume with next_step=..., "
                f"or take another directory"
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [(step, line) for step, line in rows if next_step is not None and step < next_step]
        # Checked before it is replaced: a file with an unreadable line stays unchanged.
        with replaced(self.path) as temporary, open(temporary, "wb") as file:
            file.writelines(line + b"\n" for _, line in kept)
            file.flush()
            # On the disk before the rename: otherwise a power cut could leave an empty file.
            os.fsync(file.fileno())
        self._last_step = max((step for step, _ in kept), default=None)
        self._file = open(self.path, "ab")  # noqa: SIM115 - closed by close()

    def write(self, step: int, metrics: Mapping[str, Scalar]) -> dict[str, float | int | None]:
        """Writes one row and returns it as host numbers, fetched from the devices in one transfer.

        Raises:
          ValueError: `step` is not later than the last row, or a metric is no scalar or is called `step`.
        """
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"expected a step later than {self._last_step}, the last in {self.path}; got {step}")
        if "step" in metrics:
            raise ValueError(f"expected metrics without the reserved name 'step'; got {sorted(metrics)}")
        row: dict[str, float | int | None] = {"step": step}
        for name, value in jax.device_get(dict(metrics)).items():
            if np.shape(value) != ():
                raise ValueError(f"expected a scalar as metric {name!r}; got shape {np.shape(value)}")
            number = np.asarray(value).item()
            if not isinstance(number, bool | int | float):
                raise ValueError(f"expected a real number as metric {name!r}; got {type(number).__name__} {number!r}")
            row[name] = number if math.isfinite(number) else None  # JSON has neither NaN nor infinity
        self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        self._file.flush()
        self._last_step = step
        return row

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics file in their order; `null` becomes NaN, an incomplete last line is skipped.

    Raises:
      FileNotFoundError: no such file.
      ValueError: another line cannot be read; the message names its number.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"expected a metrics file; found none at {path}")
    rows = [json.loads(line) for _, line in _read_lines(Path(path))]
    return [{name: math.nan if value is None else value for name, value in row.items()} for row in rows]


def _read_lines(path: Path) -> list[tuple[int, bytes]]:
    """(step, line without its newline) of every row; empty without a file."""
    if not path.is_file():
        return []
    # Every complete row ends with a newline, so that the rest is empty or incomplete.
    *lines, tail = path.read_bytes().split(b"\n")
    # A crash may cut off the newline only; then the row is complete.
    with suppress(ValueError):
        json.loads(tail)
        lines.append(tail)
    return [(_step_of(path, number, line), line) for number, line in enumerate(lines, start=1)]


def _step_of(path: Path, number: int, line: bytes) -> int:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: expected a JSON object; got {line[:80]!r}") from error
    # `type` rather than isinstance, because True is an int in Python.
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        raise ValueError(f"{path}, line {number}: expected a JSON object with an integer 'step'; got {line[:80]!r}")
    return row["step"]
