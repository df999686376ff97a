"""Decode attention over a quantised cache: one query per row against slots of codes and, right of them, of numbers.

    slots    [ . . 3 7 8 9 | 10 11 . ]     codes | in full precision, the newest
    valid      0 0 1 1 1 1    1  1 0       any of them may be empty

As `smd_kernels.decode`, with one softmax over both kinds. The kernels read codes and ranges from main memory and widen
them where they are multiplied: no key or value of few bits is ever written in full precision.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from smd_kernels.codes import Codes
from smd_kernels.decode import Implementation, decode_attention
from smd_kernels.hardware import why_not_decode_codes


def decode_codes_attention(
    q: Float[Array, "batch heads 1 head_dim"],
    codes: Codes,
    k: Float[Array, "batch kv_heads precise head_dim"],
    v: Float[Array, "batch kv_heads precise head_dim"],
    valid: Bool[Array, "batch kv_heads slots"],
    impl: Implementation = "xla",
) -> tuple[Float[Array, "batch heads 1 head_dim"], Float[Array, "batch kv_heads slots"]]:
    """Attention of one query per row over the valid slots of both kinds.

    Args:
      valid: of the slots of codes, then of those in full precision.
      impl: as in `smd_kernels.decode`. All round what codes stand for to the dtype of the inputs, as a learner does.

    Returns:
      As `smd_kernels.decode.decode_attention`.

    Raises:
      ValueError: for an implementation that does not exist or cannot run these shapes; it says why.
    """
    if impl == "xla":
        keys, values = codes.widened()
        keys, values = (jnp.concatenate(x, axis=2) for x in ((keys, k), (values, v)))
        return decode_attention(q, keys, values, valid)
    if impl not in ("mosaic_gpu", "mosaic_tpu"):
        raise ValueError(f"expected impl to be 'xla', 'mosaic_gpu' or 'mosaic_tpu'; got {impl!r}")
    # Tables answer first, so that a refusal needs no compiler.
    reason = why_not_decode_codes(impl, q.dtype, codes, k.shape[2], q.shape[1] // k.shape[1])
    if reason is not None:
        raise ValueError(f"impl={impl!r} cannot run: {reason}")
    # Here, because Pallas' compilers take long to import and most programs never decode on an accelerator.
    if impl == "mosaic_gpu":
        from smd_kernels.decode_codes_gpu import decode_codes_attention as kernel
    else:
        from smd_kernels.decode_codes_tpu import decode_codes_attention as kernel
    return kernel(q, codes, k, v, valid)
