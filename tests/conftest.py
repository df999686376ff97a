"""Eight fake CPU devices, fast compilation, a persistent compilation cache, and errors at rank promotion.

The environment is set before JAX first asks for its devices: XLA reads it once.
"""

import ctypes
import gc
import itertools
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Scripts that tests run share the cache. Its keys hold the versions of JAX and XLA, so stale entries are not found.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).resolve().parents[1] / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")

import chex
import jax
import pytest

# Most of the time goes to compiling programs that run once, on small arrays. Without LLVM's optimizations, without the
# emitters that send every fusion through MLIR, and in one module, a train step takes a fifth of the CPU time to compile
# (1.7 s instead of 8.3). HLO and its memory analysis stay the same.
FAST_COMPILE = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
]
# XLA aborts at an unknown flag, and newer versions don't know this one.
if version("jaxlib").startswith("0.10."):
    FAST_COMPILE.append("--xla_cpu_use_fusion_emitters=false")
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FAST_COMPILE]).strip()

chex.set_n_cpu_devices(8)

# [queries, keys] + [keys] is usually a forgotten axis; if it is meant, write `[None, :]`.
jax.config.update("jax_numpy_rank_promotion", "raise")

# Tracing makes millions of long-lived objects, which the collector would scan again and again.
gc.set_threshold(100_000, 50, 50)

MAPS = Path("/proc/self/maps")
MEMORY = Path("/proc/self/statm")
MAX_MAPS = 40_000
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Dropping programs takes over a second, and they compile again. Two workers take a third of the memory.
MAX_BYTES = max(1_500_000_000, os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES // 6)
TESTS_DONE = itertools.count(1)
JITTED = type(jax.jit(len))


class Programs:
    """Drops compiled programs when they take too much memory or too many memory maps.

    Linux allows 65,530 memory maps per process, and XLA crashes at the limit. Two workers must fit into a laptop.
    """

    def __init__(self) -> None:
        self.max_bytes = MAX_BYTES

    def drop_if_many(self) -> None:
        count_maps = next(TESTS_DONE) % 16 == 0 and MAPS.exists()  # counting is slow
        if not self.too_many(count_maps):
            return
        drop_own_programs()
        if self.too_many(count_maps):
            jax.clear_caches()
            gc.collect()
            return_freed_memory()
            # The rest is modules and arrays: clearing after every test would only recompile everything.
            self.max_bytes = max(MAX_BYTES, resident_bytes() + MAX_BYTES // 4)

    def too_many(self, count_maps: bool) -> bool:
        if MEMORY.exists() and resident_bytes() > self.max_bytes:
            return True
        return count_maps and maps() > MAX_MAPS


def drop_own_programs() -> None:
    """Drops the programs of rollouts and updates, by far the largest, and keeps JAX's thousands of small ones."""
    gc.unfreeze()  # frozen objects are not listed
    for function in gc.get_objects():
        # `type`, because `__class__` of some objects warns.
        if issubclass(type(function), JITTED) and not function.__module__.startswith("jax"):
            function.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]
    gc.collect()
    gc.freeze()
    return_freed_memory()


PROGRAMS = Programs()


def resident_bytes() -> int:
    return int(MEMORY.read_text().split()[1]) * PAGE_BYTES


def maps() -> int:
    return MAPS.read_bytes().count(b"\n")


def return_freed_memory() -> None:
    """glibc keeps freed memory in the process, where the limit counts it; other C libraries don't."""
    if hasattr(C_LIBRARY, "malloc_trim"):
        C_LIBRARY.malloc_trim(0)


C_LIBRARY = ctypes.CDLL(None)


def pytest_collection_finish() -> None:
    """Exempts the objects of modules from garbage collection, because modules stay."""
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown(item: pytest.Item) -> None:
    PROGRAMS.drop_if_many()


@pytest.fixture
def collected() -> Iterator[None]:
    """Collects orbax's coroutines after a failed save, while the test still ignores their warnings."""
    yield
    gc.collect()
