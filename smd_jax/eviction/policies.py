"""The library's eviction policies, with the formulas and constants of the cited papers and code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from smd_jax.eviction.base import (
    CacheView,
    EvictionPolicy,
    Scores,
    at_least_float32,
    check_at_least,
    check_share,
    newest_slots,
    protect,
)
from smd_jax.eviction.statistics import NewestQueries, ReceivedAttention
from smd_jax.typed_fields import check_types
from smd_kernels.reference import masked_softmax


def window_positions(view: CacheView, window: NewestQueries) -> Int[Array, "batch window"]:
    """Position of each of the newest queries in its own sequence; negative: the sequence is shorter than the window."""
    return view.newest[:, None] - window.ages(view.number)[None]


def window_scores(view: CacheView, window: NewestQueries) -> Float[Array, "batch kv_heads group window slots"]:
    """q k^T / sqrt(head_dim) of the newest queries, grouped by KV head."""
    queries = view.statistic(window)
    batch, heads, count, head_dim = queries.shape
    kv_heads = view.keys.shape[1]
    # float32 for both factors: in bfloat16 nearly equal scores would tie, and ties keep the older key.
    grouped = at_least_float32(queries).reshape(batch, kv_heads, heads // kv_heads, count, head_dim)
    return jnp.einsum("bhgwd,bhsd->bhgws", grouped, at_least_float32(view.keys)) * head_dim**-0.5


def window_weights(view: CacheView, window: NewestQueries) -> Float[Array, "batch kv_heads group window slots"]:
    """Attention of the newest queries: causal, and nothing for queries before the sequence's start. Soft caps and
    learnt sinks of the model are left out, as in the papers of these policies."""
    query = window_positions(view, window)[:, None, :, None]
    # A query before the start has a negative position, below that of every live key, so it sees nothing.
    mask = view.valid[:, :, None, :] & (view.positions[:, :, None, :] <= query)
    return masked_softmax(window_scores(view, window), mask[:, :, None])


def pool(x: Scores, kernel: int, reducer: str) -> Scores:
    """Average (zeros outside, as torch's avg_pool1d) or maximum over `kernel` neighbouring slots, same length."""
    window = (1, 1, kernel)
    strides = (1, 1, 1)
    # Both sides together are kernel - 1 slots, so that the length stays; an even kernel has one more at the left.
    sides = [(0, 0), (0, 0), (kernel // 2, (kernel - 1) // 2)]
    if reducer == "max":
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, sides)
    return jax.lax.reduce_window(x, 0.0, jax.lax.add, window, strides, sides) / kernel


def drawn_by_position(view: CacheView, draw: Callable[[Key[Array, ""]], Array]) -> Scores:
    """A number `draw(rng)` for every key. It depends on head and position, not on the slot, so padding has no
    effect."""

    def of_key(rng: Key[Array, ""], head: Int[Array, ""], position: Int[Array, ""]) -> Float[Array, ""]:
        return draw(jax.random.fold_in(jax.random.fold_in(rng, head), position))

    of_head = jax.vmap(of_key, in_axes=(None, None, 0))
    of_row = jax.vmap(of_head, in_axes=(None, 0, 0))
    heads = jnp.arange(view.positions.shape[1])
    # Empty slots share a position and hence a number, which is not used.
    return jax.vmap(of_row, in_axes=(0, None, 0))(view.rng, heads, view.positions)


@dataclass(frozen=True)
class Dense(EvictionPolicy):
    """Never evicts: the cache has a slot for every token."""

    @property
    def evicts(self) -> bool:
        return False


@dataclass(frozen=True)
class Recent(EvictionPolicy):
    """Sliding window: keeps the newest keys."""

    def score(self, view: CacheView) -> Scores:
        return view.positions.astype(jnp.float32)


@dataclass(frozen=True)
class StreamingLLM(EvictionPolicy):
    """Attention sinks and a sliding window (arXiv:2309.17453), at original positions.

    The paper renumbers positions inside the cache. Keys here keep their positions, because replay must be exact.
    """

    sinks: int = 4

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, "sinks", self.sinks, 0)

    def protected(self, budget: int) -> int:
        # A budget equal to the sinks would leave no window.
        return self.sinks + 1

    def score(self, view: CacheView) -> Scores:
        # float32 holds every whole number up to 2**24, so no two positions become equal.
        return protect(view.positions.astype(jnp.float32), view.positions < self.sinks)


@dataclass(frozen=True)
class H2O(EvictionPolicy):
    """Heavy hitters (arXiv:2306.14048): the keys that received most attention, and the newest ones.

    s_j = sum_i A_ij over all past queries and the group. `recent` is the share of the budget for the newest keys; the
    paper's code (FMInference/H2O, `modify_llama.py`) splits evenly. With `buffer = 1` it evicts once per step, exactly
    as in the paper.
    """

    recent: float = 0.5

    def __post_init__(self) -> None:
        check_types(self)
        check_share(self, "recent", self.recent)

    @property
    def statistics(self) -> tuple[ReceivedAttention]:
        return (ReceivedAttention(),)

    def protected(self, budget: int) -> int:
        return int(budget * self.recent)

    def score(self, view: CacheView) -> Scores:
        return protect(view.statistic(ReceivedAttention()), newest_slots(view, self.protected(view.budget)))


@dataclass(frozen=True)
class TOVA(EvictionPolicy):
    """Token omission via attention (arXiv:2401.06104): s_j = mean over heads of A_last,j, one choice for all heads.

    As in the paper, the newest key is scored like any other and may be evicted. kvpress always keeps it, like
    `Protect(TOVA(), recent=1)`.

    Attributes:
      shared: whether all heads of a layer keep the same keys, as in the paper. False: every KV head chooses by the mean
        over its own query heads.
    """

    shared: bool = True

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def statistics(self) -> tuple[NewestQueries]:
        return (NewestQueries(1),)

    def score(self, view: CacheView) -> Scores:
        # The window has one query; the mean is over the query heads of each KV head.
        of_heads = window_weights(view, NewestQueries(1))[:, :, :, 0].mean(2)
        if not self.shared:
            return of_heads
        return jnp.broadcast_to(of_heads.mean(1, keepdims=True), view.valid.shape)


@dataclass(frozen=True)
class SnapKV(EvictionPolicy):
    """SnapKV (arXiv:2404.14469): pooled attention of an observation window, after prefill and again while decoding.

    s_j = avgpool_kernel(sum over the last `window` queries of A_ij), mean over the group (kvpress); the window is kept.
    Constants of FasterDecoding/SnapKV `init_snapkv`: window 32, kernel 5.
    """

    window: int = 32
    kernel: int = 5

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, "window", self.window, 1)
        check_at_least(self, "kernel", self.kernel, 1)

    @property
    def statistics(self) -> tuple[NewestQueries]:
        return (NewestQueries(self.window),)

    def protected(self, budget: int) -> int:
        return self.window

    def score(self, view: CacheView) -> Scores:
        weights = window_weights(view, NewestQueries(self.window))
        recent = newest_slots(view, self.window)
        # The window is always kept, so its keys do not contribute to the pooled scores of their neighbours.
        votes = jnp.where(recent, 0.0, weights.sum(3).mean(2))
        return protect(pool(votes, self.kernel, "mean"), recent)


@dataclass(frozen=True)
class RKV(EvictionPolicy):
    """R-KV (arXiv:2505.24133, Zefan-Cai/R-KV `r1_kv.py`): importance minus redundancy; keeps the newest `window` keys.

    Z = weight * I - (1 - weight) * R over the keys outside the window.
    I: max-pooled (kernel 7) mean over the window's queries of a softmax over those keys, scores reduced by their
    maximum over the group.
    R: sim[j, s] = cos(k_j, k_s), 0 where j = s. For each j, sim[j, s] = 0 at the newest s with sim[j, s] > threshold.
    Then R_s = softmax_s(mean_j sim[j, s]).

    If no s passes the threshold, nothing is set to 0. The authors' code then sets sim[j, 0] to 0, because its argmax
    over no entries is 0.
    """

    window: int = 8
    kernel: int = 7
    weight: float = 0.1
    threshold: float = 0.5

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, "window", self.window, 1)
        check_at_least(self, "kernel", self.kernel, 1)
        check_share(self, "weight", self.weight)

    @property
    def statistics(self) -> tuple[NewestQueries]:
        return (NewestQueries(self.window),)

    def protected(self, budget: int) -> int:
        return self.window

    def score(self, view: CacheView) -> Scores:
        recent = newest_slots(view, self.window)
        candidates = view.valid & ~recent
        combined = self.weight * self._importance(view, candidates) - (1 - self.weight) * self._redundancy(view)
        return protect(combined, recent)

    def _importance(self, view: CacheView, candidates: Bool[Array, "batch kv_heads slots"]) -> Scores:
        window = NewestQueries(self.window)
        scores = window_scores(view, window).max(2)
        exists = window_positions(view, window) >= 0
        weights = masked_softmax(scores, exists[:, None, :, None] & candidates[:, :, None])
        # The mean is over existing queries: a short sequence has fewer than the window.
        count = jnp.maximum(exists.sum(-1), 1)[:, None, None]
        mean = weights.sum(2) / count
        # -inf restricts the maximum to candidates. Every candidate is in its own neighbourhood and stays finite; empty
        # slots are ignored and the window is protected.
        return pool(jnp.where(candidates, mean, -jnp.inf), self.kernel, "max")

    def _redundancy(self, view: CacheView) -> Scores:
        unit = at_least_float32(view.keys)
        # An empty slot may hold a key of zeros: avoids 0 / 0.
        unit = unit / (jnp.linalg.norm(unit, axis=-1, keepdims=True) + 1e-8)
        # Pairs of two different live keys.
        both = view.valid[:, :, :, None] & view.valid[:, :, None, :] & ~jnp.eye(unit.shape[2], dtype=bool)[None, None]
        similar = jnp.where(both, jnp.einsum("bhjd,bhsd->bhjs", unit, unit), 0.0)
        slot = jnp.arange(unit.shape[2])[None, None, None]
        # Slots are in column order, so the highest is the newest. -1 is no slot.
        last = jnp.where(similar > self.threshold, slot, -1).max(-1, keepdims=True)
        similar = jnp.where(slot == last, 0.0, similar)
        count = jnp.maximum(view.valid.sum(-1, keepdims=True), 1)
        return masked_softmax(similar.sum(2) / count, view.valid)


@dataclass(frozen=True)
class KeyDiff(EvictionPolicy):
    """KeyDiff (arXiv:2504.15364): s_j = -cos(k_j, mean of the normalised keys); keeps keys unlike the average."""

    def score(self, view: CacheView) -> Scores:
        keys = at_least_float32(view.keys)
        # The floor, as in torch's `normalize`, is for empty slots, which may hold zeros.
        unit = keys / jnp.maximum(jnp.linalg.norm(keys, axis=-1, keepdims=True), 1e-12)
        count = jnp.maximum(view.valid.sum(-1), 1)[:, :, None, None]
        # The mean over live keys: empty slots hold arbitrary values.
        anchor = jnp.where(view.valid[..., None], unit, 0.0).sum(2, keepdims=True) / count
        anchor = anchor / jnp.maximum(jnp.linalg.norm(anchor, axis=-1, keepdims=True), 1e-12)
        return -(unit * anchor).sum(-1)


@dataclass(frozen=True)
class Knorm(EvictionPolicy):
    """Key norm (arXiv:2406.11430): s_j = -||k_j||."""

    def score(self, view: CacheView) -> Scores:
        return -jnp.linalg.norm(at_least_float32(view.keys), axis=-1)


@dataclass(frozen=True)
class Random(EvictionPolicy):
    """Uniform scores, sampled at every compression: the random baseline.

    Scores depend on the row's PRNG key, the head and the position, not on the slot, so padding has no effect. A prompt
    is read once for its group with the key of the first row, so all rows of a group lose the same prompt keys.
    """

    def score(self, view: CacheView) -> Scores:
        # Explicit float32: with 64-bit numbers enabled, JAX's default dtype gives other numbers.
        return drawn_by_position(view, lambda rng: jax.random.uniform(rng, (), jnp.float32))
