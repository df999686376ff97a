"""Do the GPU kernels compile to machine code for Hopper, on a machine without a GPU?

Question   Does the compiler accept the forward and backward kernels for an H100, do they multiply on tensor cores
           (wgmma), and do their registers suffice? How much memory does the attention of a whole layer take at 32,768
           tokens, 64 query and 8 KV heads, head_dim 128 and a budget of 1,024 + 128, forward and backward?
Command    python experiments/compile_gpu.py
           (in the environment of `make compile-kernels`)
Cost       about half a minute on two CPU cores
Result     one JSON object a line; the exit status is 1 if a kernel did not compile, spills, or has no wgmma, or if a
           layer takes more than 2.5 GB.

`registers` is what a thread gets when the kernel starts; warpgroups then pass some on to each other. `serialized` says
that the compiler had to wait for every wgmma before the next. `temp_bytes` is main memory beside arguments and results.
The description of the target, experiments/targets/h100.txtpb, is XLA's own, as a machine with an H100 reports it.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

# Nothing can be timed here, so XLA must not try to choose its own kernels by their speed.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from smd_kernels.blocks import Blocks
from smd_kernels.gpu import MosaicGpuKernel
from smd_kernels.gpu_backward import Given, key_gradients, query_gradient
from smd_kernels.hardware import GPU_SIZES
from smd_kernels.segments import Segments, segment_attention

TARGETS = {"h100": Path(__file__).parent / "targets" / "h100.txtpb"}
HEAD_DIMS = (64, 128)
GROUP, BUFFER, BUDGET = 8, 128, 1024
COUNT, ROWS, KEYS = 64, GROUP * BUFFER, BUDGET + BUFFER
TOKENS, MOST_BYTES = 32768, 2.5e9
DUMP = {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}


@dataclass(frozen=True)
class Row:
    """What came of one compilation."""

    kernel: str
    target: str
    dtype: str
    head_dim: int
    compiled: bool
    registers: int | None = None
    spill_bytes: int | None = None
    wgmma: int | None = None
    serialized: bool | None = None
    temp_bytes: int | None = None
    error: str | None = None

    @property
    def good(self) -> bool:
        if self.kernel.startswith("layer"):
            return self.temp_bytes is not None and self.temp_bytes <= MOST_BYTES
        return self.compiled and self.spill_bytes == 0 and bool(self.wgmma) and not self.serialized


def jobs(head_dim: int, dtype: Any, sharding: NamedSharding) -> Iterator[tuple[str, Callable[..., Any], tuple]]:
    """Name, function and shapes of each kernel."""

    def shaped(*shape: int, dtype: Any = dtype) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    q, k = shaped(COUNT, ROWS, head_dim), shaped(COUNT, KEYS, head_dim)
    bound, per_row = shaped(COUNT, KEYS, dtype=jnp.int32), shaped(COUNT, ROWS, dtype=jnp.float32)
    blocks = Blocks(q, k, k, shaped(COUNT, ROWS, dtype=jnp.int32), bound, bound)
    given = Given(blocks, per_row, per_row, q)
    yield "forward", MosaicGpuKernel().forward, (blocks,)
    yield "dq", partial(query_gradient, sizes=GPU_SIZES, interpret=False), (given,)
    yield "dk dv", partial(key_gradients, sizes=GPU_SIZES, interpret=False), (given,)


def compiled(function: Callable[..., Any], arguments: tuple, sharding: NamedSharding) -> dict[str, Any]:
    """Fields of `Row` that the compiler reports. Raises what it raises."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {**DUMP, "MOSAIC_GPU_DUMP_TO": folder}):
        lowered = jax.jit(function, out_shardings=sharding).trace(*arguments).lower(lowering_platforms=("cuda",))
        program = lowered.compile()
        (code,), (log,) = (list(Path(folder).glob(f"*.{kind}")) for kind in ("ptx", "ptxas"))
        memory = program.memory_analysis()
        temp_bytes = None if memory is None else memory.temp_size_in_bytes
        return {**facts(code.read_text(), log.read_text()), "temp_bytes": temp_bytes}


def facts(code: str, log: str) -> dict[str, Any]:
    """What the assembler says of one kernel, and the matrix instructions that it was given."""
    return {
        "registers": max(map(int, re.findall(r"Used (\d+) registers", log))),
        "spill_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", log))),
        "serialized": "instructions are serialized" in log,
        "wgmma": code.count("wgmma.mma_async"),
    }


def layer(sharding: NamedSharding) -> Row:
    """Gathering, kernels and all, forward and backward, at the sizes of the question."""

    def shaped(heads: int) -> Any:
        return jax.ShapeDtypeStruct((1, heads, TOKENS, 128), jnp.bfloat16, sharding=sharding)

    def run(q: jax.Array, k: jax.Array, v: jax.Array, evicted_at: jax.Array) -> Any:
        segments, kernel = Segments(0, BUFFER, BUDGET), MosaicGpuKernel()
        attend = partial(segment_attention, segments=segments, kernel=kernel, blocks_at_once=GPU_SIZES.blocks)
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, evicted_at), q, k, v)
        return out, pull(q)

    evicted_at = jax.ShapeDtypeStruct((1, 8, TOKENS), jnp.int32, sharding=sharding)
    arguments = (shaped(64), shaped(8), shaped(8), evicted_at)
    program = jax.jit(run, out_shardings=sharding).trace(*arguments).lower(lowering_platforms=("cuda",)).compile()
    memory = program.memory_analysis()
    return Row(
        "layer, forward and backward", "h100", "bfloat16", 128, True, temp_bytes=memory and memory.temp_size_in_bytes
    )


def rows() -> Iterator[Row]:
    for target, description in TARGETS.items():
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name=target, target_config=description.read_text(), topology="1x1x1"
        )
        sharding = NamedSharding(Mesh(np.array(topology.devices[:1]), ("x",)), PartitionSpec())
        for head_dim in HEAD_DIMS:
            for name, function, arguments in jobs(head_dim, jnp.bfloat16, sharding):
                row = partial(Row, name, target, "bfloat16", head_dim)
                try:
                    yield row(compiled=True, **compiled(function, arguments, sharding))
                except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
                    yield row(compiled=False, error=str(error).splitlines()[0])
        yield layer(sharding)


def main() -> int:
    good = True
    for row in rows():
        print(json.dumps({key: value for key, value in asdict(row).items() if value is not None}), flush=True)
        good &= row.good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
