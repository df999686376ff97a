"""Compiled programs stay on disk: the second start of a command finds what the first one compiled."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import jax


def default_folder() -> Path:
    """The folder in the user's caches, by the XDG convention. Raises RuntimeError for a user without a home."""
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "smd_jax" / "programs"


def keep_programs(folder: Path | None = None) -> None:
    """Keeps every program that is compiled from now on, for this and other processes; says where when it begins to.

    Args:
      folder: where; None: `default_folder()`.

    JAX_COMPILATION_CACHE_DIR names another folder, and an empty one keeps nothing. JAX tells programs of other versions
    and machines apart, so that an old folder does no harm.
    """
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        # Small ones, too: a start runs hundreds of them.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    try:
        folder = folder or default_folder()
        if not folder.exists():
            folder.mkdir(parents=True, exist_ok=True)  # now, so that no other process says it again
            print(f"compiled programs are kept in {folder} (or JAX_COMPILATION_CACHE_DIR)", file=sys.stderr)
    except (OSError, RuntimeError) as error:  # no home, or one that cannot be written
        print(f"compiled programs are not kept: {error}. Set JAX_COMPILATION_CACHE_DIR to a folder", file=sys.stderr)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
