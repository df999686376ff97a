"""Shared parts of the GPU block attention kernels: tile schedules, prefetching rings and matrix products.

A program holds one tile of a block's rows (or keys) and loops over the tiles of its keys (or rows). Its last warpgroup
only fetches: it fills rings of buffers in shared memory. The computing warpgroups, one per 64 rows of the tile, read
them. Two barriers per buffer synchronise them, `ready` and `done`, as in FlashAttention-3 (arXiv 2407.08608).

The compiler infers layouts (Warpgroup semantics of Mosaic GPU), so kernels are plain array programs. The same code runs
in JAX's interpreter; only `products` differs there.
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
from smd_kernels.interpreter import check_host_threads
from smd_kernels.pytrees import any_leaves

LANES = 64  # rows of a tile per warpgroup: the height of a wgmma instruction
MOST_WARPGROUPS = 7  # that compute: with the fetching one they are the 1,024 threads of a full thread block
LONGEST_COPY = 256  # rows of a tile that TMA copies
FETCHING_REGISTERS = 40  # per thread of the fetching warpgroup; the computing warpgroups share the rest
LOWEST = -1e30  # initial running maximum: below any score but finite, so that LOWEST - LOWEST is 0, not NaN


class Walk(NamedTuple):
    """Schedule of the live tiles that one program visits, as scalars in the kernel.

    Attributes:
      full: number of its first steps, in whose tiles every row sees every key, so that they need no mask.
      steps: number of all steps; tiles without a visible pair have none.
      tile: index of the tile that a step visits; reads one number from main memory.
    """

    full: Any
    steps: Any
    tile: Callable[[Any], Any]

    def run(self, step: Callable[..., Any], carry: Any) -> Any:
        """Runs `step(index, carry, masked=…)` over all steps and returns the last carry."""
        carry = lax.fori_loop(0, self.full, lambda i, carry: step(i, carry, masked=False), carry)
        return lax.fori_loop(self.full, self.steps, lambda i, carry: step(i, carry, masked=True), carry)


def walks(blocks: Blocks, rows: int, keys: int, *, of_keys: bool = False) -> Int[Array, "blocks tiles numbers"]:
    """Computes the `Walk` of each row tile over key tiles or, with `of_keys`, of each key tile over row tiles.

    `rows` and `keys` must divide the blocks. Each walk is `full`, `steps`, and the tiles in the order of its steps:
    full ones, partly visible ones, and then those that it does not visit. Live tiles need not be neighbours: between
    them are the other branches of a tree, or evicted keys. The table has one number per tile of scores.
    """
    live = live_tiles(blocks, rows, keys)
    full = full_tiles(blocks, rows, keys)
    if of_keys:
        live, full = live.swapaxes(1, 2), full.swapaxes(1, 2)
    # A full tile is live, too.
    order = jnp.argsort(-(live.astype(jnp.int32) + full), axis=-1, stable=True)
    counts = jnp.stack([full.sum(-1), live.sum(-1)], axis=-1)
    return jnp.concatenate([counts, order], axis=-1).astype(jnp.int32)


def full_tiles(blocks: Blocks, rows: int, keys: int) -> Bool[Array, "blocks row_tiles key_tiles"]:
    """Finds the tiles in which every row sees every key."""
    column = blocks.column.reshape(blocks.column.shape[0], -1, rows)
    born, evicted_at = (x.reshape(x.shape[0], -1, keys) for x in (blocks.born, blocks.evicted_at))
    born = born.max(-1)[:, None]
    evicted_at = evicted_at.min(-1)[:, None]
    # A tile with padding is never full: padded rows have negative columns, padded keys have empty intervals.
    return (born <= column.min(-1)[:, :, None]) & (column.max(-1)[:, :, None] < evicted_at)


@any_leaves
class Ring(NamedTuple):
    """Buffers `[stages, length, ...]` that are filled together, with two barriers per stage: `ready` and `done`."""

    buffers: tuple[Any, ...]
    ready: Any
    done: Any


def ring(stages: int, warpgroups: int, *buffers: Any) -> Ring:
    """Scratch of a ring that `warpgroups` computing warpgroups read."""
    # A stage is ready when all of its copies have arrived, and done when every computing warpgroup has read it.
    ready = plgpu.Barrier(num_arrivals=len(buffers), num_barriers=stages)
    return Ring(buffers, ready, plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages))


def matrices(count: int, length: int, head_dim: int, dtype: Any) -> Any:
    """Scratch for `count` matrices in the wgmma layout: rows of 64 numbers, 128 bytes, swizzled."""
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM((count, length, head_dim), dtype, transforms=tiled)


def vectors(count: int, length: int, dtype: Any) -> Any:
    """Scratch for `count` vectors."""
    return plgpu.SMEM((count, length), dtype)


def fetch(walk: Walk, length: int, rings: Sequence[tuple[Ring, Sequence[Any]]]) -> None:
    """Fills each ring from its sources `[tiles * length, ...]`, one tile per step, as its stages become free."""
    stages = rings[0][0].buffers[0].shape[0]

    @pl.loop(0, walk.steps)
    def fill(step):
        slot = lax.rem(step, stages)
        rows = pl.ds(walk.tile(step) * length, length)
        for ring, sources in rings:
            # All stages are free in the first round.
            pl.when(step >= stages)(lambda ring=ring: plgpu.barrier_wait(ring.done.at[slot]))
            for source, buffer in zip(sources, ring.buffers, strict=True):
                plgpu.copy_gmem_to_smem(source.at[rows], buffer.at[slot], ring.ready.at[slot])

    # Wait for the last phases too: no phase of a barrier may be skipped, and no warpgroup may exit before the others
    # have signalled it.
    @pl.loop(jnp.maximum(walk.steps, stages), walk.steps + stages)
    def drain(step):
        for ring, _ in rings:
            plgpu.barrier_wait(ring.done.at[lax.rem(step, stages)])


def release(barrier: Any, *, by_threads: bool) -> None:
    """Signals that this warpgroup has read a stage of a ring.

    Args:
      by_threads: whether threads have read it, and not only wgmma. A barrier alone does not order their reads before
        TMA's next copy (`commit_smem` in JAX's reference of Pallas for GPUs).
    """
    if by_threads:
        plgpu.commit_smem()
    plgpu.barrier_arrive(barrier)


def load(barrier: Any, *copies: tuple[Any, Any]) -> None:
    """Copies (source, buffer) pairs to shared memory and waits for all of them at `barrier`."""
    for source, buffer in copies:
        plgpu.copy_gmem_to_smem(source, buffer, barrier)
    plgpu.barrier_wait(barrier)


def store(*copies: tuple[Any, Any]) -> None:
    """Copies (buffer, destination) pairs that this warpgroup wrote from shared to main memory, and waits until the
    buffers have been read."""
    plgpu.commit_smem()
    for buffer, destination in copies:
        plgpu.copy_smem_to_gmem(buffer, destination)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the buffer may go once it is read


class Product(NamedTuple):
    """`left @ right` or `left @ right.T`: left is a buffer in shared memory or an array, right is a buffer."""

    left: Any
    right: Any
    transposed: bool = False


def products(*factors: Product, onto: Sequence[Any] = (), interpret: bool) -> tuple[Any, ...]:
    """Matrix products in float32, issued together; each is added to its array in `onto`, if given."""
    if interpret:  # JAX 0.10's interpreter supports no wgmma of arrays or transposed buffers
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
    """Broadcasts one number per row over the columns of a tile."""
    return lax.broadcast_in_dim(x, shape, (0,))


def across(x: Any, shape: tuple[int, ...]) -> Any:
    """Broadcasts one number per column over the rows of a tile."""
    return lax.broadcast_in_dim(x, shape, (1,))


def registers(warpgroups: int) -> int:
    """Registers per computing thread: an equal share of those that the fetching ones leave, at most 256, in eights.

    A launch gives every warpgroup the same number, rounded down to a multiple of 8. Asking for more than their sum
    would wait forever.
    """
    threads = warpgroups + 1  # the last one fetches
    pool = min(512 // threads // 8 * 8, 256) * threads
    return min(256, (pool - FETCHING_REGISTERS) // warpgroups) // 8 * 8


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
    """Block, tile and walk of this program. Programs of a block are adjacent, so that they share fetched data in L2."""
    number = lax.axis_index("program")
    block = lax.div(number, tiles)
    tile = lax.rem(number, tiles)
    return block, tile, Walk(walks[block, tile, 0], walks[block, tile, 1], lambda step: walks[block, tile, 2 + step])


def launch(kernel: Callable[..., None], out: Any, scratch: Any, programs: int, warpgroups: int, interpret: Any) -> Any:
    """Wraps a kernel as a function of arrays.

    Programs are on the only grid axis that may exceed 65,535.

    Raises:
      ValueError: `interpret` is set and JAX has too few host threads to interpret the kernel without hanging.
    """
    threads = warpgroups + 1  # the last one fetches
    if interpret:
        check_host_threads(threads)
    return plgpu.kernel(
        kernel,
        out_type=out,
        scratch_types=(scratch,),
        grid=(programs,),
        grid_names=("program",),
        num_threads=threads,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )
