"""Do the TPU kernels compile to machine code, on a machine without a TPU?

Question   Does Mosaic accept the forward and backward kernels at real sizes, do they use the matrix units, and how much
           temporary memory do they take? Beside them splash attention, which ships with JAX, on gathered segments.
Command    python experiments/compile_tpu.py       (needs libtpu: pip install "jax[tpu]"; --quick: one target and dtype)
Cost       about five minutes on two CPU cores
Result     one JSON object a line; the exit status is 1 if a kernel did not compile or has no matrix instruction.

`temp_bytes` is main memory beside arguments and results; small arrays lie in vector memory instead. `mxu` counts matrix
instructions by kernel, from the compiler's own dump. `flops` is XLA's number: every tile of scores counts as live.

Splash attention masks with a static causal offset and segment ids, so it can stand in only where keys are evicted at
segment boundaries alone; it knows nothing of intervals.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

# Read when JAX and libtpu are loaded: there is no TPU here, so do not ask a metadata server about it.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from smd_kernels.blocks import Blocks, BlockSizes
from smd_kernels.hardware import TPU_SIZES
from smd_kernels.tpu import MosaicTpuKernel

TARGETS = {"v5e": "v5e:2x2x1", "v6e": "v6e:2x2x1"}
SIZES = {"default": BlockSizes(), "tpu": TPU_SIZES}
GROUP, BUFFER, BUDGET = 8, 128, 1024
SHAPES = {  # blocks, rows, keys
    "segments": (8 * 16, GROUP * BUFFER, BUDGET + BUFFER),
    "sequence": (8, GROUP * 8192, 8192),
}


@dataclass(frozen=True)
class Row:
    """What came of one compilation."""

    kernel: str
    target: str
    sizes: str
    shape: str
    dtype: str
    head_dim: int
    compiled: bool
    temp_bytes: int | None = None
    mxu: dict[str, int] | None = None
    flops: float | None = None
    error: str | None = None

    @property
    def good(self) -> bool:
        return self.compiled and bool(self.mxu) and min(self.mxu.values()) > 0


def matrix_instructions(dumps: Path) -> dict[str, int]:
    """Kernel -> `vmatmul` instructions in the last stage of its dump."""
    counts = {}
    for original in dumps.glob("*-original.txt"):
        stem = original.name.split("-")[0]
        name = re.findall(r"func\.func @(\w+)", original.read_text())[0]
        (last,) = dumps.glob(f"{stem}-*-finalize-llo.txt")
        counts[name] = len(re.findall(r"llo\.vmatmul", last.read_text()))
    return counts


def compile_for(target: str, function: Callable[..., Any], arguments: Any) -> jax.stages.Compiled:
    """Machine code of the function for arguments of these shapes and dtypes, on one device."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TARGETS[target]).devices
    sharding = NamedSharding(Mesh(np.array(devices[:1]), ("device",)), PartitionSpec())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    return jax.jit(function, out_shardings=sharding).trace(*placed).lower(lowering_platforms=("tpu",)).compile()


def compiled_row(label: Callable[..., Row], target: str, function: Callable[..., Any], arguments: Any) -> Row:
    """What comes of compiling the function; `label` is a row without its result."""
    dumps = Path(os.environ["LIBTPU_INIT_ARGS"].partition("=")[2])
    for path in dumps.iterdir():
        path.unlink()
    try:
        program = compile_for(target, function, arguments)
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
        return label(compiled=False, error=str(error).strip()[:300])
    flops = (program.cost_analysis() or {}).get("flops")
    memory = program.memory_analysis()
    temp_bytes = None if memory is None else memory.temp_size_in_bytes
    return label(compiled=True, temp_bytes=temp_bytes, mxu=matrix_instructions(dumps), flops=flops)


def abstract_blocks(shape: str, dtype: str, head_dim: int) -> Blocks:
    count, rows, keys = SHAPES[shape]

    def zeros() -> Blocks:
        q, k = (jnp.zeros((count, n, head_dim), dtype) for n in (rows, keys))
        column, born = (jnp.zeros((count, n), jnp.int32) for n in (rows, keys))
        return Blocks(q, k, k, column, born, born)

    return jax.eval_shape(zeros)


def both(kernel: MosaicTpuKernel, blocks: Blocks, d_out: jax.Array) -> Any:
    out, lse = kernel.forward(blocks)
    return out, *kernel.backward(blocks, out, lse, d_out)


def own_rows(sizes: str, shape: str, target: str, dtype: str, head_dim: int) -> list[Row]:
    """Forward, backward, and both in one program."""
    kernel, blocks = MosaicTpuKernel(SIZES[sizes]), abstract_blocks(shape, dtype, head_dim)
    lse = jax.ShapeDtypeStruct(blocks.column.shape, jnp.float32)
    programs = {
        "forward": (kernel.forward, (blocks,)),
        "backward": (kernel.backward, (blocks, blocks.q, lse, blocks.q)),
        "forward+backward": (partial(both, kernel), (blocks, blocks.q)),
    }
    rows = []
    for name, (function, arguments) in programs.items():
        label = partial(Row, name, target, sizes, shape, dtype, head_dim)
        rows.append(compiled_row(label, target, function, arguments))
    return rows


def splash(tile: int, q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array) -> Any:
    """Splash attention over gathered segments, `q` `[blocks, group, buffer, head_dim]`; padding is another segment."""
    mask = splash_attention_mask.CausalMask((BUFFER, BUDGET + BUFFER), offset=BUDGET)
    tiles = splash_attention_kernel.BlockSizes(
        block_q=BUFFER,
        block_kv=tile,
        block_kv_compute=tile,
        block_q_dq=BUFFER,
        block_kv_dq=tile,
        block_q_dkv=BUFFER,
        block_kv_dkv=tile,
        block_kv_dkv_compute=tile,
    )
    kernel = splash_attention_kernel.make_splash_mqa_single_device(
        splash_attention_mask.MultiHeadMask([mask] * GROUP), block_sizes=tiles
    )

    def one(q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array) -> Any:
        ids = splash_attention_kernel.SegmentIds(q=jnp.ones((BUFFER,), jnp.int32), kv=segment)
        return kernel(q, k, v, segment_ids=ids)

    return jax.vmap(one)(q, k, v, segment)


def splash_and_gradients(tile: int, d_out: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array):
    out, pull = jax.vjp(lambda q, k, v: splash(tile, q, k, v, segment), q, k, v)
    return out, pull(d_out)


def splash_rows(tile: int, target: str, dtype: str, head_dim: int) -> list[Row]:
    """Forward, and forward with gradients, of the segments."""
    blocks = abstract_blocks("segments", dtype, head_dim)
    q = jax.ShapeDtypeStruct((len(blocks.q), GROUP, BUFFER, head_dim), blocks.q.dtype)
    inputs = (q, blocks.k, blocks.v, blocks.born)
    programs = {
        "splash forward": (partial(splash, tile), inputs),
        "splash forward+backward": (partial(splash_and_gradients, tile), (q, *inputs)),
    }
    rows = []
    for name, (function, arguments) in programs.items():
        label = partial(Row, name, target, f"kv {tile}", "segments", dtype, head_dim)
        rows.append(compiled_row(label, target, function, arguments))
    return rows


def compile_all(cases: Sequence[tuple[str, str, int]]) -> bool:
    """Prints a row for each kernel in cases of target, dtype and head_dim; whether all of ours are good."""
    good = True
    for case in cases:
        rows = [row for sizes in SIZES for shape in SHAPES for row in own_rows(sizes, shape, *case)]
        # Splash is what others offer: reported, not required.
        rival = [row for tile in (128, 384) for row in splash_rows(tile, *case)]
        for row in (*rows, *rival):
            print(json.dumps(asdict(row)), flush=True)
        good &= all(row.good for row in rows)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description="Compiles the TPU kernels without a TPU.")
    parser.add_argument("--quick", action="store_true", help="v5e, bfloat16 and head_dim 128 alone")
    cases = list(itertools.product(TARGETS, ("bfloat16", "float32"), (128, 64)))
    with tempfile.TemporaryDirectory() as dumps:
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_mosaic_dump_to={dumps}"
        return 0 if compile_all(cases[:1] if parser.parse_args().quick else cases) else 1


if __name__ == "__main__":
    sys.exit(main())
