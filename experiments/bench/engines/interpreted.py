"""Settings and patches of JAX's interpreter of GPU kernels, which rehearses the benchmarks on a CPU.

The interpreter is private to JAX (`jax._src`) and may move, and its patches are those of the tests, so runs on a GPU do
not import this file.
"""

from __future__ import annotations

import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from smd_kernels.hardware import DECODE_KEYS
from tests.interpreted_gpu import patch_interpreter


def decode_parameters(slots: int) -> InterpretGPUParams:
    """Reads past the last slot give zeros, as with TMA. If no block needs them, they raise, and unset memory is NaN."""
    ragged = slots % DECODE_KEYS
    return InterpretGPUParams(
        out_of_bounds_reads="uninitialized" if ragged else "raise", uninitialized_memory="zero" if ragged else "nan"
    )


def patch_kernels() -> None:
    """Patches what the interpreter lacks, for the rest of this process: layout casts and transposed operands."""
    patch_interpreter(pytest.MonkeyPatch())
