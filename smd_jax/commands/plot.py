"""smd-plot: curves of runs, and their shadow masks.

    smd-plot runs/train runs/other                 writes runs.html, one page that needs no network
    smd-plot runs/train --out curves.png           only the curves, as a picture; .svg, too

A directory may be a run, or hold several at any depth. --config FILE reads options from a YAML file; flags override
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from smd_jax.commands.command_line import parse_words
from smd_jax.commands.config_file import with_file
from smd_jax.commands.console_scripts import smd_plot
from smd_jax.commands.errors import UserError, as_user_errors, report_errors
from smd_jax.commands.places import full_path
from smd_jax.monitor.page import write_page
from smd_jax.monitor.run_plots import plot_runs


@dataclass(frozen=True, kw_only=True)
class Args:
    """Draws runs."""

    runs: tyro.conf.Positional[tuple[Path, ...]]  # directories of runs, or their parents
    out: Path = Path("runs.html")  # .html, .png or .svg
    title: str = "smd_jax"  # of the page


def main(words: Sequence[str] | None = None) -> None:
    """The console script."""
    with report_errors(words) as given:
        run(parse_words(Args, "smd-plot", __doc__ or "", with_file(given, Args)))


def run(args: Args) -> None:
    """Writes the file and prints its path."""
    if not args.runs:
        raise UserError("expected at least one directory of a run; got none")
    out = full_path(args.out)
    if out.suffix not in (".html", ".png", ".svg"):
        raise UserError(f"expected --out to end in .html, .png or .svg; got {out}")
    with as_user_errors():
        if out.suffix == ".html":
            write_page(args.runs, out, args.title)
        else:
            plot_runs(args.runs, out)
    print(out)


if __name__ == "__main__":
    smd_plot()
