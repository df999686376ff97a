"""Do the decode kernels and the decode loop compile to what they should, for hardware that is not there?

Question   For an H100 and a TPU v5e: does every decode kernel compile, without register spills and with tensor core
           instructions? Does the loop of a rollout leave its cache in place, or does an operation inside it write a
           cache's worth of bytes at every token?
Command    python experiments/compile_decode.py      (--target h100 or tpu_v5e: one of them)
           It needs jax-cuda12-plugin, nvidia-cuda-nvcc-cu12 and libtpu; no GPU, no TPU.
Cost       about a minute on two CPU cores
Result     one JSON object a line: kernel, target, compiled, registers, spill_bytes, wgmma (instructions in the PTX),
           temp_bytes; for loops also cache_bytes, of one layer's keys, and cache_writes, the operations of
           innermost loops that write as much, in-place updates aside. Exit status 1 if a kernel does not
           compile, spills or has no wgmma, or a loop writes its cache.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

# Read when the compilers are loaded. Without a GPU nothing can be timed, hence no autotuning.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
os.environ["MOSAIC_GPU_DUMP_PTX"] = os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
os.environ["MOSAIC_GPU_DUMP_TO"] = tempfile.mkdtemp(prefix="compile_decode_")
os.environ["TPU_SKIP_MDS_QUERY"] = os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # no TPU: no metadata, no lock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from smd_jax.cache import slots as kv_cache
from smd_jax.cache.slots import LayerCache
from smd_jax.config import ModelConfig
from smd_jax.eviction.policies import H2O
from smd_jax.eviction.statistics import Observation, ReceivedAttention
from smd_jax.model import attention
from smd_jax.model.decoder import Decoder
from smd_jax.sampler.fixed_batch import RolloutConfig, rollout_program
from smd_jax.text.prompts import PromptBatch
from smd_kernels.decode import Implementation, decode_attention
from smd_kernels.hardware import why_not_decode

DUMPS = Path(os.environ["MOSAIC_GPU_DUMP_TO"])


class Shape(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    slots: int
    head_dim: int


# Groups of 4, 7 and 1 query heads; slots that fill tiles and that do not.
SHAPES = (Shape(64, 32, 8, 1152, 128), Shape(64, 14, 2, 1000, 64), Shape(8, 32, 8, 4224, 128), Shape(64, 8, 8, 384, 64))
# A layer's keys do not fit into the TPU's VMEM: XLA carries smaller ones there and back, and that is no copy of ours.
LOOP = Shape(batch=128, heads=32, kv_heads=8, slots=1024, head_dim=64)
ROLLOUT = Shape(batch=32, heads=16, kv_heads=8, slots=1024, head_dim=64)
LAYERS, BUDGET, BUFFER, STEPS = 4, 896, 128, 512


@dataclass(frozen=True)
class Target:
    """A device to compile for.

    Attributes:
      platform: as JAX calls it. impl: its own decode kernel; why_not: of that kernel.
    """

    name: str
    platform: str
    impl: Implementation
    why_not: Callable[..., str | None]

    def sharding(self) -> NamedSharding:
        if self.platform == "tpu":
            topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2x1")
        else:
            config = (Path(__file__).parent / "targets" / "h100.txtpb").read_text(encoding="utf-8")
            topology = topologies.get_topology_desc(
                platform="cuda", topology_name="h100", target_config=config, topology="1x1x1"
            )
        return NamedSharding(Mesh(np.array(topology.devices[:1]), ("device",)), PartitionSpec())


TARGETS = (
    Target("h100", "cuda", "mosaic_gpu", partial(why_not_decode, "mosaic_gpu")),
    Target("tpu_v5e", "tpu", "mosaic_tpu", partial(why_not_decode, "mosaic_tpu")),
)


@dataclass(frozen=True)
class Record:
    """One line of the output; None where a target has no such number."""

    kernel: str
    target: str
    compiled: bool
    registers: int | None = None
    spill_bytes: int | None = None
    wgmma: int | None = None
    temp_bytes: int | None = None
    cache_bytes: int | None = None
    cache_writes: tuple[str, ...] | None = None
    error: str | None = None

    @property
    def good(self) -> bool:
        return self.compiled and not self.spill_bytes and self.wgmma != 0 and not self.cache_writes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=[target.name for target in TARGETS], help="both by default")
    chosen = parser.parse_args().target
    good = True
    for target in TARGETS:
        if chosen in (None, target.name):
            for record in records(target, target.sharding()):
                print(json.dumps(asdict(record)), flush=True)
                good &= record.good
    shutil.rmtree(DUMPS)
    sys.exit(not good)


def records(target: Target, sharding: NamedSharding) -> Iterator[Record]:
    for shape in SHAPES:
        yield compile_kernel(target, shape, sharding)
    # XLA's own form in the same loop shows what the kernels' demands on layout cost, if anything.
    for impl in (target.impl, "xla"):
        yield compile_loop(f"decode loop, {impl}", target, *decode_loop(impl, sharding))
    yield compile_loop("rollout", target, *whole_rollout(target, sharding))


def abstract(sharding: NamedSharding, shape: tuple[int, ...], dtype: Any) -> Any:
    """A shape that stands for an array where nothing is computed."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def compile_kernel(target: Target, shape: Shape, sharding: NamedSharding) -> Record:
    """A kernel that its own `why_not` refuses, or the compiler, is a record with the reason."""
    batch, heads, kv_heads, slots, head_dim = shape
    name = f"decode_attention, {target.impl}, {'x'.join(map(str, shape))}"
    reason = target.why_not(jnp.bfloat16, head_dim, slots, heads // kv_heads)
    if reason is not None:
        return Record(name, target.name, compiled=False, error=reason)
    array = partial(abstract, sharding)
    q = array((batch, heads, 1, head_dim), jnp.bfloat16)
    k = array((batch, kv_heads, slots, head_dim), jnp.bfloat16)
    valid = array((batch, kv_heads, slots), jnp.bool_)
    traced = jax.jit(decode_attention, static_argnames="impl").trace(q, k, k, valid, impl=target.impl)
    try:
        compiled = traced.lower(lowering_platforms=(target.platform,)).compile()
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
        return Record(name, target.name, compiled=False, error=str(error)[:300])
    record = Record(name, target.name, compiled=True, temp_bytes=temp_bytes(compiled))
    return with_assembler_report(record) if target.platform == "cuda" else record


def temp_bytes(compiled: Any) -> int:
    return compiled.memory_analysis().temp_size_in_bytes


def with_assembler_report(record: Record) -> Record:
    """With registers, spilled bytes and wgmma instructions of the kernels assembled since the last call."""
    report = "".join(path.read_text(encoding="utf-8") for path in DUMPS.glob("*.ptxas"))
    ptx = "".join(path.read_text(encoding="utf-8") for path in DUMPS.glob("*.ptx"))
    empty(DUMPS)
    return replace(
        record,
        registers=max(int(n) for n in re.findall(r"Used (\d+) registers", report)),
        spill_bytes=sum(int(n) for n in re.findall(r"(\d+) bytes spill", report)),
        wgmma=ptx.count("wgmma.mma_async"),
    )


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def decode_loop(impl: Implementation, sharding: NamedSharding) -> tuple[Any, int]:
    """The cache side of decoding alone: write a key, attend, observe, in `LAYERS` layers; and a cache's bytes."""
    array, shape = partial(abstract, sharding), LOOP
    kv = array((shape.batch, shape.kv_heads, shape.slots, shape.head_dim), jnp.bfloat16)
    columns = array(kv.shape[:3], jnp.int32)
    layer = LayerCache(
        kv,
        kv,
        columns,
        states=(array(columns.shape, jnp.float32),),
        statistics=(ReceivedAttention(),),
    )
    x = array((shape.batch, shape.heads, 1, shape.head_dim), jnp.bfloat16)

    def step(filled, carry):
        x, layers = carry
        updated = []
        for layer in layers:
            fresh = x[:, : shape.kv_heads]
            layer = kv_cache.write(layer, BUDGET + filled, fresh, 2 * fresh, jnp.full((shape.batch, 1), filled))
            out, received = decode_attention(x, layer.keys, layer.values, layer.valid, impl)
            seen = Observation(
                queries=x,
                query_columns=jnp.full((shape.batch, 1), filled),
                keys=layer.keys,
                values=layer.values,
                columns=layer.columns,
                start=jnp.zeros(shape.batch, jnp.int32),
                received=received,
                number=filled,
                slot=BUDGET + filled,
            )
            updated.append(kv_cache.observe(layer, seen))
            x = x + out
        return x, tuple(updated)

    def segments(x, layers):
        # A loop in a loop, as in a rollout, which compresses between them.
        return jax.lax.fori_loop(0, 4, lambda _, carry: jax.lax.fori_loop(0, BUFFER, step, carry), (x, layers))

    return jax.jit(segments, donate_argnums=1).trace(x, (layer,) * LAYERS), kv.size * kv.dtype.itemsize


def whole_rollout(target: Target, sharding: NamedSharding) -> tuple[Any, int]:
    """`smd_jax.sampler.fixed_batch` of a small bfloat16 model with the cache of `ROLLOUT`; and its bytes of keys."""
    array, shape = partial(abstract, sharding), ROLLOUT
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
    model, width = Decoder(config, decode_impl=target.impl), shape.slots
    tokens, visible = jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 1, 1, 2, 2), bool)
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), tokens, tokens, visible))
    params = jax.tree.map(lambda x: array(x.shape, x.dtype), variables["params"])
    prompts = PromptBatch(array((shape.batch, width), jnp.int32), array((shape.batch, width), jnp.bool_))
    key = array((), jax.random.key(0).dtype)
    sizes = RolloutConfig(max_new_tokens=STEPS, budget=BUDGET, buffer=BUFFER)
    cache_bytes = shape.batch * shape.kv_heads * shape.slots * shape.head_dim * 2
    # The devices of this machine are not those that it compiles for.
    with mock.patch.object(attention, "wrong_device", lambda impl: None):
        return rollout_program.trace(model, params, prompts, key, policy=H2O(), config=sizes), cache_bytes


def compile_loop(name: str, target: Target, traced: Any, cache_bytes: int) -> Record:
    compiled = traced.lower(lowering_platforms=(target.platform,)).compile()
    writes = cache_writes(compiled.as_text(), cache_bytes)
    empty(DUMPS)  # kernels inside the loop have their own records
    return Record(
        name,
        target.name,
        compiled=True,
        temp_bytes=temp_bytes(compiled),
        cache_bytes=cache_bytes,
        cache_writes=tuple(writes),
    )


ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8}
# Name a buffer without writing it, or contain the operations that do. An asynchronous copy counts where it is done.
NO_WRITE = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "opt-barrier"}
IN_PLACE = {"dynamic-update-slice"}


class Operation(NamedTuple):
    """One line of optimised HLO.

    Attributes:
      shapes: type of its result, all of them for a tuple. calls: computations that it names. line: the whole text.
    """

    name: str
    shapes: str
    kind: str
    calls: tuple[str, ...]
    line: str


def parse(hlo: str) -> dict[str, list[Operation]]:
    """Computation -> operations."""
    found: dict[str, list[Operation]] = {}
    operations: list[Operation] = []
    for line in hlo.splitlines():
        if header := re.match(r"(?:ENTRY )?%?(\S+) .*\{$", line):
            operations = found[header[1]] = []
        elif text := re.match(r"\s+(?:ROOT )?%?(\S+) = (\(.*?\)|\S+) ([\w\-]+)\(", line):
            lists = re.findall(r"\b(?:calls|to_apply|body|branch_computations|called_computations)=\{?([^{}=]+)", line)
            calls = re.findall(r"%([\w.\-]+)", " ".join(lists))
            operations.append(Operation(text[1], text[2], text[3], tuple(calls), line.strip()))
    return found


def cache_writes(hlo: str, cache_bytes: int) -> list[str]:
    """Operations of the innermost loops over a cache, those that decode and those that compress it some rows at a time,
    that write at least `cache_bytes`, in-place updates aside."""
    computations = parse(hlo)
    return [
        f"{operation.kind} {operation.name}"
        for body in cache_loops(computations, cache_bytes)
        for operation in executed(computations, body)
        if largest(operation.shapes) >= cache_bytes
        and not operation.kind.endswith("-start")
        and not in_place(computations, operation)
    ]


def largest(shapes: str) -> int:
    """Bytes of the largest array in an HLO type. What a TPU holds in VMEM, memory space 1, does not count: to bring a
    cache there is to read it."""
    arrays = re.findall(r"(\w+)\[([\d,]*)\](\{[^}]*\})?", shapes)
    sizes = (
        ITEM_BYTES.get(dtype, 0) * math.prod(int(d) for d in dims.split(",") if d)
        for dtype, dims, layout in arrays
        if "S(1)" not in layout
    )
    return max(sizes, default=0)


def cache_loops(computations: dict[str, list[Operation]], cache_bytes: int) -> list[str]:
    """Bodies of the loops that carry caches and contain no other such loop."""
    bodies = {
        re.findall(r"\bbody=%?([\w.\-]+)", operation.line)[0]
        for operations in computations.values()
        for operation in operations
        if operation.kind == "while" and largest(operation.shapes) >= cache_bytes
    }
    if not bodies:
        raise ValueError("expected a loop over the cache; got none")
    return sorted(body for body in bodies if not any(set(op.calls) & bodies for op in executed(computations, body)))


def executed(computations: dict[str, list[Operation]], name: str) -> Iterator[Operation]:
    """Operations of a computation and of what it calls; a fusion counts as one."""
    for operation in computations[name]:
        yield operation
        if operation.kind in NO_WRITE:
            for callee in operation.calls:
                yield from executed(computations, callee)


def in_place(computations: dict[str, list[Operation]], operation: Operation) -> bool:
    """Whether the operation writes no array, or one slice of an array that it takes over."""
    if operation.kind == "fusion":
        inside = {op.name: op for op in computations[operation.calls[0]]}
        (root,) = (op for op in inside.values() if op.line.startswith("ROOT"))
        results = re.findall(r"%([\w.\-]+)", root.line.partition(" tuple(")[2]) if root.kind == "tuple" else [root.name]
        return all(inside[name].kind in IN_PLACE for name in results if name in inside)
    return operation.kind in NO_WRITE | IN_PLACE


if __name__ == "__main__":
    main()
