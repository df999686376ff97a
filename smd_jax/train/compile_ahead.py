"""An update that is compiled while the first rollout runs.

A rollout and an update are programs that take about as long to compile, and a compiler seldom has work for all cores of
a machine. One after the other, an update waits for the first rollout to be compiled and run:

    main thread     trace update ─► trace rollout ─► compile rollout ─► run rollout ─► update
    beside it            └────────► compile update ────────────────────────────────────┘
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax
from jax.sharding import Mesh

from smd_jax.devices.sharding import batch_sharding


@contextmanager
def compiling(lowered: jax.stages.Lowered, mesh: Mesh) -> Iterator[None]:
    """Compiles a program beside the body, and waits for it at the end. Calls that come later under `jax.set_mesh(mesh)`
    find it compiled.

    Raises:
      Exception: whatever the compiler raised.
    """

    def compile() -> None:
        # JAX looks a program up by the mesh that is set, too, and in a thread of its own none is.
        with jax.set_mesh(mesh):
            lowered.compile()
        return_freed_memory()

    # A thread is enough: a compiler lets other threads run. Tracing does not, and is done by now.
    with ThreadPoolExecutor(1) as pool:
        compiled = pool.submit(compile)
        yield
    compiled.result()


def rows_on(shapes: Any, mesh: Mesh) -> Any:
    """Shapes `[rows, ...]` with the shardings that `smd_jax.devices.sharding.shard_batch` gives to arrays.

    A program that is lowered for other shardings is another program.
    """
    sharding = batch_sharding(mesh)
    return jax.tree.map(lambda x: x.update(sharding=sharding), shapes)


def return_freed_memory() -> None:
    """Gives the system back what the process has freed: a compiler frees hundreds of megabytes, and glibc keeps them.
    Other C libraries don't."""
    if hasattr(_C_LIBRARY, "malloc_trim"):
        _C_LIBRARY.malloc_trim(0)


_C_LIBRARY = ctypes.CDLL(None)
