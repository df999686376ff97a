"""Persistent compilation cache: the second start of a command reuses the compiled programs of the first."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import jax


def cache_programs() -> None:
    """Caches compiled programs on disk from now on; prints the folder when it creates it.

    The folder is `smd_jax/programs` in the user's cache folder, by the XDG convention. JAX_COMPILATION_CACHE_DIR sets
    another one; an empty value disables the cache. JAX keys programs by version and machine, so an old folder does no
    harm.
    """
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        # Also small programs: a start runs hundreds of them.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    try:
        caches = os.environ.get("XDG_CACHE_HOME")
        folder = (Path(caches) if caches else Path.home() / ".cache") / "smd_jax" / "programs"
        if not folder.exists():
            folder.mkdir(parents=True, exist_ok=True)  # now, so that other processes do not print the line again
            print(f"compiled programs are cached in {folder} (or JAX_COMPILATION_CACHE_DIR)", file=sys.stderr)
    except (OSError, RuntimeError) as error:  # no home, or no permission to write
        print(f"compiled programs are not kept: {error}. Set JAX_COMPILATION_CACHE_DIR to a folder", file=sys.stderr)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
