"""Pallas interpreters: race detectors, and the host threads that they need."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from smd_kernels import interpreter
from smd_kernels.blocks import Blocks, BlockSizes
from smd_kernels.gpu import MosaicGpuKernel
from tests import races


def write_race() -> jax.Array:
    """Two TPU cores copy two tiles to the same place."""

    def copy(x, out):
        out[...] = x[...]

    return pl.pallas_call(
        copy,
        grid=(2,),
        in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((8, 128), lambda i: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((16, 128), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=races.STRICT_TPU,
    )(jnp.ones((16, 128)))


def read_race() -> jax.Array:
    """Reads a tile in shared memory before its copy has arrived."""

    def copy(x, out, buffer, arrived):
        plgpu.copy_gmem_to_smem(x, buffer, arrived)
        out[...] = buffer[...]
        plgpu.barrier_wait(arrived)

    return plgpu.kernel(
        copy,
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        scratch_types=[plgpu.SMEM((64, 64), jnp.float32), plgpu.Barrier()],
        interpret=races.STRICT_GPU,
    )(jnp.ones((64, 64)))


@pytest.mark.parametrize("run", [write_race, read_race], ids=["TPU", "GPU"])
def test_races_are_detected(run: Any):
    with pytest.raises((AssertionError, RuntimeError), match="RACE DETECTED"), races.forbidden():
        jax.block_until_ready(run())


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="expected a system that lists threads in /proc")
def test_host_threads_match_the_xla_pool():
    """XLA names the threads of its pool."""
    jax.block_until_ready(jnp.ones(1) + 1)
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    assert interpreter.host_threads() == names.count("tf_XLAEigen")


@pytest.mark.parametrize(("rows", "threads"), [(64, 2), (128, 3)])
def test_kernel_with_too_few_host_threads_raises(monkeypatch: pytest.MonkeyPatch, rows: int, threads: int):
    """One Pallas thread per 64 rows of a tile, and one that copies."""
    monkeypatch.setattr(interpreter, "host_threads", lambda: threads)
    matrix, vector = jnp.zeros((1, 128, 64), jnp.bfloat16), jnp.zeros((1, 128), jnp.int32)
    blocks = Blocks(matrix, matrix, matrix, vector, vector, vector)
    sizes = BlockSizes(rows=rows)
    message = (
        rf"at least {threads + 1} host threads .* kernel of {threads} threads.* got {threads}: .*jax_num_cpu_devices"
    )
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(MosaicGpuKernel(sizes, races.STRICT_GPU).forward, blocks)
    # Compiled for a GPU, the kernel needs no host threads.
    assert jax.eval_shape(MosaicGpuKernel(sizes).forward, blocks)[0].shape == (1, 128, 64)
