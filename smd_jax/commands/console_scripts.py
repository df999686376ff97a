"""The console scripts. Each checks for the packages of the extra `train`, then imports and runs its command."""

from __future__ import annotations

import errno
import io
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Packages that the commands import at the top.
NEEDED = ("tyro", "rich", "yaml", "datasets", "pyarrow", "matplotlib")


def run(command: str) -> None:
    """Runs the `main` of a module of `smd_jax.commands`; `--version` imports none.

    A command continues if its output cannot be written, so that no run is lost, and then exits with status 1. The
    status is 2 if packages are not installed or the current folder was removed.
    """
    _open_standard_streams()
    output: Any = Output(sys.stdout)
    sys.stdout = output
    status: int | str | None = 0
    try:
        _run(command)
    except SystemExit as end:
        status = end.code
    output.flush()
    if status or output.failed:
        raise SystemExit(status or 1)


class Output:
    """Standard output that discards everything after the first failed write; `failed` says whether one has failed."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.failed = False

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            self.failed = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # standard output, also of child processes
            if error.errno != errno.EPIPE:
                print(f"expected to write to standard output; got: {error.strerror}. The rest is lost", file=sys.stderr)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _open_standard_streams() -> None:
    """Opens the null device for each closed standard descriptor.

    Otherwise the next opened file would get its number and receive the printed output.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: no character of a text may end a run


def set_home() -> None:
    """Sets HOME to a temporary folder if the user has no home, as in containers with an arbitrary user id.

    Without it, Hugging Face's packages would create a folder named `~` for their caches.
    """
    if os.path.expanduser("~") != "~":
        return
    folder = Path(tempfile.gettempdir()) / f"smd_jax-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        is_ours = folder.stat().st_uid == os.getuid() and not folder.is_symlink()
    except OSError:
        is_ours = False
    os.environ["HOME"] = str(folder) if is_ours else tempfile.mkdtemp(prefix="smd_jax-")
    print(f"expected a home folder; got none: caches are kept in {os.environ['HOME']}. Set HOME", file=sys.stderr)


def _run(command: str) -> None:
    if sys.argv[1:] == ["--version"]:
        print(f"smd_jax {version('smd_jax')}")
        return
    try:
        os.getcwd()
    except FileNotFoundError:
        print("expected a current folder; got one that was removed: change to another", file=sys.stderr)
        raise SystemExit(2) from None
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        packages = ", ".join(missing)
        print(f"expected the packages {packages}; got none: pip install 'smd_jax[train]'", file=sys.stderr)
        raise SystemExit(2)
    set_home()
    import_module(f"smd_jax.commands.{command}").main()


smd_train = partial(run, "train")
smd_eval = partial(run, "evaluate")
smd_export = partial(run, "export")
smd_plot = partial(run, "plot")
smd_certify = partial(run, "certify")
