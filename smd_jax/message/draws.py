"""Sampled evictions: their record in addition to the mask, and their log-probability.

At a compression, keys are evicted one by one without replacement; a key with logit x is chosen with probability
proportional to exp(-x) among the remaining keys (Plackett-Luce). Of a, b, c, d two are evicted, c first, then a:

    log p  =  log  e^-c / (e^-a + e^-b + e^-c + e^-d)  +  log  e^-a / (e^-a + e^-b + e^-d)

The mask's `evicted_at` records which keys were evicted when, so the only extra record is their order, one integer per
key.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from smd_jax.message.gate import Gate
from smd_jax.message.masks import NEVER, record_evictions
from smd_jax.pytrees import PyTreeNode

STAYED = -1  # order of a key that no draw has evicted
NO_WEIGHT = -1e30  # finite substitute for log 0


class EvictionDraws(PyTreeNode):
    """The draws of a rollout. Compression i comes after the query of column `first + i * length - 1`; the query of the
    next column does not see its keys.

    Attributes:
      order: `[batch, layers, kv_heads, T]` ascending sampling order of the keys evicted at the same compression, not
        always from 0 on; -1: not sampled (kept, padding, after the end of the row).
      logprobs: `[batch, layers, kv_heads, compressions]` of the sampler, in nats; 0 without a counted draw.
      gate: the gate whose logits were sampled. Static.
      first: column of the first query after the first compression, the prompt's width. Static.
      length: columns between two compressions, the buffer. Static.
      group_size: consecutive rows that share a prompt, and therefore the draw at its end. Static.
    """

    order: Int[Array, "batch layers kv_heads T"]
    logprobs: Float[Array, "batch layers kv_heads compressions"]
    gate: Gate = struct.field(pytree_node=False)
    first: int = struct.field(pytree_node=False)
    length: int = struct.field(pytree_node=False)
    group_size: int = struct.field(pytree_node=False, default=1)

    @property
    def boundaries(self) -> Int[Array, " compressions"]:
        """The first column whose query did not see the evicted keys, for every compression."""
        return self.first + self.length * jnp.arange(self.logprobs.shape[-1], dtype=jnp.int32)

    def first_columns(self, columns: int) -> EvictionDraws:
        """The draws within the first `columns` columns."""
        count = boundary_count(self.first, self.length, columns)
        return self.replace(order=self.order[..., :columns], logprobs=self.logprobs[..., :count])

    def counted(self, valid: Bool[Array, "batch T"]) -> Bool[Array, "batch compressions"]:
        """Compressions before a later token of the row. (The token of column c is sampled from the hidden state of
        column c - 1, so a compression before column c affects tokens from c + 1 on.)"""
        after = self.first + valid[:, self.first :].sum(axis=1, dtype=jnp.int32)  # column after a row's last token
        return self.boundaries[None] + 1 < after[:, None]

    def trained(self, valid: Bool[Array, "batch T"]) -> Bool[Array, "batch compressions"]:
        """Counted compressions that were sampled for a single row, so that the row's advantage applies.

        At the prompt's end a group of several rows shares one draw z. Its score-function gradient is
        (R - b) ∇ log p(z) with the group's mean reward R and a baseline b that does not depend on z. The baseline of a
        group-relative advantage is R itself: the rows' terms sum to zero, and every subset of them is bias.
        """
        own = (self.boundaries > self.first) | (self.group_size == 1)
        return self.counted(valid) & own[None]


def boundary_count(first: int, length: int, columns: int) -> int:
    """Compressions before the last column: one after the prompt, one after each segment with a later query."""
    return 1 + max(columns - 1 - first, 0) // length


def record_order(
    order: Int[Array, "batch *layers kv_heads columns"],
    dropped: Int[Array, "batch *layers kv_heads compressions rest"],
) -> Int[Array, "batch *layers kv_heads columns"]:
    """Numbers the keys that each compression `dropped`, in order; negative columns are ignored."""
    *heads, compressions, rest = dropped.shape
    numbers = jnp.tile(jnp.arange(rest, dtype=jnp.int32), compressions)
    return record_evictions(order, dropped.reshape(*heads, -1), numbers[None, None])


def candidates(
    evicted_at: Int[Array, "batch kv_heads T"],
    order: Int[Array, "batch kv_heads T"],
    boundaries: Int[Array, " compressions"],
) -> tuple[Bool[Array, "batch kv_heads compressions T"], Bool[Array, "batch kv_heads compressions T"]]:
    """The keys in a layer's cache at each compression, and those that it evicted."""
    boundary = boundaries[None, None, :, None]
    columns = jnp.arange(evicted_at.shape[-1], dtype=jnp.int32)
    # A key outside the sliding window could not be sampled and has no order.
    goes = (evicted_at[:, :, None] == boundary) & (order[:, :, None] != STAYED)
    stays = (columns[None, None, None] < boundary) & (evicted_at[:, :, None] > boundary)
    return goes | stays, goes


def ordered_logprob(
    logits: Float[Array, "*draws keys"],
    order: Int[Array, "*draws keys"],
    candidate: Bool[Array, "*draws keys"],
    goes: Bool[Array, "*draws keys"],
) -> Float[Array, "*draws"]:
    """log p of evicting these candidates in this order, see above; 0 without evictions.

    Args:
      logits: of the keys, higher = keep.
      order: ascending order of the evicted keys; other values are ignored.
    """
    # Evicted keys in their order, then kept keys, then others without weight. Finite, because a sum over only -inf is
    # NaN.
    weights = jnp.where(candidate, -logits, NO_WEIGHT)
    place = jnp.where(goes, order, jnp.where(candidate, NEVER - 1, NEVER))
    by_place = jnp.argsort(place, axis=-1)
    return _log_choices(jnp.take_along_axis(weights, by_place, axis=-1), jnp.take_along_axis(goes, by_place, axis=-1))


@jax.custom_jvp
def _log_choices(weights: Float[Array, "*draws keys"], drawn: Bool[Array, "*draws keys"]) -> Float[Array, "*draws"]:
    """log p of choosing keys from left to right, each with weight exp(weights) among itself and all later keys."""
    return jnp.where(drawn, weights - _behind(weights), 0.0).sum(axis=-1)


def _behind(weights: Float[Array, "*draws keys"]) -> Float[Array, "*draws keys"]:
    return jax.lax.cumlogsumexp(weights, axis=weights.ndim - 1, reverse=True)


@_log_choices.defjvp
def _log_choices_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Any]) -> tuple[Array, Array]:
    """Written by hand: the automatic derivative of cumulative sums of exponentials is several times as long.

    Key j could be chosen in every draw i up to its own, with probability exp(weight j - sum behind i):

        d log p / d weight j  =  [j drawn] - sum over drawn i <= j of exp(weight j - behind i)
    """
    weights, drawn = primals
    behind = _behind(weights)
    # The same sum in logarithms, so that no exponential overflows: it is at most the number of draws.
    up_to = jax.lax.cumlogsumexp(jnp.where(drawn, -behind, NO_WEIGHT), axis=weights.ndim - 1)
    slope = drawn - jnp.exp(weights + up_to)
    value = jnp.where(drawn, weights - behind, 0.0).sum(axis=-1)
    return value, (slope * tangents[0]).sum(axis=-1)
