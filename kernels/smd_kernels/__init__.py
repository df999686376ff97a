"""Attention with explicit masks, shadow masks and caches of fixed size. Depends only on JAX, never on `smd_jax`.

    learner, whole sequences     interval_attention(q, k, v, evicted_at, kernel)
    learner, by segments         segment_attention(q, k, v, evicted_at, segments, kernel)
      with one of these kernels    XlaKernel, MosaicGpuKernel (Hopper), MosaicTpuKernel
    sampler, one query per row   decode_attention(q, k, v, valid, impl)
      over quantised slots       decode_codes_attention(q, codes, k, v, valid, impl)
    any boolean mask             reference.attention, attend_and_observe

`why_not_blocks`, `why_not_decode` and `why_not_decode_codes` return the reason why a hardware kernel cannot run some
inputs, or None. The hardware kernels are compiled ahead of time and tested in JAX's interpreters; none has run on a GPU
or TPU yet.
"""

from typing import TYPE_CHECKING, Any

# Masked attention of the learner, and its arguments.
from smd_kernels.intervals import interval_attention as interval_attention
from smd_kernels.segments import segment_attention as segment_attention
from smd_kernels.segments import Segments as Segments
from smd_kernels.copies import Copies as Copies
from smd_kernels.observed import attend_and_observe as attend_and_observe

# Kernels of the learner.
from smd_kernels.blocks import BlockKernel as BlockKernel
from smd_kernels.blocks import BlockSizes as BlockSizes
from smd_kernels.blocks import Blocks as Blocks
from smd_kernels.xla import XlaKernel as XlaKernel

# Attention of the sampler to its cache.
from smd_kernels.decode import decode_attention as decode_attention
from smd_kernels.decode_codes import decode_codes_attention as decode_codes_attention
from smd_kernels.codes import Codes as Codes

# Inputs that the hardware kernels support.
from smd_kernels.hardware import why_not_blocks as why_not_blocks
from smd_kernels.hardware import why_not_decode as why_not_decode
from smd_kernels.hardware import why_not_decode_codes as why_not_decode_codes

# The definition that every kernel is tested against.
from smd_kernels import reference as reference

if TYPE_CHECKING:
    from smd_kernels.gpu import MosaicGpuKernel as MosaicGpuKernel
    from smd_kernels.tpu import MosaicTpuKernel as MosaicTpuKernel


def __getattr__(name: str) -> Any:
    # Imported on first use: Pallas' compilers take longer to import than the rest of the library.
    if name == "MosaicGpuKernel":
        from smd_kernels.gpu import MosaicGpuKernel

        return MosaicGpuKernel
    if name == "MosaicTpuKernel":
        from smd_kernels.tpu import MosaicTpuKernel

        return MosaicTpuKernel
    raise AttributeError(f"module 'smd_kernels' has no attribute {name!r}")
