"""Compiles all kernels for an H100 and for TPUs, without the hardware, and checks the result.

Question   Does every kernel compile, do its registers suffice, does it use the matrix units?
           How much memory does the attention of a whole layer take at 32,768 tokens, 64 query and 8 KV heads, head_dim
           128 and a budget of 1,024 + 128, forward and backward? Does the loop of a rollout leave its cache in place,
           or does an operation in it write a cache's worth of bytes at every token?
Command    make compile-kernels        (makes an environment with the compilers, 1.5 GB; no GPU, no TPU)
           .venv-compilers/bin/python experiments/compile_kernels.py [--target h100] [--quick]
Cost       with --quick three minutes on two quiet CPU cores; without it, eight
Result     one JSON object per line and program. Exit status 1 if a program of ours does not compile; if a kernel
           spills, has no matrix instruction, or waits after each (`serialized`); if the layer takes more
           than 2.5 GB; or if a loop writes its cache.

Fields     `temp_bytes`: device memory besides arguments and results. `registers`, `spill_bytes`, `serialized`, `wgmma`
           (tensor core instructions) and `mxu` (the TPU's, by kernel): see `lib/assembler.py`. `flops` is XLA's number:
           every tile of scores counts as live. For loops, `cache_bytes` is the size of one layer's keys; `cache_writes`
           lists operations of innermost loops that write as much, not in place: see `lib/hlo.py`.

The description of the H100, experiments/targets/h100.txtpb, is XLA's own, as a machine with one reports it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

# Read when JAX and the compilers are loaded. Without the device nothing can be timed, so XLA must not autotune.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
# Without a TPU there is no metadata server to query and no device to lock.
os.environ["TPU_SKIP_MDS_QUERY"] = os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bench.engines.kernel_checks import CacheShape, by_kernel
from lib import assembler, hlo
from smd_jax.config import ModelConfig
from smd_jax.eviction.policies import H2O
from smd_jax.memory.compiled import param_shapes
from smd_jax.model import attention
from smd_jax.model.decoder import Decoder
from smd_jax.sampler.fixed_batch import RolloutConfig, rollout_program
from smd_jax.text.prompts import PromptBatch
from smd_kernels.blocks import Blocks, BlockSizes
from smd_kernels.codes import Codes
from smd_kernels.decode import decode_attention
from smd_kernels.decode_codes import decode_codes_attention
from smd_kernels.gpu import MosaicGpuKernel
from smd_kernels.gpu_backward import BackwardInputs, key_gradients, query_gradient
from smd_kernels.hardware import GPU_SIZES, TPU_SIZES, Hardware, why_not_decode, why_not_decode_codes
from smd_kernels.segments import Segments, segment_attention
from smd_kernels.tpu import MosaicTpuKernel


@dataclass(frozen=True)
class Target:
    """A device to compile for."""

    name: str
    platform: str  # JAX's name
    topology: str  # with one such device
    decode: Hardware | None = None  # its decode kernel; None: only attention is compiled

    def sharding(self) -> NamedSharding:
        """A sharding with everything on one device."""
        if self.platform == "tpu":
            topology = topologies.get_topology_desc(platform="tpu", topology_name=self.topology)
        else:
            description = Path(__file__).parent / "targets" / f"{self.name}.txtpb"
            topology = topologies.get_topology_desc(
                platform="cuda",
                topology_name=self.name,
                target_config=description.read_text(encoding="utf-8"),
                topology=self.topology,
            )
        return NamedSharding(Mesh(np.array(topology.devices[:1]), ("device",)), PartitionSpec())


TARGETS = {
    "h100": Target("h100", "cuda", "1x1x1", "mosaic_gpu"),
    "tpu_v5e": Target("tpu_v5e", "tpu", "v5e:2x2x1", "mosaic_tpu"),
    "tpu_v6e": Target("tpu_v6e", "tpu", "v6e:2x2x1"),
}
QUICK = ("h100", "tpu_v5e")  # with --quick; of the TPU's attention kernels only bfloat16 and head_dim 128

Row = dict[str, Any]  # facts about one compiled program


@dataclass(frozen=True)
class Program:
    """A program to compile and its checks."""

    labels: dict[str, Any]  # fields of the row that name it, "kernel" among them
    function: Any = None  # jitted
    args: tuple = ()  # shapes with a sharding
    kwargs: dict[str, Any] = field(default_factory=dict)
    kernels: bool = True  # whether it contains only kernels, whose assembler dumps are read
    most_bytes: float | None = None  # limit of its temporary memory
    cache_bytes: int | None = None  # of one layer's keys, for a loop over caches
    refused: str | None = None  # the kernel's reason why it cannot be compiled


def compile_program(program: Program, target: Target, dumps: assembler.Dumps) -> Row:
    """Traces, lowers and compiles. A failed compilation gives a row with the reason."""
    row = program.labels | {"target": target.name, "compiled": False}
    if program.refused is not None:
        return row | {"error": program.refused}
    dumps.empty()
    try:
        traced = program.function.trace(*program.args, **program.kwargs)
        compiled = traced.lower(lowering_platforms=(target.platform,)).compile()
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
        return row | {"error": str(error).strip()[:300]}
    row |= {"compiled": True, "temp_bytes": compiled.memory_analysis().temp_size_in_bytes}
    if program.kernels:
        row |= dumps.facts(target.platform)
        if target.platform == "tpu":
            row["flops"] = (compiled.cost_analysis() or {}).get("flops")
    if program.cache_bytes is not None:
        writes = hlo.cache_writes(compiled.as_text(), program.cache_bytes)
        row |= {"cache_bytes": program.cache_bytes, "cache_writes": writes}
    return row


def is_good(program: Program, row: Row) -> bool:
    if not row["compiled"] or any(row.get(name) for name in ("spill_bytes", "serialized", "cache_writes")):
        return False
    if program.most_bytes is not None and row["temp_bytes"] > program.most_bytes:
        return False
    if not program.kernels:
        return True
    # Each kernel separately: a backward pass has two, and both must use the matrix units.
    return row["wgmma"] > 0 if "wgmma" in row else min(row["mxu"].values(), default=0) > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=tuple(TARGETS), help="target; all by default")
    parser.add_argument("--quick", action="store_true", help=f"{' and '.join(QUICK)}; one dtype and head_dim on TPUs")
    args = parser.parse_args()
    names = QUICK if args.quick else tuple(TARGETS)
    if args.target is not None:
        names = (args.target,)
    with tempfile.TemporaryDirectory(prefix="compile_kernels_") as folder:
        good = compile_all(names, args.quick, assembler.Dumps.in_folder(Path(folder)))
    sys.exit(not good)


def compile_all(names: Sequence[str], quick: bool, dumps: assembler.Dumps) -> bool:
    """Prints a row per program of the targets. Returns whether all pass their checks."""
    good = True
    # The devices of this machine are not those that it compiles for.
    with mock.patch.object(attention, "wrong_device", lambda impl: None):
        for target in (TARGETS[name] for name in names):
            for program in programs(target, quick):
                row = compile_program(program, target, dumps)
                print(json.dumps({name: fact for name, fact in row.items() if fact is not None}), flush=True)
                good &= is_good(program, row)
    return good


def programs(target: Target, quick: bool) -> Iterator[Program]:
    """All programs of a target."""
    array = partial(jax.ShapeDtypeStruct, sharding=target.sharding())
    if target.platform == "cuda":
        for head_dim in (64, 128):
            yield from gpu_attention(array, jnp.bfloat16, head_dim)
        yield layer(array)
    else:
        cases = list(itertools.product(("bfloat16", "float32"), (128, 64)))
        for dtype, head_dim in cases[:1] if quick else cases:
            yield from tpu_attention(array, dtype, head_dim)
    if target.decode is not None:
        for shape in DECODE_SHAPES:
            yield decode_kernel(array, target.decode, shape)
        for shape, bits in itertools.product(CODES_SHAPES, (8, 4, 2)):
            yield codes_kernel(array, target.decode, shape, bits)
        yield whole_rollout(array, target.decode)


Array = Callable[[tuple[int, ...], Any], Any]  # a shape and a dtype, on the target's device
GROUP = 8
BUFFER = 128
BUDGET = 1024
GPU_BLOCKS = 64
TPU_SHAPES = {  # blocks, rows, keys
    "segments": (8 * 16, GROUP * BUFFER, BUDGET + BUFFER),
    "sequence": (8, GROUP * 8192, 8192),
}
LAYER_TOKENS = 32768
LAYER_MOST_BYTES = 2.5e9


def attention_blocks(array: Array, sizes: tuple[int, int, int], dtype: Any, head_dim: int) -> Blocks:
    """Queries and keys of so many blocks, rows and keys, with their columns and eviction times."""
    count, rows, keys = sizes
    q = array((count, rows, head_dim), dtype)
    k = array((count, keys, head_dim), dtype)
    column = array((count, rows), jnp.int32)
    born = array((count, keys), jnp.int32)
    return Blocks(q, k, k, column, born, born)


def gpu_attention(array: Array, dtype: Any, head_dim: int) -> Iterator[Program]:
    """The three GPU kernels one by one: each has its own registers."""
    blocks = attention_blocks(array, (GPU_BLOCKS, GROUP * BUFFER, BUDGET + BUFFER), dtype, head_dim)
    per_row = array(blocks.column.shape, jnp.float32)
    inputs = BackwardInputs(blocks, per_row, per_row, blocks.q)
    kernels = {
        "forward": (MosaicGpuKernel().forward, blocks),
        "dq": (partial(query_gradient, sizes=GPU_SIZES, interpret=False), inputs),
        "dk dv": (partial(key_gradients, sizes=GPU_SIZES, interpret=False), inputs),
    }
    for name, (function, argument) in kernels.items():
        labels = {"kernel": name, "dtype": jnp.dtype(dtype).name, "head_dim": head_dim}
        yield Program(labels, jax.jit(function), (argument,))


def layer(array: Array) -> Program:
    """Attention of a layer with gathering, forward and backward, at the sizes of the question."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array, evicted_at: jax.Array) -> Any:
        segments = Segments(0, BUFFER, BUDGET)
        settings = {"segments": segments, "kernel": MosaicGpuKernel(), "blocks_at_once": GPU_SIZES.blocks}
        out, pull = jax.vjp(lambda q, k, v: segment_attention(q, k, v, evicted_at, **settings), q, k, v)
        return out, pull(q)

    q = array((1, 64, LAYER_TOKENS, 128), jnp.bfloat16)
    k = array((1, 8, LAYER_TOKENS, 128), jnp.bfloat16)
    evicted_at = array((1, 8, LAYER_TOKENS), jnp.int32)
    labels = {"kernel": "layer, forward and backward", "dtype": "bfloat16", "head_dim": 128}
    return Program(labels, jax.jit(run), (q, k, k, evicted_at), kernels=False, most_bytes=LAYER_MOST_BYTES)


def tpu_attention(array: Array, dtype: str, head_dim: int) -> Iterator[Program]:
    """Forward, backward, and both in one program, with two block sizes."""
    for (sizes, block_sizes), shape in itertools.product(
        {"default": BlockSizes(), "tpu": TPU_SIZES}.items(), TPU_SHAPES
    ):
        kernel = MosaicTpuKernel(block_sizes)
        blocks = attention_blocks(array, TPU_SHAPES[shape], dtype, head_dim)
        lse = array(blocks.column.shape, jnp.float32)
        passes = {
            "forward": (kernel.forward, (blocks,)),
            "backward": (kernel.backward, (blocks, blocks.q, lse, blocks.q)),
            "forward+backward": (partial(by_kernel, kernel), (blocks, blocks.q)),
        }
        for name, (function, arguments) in passes.items():
            labels = {"kernel": name, "sizes": sizes, "shape": shape, "dtype": dtype, "head_dim": head_dim}
            yield Program(labels, jax.jit(function), arguments)


# Groups of 4, 7 and 1 query heads; slots that fill tiles and that do not.
DECODE_SHAPES = (
    CacheShape(64, 32, 8, 1152, 128),
    CacheShape(64, 14, 2, 1000, 64),
    CacheShape(8, 32, 8, 4224, 128),
    CacheShape(64, 8, 8, 384, 64),
)
CODES_SHAPES = (DECODE_SHAPES[0], DECODE_SHAPES[1])
CODES_BUFFER = 128  # slots of them in full precision
# A layer's keys do not fit into the TPU's VMEM: XLA itself copies smaller ones there and back.
ROLLOUT = CacheShape(batch=128, heads=16, kv_heads=8, slots=1024, head_dim=64)
LAYERS = 4
DECODE_BUDGET = 896
DECODE_STEPS = 512


def decode_kernel(array: Array, impl: Hardware, shape: CacheShape) -> Program:
    batch, heads, kv_heads, slots, head_dim = shape
    labels = {"kernel": f"decode_attention, {impl}, {shape}"}
    refused = why_not_decode(impl, jnp.bfloat16, head_dim, slots, heads // kv_heads)
    q = array((batch, heads, 1, head_dim), jnp.bfloat16)
    k = array((batch, kv_heads, slots, head_dim), jnp.bfloat16)
    valid = array((batch, kv_heads, slots), jnp.bool_)
    function = jax.jit(decode_attention, static_argnames="impl")
    return Program(labels, function, (q, k, k, valid), {"impl": impl}, refused=refused)


def codes_kernel(array: Array, impl: Hardware, shape: CacheShape, bits: int) -> Program:
    """Decode attention over a quantised cache: 32 groups of 64 keys, parts of 32 channels."""
    batch, heads, kv_heads, slots, head_dim = shape
    coded = (batch, kv_heads, slots - CODES_BUFFER)
    packed = array((*coded, head_dim * bits // 8), jnp.uint8)
    table = array((batch, kv_heads, 32, head_dim), jnp.bfloat16)
    parts = array((*coded, head_dim // 32), jnp.bfloat16)
    codes = Codes(packed, packed, array(coded, jnp.int32), table, table, parts, parts, bits)
    q = array((batch, heads, 1, head_dim), jnp.bfloat16)
    k = array((batch, kv_heads, CODES_BUFFER, head_dim), jnp.bfloat16)
    valid = array((batch, kv_heads, slots), jnp.bool_)
    refused = why_not_decode_codes(impl, jnp.bfloat16, codes, CODES_BUFFER, heads // kv_heads)
    labels = {"kernel": f"decode_codes_attention, {impl}, {bits} bits, {shape}"}
    function = jax.jit(decode_codes_attention, static_argnames="impl")
    return Program(labels, function, (q, codes, k, k, valid), {"impl": impl}, refused=refused)


def whole_rollout(array: Array, impl: Hardware) -> Program:
    """`smd_jax.sampler.fixed_batch` of a small bfloat16 model with the cache of `ROLLOUT`."""
    shape = ROLLOUT
    config = ModelConfig(
        vocab_size=264,
        hidden_size=256,
        intermediate_size=512,
        num_layers=LAYERS,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_positions=4096,
        tie_embeddings=True,
        dtype="bfloat16",
    )
    model = Decoder(config, decode_impl=impl)
    params = jax.tree.map(lambda x: array(x.shape, x.dtype), param_shapes(model))
    width = shape.slots  # a prompt as wide as the cache: it is full at once
    prompts = PromptBatch(array((shape.batch, width), jnp.int32), array((shape.batch, width), jnp.bool_))
    key = array((), jax.random.key(0).dtype)
    sizes = RolloutConfig(max_new_tokens=DECODE_STEPS, budget=DECODE_BUDGET, buffer=BUFFER)
    return Program(
        {"kernel": "rollout"},
        rollout_program,
        (model, params, prompts, key),
        {"policy": H2O(), "config": sizes},
        kernels=False,
        cache_bytes=shape.batch * shape.kv_heads * shape.slots * shape.head_dim * 2,  # two bytes a number
    )


if __name__ == "__main__":
    main()
