"""The console scripts. Each checks for the packages of the extra `train`, then imports and runs its command."""

from __future__ import annotations

import errno
import io
import os
import sys
import tempfile
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

STDOUT = 1
# A closed pipe, a full disk, a full quota, the file size limit, a closed terminal.
UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

# Packages that the commands import at the top.
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

    A command continues if its output cannot be written, so that no run is lost.

    Raises:
      SystemExit: with status 2 if packages are not installed or the current folder was removed; with status 1 if the
        command succeeded, but its output could not be written.
    """
    _open_standard_streams()
    output = Output()
    sys.stdout.flush()
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(output), encoding, errors, line_buffering=output.isatty())
    status: int | str | None = 0
    try:
        if sys.argv[1:] == ["--version"]:
            print(f"smd_jax {version('smd_jax')}")
        else:
            _run(command)
    except SystemExit as end:
        status = end.code
    sys.stdout.flush()
    if status or output.failed:
        raise SystemExit(status or 1)


class Output(io.RawIOBase):
    """Standard output that discards everything after the first failed write.

    Attributes:
      failed: whether a write has failed.
    """

    failed = False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return STDOUT

    def isatty(self) -> bool:
        return os.isatty(STDOUT)

    def write(self, data: Any, /) -> int:
        try:
            return os.write(STDOUT, data)
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise
            self.failed = True
            # Child processes inherit the null device.
            os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
            if error.errno != errno.EPIPE:
                print(f"expected to write to standard output; got: {error.strerror}. The rest is lost", file=sys.stderr)
            return len(memoryview(data))


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
    try:
        os.getcwd()
    except FileNotFoundError:
        print("expected a current folder; got one that was removed: change to another", file=sys.stderr)
        raise SystemExit(2) from None
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        packages = ", ".join(missing)
        print(f"expected the packages {packages}; got none: pip install -e '.[train]'", file=sys.stderr)
        raise SystemExit(2)
    set_home()
    import_module(f"smd_jax.commands.{command}").main()
