"""The host threads that JAX's interpreter of GPU kernels needs: with too few it hangs.

The interpreter runs each Pallas thread as its own XLA:CPU program, inside a callback of the program that called the
kernel. The callback blocks a thread of XLA's pool, and so does every Pallas thread that waits at a barrier. The pool
needs one more thread than the kernel: with fewer, all may wait for a Pallas thread that cannot start.
"""

from __future__ import annotations

import os

import jax


def check_host_threads(pallas_threads: int) -> None:
    """Raises ValueError if interpreting a kernel with this many threads per block could hang."""
    needed = pallas_threads + 1
    found = host_threads()
    if found < needed:
        raise ValueError(
            f"expected at least {needed} host threads to interpret a GPU kernel of {pallas_threads} threads, which "
            f"would hang with fewer; got {found}: call jax.config.update('jax_num_cpu_devices', {needed}) before JAX "
            "first uses its devices"
        )


def host_threads() -> int:
    """Threads in XLA:CPU's pool: one per core or per CPU device, whichever is more."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores, len(jax.local_devices(backend="cpu")))
