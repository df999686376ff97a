"""Supported inputs, default tile sizes and memory limits of the GPU and TPU kernels.

Importing Pallas' Mosaic compilers takes longer than importing the rest of the package. This module answers which inputs
a kernel supports without them; only code that runs a kernel imports its module: `gpu` and `tpu` for block attention,
`decode_gpu`, `decode_tpu`, `decode_codes_gpu` and `decode_codes_tpu` for decode attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from smd_kernels.blocks import BlockSizes
from smd_kernels.codes import BYTE, Codes

Hardware = Literal["mosaic_gpu", "mosaic_tpu"]

# The pass for dk and dv holds two sums and two tiles of scores: longer row tiles would spill registers.
# 256 blocks of 1,024 rows and 1,152 keys take 2.2 GB, forward and backward.
GPU_SIZES = BlockSizes(rows_dkv=64, blocks=256)

# A grid step has a fixed cost: with tiles of 128 another flash kernel reached 7.6 of 197 TFLOP/s on v5e
# (github.com/jax-ml/jax/issues/24633). Tiles of 1,024 exceed v5e's vector memory in float32.
TPU_SIZES = BlockSizes(rows=512, keys=512, rows_dq=512, keys_dq=512, rows_dkv=512, keys_dkv=512)

SMEM_BYTES = 220 * 1024  # of Hopper's 227 KiB per block; the rest is for barriers, reductions and alignment
# Each range of values has its own sums in registers.
MOST_PARTS = 8
VMEM_BYTES = 12 * 2**20  # of the 16 MiB that a TPU program gets by default; the rest is for spills
DECODE_KEYS = 64  # slots per tile of the GPU decode kernels
DECODE_STAGES = 4  # tiles in flight in them
GPU_GROUP = 8  # columns of scores^T in the decode kernel, the narrowest wgmma tile: the most query heads per KV head
TPU_LANES = 128  # length of TPU tiles along the last axis of an array


@dataclass(frozen=True)
class Limits:
    """Inputs that a kernel supports.

    Attributes:
      dtypes: names of the supported dtypes of queries, keys and values.
      because: reason for these dtypes, appended to the error message.
      head_dims: the supported head dims; None for any multiple of `head_dim_multiple`.
      slots_multiple: the number of cache slots must be a multiple of it. Decoding only.
      group: maximum of query heads per KV head; None for any number. Decoding only.
    """

    dtypes: tuple[str, ...]
    because: str = ""
    head_dims: tuple[int, ...] | None = (64, 128)
    head_dim_multiple: int = 1
    slots_multiple: int = 1
    group: int | None = None

    def why_not(self, dtype: jax.typing.DTypeLike, head_dim: int) -> str | None:
        """Returns the reason why this dtype or head dim is not supported, or None."""
        name = jnp.dtype(dtype).name
        if name not in self.dtypes:
            return f"expected {' or '.join(self.dtypes)}{self.because}; got {name}"
        if self.head_dims is not None and head_dim not in self.head_dims:
            return f"expected head_dim in {self.head_dims}; got {head_dim}"
        if head_dim % self.head_dim_multiple:
            return f"expected head_dim to be a multiple of {self.head_dim_multiple}; got {head_dim}"
        return None


# On Hopper, head dims above 128 would not leave enough registers for the sums of the backward pass.
BLOCKS: dict[Hardware, Limits] = {
    "mosaic_gpu": Limits(("bfloat16", "float16"), because=", which Hopper's wgmma multiplies"),
    "mosaic_tpu": Limits(("bfloat16", "float32")),
}
# TMA, Hopper's copy engine, copies tiles in multiples of 8 rows.
DECODE: dict[Hardware, Limits] = {
    "mosaic_gpu": Limits(("bfloat16",), slots_multiple=8, group=GPU_GROUP),
    "mosaic_tpu": Limits(("bfloat16", "float32"), head_dims=None, head_dim_multiple=16),
}
# Decoding from a quantised cache.
DECODE_CODES: dict[Hardware, Limits] = {
    "mosaic_gpu": Limits(("bfloat16",), slots_multiple=8, group=GPU_GROUP),
    "mosaic_tpu": Limits(("bfloat16", "float32")),
}


WIDE_INDICES = "expected jax_enable_x64 False, because Pallas' kernels have 32-bit indices; got True"
NO_CAPS_OR_SINKS = "expected neither a softcap of scores nor sinks, which the decode kernels do not have; got one"


def why_not_mixed(q: jax.typing.DTypeLike, k: jax.typing.DTypeLike, v: jax.typing.DTypeLike) -> str | None:
    """Returns the reason why a kernel cannot run inputs of these dtypes together, or None."""
    names = [jnp.dtype(x).name for x in (q, k, v)]
    return None if len(set(names)) == 1 else f"expected q, k and v of one dtype; got {', '.join(names)}"


def _has_wide_indices() -> bool:
    return jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]


def why_not_blocks(
    hardware: Hardware, dtype: jax.typing.DTypeLike, head_dim: int, softcap: float | None = None
) -> str | None:
    """Returns the reason why a block attention kernel cannot run queries of this dtype and head dim, or None.

    The GPU kernel also needs a device of compute capability 9.0, which is not checked here.
    """
    if _has_wide_indices():
        return WIDE_INDICES
    if hardware == "mosaic_gpu" and softcap is not None:
        return f"expected no softcap of scores, which this kernel does not have; got {softcap}"
    return BLOCKS[hardware].why_not(dtype, head_dim)


def why_not_decode(
    hardware: Hardware, dtype: jax.typing.DTypeLike, head_dim: int, slots: int, group: int
) -> str | None:
    """Returns the reason why a decode kernel cannot run these inputs, or None.

    Args:
      slots: slots of the cache per KV head. group: query heads per KV head.
    """
    if _has_wide_indices():
        return WIDE_INDICES
    limits = DECODE[hardware]
    if (reason := limits.why_not(dtype, head_dim)) is not None:
        return reason
    if not slots:
        return "expected at least one slot; got 0"
    if slots % limits.slots_multiple:
        return f"expected slots to be a multiple of {limits.slots_multiple}, the rows of a TMA tile; got {slots}"
    if limits.group is not None and group > limits.group:
        return f"expected at most {limits.group} query heads per KV head; got {group}"
    if hardware == "mosaic_gpu":
        memory = "shared memory"
        most = SMEM_BYTES
        needed = _smem_bytes(head_dim, slots)
    else:
        memory = "VMEM"
        most = VMEM_BYTES
        needed = _vmem_bytes(jnp.dtype(dtype).itemsize, head_dim, slots, group)
    if needed > most:
        return f"expected at most {most} bytes of {memory}; {slots} slots of {head_dim} need {needed}"
    return None


def why_not_decode_codes(
    hardware: Hardware, dtype: jax.typing.DTypeLike, codes: Codes, precise: int, group: int
) -> str | None:
    """Returns the reason why a decode kernel cannot run these inputs over a quantised cache, or None.

    Args:
      codes: the quantised slots; only shapes and dtypes are read. precise: number of slots in full precision.
      group: query heads per KV head.
    """
    if _has_wide_indices():
        return WIDE_INDICES
    limits = DECODE_CODES[hardware]
    if (reason := limits.why_not(dtype, codes.head_dim)) is not None:
        return reason
    if codes.head_dim * codes.bits % BYTE:
        return f"expected codes that fill their bytes; got head_dim {codes.head_dim} at {codes.bits} bits"
    for name, slots in (("slots of codes", codes.slots), ("slots in full precision", precise)):
        if not slots:
            return f"expected at least one slot; got 0 {name}"
        if slots % limits.slots_multiple:
            return f"expected {name} in multiples of {limits.slots_multiple}; got {slots}"
    if limits.group is not None and group > limits.group:
        return f"expected at most {limits.group} query heads per KV head; got {group}"
    if hardware == "mosaic_gpu":
        memory = "shared memory"
        most = SMEM_BYTES
        needed = _codes_smem_bytes(codes, precise)
        if codes.parts > MOST_PARTS:
            return f"expected at most {MOST_PARTS} ranges of values per token; got {codes.parts}"
    else:
        memory = "VMEM"
        most = VMEM_BYTES
        needed = _codes_vmem_bytes(jnp.dtype(dtype).itemsize, codes, precise, group)
    if needed > most:
        what = f"{codes.slots} + {precise} slots of {codes.head_dim} and {codes.groups} groups of keys"
        return f"expected at most {most} bytes of {memory}; {what} need {needed}"
    return None


def decode_tiles(slots: int) -> int:
    """Number of tiles of the GPU decode kernels that hold `slots` slots."""
    return -(-slots // DECODE_KEYS)


def _smem_bytes(head_dim: int, slots: int) -> int:
    """Shared memory of a thread block of `decode_gpu`: ring, queries and weights in bfloat16, scores and validity in
    float32. It includes slack: the weights count twice."""
    halves = DECODE_STAGES * DECODE_KEYS * head_dim + GPU_GROUP * head_dim + 2 * GPU_GROUP * DECODE_KEYS
    return 2 * halves + 4 * decode_tiles(slots) * DECODE_KEYS * (GPU_GROUP + 1)


def _vmem_bytes(itemsize: int, head_dim: int, slots: int, group: int) -> int:
    """VMEM of a program: K and V of this and the next program, and scores, exponentials, weights and mask."""
    padded = -(-slots // TPU_LANES) * TPU_LANES
    # Scores are float32; a group of fewer than 8 is padded to the 8 sublanes of a register.
    return 4 * padded * head_dim * itemsize + 4 * padded * max(group, 8) * 4


def plane_tile(head_dim: int, bits: int) -> int:
    """Columns per tile of dequantised codes in the GPU kernel, such that every plane has whole tiles."""
    return min(head_dim * bits // BYTE, 64)


def _codes_smem_bytes(codes: Codes, precise: int) -> int:
    """Shared memory of a thread block of `decode_codes_gpu`; mirrors its `_scratch`."""
    keys = DECODE_KEYS
    coded = decode_tiles(codes.slots)
    halves = 3 * keys * codes.head_dim + 2 * GPU_GROUP * (codes.head_dim + keys) + 2 * codes.parts * keys
    halves += 2 * -(-codes.groups // 64) * 64 * codes.head_dim
    slots = (coded + decode_tiles(precise)) * (GPU_GROUP + 1) + coded  # scores and validity; groups
    return DECODE_STAGES * keys * codes.keys.shape[3] + 2 * halves + 4 * slots * keys


def _codes_vmem_bytes(itemsize: int, codes: Codes, precise: int, group: int) -> int:
    """VMEM of a program of `decode_codes_tpu`: its inputs twice, for prefetching, and its intermediates."""

    def lanes(count: int) -> int:
        return -(-count // TPU_LANES) * TPU_LANES

    slots = lanes(codes.slots)
    # Slots are the last axis. The axis before is padded to the rows of a tile: 32 in 8, 16 in 16, 8 in 32 bits.
    rows = 32 // itemsize
    read = 2 * slots * -(-codes.keys.shape[3] // 32) * 32 + 2 * slots * -(-codes.parts // rows) * rows * itemsize
    read += 2 * (codes.groups + precise) * lanes(codes.head_dim) * itemsize
    # Planes as integers and as float32, their two ranges, and the result; the one-hot matrix of groups; scores.
    wide = 5 * slots * codes.head_dim * 4 + 2 * codes.groups * slots * itemsize
    return 2 * read + wide + 4 * (slots + lanes(precise)) * max(group, 8) * 4
