"""Rows of a study as JSON: a list, one row per line, written atomically; of a large study one file per task."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from smd_jax.disk import replaced

Row = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "experiments" / "results"


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, or of all files of a folder; none if it is missing."""
    if path.is_dir():
        return [row for file in sorted(path.glob("*.json")) for row in read_rows(file)]
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes a JSON list, one row per line; a path without an ending is a folder with a file per task."""
    if not path.suffix:
        for task in sorted({row["task"] for row in rows}):
            write_rows(path / f"{task}.json", [row for row in rows if row["task"] == task])
        return
    lines = ",\n".join(json.dumps(row, allow_nan=False) for row in rows)
    write_text(path, f"[\n{lines}\n]\n")


def merged(path: Path, rows: Sequence[Row], key: Callable[[Row], Any]) -> list[Row]:
    """The rows of a file with these added, in the order of `key`; of two rows with one key the new one stays."""
    new = {key(row) for row in rows}
    return sorted([row for row in read_rows(path) if key(row) not in new] + list(rows), key=key)


def write_text(path: Path, text: str) -> None:
    """Writes the file in one move, so that a stopped study leaves no partial file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_kept(path: Path, settings: str) -> Row | None:
    """The kept row of a run; None without one.

    Raises:
      ValueError: if the run had other settings.
    """
    if not path.exists():
        return None
    stored = json.loads(path.read_text(encoding="utf-8"))
    if stored["settings"] != settings:
        raise ValueError(
            f"expected in {path} a run of the present settings {settings}; got {stored['settings']}. Remove the "
            "folder, or name another one with --runs"
        )
    return stored["row"]


def write_kept(path: Path, settings: str, row: Row) -> None:
    """Writes the file that `read_kept` reads."""
    write_text(path, json.dumps({"settings": settings, "row": row}, allow_nan=False))


def settings_text(value: object) -> str:
    """repr without the fields at their default: a new or deleted option leaves the rows of a study valid."""
    if isinstance(value, tuple):
        return f"({', '.join(map(settings_text, value))})"
    if not is_dataclass(value) or isinstance(value, type):
        return repr(value)
    changed = [(field.name, found) for field in fields(value) if (found := getattr(value, field.name)) != field.default]
    return f"{type(value).__name__}({', '.join(f'{name}={settings_text(found)}' for name, found in changed)})"


def fingerprint(settings: str) -> str:
    """Hash of a run's settings, stored in its row."""
    return hashlib.sha256(settings.encode()).hexdigest()[:16]


def number(value: float) -> float | None:
    """Rounds to six significant digits; None for NaN and infinities, which JSON lacks."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
