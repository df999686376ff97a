"""Fail unless the installed wheel, and not the repository, provides both packages. Usage: check_wheel.py REPOSITORY."""

import sys
from pathlib import Path

import smd_jax
import smd_kernels

repository = Path(sys.argv[1]).resolve()
for package in (smd_jax, smd_kernels):
    folder = Path(package.__path__[0]).resolve()
    if folder.is_relative_to(repository):
        sys.exit(f"{package.__name__}: expected the installed wheel, got the repository's {folder}")
    if not (folder / "py.typed").is_file():
        sys.exit(f"{package.__name__}: expected py.typed in the wheel, got a wheel without it in {folder}")
    print(f"{package.__name__} comes from {folder}")
