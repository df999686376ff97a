"""The console scripts: each checks for the packages of the extra `train`, and then imports and runs its command."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

STDOUT = 1

# Imported by the commands at their top.
NEEDED = ("tyro", "rich", "yaml", "datasets", "pyarrow", "matplotlib")


def smd_train() -> None:
    run("train")


def smd_eval() -> None:
    run("evaluate")


def smd_export() -> None:
    run("export")


def smd_plot() -> None:
    run("plot")


def run(command: str) -> None:
    """Runs the `main` of a module of `smd_jax.commands`; `--version` imports none.

    Raises:
      SystemExit: with status 2, for packages that are not installed, or where the current folder was removed; with 1
        and without a word where nothing reads what is printed.
    """
    try:
        if sys.argv[1:] == ["--version"]:
            print(f"smd_jax {version('smd_jax')}")
        else:
            _run(command)
        sys.stdout.flush()
    except BrokenPipeError:
        _leave_pipe()
        raise SystemExit(1) from None
    except SystemExit:
        # What --help printed is written now, and not at the exit, where an error would be a traceback.
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            _leave_pipe()
        raise


def _leave_pipe() -> None:
    """What is still to be written goes nowhere: Python would try again at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)


def _open_standard_streams() -> None:
    """Opens the null device for each of the first three descriptors that is closed: another file would get its number,
    and what is printed."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number, which is this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115


def _run(command: str) -> None:
    _open_standard_streams()
    try:
        os.getcwd()
    except FileNotFoundError:
        print("expected a current folder; got one that was removed: change to another", file=sys.stderr)
        raise SystemExit(2) from None
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        said = f"the commands of smd_jax need {', '.join(missing)}, not installed here: pip install -e '.[train]'"
        print(said, file=sys.stderr)
        raise SystemExit(2)
    import_module(f"smd_jax.commands.{command}").main()
