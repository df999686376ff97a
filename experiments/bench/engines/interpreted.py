"""Settings and patches of JAX's interpreter of GPU kernels, which rehearses the benchmarks on a CPU.

The interpreter is private to JAX (`jax._src`) and may move, so runs on a GPU do not import this file.
"""

from __future__ import annotations

from typing import Any

import jax
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from smd_kernels import decode_codes_gpu, decode_gpu
from smd_kernels.hardware import DecodeSizes


def parameters() -> InterpretGPUParams:
    return InterpretGPUParams()


def decode_parameters(slots: int) -> InterpretGPUParams:
    """Reads past the last slot give zeros, as with TMA. If no block needs them, they raise, and unset memory is NaN."""
    ragged = slots % DecodeSizes().keys
    return InterpretGPUParams(
        out_of_bounds_reads="uninitialized" if ragged else "raise", uninitialized_memory="zero" if ragged else "nan"
    )


class Transposed:
    """The transpose of a reference, which the interpreter lacks."""

    def __init__(self, ref: Any) -> None:
        self.ref = ref

    def __getitem__(self, index: Any) -> jax.Array:
        return self.ref[...].T

    def __setitem__(self, index: Any, value: jax.Array) -> None:
        self.ref[...] = value.T


def patch_kernels() -> None:
    """Patches what the interpreter lacks, for the rest of this process: layout casts and transposed operands."""
    multiply = plgpu.wgmma

    def wgmma(acc: Any, a: Any, b: Any) -> None:
        def multiply_copies(a_copy: Any, b_copy: Any) -> None:
            a_copy[...], b_copy[...] = a[...], b[...]
            multiply(acc, a_copy, b_copy)

        pl.run_scoped(multiply_copies, *(plgpu.SMEM(x.shape, x.dtype) for x in (a[...], b[...])))

    plgpu.wgmma = wgmma
    plgpu.layout_cast = lambda x, layout: x
    plgpu.load = lambda ref, index, optimized: ref[...]
    decode_gpu._transposed = Transposed
    decode_codes_gpu._transposed = Transposed
