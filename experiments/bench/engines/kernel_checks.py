"""Compares every GPU kernel with the float32 reference. Run by `bench/accelerator.py`.

Each case generates inputs in the kernel's dtype and passes them as float32 to `smd_kernels.reference`. The largest
difference, relative to the largest expected number, has a tolerance; NaN fails. More runs must be bitwise equal, since
wrongly ordered reads of shared memory show now and then. Needs jax, numpy, jaxtyping and `smd_kernels` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, cycle
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from smd_kernels import decode_codes_gpu, decode_gpu, reference
from smd_kernels.blocks import BlockKernel, Blocks, BlockSizes
from smd_kernels.codes import Codes
from smd_kernels.gpu import MosaicGpuKernel
from smd_kernels.hardware import GPU_SIZES
from smd_kernels.intervals import interval_attention
from smd_kernels.segments import Segments, segment_attention
from smd_kernels.xla import ACCELERATOR_SIZES, XlaKernel

Row = dict[str, Any]
# Tolerances, relative to the largest expected number. Weights, outputs and their gradients are rounded to 8 bits
# (bfloat16); gradients of whole sequences sum many of them. Weights that slots received are summed in float32.
BLOCKS = {"out": 2**-7, "lse": 1e-4, "dq": 2**-7, "dk": 2**-7, "dv": 2**-7}
ATTENTION = {"out": 2**-6, "dq": 2**-6, "dk": 2**-6, "dv": 2**-6}
DECODED = {"out": 2e-2, "received": 1e-4}
COLUMNS = 40  # of random blocks: few, so that many rows are at the first or last column of a key
SMALL_TILES = BlockSizes(64, 64, 64, 64, 64, 64)


@dataclass(frozen=True)
class Case:
    """A kernel and its inputs."""

    name: str
    kernel: str
    dtype: str
    tolerances: dict[str, float]  # largest relative difference of each part of the result, in order
    inputs: Callable[[], tuple[Any, ...]]
    run: Callable[..., Any]  # of `inputs()`
    expected: Callable[..., Any]  # of `inputs()` in float32

    def row(self, repeats: int) -> Row:
        given = self.inputs()
        program = jax.jit(self.run)
        got = jax.block_until_ready(program(*given))
        again = (program(*given) for _ in range(repeats))  # one at a time: the results may be large
        wide = jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, given)
        return compare(self, got, again, jax.jit(self.expected)(*wide))


def compare(case: Case, got: Any, again: Iterable[Any], expected: Any) -> Row:
    off = {}
    same_bits = all(map(np.array_equal, chain.from_iterable(again), cycle(got)))
    for name, x, z in zip(case.tolerances, got, expected, strict=True):
        x, z = (np.asarray(a, np.float32) for a in (x, z))
        # Rows that see no key have an infinite log-denominator, which must be in both.
        finite = np.isfinite(z)
        unlike = not np.array_equal(x[~finite], z[~finite])
        scale = np.abs(z[finite]).max(initial=0.0) or 1.0
        # NumPy's maximum propagates NaN; XLA's on CPU does not.
        off[name] = float("inf") if unlike else float(np.abs(x[finite] - z[finite]).max(initial=0.0) / scale)
    ok = same_bits and all(off[name] <= limit for name, limit in case.tolerances.items())
    row: Row = {"check": case.name, "kernel": case.kernel, "dtype": case.dtype, "ok": ok}
    # JSON has no infinities and NaN.
    said = {name: x if np.isfinite(x) else None for name, x in off.items()}
    return row | {"off": said, "tolerance": case.tolerances, "same_bits": same_bits}


def random_blocks(count: int, rows: int, keys: int, head_dim: int, dtype: str) -> tuple[Blocks, Any]:
    """Blocks and the gradient of their output. Rows are in any order, with padding; keys are visible for a while or
    never. The first 64 rows and keys are always visible, so one tile of 64 needs no mask."""
    rng = np.random.default_rng(0)
    q, k, v, d_out = (jnp.asarray(rng.standard_normal((count, n, head_dim)), dtype) for n in (rows, keys, keys, rows))
    column = rng.integers(-3, COLUMNS, (count, rows)).clip(-1)
    column[:, :64] = rng.integers(COLUMNS // 2, COLUMNS, (count, min(rows, 64)))
    column[:, -1] = -1
    born = rng.integers(0, COLUMNS, (count, keys))
    evicted_at = np.maximum(born + rng.integers(-3, 20, (count, keys)), 0)
    born[:, :64], evicted_at[:, :64] = 5, COLUMNS
    evicted_at[:, 70:75] = 0
    return Blocks(q, k, v, *(jnp.asarray(x, jnp.int32) for x in (column, born, evicted_at))), d_out


def segment_blocks(count: int, group: int, length: int, budget: int, head_dim: int, dtype: str) -> tuple[Blocks, Any]:
    """Blocks of a rollout: kept keys that all rows see, and the segment's keys, causally; in column order."""
    rng = np.random.default_rng(0)
    sizes = (group * length, budget + length, budget + length, group * length)
    q, k, v, d_out = (jnp.asarray(rng.standard_normal((count, n, head_dim)), dtype) for n in sizes)
    column = jnp.asarray(np.tile(np.repeat(budget + np.arange(length), group), (count, 1)), jnp.int32)
    born = jnp.asarray(np.tile(np.arange(budget + length), (count, 1)), jnp.int32)
    return Blocks(q, k, v, column, born, jnp.full_like(born, 2 * (budget + length))), d_out


def by_kernel(kernel: BlockKernel, blocks: Blocks, d_out: Any) -> tuple[Any, ...]:
    out, lse = kernel.forward(blocks)
    return out, lse, *kernel.backward(blocks, out, lse, d_out)


def by_reference(blocks: Blocks, d_out: Any) -> tuple[Any, ...]:
    column = blocks.column[:, :, None]
    visible = (blocks.born[:, None] <= column) & (column < blocks.evicted_at[:, None])

    def attend(q: Any, k: Any, v: Any) -> Any:
        return reference.attention(q[:, None], k[:, None], v[:, None], visible[:, None])[:, 0]

    out, pull = jax.vjp(attend, blocks.q, blocks.k, blocks.v)
    highest = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("nrd,nsd->nrs", blocks.q, blocks.k, precision=highest) * blocks.q.shape[-1] ** -0.5
    lse = jax.nn.logsumexp(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return out, jnp.where(visible.any(-1), lse, jnp.inf), *pull(d_out)


def block_case(name: str, kernel: BlockKernel, inputs: Callable[[], Any], dtype: str) -> Case:
    return Case(name, type(kernel).__name__, dtype, BLOCKS, inputs, partial(by_kernel, kernel), by_reference)


def sequences(heads: int, kv_heads: int, tokens: int, head_dim: int, dtype: str) -> tuple[Any, ...]:
    """q, k, v and the gradient of the output, of two rows."""
    rng = np.random.default_rng(1)
    each = (heads, kv_heads, kv_heads, heads)
    return tuple(jnp.asarray(rng.standard_normal((2, n, tokens, head_dim)), dtype) for n in each)


def window(kv_heads: int, tokens: int, segments: Segments, padding: int) -> Any:
    """`evicted_at` of a sampler that keeps the newest `budget` keys at every boundary, one key fewer in each following
    head; the second row begins with padding."""
    key = np.arange(tokens)
    evicted_at = np.zeros((2, kv_heads, tokens), np.int32)
    for head in range(kv_heads):
        # The first boundary that is more than `budget` columns away from the key.
        away = key + max(segments.budget - head, 1) + 1 - segments.first
        boundary = segments.first + np.maximum(-(-away // segments.length), 0) * segments.length
        evicted_at[:, head] = np.maximum(boundary, key + 1)
    evicted_at[1, :, :padding] = 0
    return jnp.asarray(evicted_at)


def random_evictions(kv_heads: int, tokens: int, padding: int) -> Any:
    """`evicted_at` with random lifetimes."""
    rng = np.random.default_rng(2)
    evicted_at = np.arange(tokens) + rng.integers(1, tokens, (2, kv_heads, tokens))
    evicted_at[1, :, :padding] = 0
    return jnp.asarray(evicted_at, jnp.int32)


def with_gradients(attend: Callable[..., Any], q: Any, k: Any, v: Any, d_out: Any, evicted_at: Any) -> tuple[Any, ...]:
    out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, evicted_at), q, k, v)
    return out, *pull(d_out)


def masked(q: Any, k: Any, v: Any, evicted_at: Any) -> Any:
    return reference.attention(q, k, v, reference.interval_mask(evicted_at))


def attention_case(
    name: str, kernel: BlockKernel, heads: tuple[int, int], tokens: int, head_dim: int, segments: Segments | None
) -> Case:
    """Segment attention; if `segments` is None, interval attention with random lifetimes of keys."""
    dtype = "bfloat16"
    padding = tokens // 5
    if segments is None:
        attend = partial(interval_attention, kernel=kernel)
        evicted_at = partial(random_evictions, heads[1], tokens, padding)
    else:
        attend = partial(segment_attention, segments=segments, kernel=kernel)
        evicted_at = partial(window, heads[1], tokens, segments, padding)

    def inputs() -> tuple[Any, ...]:
        return *sequences(*heads, tokens, head_dim, dtype), evicted_at()

    gradients = partial(with_gradients, attend), partial(with_gradients, masked)
    return Case(name, type(kernel).__name__, dtype, ATTENTION, inputs, *gradients)


class CacheShape(NamedTuple):
    """Sizes of a layer's cache and its queries."""

    batch: int
    heads: int
    kv_heads: int
    slots: int
    head_dim: int

    def __str__(self) -> str:
        return "x".join(map(str, self))


def cached(shape: CacheShape, valid: str) -> tuple[Any, ...]:
    """q, k, v and the valid slots. The first row's last head has none, to test empty attention.

    Args:
      valid: "any" random slots, "all", or a "window" of them, as in a cache that fills up.
    """
    batch, heads, kv_heads, slots, head_dim = shape
    rng = np.random.default_rng(3)
    shapes = ((batch, heads, 1, head_dim), *[(batch, kv_heads, slots, head_dim)] * 2)
    q, k, v = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes)
    slot = np.broadcast_to(np.arange(slots), (batch, kv_heads, slots))
    filled = {
        "any": rng.random(slot.shape) < 0.6,
        "all": np.ones(slot.shape, bool),
        "window": (slot >= slots // 8) & (slot < slots // 2 + 1),
    }[valid].copy()
    filled[0, -1] = False
    return q, k, v, jnp.asarray(filled)


def decode_case(shape: CacheShape, valid: str, interpret: Any = None) -> Case:
    run = partial(decode_gpu.decode_attention, interpret=interpret)
    inputs, name = partial(cached, shape, valid), f"decode {shape}, {valid} valid"
    return Case(name, "decode_gpu", "bfloat16", DECODED, inputs, run, reference.decode_attention)


@dataclass(frozen=True)
class CodesShape:
    """Sizes of a quantised cache: slots of codes, slots in full precision, groups of keys, ranges of a value."""

    batch: int
    heads: int
    kv_heads: int
    slots: int
    precise: int
    head_dim: int
    bits: int
    groups: int
    parts: int

    def __str__(self) -> str:
        sizes = (self.batch, self.heads, self.kv_heads, f"{self.slots}+{self.precise}", self.head_dim)
        return f"decode codes {'x'.join(map(str, sizes))}, {self.bits} bits"


def quantized(shape: CodesShape) -> tuple[Any, ...]:
    """q, codes, k, v and the valid slots. The first row's last head has none, to test empty attention."""
    rng = np.random.default_rng(4)
    rows = (shape.batch, shape.kv_heads)

    def normal(*sizes: int, scale: float = 1.0) -> Any:
        return jnp.asarray(scale * rng.standard_normal(sizes), jnp.bfloat16)

    def packed() -> Any:
        return jnp.asarray(rng.integers(0, 256, (*rows, shape.slots, shape.head_dim * shape.bits // 8)), jnp.uint8)

    step = 2 / (2**shape.bits - 1)  # numbers of about 1, for any number of bits
    codes = Codes(
        keys=packed(),
        values=packed(),
        group=jnp.asarray(rng.integers(0, shape.groups, (*rows, shape.slots)), jnp.int32),
        key_low=normal(*rows, shape.groups, shape.head_dim),
        key_scale=normal(*rows, shape.groups, shape.head_dim, scale=step),
        value_low=normal(*rows, shape.slots, shape.parts),
        value_scale=normal(*rows, shape.slots, shape.parts, scale=step),
        bits=shape.bits,
    )
    filled = rng.random((*rows, shape.slots + shape.precise)) < 0.6
    filled[0, -1] = False
    q = normal(shape.batch, shape.heads, 1, shape.head_dim)
    k, v = (normal(*rows, shape.precise, shape.head_dim) for _ in range(2))
    return q, codes, k, v, jnp.asarray(filled)


def by_dequantized(q: Any, codes: Codes, k: Any, v: Any, valid: Any) -> Any:
    """The reference over the numbers that the codes stand for, rounded to bfloat16 as the learner rounds them."""
    # XLA may leave out a cast to bfloat16 and back.
    keys, values = (jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7) for x in codes.dequantized())
    keys, values = (jnp.concatenate(pair, axis=2) for pair in ((keys, k), (values, v)))
    return reference.decode_attention(q, keys, values, valid)


def decode_codes_case(shape: CodesShape, interpret: Any = None) -> Case:
    run = partial(decode_codes_gpu.decode_codes_attention, interpret=interpret)
    inputs = partial(quantized, shape)
    return Case(str(shape), "decode_codes_gpu", "bfloat16", DECODED, inputs, run, by_dequantized)


def cases() -> Iterator[Case]:
    """Cases for a GPU, small ones first, so that a hang shows early."""
    ours = MosaicGpuKernel(GPU_SIZES)
    for dtype in ("bfloat16", "float16"):
        for head_dim in (64, 128):
            for name, sizes in {"small tiles": SMALL_TILES, "default tiles": GPU_SIZES}.items():
                shape = (3, 300, 500, head_dim)
                label = f"blocks {'x'.join(map(str, shape))}, {name}"
                yield block_case(label, MosaicGpuKernel(sizes), partial(random_blocks, *shape, dtype), dtype)
    # As many programs as a layer has, more than the GPU can hold at once.
    whole = partial(segment_blocks, 96, 8, 128, 1024, 128, "bfloat16")
    yield block_case("96 segments of 128 x 8 rows, 1,024 + 128 keys", ours, whole, "bfloat16")
    # A control: if plain JAX fails as well, the comparison is wrong, not the kernel.
    yield block_case("control: 96 segments in plain JAX", XlaKernel(ACCELERATOR_SIZES), whole, "bfloat16")
    for heads in ((1, 1), (6, 2), (8, 1), (16, 8)):
        for head_dim in (64, 128):
            segments = Segments(70, 32, 96)
            label = f"{heads[0]}/{heads[1]} heads of {head_dim}"
            yield attention_case(f"{label}, windows, padding", ours, heads, 500, head_dim, segments)
            yield attention_case(f"{label}, any interval, padding", ours, heads, 500, head_dim, None)
    yield attention_case("4/2 heads of 128, no prompt, 2,048 tokens", ours, (4, 2), 2048, 128, Segments(0, 128, 256))
    for group, kv_heads in ((1, 2), (2, 4), (3, 2), (6, 2), (7, 2), (8, 4)):
        for head_dim in (64, 128):
            for slots in (72, 640):
                for valid in ("any", "window") if slots == 640 else ("any",):
                    yield decode_case(CacheShape(3, group * kv_heads, kv_heads, slots, head_dim), valid)
    # Every size of a swizzled tile; slots of codes in fewer tiles than the ring has stages, and in more.
    for bits, head_dim, slots in ((8, 128, 1000), (4, 64, 1000), (4, 128, 64), (2, 64, 1000)):
        yield decode_codes_case(CodesShape(3, 12, 2, slots, 72, head_dim, bits, groups=70, parts=2))
    yield decode_case(CacheShape(64, 12, 2, 1152, 128), "all")
    yield decode_case(CacheShape(8, 32, 8, 4096, 128), "any")


def rehearsed() -> Iterator[Case]:
    """The same checks at toy sizes, for JAX's interpreter of GPU kernels: one case of each kind."""
    from interpreted import InterpretGPUParams, decode_parameters  # private to JAX, so not imported on a GPU

    kernel = MosaicGpuKernel(SMALL_TILES, InterpretGPUParams())
    shape = (1, 70, 100, 64)
    yield block_case("blocks 1x70x100x64, small tiles", kernel, partial(random_blocks, *shape, "bfloat16"), "bfloat16")
    yield attention_case("3/1 heads of 64, windows, padding", kernel, (3, 1), 40, 64, Segments(9, 8, 7))
    for slots, valid in ((40, "any"), (72, "window")):
        yield decode_case(CacheShape(2, 3, 1, slots, 64), valid, decode_parameters(slots))
    yield decode_codes_case(CodesShape(2, 3, 1, 72, 40, 64, bits=4, groups=5, parts=2), decode_parameters(40))
