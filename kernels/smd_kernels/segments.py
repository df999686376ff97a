"""Attention over the segments of a rollout: every query attends to `budget + length` keys, however long the response.

    columns    0 ……………… first ……… +length ……… +2 length ………
               prompt       segment 0   segment 1   segment 2
                          ▲           ▲           ▲
                          boundaries: at most `budget` earlier keys are still visible

All queries of a segment see the keys that were kept at its boundary and, causally, its own. The kept keys are gathered
once per segment, so time and memory are O(tokens · (budget + length)) in place of O(tokens²). A key may also be evicted
within a segment: the interval test is made again on what was gathered. The prompt attends to itself, causally.

A kept key stays in one slot from boundary to boundary, as in the sampler's cache. Its gradient is then a sum along
the segments of its slot, in a fixed order, where scattering it back would take atomic additions. Segments are gathered
and attended to in groups of bounded memory (all at once: the vectorised form). Carrying the cache itself from segment
to segment instead, one after another, would leave nothing to do side by side.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from smd_kernels.blocks import LATEST, BlockKernel, Blocks, even, pad_rows
from smd_kernels.copies import Copies
from smd_kernels.intervals import fold, no_gradient, unfold, whole_sequences
from smd_kernels.pytrees import any_leaves

EMPTY = -1  # column of a slot that holds no key


@dataclass(frozen=True)
class Segments:
    """Where a rollout's compressions were, and how much they left.

    Attributes:
      first: column of the first response token, where the first segment begins.
      length: queries of a segment, the rollout's buffer.
      budget: no more keys than this are visible from before a segment to its first query, in any row and head.
    """

    first: int
    length: int
    budget: int

    def __post_init__(self) -> None:
        if self.first < 0 or self.length < 1 or self.budget < 1:
            raise ValueError(f"expected first >= 0, length >= 1 and budget >= 1; got {self}")

    def count(self, tokens: int) -> int:
        """Segments of a trajectory of this many columns."""
        return -(-max(tokens - self.first, 0) // self.length)


@any_leaves
class SlotTable(NamedTuple):
    """Where every key is kept.

    Attributes:
      slot: `[blocks, tokens]` slot of each key while it is kept; `budget` if no boundary keeps it.
      kept: `[blocks, segments, budget]` column of the key in each slot at each boundary, `EMPTY` where there is none.
    """

    slot: Int[Array, "blocks tokens"]
    kept: Int[Array, "blocks segments budget"]


def slot_table(evicted_at: Int[Array, "blocks tokens"], segments: Segments) -> SlotTable:
    """Slots for the kept keys, the longest free one first; O(tokens) memory, no loop over the segments.

    The k-th key to come takes the slot of the k-th key to go, after the `budget` slots that are free at the start.
    Following from key to predecessor leads to one of those; log2(segments) doublings of the step follow all at once.
    """
    tokens = evicted_at.shape[1]
    budget = segments.budget
    count = segments.count(evicted_at.shape[1])
    column = jnp.arange(tokens, dtype=jnp.int32)[None]
    # Boundary i is at column first + i * length; a key is kept at the boundaries enters <= i < leaves.
    enters = jnp.maximum(column - segments.first + segments.length, 0) // segments.length
    # A key enters at the end of its own segment, which sees it directly. Leaving is rounded up: a key that goes exactly
    # at a boundary is not seen by the query that stands there.
    leaves = jnp.clip(-((segments.first - evicted_at) // segments.length), 0, count)
    is_kept = enters < leaves
    # The first `budget` keys to come find free slots; the n-th after them takes the slot of the n-th to go.
    order = jnp.cumsum(is_kept, axis=1, dtype=jnp.int32) - 1
    # Keys that no boundary keeps sort behind all others: `leaves` is at most `count`. A stable sort keeps keys that go
    # together in the order of their columns.
    goes = jnp.argsort(jnp.where(is_kept, leaves, count + 1), axis=1, stable=True).astype(jnp.int32)
    before = jnp.take_along_axis(goes, jnp.maximum(order - budget, 0), axis=1)
    before = jnp.where(is_kept & (order >= budget), before, column)
    # A predecessor is gone when its successor enters, so a chain has at most one key per boundary. It ends at a key
    # that points to itself, one of the first `budget`, whose place in the order is the slot.
    for _ in range(count.bit_length()):
        before = jnp.take_along_axis(before, before, axis=1)
    slot = jnp.where(is_kept, jnp.take_along_axis(order, before, axis=1), budget)

    block = jnp.arange(evicted_at.shape[0])[:, None]
    arrivals = jnp.full((evicted_at.shape[0], count, budget), EMPTY, jnp.int32)
    # Slot `budget` lies beyond the axis: keys that no boundary keeps are dropped.
    arrivals = arrivals.at[block, jnp.broadcast_to(enters, slot.shape), slot].set(column, mode="drop")
    # Columns grow, so the largest so far is the newest arrival in a slot; whether it is still there is asked below.
    kept = jax.lax.cummax(arrivals, axis=1)
    boundary = jnp.arange(count, dtype=jnp.int32)[None, :, None]
    # An empty slot looks up column 0, and stays `EMPTY` whatever it finds there.
    last = jnp.take_along_axis(leaves, jnp.maximum(kept, 0).reshape(kept.shape[0], -1), axis=1).reshape(kept.shape)
    return SlotTable(slot, jnp.where(boundary < last, kept, EMPTY))


@partial(jax.jit, static_argnames=("segments", "kernel", "blocks_at_once"))
def segment_attention(
    q: Float[Array, "batch heads tokens head_dim"],
    k: Float[Array, "batch kv_heads tokens head_dim"],
    v: Float[Array, "batch kv_heads tokens head_dim"],
    evicted_at: Int[Array, "batch kv_heads tokens"],
    segments: Segments,
    kernel: BlockKernel,
    blocks_at_once: int = 256,
    copies: Copies | None = None,
) -> Float[Array, "batch heads tokens head_dim"]:
    """Attention in which query t sees key s iff `s <= t < evicted_at[s]`, for a mask that keeps to its segments.

    Args:
      evicted_at: int32; 0 for padding. More than `segments.budget` keys visible at a boundary give wrong results.
      segments, kernel: where the boundaries are, and what does the arithmetic. Static.
      blocks_at_once: gathered and attended to together, one for each segment, KV head and row of the batch; bounds the
        memory. Static.
      copies: what later segments see of the keys, see `smd_kernels.copies`; None: the keys themselves. Their segments
        are these.

    Returns:
      In the dtype of `q`; zeros, with zero gradients, for a query that sees no key.
    """
    kv_heads = k.shape[1]
    tokens = q.shape[2]
    # Shapes are computed from `first`, which must not lie beyond the columns that there are.
    segments = replace(segments, first=min(segments.first, tokens))
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (k, v, evicted_at.astype(jnp.int32), copies))
    # Segments at once: each brings a block for every row of the batch and every KV head.
    together = max(blocks_at_once // (k.shape[0] * kv_heads), 1)
    plan = _Plan(segments, kernel, even(max(segments.count(tokens), 1), together))
    return unfold(_attend(plan, _Tokens(fold(q, kv_heads), *flat)), kv_heads)


@dataclass(frozen=True)
class _Plan:
    """The static arguments."""

    segments: Segments
    kernel: BlockKernel
    together: int


@any_leaves
class _Tokens(NamedTuple):
    """Every row and KV head of a batch is one block.

    Attributes:
      rows: `[blocks, tokens, group, head_dim]` queries. k, v: `[blocks, tokens, head_dim]`.
      evicted_at: `[blocks, tokens]`. copies: as k and v.
    """

    rows: Float[Array, "blocks tokens group head_dim"]
    k: Float[Array, "blocks tokens head_dim"]
    v: Float[Array, "blocks tokens head_dim"]
    evicted_at: Int[Array, "blocks tokens"]
    copies: Copies | None

    @property
    def kept(self) -> tuple[Array, Array]:
        """Keys and values as later segments see them."""
        return (self.k, self.v) if self.copies is None else (self.copies.k, self.copies.v)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: _Plan, tokens: _Tokens) -> Array:
    return _forward(plan, tokens)[0]


def _forward(plan: _Plan, tokens: _Tokens) -> tuple[Array, tuple[_Tokens, SlotTable, Array, Array]]:
    table = slot_table(tokens.evicted_at, plan.segments)
    out, lse = _prompt_forward(plan, tokens)
    if table.kept.shape[1]:
        padded = _pad_tokens(plan, tokens)
        kept = _pad_segments(plan, table.kept)
        # One chunk after another, so that the gathered keys of one chunk alone are in memory.
        parts = jax.lax.map(lambda i: plan.kernel.forward(_chunk(plan, tokens, padded, kept, i)), _chunks(kept, plan))
        response = (_join(plan, x, tokens.rows.shape) for x in parts)
        out, lse = (jnp.concatenate(pair, axis=1) for pair in zip((out, lse), response, strict=True))
    return out, (tokens, table, out, lse)


def _backward(plan: _Plan, saved: tuple[_Tokens, SlotTable, Array, Array], d_out: Array) -> tuple[_Tokens]:
    tokens, table, out, lse = saved
    dq, dk, dv = _prompt_backward(plan, tokens, out, lse, d_out)
    if table.kept.shape[1]:
        (ck, cv), (rq, rk, rv) = _response_backward(plan, tokens, table, out, lse, d_out)
        # What the first boundary keeps are keys of the prompt: their sums go from the slots back to them.
        slot = table.slot[:, : plan.segments.first]
        dk = dk + _from_slots(ck, slot)
        dv = dv + _from_slots(cv, slot)
        dq, dk, dv = (jnp.concatenate(pair, axis=1) for pair in ((dq, rq), (dk, rk), (dv, rv)))
    # Kept keys gave their gradients to the keys, whether they are copies or not.
    rest = no_gradient(tokens.evicted_at), jax.tree.map(jnp.zeros_like, tokens.copies)
    return (_Tokens(dq, dk.astype(tokens.k.dtype), dv.astype(tokens.v.dtype), *rest),)


_attend.defvjp(_forward, _backward)


def _prompt(plan: _Plan, tokens: _Tokens) -> Blocks:
    rows, k, v, evicted_at, _ = tokens
    return whole_sequences(*(x[:, : plan.segments.first] for x in (rows, k, v, evicted_at)))


def _prompt_forward(plan: _Plan, tokens: _Tokens) -> tuple[Array, Array]:
    """Output and log-denominators of the prompt, by token and group."""
    shape = (tokens.rows.shape[0], plan.segments.first, *tokens.rows.shape[2:])
    # Kernels get no blocks without rows or keys.
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
    """The response's part of `[blocks, tokens, ...]`, up to a whole number of chunks."""
    # Zeros will do for all. A key with `evicted_at` 0 is never seen. A padded row has a column like any other and may
    # see keys, but its output is cut off and its zero `d_out` adds nothing to any gradient.
    return pad_rows(x[:, plan.segments.first :], plan.segments.length * plan.together, 0)


def _pad_tokens(plan: _Plan, tokens: _Tokens) -> _Tokens:
    """All of the response but the copies, of which it has no need."""
    return jax.tree.map(lambda x: _pad_response(plan, x), tokens._replace(copies=None))


def _pad_segments(plan: _Plan, kept: Array) -> Array:
    return pad_rows(kept, plan.together, EMPTY)


def _chunks(kept: Array, plan: _Plan) -> Array:
    return jnp.arange(kept.shape[1] // plan.together)


def _part(plan: _Plan, x: Array, chunk: Array) -> Array:
    """A chunk of padded `[blocks, tokens, ...]` by its segments: `[blocks * together, length, ...]`."""
    size = plan.together * plan.segments.length
    part = jax.lax.dynamic_slice_in_dim(x, chunk * size, size, axis=1)
    return part.reshape(-1, plan.segments.length, *x.shape[2:])


def _join(plan: _Plan, parts: Array, shape: tuple[int, ...]) -> Array:
    """`[chunks, blocks * together, length * group, ...]` -> `[blocks, response tokens, group, ...]`."""
    count, tokens, group, _ = shape
    parts = parts.reshape(parts.shape[0], count, -1, group, *parts.shape[3:]).swapaxes(0, 1)
    return parts.reshape(count, -1, *parts.shape[3:])[:, : tokens - plan.segments.first]


def _chunk(plan: _Plan, tokens: _Tokens, padded: _Tokens, kept: Array, chunk: Array) -> Blocks:
    """The segments of one chunk, each with the keys that its boundary kept and its own."""
    together = plan.together
    length = plan.segments.length
    group = padded.rows.shape[2]
    rows, own_k, own_v, own_evicted_at, _ = jax.tree.map(lambda x: _part(plan, x, chunk), padded)
    column = plan.segments.first + chunk * together * length + jnp.arange(together * length, dtype=jnp.int32)
    # The same columns for every row and KV head, whose segments lie side by side.
    column = jnp.tile(column.reshape(together, length), (padded.rows.shape[0], 1))
    kept = jax.lax.dynamic_slice_in_dim(kept, chunk * together, together, axis=1)

    def gathered(x: Array, own: Array) -> Array:
        # An empty slot gathers column 0 in place of a negative index; `born` hides it below.
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
        # No query is as late as `LATEST`: nobody sees an empty slot.
        born=jnp.concatenate([jnp.where(kept_column == EMPTY, LATEST, kept_column), column], axis=1),
        evicted_at=gathered(tokens.evicted_at, own_evicted_at),
    )


def _response_backward(
    plan: _Plan, tokens: _Tokens, table: SlotTable, out: Array, lse: Array, d_out: Array
) -> tuple[tuple[Array, Array], tuple[Array, Array, Array]]:
    """Gradients of the keys and values in the slots of the first boundary, and of the response's q, k and v."""
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

    # Sums over segments are of the kernel's precision, float32 or wider, whatever the dtype of the keys.
    nothing = jnp.zeros((count, budget, tokens.k.shape[-1]), lse.dtype)
    # From the last chunk to the first: a key's gradient is complete only when every later segment has added to it.
    carry, (dq, dk, dv) = jax.lax.scan(one, (nothing, nothing), _chunks(kept, plan), reverse=True)
    response = tokens.rows.shape[1] - plan.segments.first
    dk, dv = (x.swapaxes(0, 1).reshape(count, -1, x.shape[-1])[:, :response] for x in (dk, dv))
    return carry, (_join(plan, dq, tokens.rows.shape), dk, dv)


def _stays(kept: Array) -> Array:
    """Whether the key in a slot is still there at the next boundary."""
    # Behind the last boundary nothing stays. Two empty slots are equal, too, but hold no key.
    following = jnp.pad(kept[:, 1:], [(0, 0), (0, 1), (0, 0)], constant_values=EMPTY)
    return (kept == following) & (kept != EMPTY)


def _walk_back(
    carry: tuple[Array, Array], d_keys: tuple[Array, Array], slot: Array, stays: Array
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Sums the gradients of every kept key along its slot, from the last segment to the one that it came from.

    Args:
      carry: `[blocks, budget, head_dim]` for k and v: gradients of what the boundary after the last segment keeps.
      d_keys: `[blocks, segments, budget + length, head_dim]`. slot: `[blocks, segments, length]` of each segment's
        own keys at the next boundary. stays: `[blocks, segments, budget]`.

    Returns:
      The carry for the boundary of the first segment, and `[blocks, segments * length, head_dim]` of the own keys.
    """
    budget = stays.shape[2]

    def one(carry: tuple[Array, Array], at: Any) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        gradients, slot, stays = at
        # The carry is by the slots of the next boundary. A segment's own keys fetch the sum of the slot that they move
        # into; kept keys take over theirs only if the slot still has the same key there.
        own = tuple(x[:, budget:] + _from_slots(c, slot) for x, c in zip(gradients, carry, strict=True))
        kept = tuple(x[:, :budget] + jnp.where(stays[..., None], c, 0) for x, c in zip(gradients, carry, strict=True))
        return kept, own

    by_segment = jax.tree.map(lambda x: x.swapaxes(0, 1), (d_keys, slot, stays))
    carry, own = jax.lax.scan(one, carry, by_segment, reverse=True)
    dk, dv = (x.swapaxes(0, 1).reshape(x.shape[1], -1, x.shape[-1]) for x in own)
    return carry, (dk, dv)


def _from_slots(gradient: Array, slot: Array) -> Array:
    """`[blocks, budget, head_dim]` at the slots of some keys; zeros for keys that are in none."""
    outside = slot >= gradient.shape[1]
    # Keys without a slot look up slot 0, an index that exists, and are set to zero after.
    found = jnp.take_along_axis(gradient, jnp.where(outside, 0, slot)[..., None], axis=1)
    return jnp.where(outside[..., None], 0, found)
