"""Attention over the segments of a rollout: a query attends to at most `budget + length` keys at any response length.

    columns    0 ……………… first ……… +length ……… +2 length ………
               prompt       segment 0   segment 1   segment 2
                          ▲           ▲           ▲
                          boundaries: at most `budget` earlier keys are still visible

The queries of a segment see the keys kept at its boundary and, causally, the segment's own keys. Kept keys are gathered
once per segment, so time and memory are O(tokens · (budget + length)) instead of O(tokens²). A key may be evicted
within a segment: kernels test the interval of every gathered key. The prompt attends to itself causally.

A kept key stays in one slot from boundary to boundary, as in the sampler's cache. Its gradient is a sum over the
segments of its slot in a fixed order; a scatter-add would need atomics. Segments are gathered and attended to in
groups, which bounds memory. Carrying the cache from segment to segment would make the segments sequential.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer

from smd_kernels.blocks import LATEST, BlockKernel, Blocks, even, pad_rows, to_int32
from smd_kernels.copies import Copies
from smd_kernels.intervals import fold, no_gradient, unfold, whole_sequences
from smd_kernels.pytrees import any_leaves
from smd_kernels.sinks import add_sinks, sink_gradient

EMPTY = -1  # column of a slot that holds no key


@dataclass(frozen=True)
class Segments:
    """Compression boundaries of a rollout and its cache budget.

    Attributes:
      first: column of the first response token, where the first segment begins.
      length: queries per segment: the rollout's buffer.
      budget: most earlier keys that the first query of a segment sees, in any row and head.

    Raises:
      ValueError: `first` is negative, or `length` or `budget` is less than 1.
    """

    first: int
    length: int
    budget: int

    def __post_init__(self) -> None:
        if self.first < 0 or self.length < 1 or self.budget < 1:
            raise ValueError(f"expected first >= 0, length >= 1 and budget >= 1; got {self}")

    def count(self, tokens: int) -> int:
        """Number of segments in a trajectory of `tokens` columns."""
        return -(-max(tokens - self.first, 0) // self.length)


@any_leaves
class SlotTable(NamedTuple):
    """Slot of every kept key.

    Attributes:
      slot: `[blocks, tokens]` slot of each key while it is kept; `budget` if no boundary keeps it.
      kept: `[blocks, segments, budget]` column of the key in each slot at each boundary; `EMPTY` in an empty slot.
    """

    slot: Int[Array, "blocks tokens"]
    kept: Int[Array, "blocks segments budget"]


def slot_table(evicted_at: Int[Array, "blocks tokens"], segments: Segments) -> SlotTable:
    """Assigns slots to the kept keys, the longest-free slot first; O(tokens) memory, no loop over segments.

    The first `budget` keys to enter take the free slots; key number `budget + n` takes the slot of the n-th key to
    leave, its predecessor. Following predecessors leads to one of the first `budget` keys; pointer doubling follows all
    chains in log2(segments) steps.
    """
    tokens = evicted_at.shape[1]
    budget = segments.budget
    count = segments.count(evicted_at.shape[1])
    column = jnp.arange(tokens, dtype=jnp.int32)[None]
    # Boundary i is at column first + i * length; a key is kept at the boundaries enters <= i < leaves.
    enters = jnp.maximum(column - segments.first + segments.length, 0) // segments.length
    # A key enters at the end of its own segment, which sees it directly. `leaves` rounds up: the first query after a
    # boundary does not see a key that is evicted exactly there.
    leaves = jnp.clip(-((segments.first - evicted_at) // segments.length), 0, count)
    is_kept = enters < leaves
    order = jnp.cumsum(is_kept, axis=1, dtype=jnp.int32) - 1
    # Keys that no boundary keeps sort last: `leaves` is at most `count`. The sort is stable: keys that leave together
    # stay in column order.
    leaving = jnp.argsort(jnp.where(is_kept, leaves, count + 1), axis=1, stable=True).astype(jnp.int32)
    before = jnp.take_along_axis(leaving, jnp.maximum(order - budget, 0), axis=1)
    before = jnp.where(is_kept & (order >= budget), before, column)
    # A key has left when its successor enters, so a chain has at most one key per boundary. It ends at one of the first
    # `budget` keys, which points to itself and whose `order` is the slot.
    for _ in range(count.bit_length()):
        before = jnp.take_along_axis(before, before, axis=1)
    slot = jnp.where(is_kept, jnp.take_along_axis(order, before, axis=1), budget)

    block = jnp.arange(evicted_at.shape[0])[:, None]
    arrivals = jnp.full((evicted_at.shape[0], count, budget), EMPTY, jnp.int32)
    # Slot `budget` is out of range: the scatter drops keys that no boundary keeps.
    arrivals = arrivals.at[block, jnp.broadcast_to(enters, slot.shape), slot].set(column, mode="drop")
    # Columns increase, so the running maximum is the newest key in a slot. It may have left: tested below.
    kept = jax.lax.cummax(arrivals, axis=1)
    boundary = jnp.arange(count, dtype=jnp.int32)[None, :, None]
    # An empty slot looks up column 0 and stays `EMPTY` in either case.
    last = jnp.take_along_axis(leaves, jnp.maximum(kept, 0).reshape(kept.shape[0], -1), axis=1).reshape(kept.shape)
    return SlotTable(slot, jnp.where(boundary < last, kept, EMPTY))


def segment_attention(
    q: Float[Array, "batch heads tokens head_dim"],
    k: Float[Array, "batch kv_heads tokens head_dim"],
    v: Float[Array, "batch kv_heads tokens head_dim"],
    evicted_at: Integer[Array | np.ndarray, "batch kv_heads tokens"],
    segments: Segments,
    kernel: BlockKernel,
    blocks_at_once: int = 256,
    copies: Copies | None = None,
    sinks: Float[Array, "batch heads"] | None = None,
) -> Float[Array, "batch heads tokens head_dim"]:
    """Attention in which query t sees key s iff `s <= t < evicted_at[s]`, with its own backward pass.

    Args:
      q, k, v: one dtype; `heads` is a multiple of `kv_heads`.
      evicted_at: first column that no longer sees each key; 0 for padding. Of any integer dtype. Results are wrong,
        without an error, if more than `segments.budget` earlier keys are visible at a boundary.
      segments: the boundaries and the budget. Static.
      kernel: computes the attention of blocks, for example `XlaKernel()`. Static.
      blocks_at_once: blocks per kernel call, one for each segment, KV head and batch row; bounds memory. Static.
      copies: copies, with the same segments, that later segments see instead of the keys; None if they see the keys.
      sinks: a score of each row and head that takes part in its softmax, and whose weight is dropped.

    Returns:
      The output in the dtype of `q`; zeros, with zero gradients, for a query that sees no key.

    Raises:
      ValueError: the kernel cannot run this dtype, head_dim or length.
    """
    if not q.size:
        return jnp.zeros_like(q)  # an empty batch: kernels do not accept zero blocks
    # Outside of the jitted function, which would convert a NumPy array to int32 before it can be clipped.
    return _segment_attention(q, k, v, to_int32(evicted_at), copies, sinks, segments, kernel, blocks_at_once)


@partial(jax.jit, static_argnames=("segments", "kernel", "blocks_at_once"))
def _segment_attention(
    q: Array,
    k: Array,
    v: Array,
    evicted_at: Any,
    copies: Copies | None,
    sinks: Array | None,
    segments: Segments,
    kernel: BlockKernel,
    blocks_at_once: int,
) -> Array:
    kv_heads = k.shape[1]
    tokens = q.shape[2]
    # Shapes are computed from `first`, which must not exceed the number of columns.
    segments = replace(segments, first=min(segments.first, tokens))
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (k, v, evicted_at, copies))
    # Segments per kernel call: each has one block for every batch row and KV head.
    together = max(blocks_at_once // (k.shape[0] * kv_heads), 1)
    plan = _Plan(segments, kernel, even(max(segments.count(tokens), 1), together))
    rows = fold(q, kv_heads)
    if sinks is not None:
        sinks = sinks.reshape(-1, 1, rows.shape[2]).astype(jnp.promote_types(q.dtype, jnp.float32))
    return unfold(_attend(plan, _Tokens(rows, *flat), sinks), kv_heads)


@dataclass(frozen=True)
class _Plan:
    """Static arguments.

    Attributes:
      together: segments per chunk; a chunk is one kernel call.
    """

    segments: Segments
    kernel: BlockKernel
    together: int


@any_leaves
class _Tokens(NamedTuple):
    """Inputs with one block per batch row and KV head.

    Attributes:
      rows: `[blocks, tokens, group, head_dim]` queries. k, v: `[blocks, tokens, head_dim]`.
      evicted_at: `[blocks, tokens]`. copies: shaped like k and v.
    """

    rows: Float[Array, "blocks tokens group head_dim"]
    k: Float[Array, "blocks tokens head_dim"]
    v: Float[Array, "blocks tokens head_dim"]
    evicted_at: Int[Array, "blocks tokens"]
    copies: Copies | None

    @property
    def kept(self) -> tuple[Array, Array]:
        """The keys and values that later segments see."""
        return (self.k, self.v) if self.copies is None else (self.copies.k, self.copies.v)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: _Plan, tokens: _Tokens, sinks: Float[Array, "blocks 1 group"] | None) -> Array:
    return _forward(plan, tokens, sinks)[0]


def _forward(plan: _Plan, tokens: _Tokens, sinks: Array | None) -> tuple[Array, tuple[Any, ...]]:
    table = slot_table(tokens.evicted_at, plan.segments)
    out, lse = _prompt_forward(plan, tokens)
    if table.kept.shape[1]:
        padded = _pad_tokens(plan, tokens)
        kept = _pad_segments(plan, table.kept)
        # Sequential, so that only one chunk's gathered keys are in memory.
        parts = jax.lax.map(lambda i: plan.kernel.forward(_chunk(plan, tokens, padded, kept, i)), _chunks(kept, plan))
        response = (_join(plan, x, tokens.rows.shape) for x in parts)
        out, lse = (jnp.concatenate(pair, axis=1) for pair in zip((out, lse), response, strict=True))
    if sinks is not None:
        out, lse = add_sinks(out, lse, sinks)
    return out, (tokens, sinks, table, out, lse)


def _backward(plan: _Plan, saved: tuple[Any, ...], d_out: Array) -> tuple[_Tokens, Array | None]:
    tokens, sinks, table, out, lse = saved
    dq, dk, dv = _prompt_backward(plan, tokens, out, lse, d_out)
    if table.kept.shape[1]:
        (ck, cv), (rq, rk, rv) = _response_backward(plan, tokens, table, out, lse, d_out)
        # The keys kept at the first boundary belong to the prompt: their gradients go from the slots to the prompt.
        slot = table.slot[:, : plan.segments.first]
        dk = dk + _from_slots(ck, slot)
        dv = dv + _from_slots(cv, slot)
        dq, dk, dv = (jnp.concatenate(pair, axis=1) for pair in ((dq, rq), (dk, rk), (dv, rv)))
    # The gradients of kept keys went to the keys, also where later segments saw copies.
    rest = no_gradient(tokens.evicted_at), jax.tree.map(jnp.zeros_like, tokens.copies)
    d_tokens = _Tokens(dq, dk.astype(tokens.k.dtype), dv.astype(tokens.v.dtype), *rest)
    return d_tokens, None if sinks is None else sink_gradient(sinks, out, lse, d_out).sum(1, keepdims=True)


_attend.defvjp(_forward, _backward)


def _prompt(plan: _Plan, tokens: _Tokens) -> Blocks:
    rows, k, v, evicted_at, _ = tokens
    return whole_sequences(*(x[:, : plan.segments.first] for x in (rows, k, v, evicted_at)))


def _prompt_forward(plan: _Plan, tokens: _Tokens) -> tuple[Array, Array]:
    """Output and lse of the prompt: `[blocks, first, group, head_dim]` and `[blocks, first, group]`."""
    shape = (tokens.rows.shape[0], plan.segments.first, *tokens.rows.shape[2:])
    # Kernels do not accept blocks without rows or keys.
    if not plan.segments.first:
        return jnp.zeros(shape, tokens.rows.dtype), jnp.zeros(shape[:3], jnp.promote_types(jnp.float32, tokens.k.dtype))
    out, lse = plan.kernel.forward(_prompt(plan, tokens))
    return out.reshape(shape), lse.reshape(shape[:3])


def _prompt_backward(plan: _Plan, tokens: _Tokens, out: Array, lse: Array, d_out: Array) -> tuple[Array, Array, Array]:
    first = plan.segments.first
    rows = tokens.rows
    if not first:
        nothing = jnp.zeros((rows.shape[0], 0, rows.shape[-1]), lse.dtype)
        return jnp.zeros_like(rows[:, :0]), nothing, nothing
    flat = (x[:, :first].reshape(rows.shape[0], -1, *x.shape[3:]) for x in (out, lse, d_out))
    dq, dk, dv = plan.kernel.backward(_prompt(plan, tokens), *flat)
    return dq.reshape(rows[:, :first].shape), dk, dv


def _pad_response(plan: _Plan, x: Array) -> Array:
    """Cuts the response out of `[blocks, tokens, ...]` and pads it to whole chunks."""
    # Zeros pad every array. A key with `evicted_at` 0 is never visible. A padded row may see keys, but its output is
    # cut off and its zero `d_out` adds nothing to any gradient.
    return pad_rows(x[:, plan.segments.first :], plan.segments.length * plan.together, 0)


def _pad_tokens(plan: _Plan, tokens: _Tokens) -> _Tokens:
    """Pads the response of all arrays but the copies, which a segment's own keys do not need."""
    return jax.tree.map(lambda x: _pad_response(plan, x), tokens._replace(copies=None))


def _pad_segments(plan: _Plan, kept: Array) -> Array:
    return pad_rows(kept, plan.together, EMPTY)


def _chunks(kept: Array, plan: _Plan) -> Array:
    return jnp.arange(kept.shape[1] // plan.together)


def _part(plan: _Plan, x: Array, chunk: Array) -> Array:
    """Cuts a chunk of padded `[blocks, tokens, ...]` into its segments: `[blocks * together, length, ...]`."""
    size = plan.together * plan.segments.length
    part = jax.lax.dynamic_slice_in_dim(x, chunk * size, size, axis=1)
    return part.reshape(-1, plan.segments.length, *x.shape[2:])


def _join(plan: _Plan, parts: Array, shape: tuple[int, ...]) -> Array:
    """Joins `[chunks, blocks * together, length * group, ...]` to `[blocks, response tokens, group, ...]`."""
    count, tokens, group, _ = shape
    parts = parts.reshape(parts.shape[0], count, -1, group, *parts.shape[3:]).swapaxes(0, 1)
    return parts.reshape(count, -1, *parts.shape[3:])[:, : tokens - plan.segments.first]


def _chunk(plan: _Plan, tokens: _Tokens, padded: _Tokens, kept: Array, chunk: Array) -> Blocks:
    """Builds the blocks of one chunk: each segment with the keys kept at its boundary and its own keys."""
    together = plan.together
    length = plan.segments.length
    group = padded.rows.shape[2]
    rows, own_k, own_v, own_evicted_at, _ = jax.tree.map(lambda x: _part(plan, x, chunk), padded)
    column = plan.segments.first + chunk * together * length + jnp.arange(together * length, dtype=jnp.int32)
    # Every batch row and KV head has the same columns.
    column = jnp.tile(column.reshape(together, length), (padded.rows.shape[0], 1))
    kept = jax.lax.dynamic_slice_in_dim(kept, chunk * together, together, axis=1)

    def gathered(x: Array, own: Array) -> Array:
        # An empty slot gathers column 0 instead of a negative index; `born` hides it below.
        index = jnp.maximum(kept, 0).reshape(kept.shape[0], -1, *(1,) * (x.ndim - 2))
        found = jnp.take_along_axis(x, index, axis=1).reshape(-1, kept.shape[2], *x.shape[2:])
        return jnp.concatenate([found, own], axis=1)

    kept_column = kept.reshape(-1, kept.shape[2])
    kept_k, kept_v = tokens.kept
    return Blocks(
        q=rows.reshape(rows.shape[0], length * group, -1),
        k=gathered(kept_k, own_k),
        v=gathered(kept_v, own_v),
        column=jnp.repeat(column, group, axis=1),
        # No query is as late as `LATEST`, so no query sees an empty slot.
        born=jnp.concatenate([jnp.where(kept_column == EMPTY, LATEST, kept_column), column], axis=1),
        evicted_at=gathered(tokens.evicted_at, own_evicted_at),
    )


def _response_backward(
    plan: _Plan, tokens: _Tokens, table: SlotTable, out: Array, lse: Array, d_out: Array
) -> tuple[tuple[Array, Array], tuple[Array, Array, Array]]:
    """Gradients of the keys and values kept at the first boundary, and of the response's q, k and v."""
    padded = _pad_tokens(plan, tokens)
    kept = _pad_segments(plan, table.kept)
    rows = [_pad_response(plan, x) for x in (out, lse, d_out)]
    slot = _pad_response(plan, table.slot)
    stays = _stays(kept)
    count = kept.shape[0]
    budget = plan.segments.budget

    def one(carry: tuple[Array, Array], chunk: Array) -> tuple[tuple[Array, Array], tuple[Array, Array, Array]]:
        blocks = _chunk(plan, tokens, padded, kept, chunk)
        flat = (x.reshape(*blocks.q.shape[:2], *x.shape[3:]) for x in (_part(plan, x, chunk) for x in rows))
        dq, *d_keys = plan.kernel.backward(blocks, *flat)
        moves = (
            _part(plan, slot, chunk).reshape(count, plan.together, -1),
            jax.lax.dynamic_slice_in_dim(stays, chunk * plan.together, plan.together, axis=1),
        )
        by_segment = (x.reshape(count, plan.together, *x.shape[1:]) for x in d_keys)
        carry, own = _walk_back(carry, tuple(by_segment), *moves)
        return carry, (dq, *own)

    # Sums over segments have the kernel's precision, float32 or wider, for keys of any dtype.
    nothing = jnp.zeros((count, budget, tokens.k.shape[-1]), lse.dtype)
    # From the last chunk to the first: a key's gradient is complete once every later segment has added to it.
    carry, (dq, dk, dv) = jax.lax.scan(one, (nothing, nothing), _chunks(kept, plan), reverse=True)
    response = tokens.rows.shape[1] - plan.segments.first
    dk, dv = (x.swapaxes(0, 1).reshape(count, -1, x.shape[-1])[:, :response] for x in (dk, dv))
    return carry, (_join(plan, dq, tokens.rows.shape), dk, dv)


def _stays(kept: Array) -> Array:
    """Whether the key in a slot is in the same slot at the next boundary."""
    # No key stays after the last boundary. Two empty slots are equal but hold no key.
    following = jnp.pad(kept[:, 1:], [(0, 0), (0, 1), (0, 0)], constant_values=EMPTY)
    return (kept == following) & (kept != EMPTY)


def _walk_back(
    carry: tuple[Array, Array], d_keys: tuple[Array, Array], slot: Array, stays: Array
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Sums the gradients of every kept key along its slot, from the last segment back to the key's own segment.

    Args:
      carry: `[blocks, budget, head_dim]` for k and v: gradients of the keys kept at the boundary after the last
        segment.
      d_keys: `[blocks, segments, budget + length, head_dim]` gradients from the kernel.
      slot: `[blocks, segments, length]` slots of each segment's own keys at the next boundary.
      stays: `[blocks, segments, budget]`, see `_stays`.

    Returns:
      The carry at the boundary of the first segment, and the gradients `[blocks, segments * length, head_dim]` of the
      segments' own keys.
    """
    budget = stays.shape[2]

    def one(carry: tuple[Array, Array], at: Any) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        gradients, slot, stays = at
        # The carry is indexed by the slots of the next boundary. A segment's own keys add the sum of the slot that they
        # move into; kept keys add theirs only if the slot still holds the same key there.
        own = tuple(x[:, budget:] + _from_slots(c, slot) for x, c in zip(gradients, carry, strict=True))
        kept = tuple(x[:, :budget] + jnp.where(stays[..., None], c, 0) for x, c in zip(gradients, carry, strict=True))
        return kept, own

    by_segment = jax.tree.map(lambda x: x.swapaxes(0, 1), (d_keys, slot, stays))
    carry, own = jax.lax.scan(one, carry, by_segment, reverse=True)
    dk, dv = (x.swapaxes(0, 1).reshape(x.shape[1], -1, x.shape[-1]) for x in own)
    return carry, (dk, dv)


def _from_slots(gradient: Array, slot: Array) -> Array:
    """Gathers `[blocks, budget, head_dim]` at the slots of keys; zeros for keys without a slot."""
    outside = slot >= gradient.shape[1]
    # Keys without a slot look up slot 0, a valid index, and are set to zero below.
    found = jnp.take_along_axis(gradient, jnp.where(outside, 0, slot)[..., None], axis=1)
    return jnp.where(outside[..., None], 0, found)
