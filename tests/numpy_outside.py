"""Forward pass of outside_model.py in float64 NumPy under an explicit mask, written from its description.

Loops over queries and heads, so that it shares no attention layout with the library.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.outside_model import OutsideModel


def outside_logits(model: OutsideModel, params: Any, tokens: np.ndarray, positions: np.ndarray, mask: np.ndarray):
    """Logits `[tokens, vocab]` of one row; `mask` `[layers, kv_heads, queries, keys]`, windows not yet applied."""
    hidden = params["table"][tokens] * np.sqrt(model.hidden_size)
    for index, window in enumerate(model.windows):
        p = params["blocks"][f"block{index}"]
        hidden = hidden + _norm(
            _attention(model, p, _norm(hidden, p["before"][0]), positions, mask[index], window), p["after"][0]
        )
        y = _norm(hidden, p["before"][1])
        mlp = (_gelu(y @ p["geglu"][0]) * (y @ p["geglu"][1])) @ p["out"]
        hidden = hidden + _norm(mlp, p["after"][1])
    return model.cap * np.tanh(_norm(hidden, params["last"]) @ params["table"].T / model.cap)


def _attention(model: OutsideModel, p: Any, y: np.ndarray, positions: np.ndarray, mask: np.ndarray, window: int | None):
    size, group = model.head_dim, model.heads // model.kv_heads
    out = np.zeros((len(y), model.heads * size))
    for head in range(model.heads):
        own, shared = slice(head * size, (head + 1) * size), slice(head // group * size, (head // group + 1) * size)
        q = _rotate(_norm(y @ p["wq"][:, own], p["norm_q"]), positions)
        k = _rotate(_norm(y @ p["wkv"][0][:, shared], p["norm_k"]), positions)
        v = y @ p["wkv"][1][:, shared]
        for t in range(len(y)):
            seen = [s for s in range(len(y)) if mask[head // group, t, s] and (window is None or t - s < window)]
            if seen:
                weights = np.exp(model.query_scale * (k[seen] @ q[t]))
                out[t, own] = weights @ v[seen] / weights.sum()
    return out @ p["wo"]


def _norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + scale)


def _gelu(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _rotate(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Channels 2i and 2i + 1 of the first half as a complex number, rotated by the position's angle."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10_000.0 ** (-np.arange(half // 2) / (half // 2))
    rotated = (x[:, 0:half:2] + 1j * x[:, 1:half:2]) * np.exp(1j * angles)
    return np.concatenate([np.stack([rotated.real, rotated.imag], -1).reshape(len(x), half), x[:, half:]], -1)
