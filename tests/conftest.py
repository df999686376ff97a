"""Eight fake CPU devices, a compilation cache that outlives the run, and no silent rank promotion.

The environment is set before JAX first asks for its devices: XLA reads it once.
"""

import ctypes
import gc
import itertools
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import chex
import jax
import pytest

chex.set_n_cpu_devices(8)

# Most of the time goes to compilation. Keys hold the versions of JAX and of the compiler: stale entries are not found.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    jax.config.update("jax_compilation_cache_dir", str(Path(__file__).resolve().parents[1] / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)

# [queries, keys] + [keys] is more often a forgotten axis than a wish; who means it writes `[None, :]`.
jax.config.update("jax_numpy_rank_promotion", "raise")

MAPS = Path("/proc/self/maps")
MEMORY = Path("/proc/self/statm")
MAX_MAPS = 20_000
MAX_BYTES = 1_200_000_000
TESTS_DONE = itertools.count(1)


@pytest.fixture(scope="module")
def quick_compilation():
    """For modules that compile many programs and run each a few times: the compiler spares itself the polish."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


class Programs:
    """Compiled programs stay until somebody drops them; here, when they take too much.

    Linux lets a process have 65,530 memory maps, and every compiled program takes some: at the limit XLA crashes. And
    two workers have to fit into a laptop.
    """

    def __init__(self) -> None:
        self.max_bytes = MAX_BYTES

    def drop_if_many(self) -> None:
        too_large = MEMORY.exists() and resident_bytes() > self.max_bytes
        if not too_large and not (next(TESTS_DONE) % 16 == 0 and MAPS.exists() and maps() > MAX_MAPS):
            return
        jax.clear_caches()
        gc.collect()
        return_freed_memory()
        # What is left are modules and arrays: clearing for them after every test would only compile everything anew.
        self.max_bytes = max(MAX_BYTES, resident_bytes() + MAX_BYTES // 4)


PROGRAMS = Programs()


def resident_bytes() -> int:
    return int(MEMORY.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def maps() -> int:
    return MAPS.read_bytes().count(b"\n")


def return_freed_memory() -> None:
    """glibc keeps freed memory for the process, which the limit counts all the same; other C libraries don't."""
    if hasattr(C_LIBRARY, "malloc_trim"):
        C_LIBRARY.malloc_trim(0)


C_LIBRARY = ctypes.CDLL(None)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    PROGRAMS.drop_if_many()
