"""The console scripts: each checks for the packages of the extra `train`, and then imports and runs its command."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec

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
    """Runs the `main` of a module of `smd_jax.commands`.

    Raises:
      SystemExit: with status 2, for packages that are not installed.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        said = f"the commands of smd_jax need {', '.join(missing)}, not installed here: pip install -e '.[train]'"
        print(said, file=sys.stderr)
        raise SystemExit(2)
    import_module(f"smd_jax.commands.{command}").main()
