"""What the GPU kernels share: which tiles a program walks, buffers that TMA fills ahead of it, and matrix products.

A program owns one tile of one block (of rows, or of keys) and walks the tiles of the other side. Its last warpgroup
only fetches: it fills rings of buffers in shared memory, and the computing warpgroups, with 64 rows of the tile each,
empty them. Two barriers a buffer keep them apart, `ready` and `done`, as in FlashAttention-3 (arXiv 2407.08608).

Layouts are inferred by the compiler (the Warpgroup semantics of Mosaic GPU), so kernels are plain array programs, and
the same text runs in interpret mode, with `products` as the one place that knows the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Int

from smd_kernels.blocks import Blocks, live_tiles
from smd_kernels.pytrees import any_leaves

LANES = 64  # rows of a tile that one warpgroup computes: the height of a wgmma instruction
FETCHING_REGISTERS = 40  # a thread of the fetching warpgroup needs few; the others share the rest
LOWEST = -1e30  # below any score, yet finite: the difference of two of them is 0, not NaN


class Walk(NamedTuple):
    """The tiles that one program visits, as scalars in the kernel: first those where every row sees every key, which
    need no mask, then the others. Tiles before `first` and from `after` on have nothing to see."""

    first: Any
    first_full: Any
    after_full: Any
    after: Any

    @property
    def steps(self) -> Any:
        return self.after - self.first

    @property
    def full(self) -> Any:
        return self.after_full - self.first_full

    def tile(self, step: Any) -> Any:
        """Number of the tile visited at a step."""
        # Steps with a mask count up from the first tile and jump over the run of full ones, whose turn comes first.
        masked = self.first + step - self.full
        masked = jnp.where(masked < self.first_full, masked, masked + self.full)
        return jnp.where(step < self.full, self.first_full + step, masked)

    def run(self, step: Callable[..., Any], carry: Any) -> Any:
        """`step(number, carry, masked=...)` over all steps."""
        carry = lax.fori_loop(0, self.full, lambda i, carry: step(i, carry, masked=False), carry)
        return lax.fori_loop(self.full, self.steps, lambda i, carry: step(i, carry, masked=True), carry)


def walks(blocks: Blocks, rows: int, keys: int, *, of_keys: bool = False) -> Int[Array, "blocks tiles 4"]:
    """The `Walk` of each row tile over key tiles, or of each key tile over row tiles; the sizes divide the blocks."""
    live = live_tiles(blocks, rows, keys)
    full = full_tiles(blocks, rows, keys)
    first, after = live.of_keys() if of_keys else live.of_rows()
    first_full, after_full = first_run(full.swapaxes(1, 2) if of_keys else full, first)
    return jnp.stack([first, first_full, after_full, after], axis=-1)


def full_tiles(blocks: Blocks, rows: int, keys: int) -> Bool[Array, "blocks row_tiles key_tiles"]:
    """Tiles in which every row sees every key."""
    column = blocks.column.reshape(blocks.column.shape[0], -1, rows)
    born, evicted_at = (x.reshape(x.shape[0], -1, keys) for x in (blocks.born, blocks.evicted_at))
    born = born.max(-1)[:, None]
    evicted_at = evicted_at.min(-1)[:, None]
    # Padding is never full: the column of its rows is negative, the interval of its keys empty.
    return (born <= column.min(-1)[:, :, None]) & (column.max(-1)[:, :, None] < evicted_at)


def first_run(
    full: Bool[Array, "blocks tiles others"], default: Int[Array, "blocks tiles"]
) -> tuple[Int[Array, "blocks tiles"], Int[Array, "blocks tiles"]]:
    """Start and end of the first run of true entries along the last axis; `default` twice where there is none."""
    start = jnp.where(full.any(-1), jnp.argmax(full, axis=-1), default)
    number = jnp.arange(full.shape[-1])
    broken = ~full & (number[None, None] >= start[..., None])
    end = jnp.where(broken.any(-1), jnp.argmax(broken, axis=-1), full.shape[-1])
    return start.astype(jnp.int32), jnp.where(full.any(-1), end, default).astype(jnp.int32)


@any_leaves
class Ring(NamedTuple):
    """Buffers `[stages, length, ...]` that are filled together, and a barrier per stage for filled and for emptied."""

    buffers: tuple[Any, ...]
    ready: Any
    done: Any


def ring(stages: int, warpgroups: int, *buffers: Any) -> Ring:
    """Scratch of a ring that `warpgroups` computing warpgroups empty."""
    # A buffer set is ready when each of its copies has arrived, and free when every computing warpgroup has read it.
    ready = plgpu.Barrier(num_arrivals=len(buffers), num_barriers=stages)
    return Ring(buffers, ready, plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages))


def matrices(count: int, length: int, head_dim: int, dtype: Any) -> Any:
    """Scratch for `count` matrices in the layout that wgmma reads; each row of 64 numbers is 128 bytes, swizzled."""
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM((count, length, head_dim), dtype, transforms=tiled)


def vectors(count: int, length: int, dtype: Any) -> Any:
    """Scratch for `count` vectors."""
    return plgpu.SMEM((count, length), dtype)


def fetch(walk: Walk, length: int, rings: Sequence[tuple[Ring, Sequence[Any]]]) -> None:
    """Fills each ring from its sources `[tiles * length, ...]`, a tile a step, as buffers become free."""
    stages = rings[0][0].buffers[0].shape[0]

    @pl.loop(0, walk.steps)
    def fill(step):
        slot = lax.rem(step, stages)
        rows = pl.ds(walk.tile(step) * length, length)
        for ring, sources in rings:
            # In the first round all buffers are empty.
            pl.when(step >= stages)(lambda ring=ring: plgpu.barrier_wait(ring.done.at[slot]))
            for source, buffer in zip(sources, ring.buffers, strict=True):
                plgpu.copy_gmem_to_smem(source.at[rows], buffer.at[slot], ring.ready.at[slot])

    # Whoever waits on a barrier sees all its phases; and no program ends while others still signal to it.
    @pl.loop(jnp.maximum(walk.steps, stages), walk.steps + stages)
    def drain(step):
        for ring, _ in rings:
            plgpu.barrier_wait(ring.done.at[lax.rem(step, stages)])


def load(barrier: Any, *copies: tuple[Any, Any]) -> None:
    """Copies (source, buffer) pairs to shared memory and waits for them."""
    for source, buffer in copies:
        plgpu.copy_gmem_to_smem(source, buffer, barrier)
    plgpu.barrier_wait(barrier)


def store(*copies: tuple[Any, Any]) -> None:
    """Copies (buffer, destination) pairs from shared memory, which holds what this warpgroup wrote, and waits."""
    plgpu.commit_smem()
    for buffer, destination in copies:
        plgpu.copy_smem_to_gmem(buffer, destination)
    plgpu.wait_smem_to_gmem(0)


class Product(NamedTuple):
    """`left @ right`, or `left @ right.T`. Left: a buffer in shared memory or an array; right: a buffer."""

    left: Any
    right: Any
    transposed: bool = False


def products(*factors: Product, onto: Sequence[Any] = (), interpret: bool) -> tuple[Any, ...]:
    """Matrix products in float32, started together, each added to its array of `onto` if there is one."""
    if interpret:  # the interpreter of JAX 0.10 has no wgmma of arrays or of transposed buffers
        plain = tuple(map(_plain_product, factors))
        return tuple(x + y for x, y in zip(onto, plain, strict=True)) if onto else plain
    pairs: list[tuple[Any, Any]] = [(x.left, x.right.transpose((1, 0)) if x.transposed else x.right) for x in factors]

    def multiply(sums: Sequence[Any]) -> None:
        for total, (left, right) in zip(sums, pairs, strict=True):
            plgpu.wgmma(total, left, right)

    def fresh(*sums: Any) -> tuple[Any, ...]:
        multiply(sums)
        return tuple(total[...] for total in sums)

    if onto:
        return tuple(pl.run_state(multiply)(tuple(map(plgpu.WGMMAAccumulatorRef.init, onto))))
    sums = (plgpu.WGMMAAccumulatorRef((left.shape[0], right.shape[1]), jnp.float32) for left, right in pairs)
    return tuple(pl.run_scoped(fresh, *sums))


def _plain_product(x: Product) -> Any:
    left = x.left if isinstance(x.left, jax.Array) else x.left[...]
    contracted = (((1,), (1 if x.transposed else 0,)), ((), ()))
    return lax.dot_general(left, x.right[...], contracted, preferred_element_type=jnp.float32)


def down(x: Any, shape: tuple[int, ...]) -> Any:
    """A number per row of the tile, spread over its columns."""
    return lax.broadcast_in_dim(x, shape, (0,))


def across(x: Any, shape: tuple[int, ...]) -> Any:
    """A number per column of the tile, spread over its rows."""
    return lax.broadcast_in_dim(x, shape, (1,))


def registers(warpgroups: int) -> int:
    """Registers a computing thread may have: 512 per lane of a warpgroup, 256 at most, in units of eight."""
    return min(256, (512 - FETCHING_REGISTERS) // warpgroups) // 8 * 8


def program(warpgroups: int, compute: Callable[[Any], None], fetch: Callable[[], None]) -> None:
    """Runs `compute(number)` in the computing warpgroups and `fetch()` in the last one."""
    number = lax.axis_index("warpgroup")

    @pl.when(number == warpgroups)
    def last():
        plgpu.set_max_registers(FETCHING_REGISTERS, action="decrease")
        fetch()

    @pl.when(number < warpgroups)
    def others():
        plgpu.set_max_registers(registers(warpgroups), action="increase")
        compute(number)


def own_tile(walks: Any, tiles: int) -> tuple[Any, Any, Walk]:
    """Block, tile and walk of this program. Programs of a block follow each other: they share what they fetch."""
    number = lax.axis_index("program")
    block = lax.div(number, tiles)
    tile = lax.rem(number, tiles)
    return block, tile, Walk(*(walks[block, tile, i] for i in range(4)))


def launch(kernel: Callable[..., None], out: Any, scratch: Any, programs: int, warpgroups: int, interpret: Any) -> Any:
    """A function of the kernel's arrays. Programs lie on the one grid axis that may be longer than 65,535."""
    return plgpu.kernel(
        kernel,
        out_type=out,
        scratch_types=(scratch,),
        grid=(programs,),
        grid_names=("program",),
        # One more, which fetches.
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )
