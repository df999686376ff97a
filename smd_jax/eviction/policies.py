"""The library's eviction policies, with the formulas and constants of the cited papers and code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
from smd_jax.message.gate import Gate, LinearGate, gate_parameters
from smd_jax.message.query_centers import QueryCenters
from smd_jax.typed_fields import check_types
from smd_kernels.reference import masked_softmax

LEAST_DEVIATION = 1e-6  # smallest standard deviation by which TriAttention divides a head's scores


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
    # Both sides together are kernel - 1 slots, so that the length stays; an even kernel has one more at the left.
    sides = [(0, 0), (0, 0), (kernel // 2, (kernel - 1) // 2)]
    if reducer == "max":
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, kernel), (1, 1, 1), sides)
    return jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 1, kernel), (1, 1, 1), sides) / kernel


def drawn_by_position(view: CacheView, draw: Callable[..., Array]) -> Scores:
    """A random number for every key, by its head and position, not its slot. `draw` is a function of `jax.random`."""

    def of_key(rng: Key[Array, ""], head: Int[Array, ""], position: Int[Array, ""]) -> Float[Array, ""]:
        # Explicit float32: with 64-bit numbers enabled, JAX's default dtype gives other numbers.
        return draw(jax.random.fold_in(jax.random.fold_in(rng, head), position), (), jnp.float32)

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
        check_at_least(self, 0, "sinks")

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
        check_share(self, "recent")

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
        check_at_least(self, 1, "window", "kernel")

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

    Z = weight * I - (1 - weight) * R over the keys outside the window; `weight` is the paper's, the file's is 0.07.
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
        check_at_least(self, 1, "window", "kernel")
        check_share(self, "weight")

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
        return drawn_by_position(view, jax.random.uniform)


@dataclass(frozen=True)
class TriAttention(EvictionPolicy):
    """TriAttention (arXiv:2604.04921; WeianMao/triattention `pruning_utils.py`), in the mode that TensorRT-LLM calls
    `per_layer_perhead`: every KV head of every layer chooses its keys.

    With E the mean query before RoPE and k a key before RoPE, as complex numbers of each frequency w:

        s_j = mean over d of sum over w of  Re(E conj(k_j) exp(i w (t + d - p_j)))  +  (mean |q| - |E|) |k_j|

    t is the position of the next query, d = 1, 2, 4, … up to `longest`. Scores of a query head are normalised over the
    keys (mean 0, variance 1), and a KV head takes the maximum over its query heads.

    There is no window of newest keys: `Protect(..., recent=n)` adds one. TensorRT-LLM never evicts the prompt, and its
    budget is for the response. To do the same, set `sinks` to the prompt length and increase the budget by as much.

    Attributes:
      centers: query centers of the model, see `smd_jax.model.query_centers`.
      sinks: number of first keys, which are kept and left out of the normalisation.
      longest: the largest d.

    Raises:
      TypeError, ValueError: a value of the wrong type or out of range.
    """

    centers: QueryCenters
    sinks: int = 0
    longest: int = 65536

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 0, "sinks")
        check_at_least(self, 1, "longest")

    def protected(self, budget: int) -> int:
        return self.sinks

    def parameters(self, params: Any, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Real and imaginary part of the mean query, rotated and averaged over d; the weight of |k|; the frequencies.

        Raises:
          ValueError: the centers have fewer layers.
        """
        if layer >= len(self.centers.mean):
            raise ValueError(f"expected query centers of at least {layer + 1} layers; got {len(self.centers.mean)}")
        mean, frequencies = self.centers.mean[layer].astype(np.complex128), self.centers.frequencies[layer]
        ahead = 2.0 ** np.arange(int(np.log2(self.longest)) + 1)
        turned = mean * np.exp(1j * ahead[:, None] * frequencies).mean(axis=0)
        return turned.real, turned.imag, self.centers.length[layer] - np.abs(mean), frequencies

    def score(self, view: CacheView) -> Scores:
        of_heads = self._of_heads(view)
        candidates = view.valid & (view.positions >= self.sinks)
        counted = candidates[:, :, None]
        count = jnp.maximum(counted.sum(-1, keepdims=True), 1)
        mean = jnp.where(counted, of_heads, 0).sum(-1, keepdims=True) / count
        centered = jnp.where(counted, of_heads - mean, 0)
        deviation = jnp.sqrt((centered**2).sum(-1, keepdims=True) / count)
        scores = (centered / jnp.maximum(deviation, LEAST_DEVIATION)).max(axis=2)
        return protect(scores, view.positions < self.sinks) if self.sinks else scores

    def _of_heads(self, view: CacheView) -> Float[Array, "batch kv_heads group slots"]:
        """Scores of every query head."""
        keys = at_least_float32(view.keys)
        kv_heads, half = keys.shape[1], keys.shape[3] // 2
        real, imaginary, weight, frequencies = (jnp.asarray(x, keys.dtype) for x in view.parameters)
        heads, frequency_count = real.shape
        if heads % kv_heads or frequency_count != half:
            raise ValueError(
                f"expected query centers of a multiple of {kv_heads} heads and {half} frequencies; got {heads} and "
                f"{frequency_count}"
            )
        # A cached key is already rotated to its position, so only the query's position is needed.
        angles = (view.newest[:, None] + 1).astype(keys.dtype) * frequencies[None]
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        real, imaginary = real[None], imaginary[None]
        turned = jnp.concatenate([real * cos - imaginary * sin, real * sin + imaginary * cos], axis=-1)
        grouped = turned.reshape(len(turned), kv_heads, -1, 2 * half)
        lengths = jnp.sqrt(keys[..., :half] ** 2 + keys[..., half:] ** 2)
        weights = weight.reshape(kv_heads, -1, half)
        # Accelerators multiply float32 in fewer bits by default.
        expected = jnp.einsum("bhgd,bhsd->bhgs", grouped, keys, precision="highest")
        return expected + jnp.einsum("hgf,bhsf->bhgs", weights, lengths, precision="highest")


@dataclass(frozen=True)
class LearnedGate(EvictionPolicy):
    """Evicts keys by sampling without replacement, in proportion to exp(-logit) of a gate (`smd_jax.message.gate`).

    The lowest scores of logit - Gumbel noise are such a sample (Gumbel top-k, arXiv:1903.06059). The trajectory records
    order and log-probability (`smd_jax.message.draws`); `UpdateConfig.eviction_coef` trains the gate.

    Add the parameters of a `LinearGate` with `smd_jax.message.gate.add_gate`; an `AttentionGate` has none. The gate
    protects only its `sinks`.
    Inside `Protect` or `Pyramid` it evicts in the same way, but records no draws to train on.

    A group's rows share the draws made while their prompt is read, as with `Random`. Shared draws are recorded and
    replayed, but not trained: see `EvictionDraws.trained`.

    Attributes:
      greedy: evict the keys with the lowest logits, without sampling and without a record.

    Raises:
      TypeError: for a value of the wrong type.
    """

    weights: Gate = field(default_factory=LinearGate)
    greedy: bool = False

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def gate(self) -> Gate | None:
        return None if self.greedy else self.weights

    @property
    def statistics(self) -> tuple[NewestQueries]:
        return (NewestQueries(1),)

    def protected(self, budget: int) -> int:
        return self.weights.sinks

    def parameters(self, params: Any, layer: int) -> Any:
        return gate_parameters(params, self.weights, layer)

    def score(self, view: CacheView) -> Scores:
        logits = gate_logits(self.weights, view)
        return logits if self.greedy else logits - drawn_by_position(view, jax.random.gumbel)


def gate_logits(gate: Gate, view: CacheView) -> Scores:
    """The gate's logit of each cached key."""
    queries = view.statistic(NewestQueries(1))
    logits = gate.logits(view.parameters, view.keys, view.values, view.positions, view.newest[:, None], queries)
    return gate.keep_sinks(logits, view.positions)[:, :, 0]


# By name, with their default parameters.
POLICIES: dict[str, EvictionPolicy] = {
    "dense": Dense(),
    "gate": LearnedGate(),
    "h2o": H2O(),
    "keydiff": KeyDiff(),
    "knorm": Knorm(),
    "random": Random(),
    "recent": Recent(),
    "rkv": RKV(),
    "snapkv": SnapKV(),
    "streaming_llm": StreamingLLM(),
    "tova": TOVA(),
}
