"""What should the GPU kernels take on an H100? From their machine code, before anybody has run them.

Question   How long is a tile of each kernel, what bounds it, and what follows for a layer's attention at 8,192 and
           32,768 tokens (64 query and 8 KV heads, head_dim 128, budget 1,024 + 128) and for a step of decoding? So that
           a measurement (`bench/accelerator.py`) can be compared with a prediction, and a difference explained.
Command    make compile-kernels         (makes the environment with the compilers)
           .venv-compilers/bin/python experiments/predict_kernels.py --out FILE
Cost       one minute; ptxas of CUDA 12.9 or newer, nvdisasm of the package nvidia-cuda-nvdisasm. No GPU.
Result     predictions, not measurements: experiments/results/kernels_predicted_h100.json

Model      Of the innermost loops in the disassembled kernel that multiply matrices or take exponentials, the
           instructions are counted: one step of one warpgroup. An SM has four partitions, each of which runs one warp
           of a warpgroup; what a warp needs of its partition, in cycles, the warpgroup needs (`machine_code.py`):

             tensor   HGMMA 64 x N x 16: 2 * 64 * N * 16 FLOP at 4,096 FLOP a cycle and SM, so N / 2 cycles
             issue    one instruction a cycle
             special  8 cycles for each MUFU (exponentials): 4 of 32 lanes a cycle
             integer  2 cycles for each integer instruction: 16 of 32 lanes a cycle
             shared   factors of HGMMA, and LDS and STS, at 128 bytes a cycle and SM

           All warpgroups of an SM share these. If they overlap perfectly, a step of all takes the largest of the five
           sums: `predicted_us`. If nothing overlaps, tensor time and the largest of the others add up:
           `predicted_us_in_turn`. Neither is less than the bytes over the rate of memory (`memory_us`). Programs are
           counted in whole waves. A measurement outside of the two says that the model misses something: waits at
           barriers, first loads and last stores of a program, and the lower clock under load are not in it.

           `gather_us` stands beside: the bytes that gathering the kept keys has to move, in plain JAX, over the rate of
           memory. Its index arithmetic, and adding up gradients over segments, are in neither.
Hardware   H100 SXM: 132 SMs, 989.4 TFLOP/s in dense bfloat16, 3.35 TB/s (NVIDIA H100 datasheet); 4,096 FLOP a cycle and
           SM, at 1.83 GHz, are that rate. 65,536 registers, 227 KiB of shared memory for blocks, 64 warps (CUDA C++
           Programming Guide, compute capability 9.0); lanes a cycle and SM, from its table of arithmetic throughput:
           128 float32, 64 integer, 16 special functions. Memory is taken at 0.9 of its rate, an assumption: cuDNN's
           normalisation reaches 86 to 88 % of it on an H200 (cudnn-frontend's published results).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import compile_kernels as programs  # before JAX: it sets what JAX and the compilers read when they are loaded

# isort: split
import jax
import jax.numpy as jnp
import numpy as np

import assembler
from machine_code import Loop, cycles, loops
from provenance import provenance
from smd_kernels.blocks import Blocks
from smd_kernels.gpu_tiles import walks
from smd_kernels.hardware import GPU_DECODE_SIZES, GPU_SIZES

Row = dict[str, Any]

SMS = 132
CLOCK = 1.83e9
MEMORY = 0.9 * 3.35e12
REGISTERS = 65_536
SHARED = 227 * 1024
RESERVED = 1024  # bytes of shared memory that the system takes of every block
WARPS = 64


@dataclass(frozen=True)
class Kernel:
    """What the compilers say of one.

    Attributes:
      threads: of a block. registers: of each when the kernel starts. shared: bytes of a block.
      loops: in the order of the code.
    """

    threads: int
    registers: int
    spill_bytes: int
    shared: int
    loops: tuple[Loop, ...]

    @property
    def blocks_per_sm(self) -> int:
        by_registers = REGISTERS // (self.registers * self.threads)
        by_shared = SHARED // (self.shared + RESERVED)
        return min(by_registers, by_shared, WARPS * 32 // self.threads, 32)

    @property
    def occupancy(self) -> float:
        return self.blocks_per_sm * self.threads / 32 / WARPS


# ---------------------------------------------------------------- machine code


def assembled(folder: Path) -> Kernel:
    """The kernel that was compiled last, from the compilers' dumps: reads its PTX with the same assembler once more."""
    [ptx] = folder.glob("*.ptx")
    cubin = folder / "kernel.cubin"
    done = subprocess.run(
        [tool("ptxas"), "-v", "-arch=sm_90a", str(ptx), "-o", str(cubin)], check=True, capture_output=True, text=True
    )
    sass = subprocess.run([tool("nvdisasm"), "-c", str(cubin)], check=True, capture_output=True, text=True).stdout
    [passes] = folder.glob("*.mlir-passes.log")
    launch = re.search(
        r"threads\([^)]*\) in \(%\w+ = %c(\d+)\w*,.*?dynamic_shared_memory_size %c(\d+)", passes.read_text("utf-8")
    )
    registers = re.findall(r"Used (\d+) registers", done.stderr)
    if launch is None or not registers:
        raise ValueError(f"expected a launch and the assembler's report in {folder}; got neither or one of them")
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", done.stderr)))
    return Kernel(int(launch[1]), max(map(int, registers)), spilled, int(launch[2]), tuple(loops(sass)))


def tool(name: str) -> str:
    """A program of CUDA: on the path, or in NVIDIA's packages beside JAX."""
    packages = Path(np.__file__).parents[1] / "nvidia"
    found = shutil.which(name) or next(map(str, sorted(packages.glob(f"*/bin/{name}"))), None)
    if found is None:
        raise SystemExit(f"expected {name} on the path or in an installed package of NVIDIA; got none")
    return found


# ---------------------------------------------------------------- time


def predicted(kernel: Kernel, steps: Sequence[tuple[Loop, float]], blocks: int, moved: float, warpgroups: int) -> Row:
    """Times of a call of `blocks` blocks, in which each warpgroup makes these steps.

    Args:
      moved: bytes between main memory and the SMs.
    """
    waves = math.ceil(blocks / (SMS * kernel.blocks_per_sm))
    at_once = kernel.blocks_per_sm * warpgroups
    overlapped, in_turn, bound = cycles([(loop, times * at_once) for loop, times in steps])
    memory = moved / MEMORY
    compute = waves * overlapped / CLOCK
    flops = blocks * warpgroups * sum(loop.flops * times for loop, times in steps)
    row: Row = {"predicted_us": max(compute, memory) * 1e6}
    row |= {"predicted_us_in_turn": max(waves * in_turn / CLOCK, memory) * 1e6}
    row |= {"bound_by": bound if compute >= memory else "memory", "memory_us": memory * 1e6}
    row |= {"bytes": moved, "flops": flops, "blocks": blocks, "waves": waves, "warpgroups": warpgroups}
    row |= {"blocks_per_sm": kernel.blocks_per_sm, "occupancy": kernel.occupancy, "threads": kernel.threads}
    row |= {"registers": kernel.registers, "spill_bytes": kernel.spill_bytes, "shared_bytes": kernel.shared}
    return row | {"steps": [{"times": times} | loop._asdict() for loop, times in steps]}


# ---------------------------------------------------------------- the kernels


def segment(tokens: int) -> tuple[Blocks, int]:
    """A segment in the middle of a rollout, whose queries all see `budget` kept keys; how many a layer has."""
    group, length, budget = programs.GROUP, programs.BUFFER, programs.BUDGET
    column = jnp.repeat(budget + jnp.arange(length), group)[None]
    born = jnp.arange(budget + length)[None]
    nothing = jnp.zeros((1, 1, 1))
    blocks = Blocks(nothing, nothing, nothing, column, born, jnp.full_like(born, 2 * (budget + length)))
    return blocks, tokens // length * 8  # KV heads


def steps_of(kernel: Kernel, table: Any) -> list[tuple[Loop, float]]:
    """How often a block goes through each of its two loops: tiles without a mask, and with one; on average."""
    first, first_full, after_full, after = (np.asarray(table)[..., i] for i in range(4))
    full = float((after_full - first_full).mean())
    plain, masked = kernel.loops
    return [(plain, full), (masked, float((after - first).mean()) - full)]


def attention(folder: Path, array: programs.Array, dumps: assembler.Dumps) -> Iterator[Row]:
    """The three kernels, at the sizes of a layer of 8,192 and of 32,768 tokens."""
    head_dim = 128
    sizes = {
        "forward": (GPU_SIZES.rows, GPU_SIZES.keys, False),
        "dq": (GPU_SIZES.rows_dq, GPU_SIZES.keys_dq, False),
        "dk dv": (GPU_SIZES.rows_dkv, GPU_SIZES.keys_dkv, True),
    }
    for program in programs.gpu_attention(array, jnp.bfloat16, head_dim):
        kernel = compiled(program, folder, dumps)
        rows, keys, of_keys = sizes[program.labels["kernel"]]
        for tokens in (8192, 32768):
            blocks, count = segment(tokens)
            table = walks(blocks, rows, keys, of_keys=of_keys)
            own = keys if of_keys else rows
            moved = count * block_bytes(
                program.labels["kernel"], blocks.column.shape[1], blocks.born.shape[1], head_dim
            )
            shape = {"tokens": tokens, "heads": 64, "kv_heads": 8, "head_dim": head_dim}
            shape |= {"budget": programs.BUDGET, "buffer": programs.BUFFER}
            row = predicted(kernel, steps_of(kernel, table), count * table.shape[1], moved, own // 64)
            gather = 2 * 2 * 2 * count * programs.BUDGET * head_dim / MEMORY * 1e6  # k, v; in, out; two bytes
            yield {"kernel": f"attention {program.labels['kernel']}", "shape": shape} | row | {"gather_us": gather}


def block_bytes(name: str, rows: int, keys: int, head_dim: int) -> float:
    """Of one block, read and written once: programs of a block follow each other, and what they share is in L2."""
    narrow = 2 * head_dim
    read = rows * (narrow + 4) + keys * (2 * narrow + 8)
    if name == "forward":
        return read + rows * (narrow + 4)
    read += rows * (narrow + 8)
    return read + (rows * narrow if name == "dq" else keys * 2 * 4 * head_dim)


def decoding(folder: Path, array: programs.Array, dumps: assembler.Dumps, target: programs.Target) -> Iterator[Row]:
    """A step of a layer's cache: three loops, over the tiles of K, for the sums, and over those of V."""
    for shape in (*programs.DECODE_SHAPES, programs.Shape(256, 12, 2, 1152, 128)):
        kernel = compiled(programs.decode_kernel(array, target, shape), folder, dumps)
        tiles = GPU_DECODE_SIZES.tiles(shape.slots)
        slots = shape.batch * shape.kv_heads * shape.slots
        moved = 4 * slots * shape.head_dim + 8 * slots + 4 * shape.batch * shape.heads * shape.head_dim
        steps = [(loop, float(tiles)) for loop in kernel.loops]
        yield {"kernel": "decode", "shape": shape._asdict()} | predicted(
            kernel, steps, shape.batch * shape.kv_heads, moved, kernel.threads // 128
        )


def compiled(program: programs.Program, folder: Path, dumps: assembler.Dumps) -> Kernel:
    dumps.empty()
    program.function.trace(*program.args, **program.kwargs).lower(lowering_platforms=("cuda",)).compile()
    return assembled(folder)


def rounded(x: Any) -> Any:
    """Numbers to what can be meant."""
    if isinstance(x, dict):
        return {name: rounded(value) for name, value in x.items()}
    if isinstance(x, list):
        return [rounded(value) for value in x]
    return round(x, 3) if isinstance(x, float) else x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="write the rows, with date and command, to this file")
    args = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory(prefix="predict_kernels_") as name:
        dumps = assembler.Dumps.in_folder(Path(name))
        os.environ["MOSAIC_GPU_DUMP_MLIR_PASSES"] = "1"
        target = programs.TARGETS["h100"]
        array = partial(jax.ShapeDtypeStruct, sharding=target.sharding())
        for row in (*attention(dumps.gpu, array, dumps), *decoding(dumps.gpu, array, dumps, target)):
            found.append(rounded(row))
            print(json.dumps(found[-1]), flush=True)
    if args.out is not None:
        said = "predicted from compiled code for an H100; nothing here was measured"
        said_by = provenance(("jax", "jaxlib", "jax-cuda12-plugin", "nvidia-cuda-nvdisasm"))
        assembled_by = subprocess.run([tool("ptxas"), "--version"], capture_output=True, text=True, check=True).stdout
        said_by["versions"]["ptxas"] = re.findall(r"release ([\d.]+)", assembled_by)[0]
        args.out.write_text(json.dumps({"predictions": said} | said_by | {"rows": found}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
