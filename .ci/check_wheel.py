"""Checks the installed wheel as a user meets it. Usage: check_wheel.py REPOSITORY

1. Both packages come from the wheel, not from the repository.
2. `smd-train --help` works.
3. `smd-train` makes a small run, and `smd-plot` an HTML page and a PNG of it.
4. The README's script, `experiments/grpo.py`, trains two steps.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import smd_jax
import smd_kernels
from smd_jax.testing import tiny_model_config, write_random_checkpoint

SCRIPTS = Path(sys.executable).parent
RUN = (
    *("grpo", "--dataset", "reasoning_gym:distractor_sort", "--dataset-size", "20", "--max-steps", "2"),
    *("--dataset-parameters", "num_digits=3", "num_distractors=4", "--num-prompts", "2", "--num-generations", "2"),
    *("--max-completion-length", "5", "--eviction", "h2o", "--budget", "8", "--buffer", "2", "--sinks", "1"),
    *("--eval-steps", "1", "--eval-rows", "4", "--reward-timeout", "None"),
)


def main(repository: Path) -> None:
    for package in (smd_jax, smd_kernels):
        check_package(Path(package.__path__[0]).resolve(), package.__name__, repository)
    command("smd-train", "--help")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_random_checkpoint(folder / "model", config=tiny_model_config(num_layers=1))
        command("smd-train", *RUN, "--model", str(folder / "model"), "--output-dir", str(folder / "run"))
        for name, start in (("page.html", b"<!doctype html>"), ("curves.png", b"\x89PNG")):
            command("smd-plot", str(folder / "run"), "--out", str(folder / name))
            check_start(folder / name, start)
        check_start(folder / "run" / "training.png", b"\x89PNG")
    command(sys.executable, "-I", str(repository / "experiments" / "grpo.py"), "--steps", "2")


def check_package(folder: Path, name: str, repository: Path) -> None:
    if folder.is_relative_to(repository):
        sys.exit(f"{name}: expected the installed wheel; got the repository's {folder}")
    if not (folder / "py.typed").is_file():
        sys.exit(f"{name}: expected py.typed in the wheel; got a wheel without it in {folder}")
    print(f"{name} comes from {folder}")


def command(name: str, *words: str) -> None:
    """Runs an installed command or a program; ends with its output where it fails."""
    print(f"{name} {' '.join(words)}", flush=True)
    done = subprocess.run([SCRIPTS / name, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        sys.exit(f"{name}: expected exit status 0; got {done.returncode}:\n{done.stdout}")


def check_start(file: Path, start: bytes) -> None:
    found = file.read_bytes()[: len(start)]
    if found != start:
        sys.exit(f"{file.name}: expected a file that begins with {start!r}; got {found!r}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
