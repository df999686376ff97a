"""Reference decoder in float64 NumPy, one query and one head at a time.

Plain RoPE, with or without biases and tied embeddings; no Q/K norm.
"""

from typing import Any

import numpy as np

from smd_jax.config import ModelConfig


def rms_norm(x: np.ndarray, scale: Any, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * np.asarray(scale, np.float64)


def dense(x: np.ndarray, layer: dict[str, Any]) -> np.ndarray:
    out = x @ np.asarray(layer["kernel"], np.float64)
    return out + np.asarray(layer["bias"], np.float64) if "bias" in layer else out


def rotate(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    """RoPE of one vector: rotates entries i and i + half."""
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
            rotated = [[rotate(t, p, config.rope_theta) for t, p in zip(h, positions, strict=True)] for h in part]
            part = np.array(rotated)
        parts.append(part)
    return parts[0], parts[1], parts[2]


def attention(
    q: Any, k: Any, v: Any, mask: Any, softcap: float | None = None, sinks: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """The output `[batch, heads, queries, head_dim]`, and the sum of weights that every key receives
    `[batch, kv_heads, keys]`; zeros where nothing is visible.

    Args:
      mask: `[batch, kv_heads, queries, keys]`.
      softcap: of the scores.
      sinks: scores `[heads]` of keys without a value.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    mask = np.asarray(mask)
    out, received = np.zeros(q.shape), np.zeros(k.shape[:3])
    for row, head, query in np.ndindex(q.shape[:3]):
        shared = row, head // (q.shape[1] // k.shape[1])
        seen = np.flatnonzero(mask[(*shared, query)])
        scores = k[shared][seen] @ q[row, head, query] / np.sqrt(q.shape[3])
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        if sinks is None or not len(seen):
            weights = softmax(scores)
        else:
            weights = softmax(np.append(scores, np.float64(sinks[head])))[:-1]
        out[row, head, query] = weights @ v[shared][seen]
        received[shared][seen] += weights
    return out, received


def logits(params: Any, config: ModelConfig, tokens: np.ndarray, positions: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """`[tokens, vocab]` of one row under `mask [layers, kv_heads, queries, keys]`."""
    x = np.asarray(params["embed"]["embedding"], np.float64)[tokens]
    for index in range(config.num_layers):
        layer = params[f"layers_{index}"]
        q, k, v = (part[None] for part in projections(x, positions, layer, config))
        out = attention(q, k, v, mask[None, index])[0][0]
        x = x + dense(out.transpose(1, 0, 2).reshape(len(x), -1), layer["attention"]["o_proj"])
        normed = rms_norm(x, layer["mlp_norm"]["scale"], config.norm_eps)
        gate = dense(normed, layer["mlp"]["gate_proj"])
        x = x + dense(gate / (1 + np.exp(-gate)) * dense(normed, layer["mlp"]["up_proj"]), layer["mlp"]["down_proj"])
    hidden = rms_norm(x, params["norm"]["scale"], config.norm_eps)
    head = np.asarray(params["embed"]["embedding"]).T if config.tie_embeddings else params["lm_head"]["kernel"]
    return hidden @ np.asarray(head, np.float64)
