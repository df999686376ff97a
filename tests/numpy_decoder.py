"""The decoder once more, in plain numpy and float64, one query and one head at a time: what the model is held against.

Plain RoPE, with or without biases and tied embeddings; no Q/K norm.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from smd_jax.config import ModelConfig


def rms_norm(x: np.ndarray, scale: Any, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * np.asarray(scale, np.float64)


def dense(x: np.ndarray, layer: dict[str, Any]) -> np.ndarray:
    out = x @ np.asarray(layer["kernel"], np.float64)
    return out + np.asarray(layer["bias"], np.float64) if "bias" in layer else out


def rotate(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    """RoPE of one vector: entry i turns with entry i + half."""
    half = len(x) // 2
    out = np.empty_like(x)
    for i in range(half):
        angle = position * theta ** (-i / half)
        out[i] = x[i] * np.cos(angle) - x[i + half] * np.sin(angle)
        out[i + half] = x[i + half] * np.cos(angle) + x[i] * np.sin(angle)
    return out


def softmax(scores: np.ndarray) -> np.ndarray:
    """Over a vector; empty gives empty."""
    weights = np.exp(scores - scores.max()) if len(scores) else scores
    return weights / weights.sum() if len(scores) else weights


def projections(
    x: np.ndarray, positions: np.ndarray, layer: dict[str, Any], config: ModelConfig
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q `[heads, tokens, head_dim]`, k and v `[kv_heads, tokens, head_dim]` of one row, q and k after RoPE."""
    normed = rms_norm(x, layer["attention_norm"]["scale"], config.norm_eps)
    parts = []
    for name in ("q_proj", "k_proj", "v_proj"):
        part = dense(normed, layer["attention"][name]).reshape(len(x), -1, config.head_dim).transpose(1, 0, 2)
        if name != "v_proj":
            turned = [[rotate(t, p, config.rope_theta) for t, p in zip(h, positions, strict=True)] for h in part]
            part = np.array(turned)
        parts.append(part)
    return parts[0], parts[1], parts[2]


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """`[heads, tokens, head_dim]` of one row under `mask [kv_heads, queries, keys]`; zeros where nothing is visible."""
    group = len(q) // len(k)
    out = np.zeros_like(q)
    for head in range(len(q)):
        shared = head // group
        for query in range(q.shape[1]):
            seen = np.flatnonzero(mask[shared, query])
            weights = softmax(k[shared, seen] @ q[head, query] / np.sqrt(q.shape[-1]))
            out[head, query] = weights @ v[shared, seen]
    return out


def logits(params: Any, config: ModelConfig, tokens: np.ndarray, positions: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """`[tokens, vocab]` of one row under `mask [layers, kv_heads, queries, keys]`."""
    x = np.asarray(params["embed"]["embedding"], np.float64)[tokens]
    for index in range(config.num_layers):
        layer = params[f"layers_{index}"]
        out = attention(*projections(x, positions, layer, config), mask[index])
        x = x + dense(out.transpose(1, 0, 2).reshape(len(x), -1), layer["attention"]["o_proj"])
        normed = rms_norm(x, layer["mlp_norm"]["scale"], config.norm_eps)
        gate = dense(normed, layer["mlp"]["gate_proj"])
        x = x + dense(gate / (1 + np.exp(-gate)) * dense(normed, layer["mlp"]["up_proj"]), layer["mlp"]["down_proj"])
    hidden = rms_norm(x, params["norm"]["scale"], config.norm_eps)
    head = np.asarray(params["embed"]["embedding"]).T if config.tie_embeddings else params["lm_head"]["kernel"]
    return hidden @ np.asarray(head, np.float64)
