"""Compiles a program while the main thread works on."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import jax
from jax.sharding import Mesh


@contextmanager
def compiling(lowered: jax.stages.Lowered, mesh: Mesh) -> Iterator[None]:
    """Compiles a program in a thread during the body, and waits for it at the end.

    Later calls under `jax.set_mesh(mesh)` find it compiled. Errors of the compiler are raised at the end. A rollout and
    an update take about as long to compile, and a compiler seldom uses all cores of a machine:

        main thread     trace update ─► trace rollout ─► compile rollout ─► run rollout ─► update
        a thread             └────────► compile update ────────────────────────────────────┘
    """

    def compile() -> None:
        # The mesh is part of the key under which JAX caches a program, and a new thread has none.
        with jax.set_mesh(mesh):
            lowered.compile()
        return_freed_memory()

    # A thread is enough, because the compiler releases the lock of Python; tracing does not, and is over.
    with ThreadPoolExecutor(1) as pool:
        compiled = pool.submit(compile)
        yield
    compiled.result()


def return_freed_memory() -> None:
    """Returns freed memory to the system: a compiler frees hundreds of megabytes, which glibc keeps."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
