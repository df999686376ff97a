"""Provenance of a result: date, command, commit, versions, CPU.

Speeds depend on the machine: the same commit was 3.4 times as fast as kvpress on one CPU and 2.0 times on another.

Standard library only, so that a script can use it before it imports JAX.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CPU_FACTS = {"family": "cpu family", "model": "model", "stepping": "stepping"}


def provenance(packages: Sequence[str] = ("jax", "jaxlib", "flax")) -> dict[str, Any]:
    """Date, command, commit, versions and CPU of the running script."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": command_line(),
        "commit": commit(),
        "cpu": cpu(),
        "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in packages},
    }


def command_line() -> str:
    """The command as typed in the repository; of absolute paths only the last name."""
    script = Path(sys.argv[0]).resolve()
    shown = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return shlex.join(["python", str(shown), *words])


def commit() -> str:
    """Short hash of the running code, with a "+" if tracked files have changed.

    Results do not count: a study writes them while it runs.
    """
    try:
        head = git("rev-parse", "--short", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":!experiments/results")
    except (FileNotFoundError, subprocess.CalledProcessError):  # no git, or sources without history
        return "not recorded"
    return f"{head}+" if changed else head


def clean_commit() -> str:
    """`commit()` of a result that will be reported.

    Raises:
      RuntimeError: if tracked files differ from the commit, or there is no commit.
    """
    found = commit()
    if not is_clean(found):
        raise RuntimeError(
            f"expected a clean commit for a reported row; got {found}. Commit the changes, or use a clone"
        )
    return found


def is_clean(commit: str) -> bool:
    """Whether a recorded commit names the code that ran."""
    return not commit.endswith("+") and commit != "not recorded"


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def cpu() -> str:
    """Number and name of the CPUs, with family, model and stepping: some hypervisors use one name for several CPUs."""
    listing = Path("/proc/cpuinfo")
    if not listing.exists():
        return f"{os.cpu_count()} x {platform.processor() or platform.machine()}"
    return describe_cpu(listing.read_text(encoding="utf-8"), os.cpu_count() or 1)


def describe_cpu(listing: str, count: int) -> str:
    """Reads the text of /proc/cpuinfo; on ARM, which lists no name, the name is the architecture."""
    name = found(listing, "model name") or platform.machine()
    numbers = [f"{short} {value}" for short, field in CPU_FACTS.items() if (value := found(listing, field))]
    return f"{count} x {name}" + (f" ({', '.join(numbers)})" if numbers else "")


def found(listing: str, field: str) -> str | None:
    """The value of a field of the first processor."""
    match = re.search(rf"^{re.escape(field)}\s*:\s*(.+)$", listing, re.MULTILINE)
    return match[1].strip() if match else None
