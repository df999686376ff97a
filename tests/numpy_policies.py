"""Reference eviction scores in float64 NumPy: loops over the existing keys, written from the papers' formulas.

A new policy needs a function here only if a test should compare its scores with a second implementation.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from smd_jax.eviction.base import EvictionPolicy
from smd_jax.eviction.policies import H2O, RKV, TOVA, KeyDiff, Knorm, Recent, SnapKV, StreamingLLM, TriAttention
from smd_jax.eviction.wrappers import Protect, Pyramid
from tests.numpy_decoder import softmax


@dataclass(frozen=True)
class Row:
    """One layer of one row at a compression: its n keys in order, without empty slots, and the queries that exist.

    `keys [kv_heads, n, head_dim]`, `positions [kv_heads, n]`, the attention that they `received [kv_heads, n]`, and
    `queries [heads, w, head_dim]` with `query_positions [w]`.
    """

    keys: np.ndarray
    positions: np.ndarray
    received: np.ndarray
    queries: np.ndarray
    query_positions: np.ndarray
    budget: int

    @property
    def group(self) -> int:
        return len(self.queries) // len(self.keys)

    def raw(self, head: int, query: int) -> np.ndarray:
        """q k^T / sqrt(head_dim) of one query head."""
        return self.keys[head // self.group] @ self.queries[head, query] / np.sqrt(self.keys.shape[-1])

    def attention(self, head: int, query: int) -> np.ndarray:
        """Weights `[n]` of one query, zero for keys that are newer than it."""
        seen = self.positions[head // self.group] <= self.query_positions[query]
        weights = np.zeros(len(seen))
        weights[seen] = softmax(self.raw(head, query)[seen])
        return weights


def recent(policy: Recent, row: Row) -> np.ndarray:
    return row.positions.astype(float)


def streaming_llm(policy: StreamingLLM, row: Row) -> np.ndarray:
    return np.where(row.positions < policy.sinks, np.inf, row.positions)


def h2o(policy: H2O, row: Row) -> np.ndarray:
    score = row.received.copy()
    score[:, max(score.shape[1] - int(policy.recent * row.budget), 0) :] = np.inf
    return score


def tova(policy: TOVA, row: Row) -> np.ndarray:
    newest = int(np.argmax(row.query_positions))
    weights = np.stack([row.attention(head, newest) for head in range(len(row.queries))])
    if policy.shared:
        return np.stack([weights.mean(axis=0)] * len(row.keys))
    return np.stack([weights[h * row.group : (h + 1) * row.group].mean(axis=0) for h in range(len(row.keys))])


def snapkv(policy: SnapKV, row: Row) -> np.ndarray:
    kv_heads, n, _ = row.keys.shape
    candidates = max(n - policy.window, 0)
    score = np.full((kv_heads, n), np.inf)
    for h in range(kv_heads):
        votes = np.zeros(candidates)
        for head in range(h * row.group, (h + 1) * row.group):
            for query in range(len(row.query_positions)):
                votes += row.attention(head, query)[:candidates] / row.group
        for j in range(candidates):
            near = range(j - policy.kernel // 2, j + policy.kernel // 2 + 1)
            score[h, j] = sum(votes[i] for i in near if 0 <= i < candidates) / policy.kernel
    return score


def rkv(policy: RKV, row: Row) -> np.ndarray:
    kv_heads, n, _ = row.keys.shape
    candidates = max(n - policy.window, 0)
    score = np.full((kv_heads, n), np.inf)
    for h in range(kv_heads):
        importance = np.zeros(candidates)
        for query in range(len(row.query_positions)):
            heads = range(h * row.group, (h + 1) * row.group)
            strongest = np.max([row.raw(head, query) for head in heads], axis=0)
            importance += softmax(strongest[:candidates]) / len(row.query_positions)
        redundancy = rkv_redundancy(row.keys[h], policy.threshold)
        for j in range(candidates):
            near = [i for i in range(j - policy.kernel // 2, j + policy.kernel // 2 + 1) if 0 <= i < candidates]
            score[h, j] = policy.weight * max(importance[near]) - (1 - policy.weight) * redundancy[j]
    return score


def rkv_redundancy(keys: np.ndarray, threshold: float) -> np.ndarray:
    n = len(keys)
    unit = [key / (np.linalg.norm(key) + 1e-8) for key in keys]
    similar = np.zeros((n, n))
    for j, s in np.ndindex(n, n):
        if j != s:
            similar[j, s] = unit[j] @ unit[s]
    for j in range(n):
        above = np.flatnonzero(similar[j] > threshold)
        if len(above):
            similar[j, above[-1]] = 0.0
    return softmax(similar.mean(0))


def keydiff(policy: KeyDiff, row: Row) -> np.ndarray:
    unit = row.keys / np.linalg.norm(row.keys, axis=-1, keepdims=True)
    anchor = unit.mean(1)
    anchor = anchor / np.linalg.norm(anchor, axis=-1, keepdims=True)
    return np.array([[-(key @ anchor[h]) for key in unit[h]] for h in range(len(unit))])


def knorm(policy: Knorm, row: Row) -> np.ndarray:
    return np.array([[-np.sqrt(sum(x * x for x in key)) for key in head] for head in row.keys])


def triattention(policy: TriAttention, row: Row, layer: int = 0) -> np.ndarray:
    """Inverts RoPE on the keys and sums over the offsets one by one."""
    means, lengths = (np.asarray(x, np.complex128)[layer] for x in (policy.centers.mean, policy.centers.length))
    frequencies = policy.centers.frequencies[layer]
    half = len(frequencies)
    score = np.zeros(row.keys.shape[:2])
    offsets = [2**power for power in range(30) if 2**power <= policy.longest]
    for h, (keys, positions) in enumerate(zip(row.keys, row.positions, strict=True)):
        candidates = np.flatnonzero(positions >= policy.sinks)
        rotated = keys[:, :half] + 1j * keys[:, half:]
        unrotated = rotated * np.exp(-1j * positions[:, None] * frequencies)
        distance = positions.max() + 1 - positions
        head_scores = []
        for head in range(h * len(means) // len(row.keys), (h + 1) * len(means) // len(row.keys)):
            phase = np.angle(means[head] * unrotated.conj())
            amplitude = abs(means[head]) * abs(unrotated)
            total = np.zeros(len(keys))
            for offset in offsets:
                angle = (distance + offset)[:, None] * frequencies + phase
                total += (amplitude * np.cos(angle)).sum(axis=1) / len(offsets)
            total += ((lengths[head].real - abs(means[head])) * abs(unrotated)).sum(axis=1)
            chosen = total[candidates]
            head_scores.append((total - chosen.mean()) / max(chosen.std(), 1e-6) if len(chosen) else total)
        score[h] = np.where(positions < policy.sinks, np.inf, np.max(head_scores, axis=0))
    return score


def protect(policy: Protect, row: Row) -> np.ndarray:
    score = scores(policy.inner, row).copy()
    score[row.positions < policy.sinks] = np.inf
    score[:, max(score.shape[1] - policy.recent, 0) :] = np.inf
    return score


def pyramid(policy: Pyramid, row: Row) -> np.ndarray:
    return scores(policy.inner, row)


FORMULAS: dict[type[EvictionPolicy], Callable[..., np.ndarray]] = {
    Recent: recent,
    StreamingLLM: streaming_llm,
    H2O: h2o,
    TOVA: tova,
    SnapKV: snapkv,
    RKV: rkv,
    KeyDiff: keydiff,
    Knorm: knorm,
    TriAttention: triattention,
    Protect: protect,
    Pyramid: pyramid,
}


def scores(policy: EvictionPolicy, row: Row) -> np.ndarray:
    """Eviction scores of `policy`, `[kv_heads, n]`; higher = keep."""
    return FORMULAS[type(policy)](policy, row)
