"""The console scripts: each checks for the packages of the extra `train`, and then imports and runs its command."""

from __future__ import annotations

import errno
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


def smd_certify() -> None:
    run("certify")


def run(command: str) -> None:
    """Runs the `main` of a module of `smd_jax.commands`; `--version` imports none.

    Raises:
      SystemExit: with status 2 if packages are not installed or the current folder was removed; with status 1 if
        nothing reads the output, or the disk that it goes to is full.
    """
    try:
        if sys.argv[1:] == ["--version"]:
            print(f"smd_jax {version('smd_jax')}")
        else:
            _run(command)
        sys.stdout.flush()
    except OSError as error:
        _discard_output(error)
        raise SystemExit(1) from None
    except SystemExit:
        # Writes the help now. At the exit of Python an error would be a traceback.
        try:
            sys.stdout.flush()
        except OSError as error:
            _discard_output(error)
        raise


def _discard_output(error: OSError) -> None:
    """Sends the rest of stdout nowhere, because Python would write it again at its exit.

    Raises the error if it is about another file.
    """
    if error.errno not in (errno.EPIPE, errno.ENOSPC) or error.filename is not None:
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
    if error.errno == errno.ENOSPC:
        print(f"expected room for the output; got {error.strerror}", file=sys.stderr)


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
