"""What the page's script reads, as JSON that nothing can break out of."""

from __future__ import annotations

import base64
import json
from typing import Any

from smd_jax.monitor.saved_masks import SavedMask
from smd_jax.text.visible_text import visible


def embedded(data: Any) -> str:
    """JSON for inside of `<script type="application/json">`: without any `<`, it holds no tag and no comment."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


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
