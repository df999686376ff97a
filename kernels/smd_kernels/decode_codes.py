"""Decode attention to a quantised cache: slots of codes, followed by slots in full precision.

    slots    [ . . 3 7 8 9 | 10 11 . ]     codes | full precision, the newest keys
    valid      0 0 1 1 1 1    1  1 0       any slot may be empty

Like `smd_kernels.decode`, with one softmax over both kinds of slots. The kernels read codes and ranges from main memory
and dequantise them on chip: no quantised key or value is written to memory in full precision.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from smd_kernels.codes import Codes
from smd_kernels.decode import Implementation, decode_attention
from smd_kernels.hardware import NO_CAPS_OR_SINKS, why_not_decode_codes, why_not_mixed


def decode_codes_attention(
    q: Float[Array, "batch heads 1 head_dim"],
    codes: Codes,
    k: Float[Array, "batch kv_heads precise head_dim"],
    v: Float[Array, "batch kv_heads precise head_dim"],
    valid: Bool[Array, "batch kv_heads slots"],
    impl: Implementation = "xla",
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
) -> tuple[Float[Array, "batch heads 1 head_dim"], Float[Array, "batch kv_heads slots"]]:
    """Attention of one query per row to the valid slots of a quantised cache.

    Args:
      q, k, v: one dtype, also that of the ranges in `codes`; `heads` is a multiple of `kv_heads`.
      codes: the quantised slots. k, v: the slots in full precision.
      valid: which slots hold a key: the quantised slots, then those in full precision.
      softcap, sinks: as in `decode_attention`.
      impl: as in `decode_attention`. All implementations round dequantised keys to the dtype of `q`, like the learner.

    Returns:
      As `decode_attention`, over all slots: the output, and the weights that each slot received.

    Raises:
      ValueError: the implementation is unknown or cannot run these shapes and dtypes; the message gives the reason.
    """
    if impl == "xla":
        keys, values = codes.dequantized()
        keys, values = (jnp.concatenate(x, axis=2) for x in ((keys, k), (values, v)))
        return decode_attention(q, keys, values, valid, softcap=softcap, sinks=sinks)
    if impl not in ("mosaic_gpu", "mosaic_tpu"):
        raise ValueError(f"expected impl to be 'xla', 'mosaic_gpu' or 'mosaic_tpu'; got {impl!r}")
    if softcap is not None or sinks is not None:
        raise ValueError(f"impl={impl!r} cannot run: {NO_CAPS_OR_SINKS}")
    # Checked before the compiler is imported.
    reason = why_not_mixed(q.dtype, k.dtype, v.dtype)
    reason = reason or why_not_decode_codes(impl, q.dtype, codes, k.shape[2], q.shape[1] // k.shape[1])
    if reason is not None:
        raise ValueError(f"impl={impl!r} cannot run: {reason}")
    # Imported here: Pallas' compilers take long to import, and most programs never decode on an accelerator.
    if impl == "mosaic_gpu":
        from smd_kernels.decode_codes_gpu import decode_codes_attention as kernel
    else:
        from smd_kernels.decode_codes_tpu import decode_codes_attention as kernel
    return kernel(q, codes, k, v, valid)
