"""`attend`: the entry point of masked attention.

    impl          mask                         method
    reference     any                          everything in float32: the definition
    xla           any                          scores and mask of T × T, products in the dtype of the inputs
    interval      a KeyInterval                scores tile by tile, in plain JAX: memory O(T)
    segments      a KeyInterval with segments  gathers the visible keys of each segment: time O(T · budget), memory O(T)
    portable      a KeyInterval                `segments` or `interval`, whichever is cheaper
    mosaic_gpu    a KeyInterval                a Pallas kernel for Hopper GPUs, over segments if cheaper
    mosaic_tpu    a KeyInterval                a Pallas kernel for TPUs, over segments if cheaper

Shapes and the convention for queries that see nothing are those of `smd_kernels.reference`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from smd_jax.devices.sharding import over_heads, split_heads
from smd_jax.message.masks import KeyInterval, LayerMask, ShadowMask, check_booleans, check_whole_columns, to_visible
from smd_jax.shapes import check_shape
from smd_jax.typed_fields import check_choice, check_types
from smd_kernels import reference
from smd_kernels.blocks import BlockKernel, BlockSizes
from smd_kernels.codes import Codes
from smd_kernels.copies import append_copies
from smd_kernels.decode import Implementation as DecodeImplementation
from smd_kernels.decode import decode_attention
from smd_kernels.decode_codes import decode_codes_attention
from smd_kernels.hardware import BLOCKS, GPU_SIZES, NO_CAPS_OR_SINKS, TPU_SIZES, why_not_blocks, why_not_mixed
from smd_kernels.hardware import why_not_decode as kernel_why_not_decode
from smd_kernels.hardware import why_not_decode_codes as kernel_why_not_decode_codes
from smd_kernels.intervals import interval_attention
from smd_kernels.observed import attend_and_observe
from smd_kernels.segments import Segments, segment_attention
from smd_kernels.xla import ACCELERATOR_SIZES, CPU_SIZES, XlaKernel

# Cost of a score of gathered keys relative to one of the causal triangle, from the break-even in
# experiments/results/attention_cpu_budgets.json; not measured on GPU and TPU.
GATHERED_SCORE = 1.6
PTXAS = "nvidia-cuda-nvcc-cu12"  # the package with CUDA 12's assembler

Implementation = Literal["reference", "xla", "interval", "segments", "portable", "mosaic_gpu", "mosaic_tpu"]


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Implementations of attention. Static.

    Attributes:
      impl, sizes: implementation of the teacher-forced pass and of prefill, and its block sizes, see `attend`.
      decode_impl: implementation of decoding, see `decode`. None chooses the fastest that can run.
      softcap: soft cap of the scores by tanh (Gemma 2); None: no cap.

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: for a soft cap that is not positive and finite, or an implementation that does not exist.
    """

    impl: Implementation | None = None
    sizes: BlockSizes | None = None
    decode_impl: DecodeImplementation | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        check_types(self)
        for field, names in (("impl", Implementation), ("decode_impl", DecodeImplementation)):
            if (name := getattr(self, field)) is not None:
                check_choice(field, name, get_args(names))
        check_softcap(self.softcap)

    def attend(self, q: Array, k: Array, v: Array, mask: LayerMask, sinks: Array | None = None) -> Array:
        """`attend` with this configuration."""
        return attend(q, k, v, mask, self.impl, self.sizes, self.softcap, sinks)


def attend(
    q: Float[Array, "batch heads queries head_dim"],
    k: Float[Array, "batch kv_heads keys head_dim"],
    v: Float[Array, "batch kv_heads keys head_dim"],
    mask: LayerMask,
    impl: Implementation | None = None,
    sizes: BlockSizes | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch heads queries head_dim"]:
    """Attention under one layer's mask.

    Args:
      k, v: finite also where no query sees them: NaN times a weight of 0 is NaN.
      mask: booleans `[batch, kv_heads, queries, keys]`, or a KeyInterval over as many keys as queries.
      impl: see above. None chooses the fastest by platform, dtype, length and budget. On a Hopper GPU or a TPU these
        are the Mosaic kernels if they support the inputs: compiled ahead of time and checked in JAX's interpreters, but
        not yet run on the hardware. Name another ("portable", "xla") to avoid them. Static.
      sizes: tile sizes; None is the implementation's default. "reference" and "xla" have none. Static.
      softcap: see AttentionConfig; "mosaic_gpu" has none. Static.
      sinks: one extra score per head in the softmax, whose weight is dropped (gpt-oss).

    All but "reference" and "xla" define their own backward pass: for forward-mode or second derivatives use "xla".
    Inside your own `jax.shard_map` they need `check_vma=False`.

    Raises:
      TypeError: for q without floats; for a mask of all layers, none, or one of numbers, such as Hugging Face's 0 and
        -1e9.
      ValueError: for arrays whose shapes do not fit together; for an unknown implementation, or one that cannot run
        these inputs, with the reason; for a softcap that is not positive and finite.
    """
    _check_arrays(q, k, v, mask)
    if sinks is not None:
        check_shape("sinks", sinks, (q.shape[1],))
    check_softcap(softcap)
    if impl is None:
        impl = best(q, k, mask, softcap, v)
    if (reason := why_not(impl, q, k, mask, softcap, v)) is not None:
        raise ValueError(f"expected an implementation that can run here; got impl={impl!r}: {reason}")
    copies = None
    if isinstance(mask, KeyInterval) and mask.quantized is not None:
        # Only padding has an `evicted_at` of 0.
        copies = mask.quantized.copies(k, v, mask.evicted_at > 0)
    if impl in ("reference", "xla") or not isinstance(mask, KeyInterval):
        visible = to_visible(mask)
        if copies is not None:
            # A quantised key is appended as a second key, and the mask selects which of the two a query sees.
            k, v, visible = append_copies(k, v, visible, copies)
        if impl == "reference":
            return reference.attention(q, k, v, visible, softcap, sinks)
        return attend_and_observe(q, k, v, visible, softcap, sinks)[0]
    # A mask may be shared by rows or heads; the kernels need an interval for every key.
    arrays = k, v, jnp.broadcast_to(mask.evicted_at, k.shape[:3]), copies
    arrays = jax.tree.map(lambda x: split_heads(x, q.shape[1]), arrays)
    sinks = None if sinks is None else jnp.broadcast_to(sinks[None], q.shape[:2])
    kernel, blocks_at_once = _kernel(impl, sizes, softcap)
    # "interval" and "segments" are explicit; the others choose the cheaper of both.
    segments = mask.segments if impl == "segments" or (impl != "interval" and pays(mask.segments, k.shape[2])) else None

    def run(q: Array, k: Array, v: Array, evicted_at: Array, copies: Any, sinks: Array | None) -> Array:
        if segments is None:
            return interval_attention(q, k, v, evicted_at, kernel, copies, sinks)
        return segment_attention(q, k, v, evicted_at, segments, kernel, blocks_at_once, copies, sinks)

    return over_heads(run, q, *arrays, sinks)


def check_softcap(softcap: float | None) -> None:
    """Raises ValueError for a soft cap that is not positive and finite."""
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"expected a finite softcap > 0, or None for no cap; got {softcap}")


def _check_arrays(q: Array, k: Array, v: Array, mask: object) -> None:
    """Raises TypeError for q without floats or a mask that is not one layer's booleans or intervals, and ValueError for
    other shapes."""
    check_shape("q", q, ("batch", "heads", "queries", "head_dim"))
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise TypeError(f"expected q as floats; got {q.dtype}")
    batch, heads, queries, head_dim = q.shape
    check_shape("k", k, (batch, "kv_heads", "keys", head_dim))
    kv_heads, keys = k.shape[1:3]
    check_shape("v", v, k.shape)
    if not keys:
        raise ValueError("expected at least one token; got 0")
    if heads % kv_heads:
        raise ValueError(f"expected heads of q to be a multiple of the {kv_heads} KV heads of k; got {heads}")
    if isinstance(mask, ShadowMask):
        raise TypeError("expected the mask of one layer, mask.layer(index); got a ShadowMask, which has all layers")
    if isinstance(mask, KeyInterval):
        check_whole_columns(mask.evicted_at)
        if not queries == keys == mask.evicted_at.shape[-1]:
            got = f"{queries} queries, {keys} keys and a mask of {mask.evicted_at.shape[-1]}"
            raise ValueError(
                f"expected as many queries as keys and intervals, in arrays [batch, heads, tokens, head_dim]; got {got}"
            )
        name, got, wanted = "mask.evicted_at", mask.evicted_at.shape, (batch, kv_heads, keys)
    elif isinstance(mask, jax.Array | np.ndarray):
        check_booleans(mask)
        name, got, wanted = "mask", mask.shape, (batch, kv_heads, queries, keys)
    else:
        raise TypeError(
            f"expected the mask as a KeyInterval or as booleans; got {type(mask).__name__}. Without evictions: "
            "dense_mask(valid).layer(0)"
        )
    fits = len(got) == len(wanted) and all(size in (1, full) for size, full in zip(got[:2], wanted[:2], strict=True))
    if not fits or got[2:] != wanted[2:]:
        raise ValueError(
            f"expected {name} of shape {list(wanted)} for {queries} queries of {heads} heads and {keys} keys of "
            f"{kv_heads} KV heads, where the first two axes may be 1; got {list(got)}"
        )


def best(q: Array, k: Array, mask: LayerMask, softcap: float | None = None, v: Array | None = None) -> Implementation:
    """The implementation for `impl=None`. Warns once if the device's kernel supports this dtype and head dim but cannot
    run for another reason, such as a soft cap."""
    # Only interval masks allow skipping tiles; any other mask is read as a whole.
    if not isinstance(mask, KeyInterval):
        return "xla"
    for impl in ("mosaic_gpu", "mosaic_tpu"):
        reason = why_not(impl, q, k, mask, softcap, v)
        if reason is None:
            return impl
        if wrong_device(impl) is None and BLOCKS[impl].why_not(q.dtype, q.shape[3]) is None:
            _warn_once(f"attention without the kernel {impl}, which is slower: {reason}")
    return "portable"


def why_not(
    impl: str, q: Array, k: Array, mask: LayerMask, softcap: float | None = None, v: Array | None = None
) -> str | None:
    """The reason why an implementation cannot run these inputs on this machine, or None.

    Args:
      v: None: of the dtype of `k`.
    """
    if impl not in get_args(Implementation):
        return f"expected one of {', '.join(get_args(Implementation))}"
    if impl in ("reference", "xla"):
        return None
    if not isinstance(mask, KeyInterval):
        return "expected a mask in interval form (ShadowMask, KeyInterval); got booleans"
    if impl == "segments":
        return "expected a mask that says where its segments are; got none" if mask.segments is None else None
    if impl == "mosaic_gpu" or impl == "mosaic_tpu":
        return why_not_here(impl, q, k, v) or why_not_blocks(impl, q.dtype, q.shape[3], softcap)
    return None


def pays(segments: Segments | None, tokens: int) -> bool:
    """Whether gathering segments is cheaper than the causal triangle: about budget + length < 0.3 tokens."""
    return segments is not None and cost(segments, tokens) < cost(None, tokens)


def cost(segments: Segments | None, tokens: int) -> float:
    """Cost of attention in scores per row and head, over segments or as a causal triangle.

    The columns before the first segment are a causal triangle; every later query has a score for each of the
    `budget + length` gathered keys of its segment, visible or not.
    """
    if segments is None:
        # Half of the square, because tiles of queries before their keys are skipped.
        return tokens**2 / 2
    prompt = min(segments.first, tokens)
    gathered = (tokens - prompt) * (segments.budget + segments.length)
    return GATHERED_SCORE * gathered + prompt**2 / 2


def wrong_device(impl: Literal["mosaic_gpu", "mosaic_tpu"]) -> str | None:
    """The reason why a kernel cannot run on JAX's device, or None."""
    found = _platform()
    needed = "gpu" if impl == "mosaic_gpu" else "tpu"
    if found != needed:
        return f"expected JAX to run on a {needed.upper()}; got {found!r}"
    if impl == "mosaic_tpu":
        return None
    capability = jax.devices()[0].compute_capability
    if capability != "9.0":
        return f"expected a Hopper GPU (compute capability 9.0); got {capability}"
    return _wrong_assembler()


@cache
def _wrong_assembler() -> str | None:
    """The reason why the installed ptxas may miscompile masked loops, or None. JAX's own Hopper attention refuses them
    with CUDA 12.8.0 to 12.9.0 (`jax/experimental/pallas/ops/gpu/attention_mgpu.py`)."""
    try:
        found = metadata.version(PTXAS)
    except metadata.PackageNotFoundError:
        return None  # of CUDA 13, or of the system
    if (12, 8) <= tuple(map(int, found.split(".")[:3])) < (12, 9, 86):
        return f"expected {PTXAS} before 12.8 or from 12.9.86: others may miscompile the kernel; got {found}"
    return None


def why_not_here(impl: Literal["mosaic_gpu", "mosaic_tpu"], q: Array, k: Array, v: Array | None) -> str | None:
    """The reason why no kernel can run on this device, or with these dtypes together, or None."""
    return wrong_device(impl) or why_not_mixed(q.dtype, k.dtype, k.dtype if v is None else v.dtype)


def _platform() -> str:
    """The platform of `jax.default_device`, or of JAX's default backend."""
    device = jax.config.values["jax_default_device"]
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def _kernel(impl: Implementation, sizes: BlockSizes | None, softcap: float | None) -> tuple[BlockKernel, int]:
    """The kernel, and the number of blocks gathered at once."""
    # Imported here, because Pallas' compilers take longer to import than the rest of the library.
    if impl == "mosaic_gpu":
        from smd_kernels.gpu import MosaicGpuKernel

        sizes = sizes or GPU_SIZES
        return MosaicGpuKernel(sizes), sizes.blocks
    if impl == "mosaic_tpu":
        from smd_kernels.tpu import MosaicTpuKernel

        sizes = sizes or TPU_SIZES
        return MosaicTpuKernel(sizes, softcap=softcap), sizes.blocks
    sizes = sizes or (CPU_SIZES if _platform() == "cpu" else ACCELERATOR_SIZES)
    return XlaKernel(sizes, softcap), sizes.blocks


def decode(
    q: Float[Array, "batch heads 1 head_dim"],
    k: Float[Array, "batch kv_heads precise head_dim"],
    v: Float[Array, "batch kv_heads precise head_dim"],
    valid: Bool[Array, "batch kv_heads slots"],
    impl: DecodeImplementation | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    codes: Codes | None = None,
) -> tuple[Float[Array, "batch heads 1 head_dim"], Float[Array, "batch kv_heads slots"]]:
    """One query per row against the slots of a cache, and the attention that each slot received from the group.

    Args:
      impl: see `smd_kernels.decode` and `smd_kernels.decode_codes`. None uses a kernel if one can run, by platform,
        dtype and sizes, else "xla"; the kernels have not run on hardware yet.
      softcap, sinks: as in `attend`; the kernels have neither.
      codes: quantised slots of the cache, before those of `k` and `v` in full precision; None: there are none.

    Raises:
      ValueError: for an unknown implementation, or one that cannot run these inputs, with the reason.
    """
    extras = softcap is not None or sinks is not None
    why_not = partial(why_not_decode, q=q, k=k, codes=codes, extras=extras, v=v)
    if impl is None:
        impl = _best_decode(why_not)
    elif (reason := why_not(impl)) is not None:
        raise ValueError(f"expected an implementation that can run here; got impl={impl!r}: {reason}")
    attention: Callable[..., tuple[Array, Array]] = decode_attention if codes is None else decode_codes_attention
    arrays = (q, k, v, valid) if codes is None else (q, codes, k, v, valid)
    if impl == "xla":
        # Plain products, which the compiler shards.
        return attention(*arrays, impl, softcap, sinks)
    return over_heads(partial(attention, impl=impl), *arrays)


def _best_decode(why_not: Callable[[str], str | None]) -> DecodeImplementation:
    for impl in ("mosaic_gpu", "mosaic_tpu"):
        reason = why_not(impl)
        if reason is None:
            return impl
        if wrong_device(impl) is None:
            _warn_once(f"decoding without the kernel {impl}, which is slower: {reason}")
    return "xla"


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def why_not_decode(
    impl: str, q: Array, k: Array, codes: Codes | None = None, extras: bool = False, v: Array | None = None
) -> str | None:
    """The reason why an implementation of `decode` cannot run these inputs, or None.

    Args:
      extras: whether there is a softcap, or sinks.
      v: None: of the dtype of `k`.
    """
    if impl != "mosaic_gpu" and impl != "mosaic_tpu":
        return None if impl == "xla" else f"expected one of {', '.join(get_args(DecodeImplementation))}"
    reason = why_not_here(impl, q, k, v) or (NO_CAPS_OR_SINKS if extras else None)
    if reason is not None:
        return reason
    group, slots = q.shape[1] // k.shape[1], k.shape[2]
    if codes is None:
        return kernel_why_not_decode(impl, q.dtype, q.shape[3], slots, group)
    return kernel_why_not_decode_codes(impl, q.dtype, codes, slots, group)
