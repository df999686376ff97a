"""What the page's script reads, as JSON that nothing can break out of."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from smd_jax.monitor.saved_masks import SavedMask
from smd_jax.monitor.svg_chart import Series
from smd_jax.text.visible_text import visible


def embedded(data: Any) -> str:
    """JSON for inside of `<script type="application/json">`: without any `<`, it holds no tag and no comment."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def chart_data(series: Sequence[Series]) -> list[dict[str, Any]]:
    """Numbers of one chart, for whoever points at it."""
    found = []
    for one in series:
        curve = one.mean
        entry: dict[str, Any] = {"arm": one.index, "x": _short(curve.steps), "y": _short(curve.mean)}
        if curve.low is not None and curve.high is not None:
            entry |= {"low": _short(curve.low), "high": _short(curve.high)}
        found.append(entry)
    return found


def mask_data(mask: SavedMask, title: str) -> dict[str, Any]:
    """One completion: `evicted` holds uint32 numbers, little-endian, in the order layer, head, token."""
    layers, heads, tokens = mask.evicted_at.shape
    return {
        "title": title,
        "prompt": mask.prompt_length,
        "layers": layers,
        "heads": heads,
        "tokens": tokens,
        "pieces": [visible(piece) for piece in mask.pieces],
        "evicted": base64.b64encode(mask.evicted_at.astype("<u4").tobytes()).decode("ascii"),
    }


def _short(values: np.ndarray) -> list[float]:
    return [float(f"{value:.5g}") for value in values]
