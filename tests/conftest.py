"""Eight fake CPU devices, a compilation cache that outlives the run, and no silent rank promotion.

The environment is set before JAX first asks for its devices: XLA reads it once.
"""

import itertools
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import chex
import jax
import pytest

chex.set_n_cpu_devices(8)

# Most of the time goes to compilation. Keys hold the versions of JAX and of the compiler: stale entries are not found.
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).resolve().parents[1] / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)

# [queries, keys] + [keys] is more often a forgotten axis than a wish; who means it writes `[None, :]`.
jax.config.update("jax_numpy_rank_promotion", "raise")

MAPS = Path("/proc/self/maps")
TESTS_DONE = itertools.count(1)


@pytest.fixture(scope="module")
def quick_compilation():
    """For modules that compile many programs and run each a few times: the compiler spares itself the polish."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Linux lets a process have 65,530 memory maps. Every compiled program takes some, and at the limit XLA crashes."""
    if next(TESTS_DONE) % 16 == 0 and MAPS.exists() and MAPS.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
