"""Eight fake CPU devices, a compiler in a hurry, a compilation cache that outlives the run, no silent rank promotion.

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
# Scripts that tests run find what others have compiled, too. Keys hold the versions of JAX and of the compiler: stale
# entries are not found.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).resolve().parents[1] / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")

import chex
import jax
import pytest

# Most of the time goes to compiling programs that run once, on small arrays. Without LLVM's optimizations, without the
# emitters that send every fusion through MLIR, and in one module, a train step takes a fifth of the CPU time to compile
# (1.7 s in place of 8.3). HLO, and with it what the memory analysis says, is what it always is.
QUICK = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
]
# XLA ends the process over a flag that it doesn't know, and newer ones don't know this one.
if version("jaxlib").startswith("0.10."):
    QUICK.append("--xla_cpu_use_fusion_emitters=false")
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *QUICK]).strip()

chex.set_n_cpu_devices(8)

# [queries, keys] + [keys] is more often a forgotten axis than a wish; who means it writes `[None, :]`.
jax.config.update("jax_numpy_rank_promotion", "raise")

# Tracing makes millions of small objects that live long, and the collector would look at all of them again and again.
gc.set_threshold(100_000, 50, 50)

MAPS = Path("/proc/self/maps")
MEMORY = Path("/proc/self/statm")
MAX_MAPS = 40_000
PAGE = os.sysconf("SC_PAGE_SIZE")
# A drop takes more than a second, and what is dropped compiles again. Two workers take a third of the memory.
MAX_BYTES = max(1_500_000_000, os.sysconf("SC_PHYS_PAGES") * PAGE // 6)
TESTS_DONE = itertools.count(1)
JITTED = type(jax.jit(len))


class Programs:
    """Compiled programs stay until somebody drops them; here, when they take too much.

    Linux lets a process have 65,530 memory maps, and every compiled program takes some: at the limit XLA crashes. And
    two workers have to fit into a laptop.
    """

    def __init__(self) -> None:
        self.max_bytes = MAX_BYTES

    def drop_if_many(self) -> None:
        count_maps = next(TESTS_DONE) % 16 == 0 and MAPS.exists()  # which takes long
        if not self.too_many(count_maps):
            return
        drop_ours()
        if self.too_many(count_maps):
            jax.clear_caches()
            gc.collect()
            return_freed_memory()
            # What is left are modules and arrays: clearing for them after every test would compile everything anew.
            self.max_bytes = max(MAX_BYTES, resident_bytes() + MAX_BYTES // 4)

    def too_many(self, count_maps: bool) -> bool:
        if MEMORY.exists() and resident_bytes() > self.max_bytes:
            return True
        return count_maps and maps() > MAX_MAPS


def drop_ours() -> None:
    """Drops the programs of rollouts and updates, the largest by far, and leaves JAX its thousands of small ones."""
    gc.unfreeze()  # what modules hold is not listed otherwise
    for function in gc.get_objects():
        # By its type: some objects warn of themselves when they are asked for their class.
        if issubclass(type(function), JITTED) and not function.__module__.startswith("jax"):
            function.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]
    gc.collect()
    gc.freeze()
    return_freed_memory()


PROGRAMS = Programs()


def resident_bytes() -> int:
    return int(MEMORY.read_text().split()[1]) * PAGE


def maps() -> int:
    return MAPS.read_bytes().count(b"\n")


def return_freed_memory() -> None:
    """glibc keeps freed memory for the process, which the limit counts all the same; other C libraries don't."""
    if hasattr(C_LIBRARY, "malloc_trim"):
        C_LIBRARY.malloc_trim(0)


C_LIBRARY = ctypes.CDLL(None)


def pytest_collection_finish() -> None:
    """Modules stay: the collector need not look at what they are made of again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown(item: pytest.Item) -> None:
    PROGRAMS.drop_if_many()


@pytest.fixture
def collected() -> Iterator[None]:
    """What a save that failed leaves of orbax's coroutines ends within the test, which ignores what they say."""
    yield
    gc.collect()
