"""`KeyInterval` to tokamax's attention `Mask`, and back. Needs tokamax (Python 3.12 or later).

`q_end` of tokamax is `evicted_at`: the first query that does not see a key.

    mask = to_tokamax(trajectory.mask.layer(0), num_heads)
    mask.as_array(queries, keys)      # [batch, heads, queries, keys]

Written against tokamax 0.0.17, whose `Mask` is in `tokamax._src.ops.attention.base`. Its implementations turn a mask
per head into booleans; none keeps one integer per key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from smd_jax.message.masks import NEVER, KeyInterval, check_full_precision
from smd_kernels.blocks import to_int32

if TYPE_CHECKING:
    from tokamax._src.ops.attention.base import Mask


def to_tokamax(interval: KeyInterval, num_heads: int) -> Mask:
    """The mask of one layer: causal, with `q_end` int32 `[batch, num_heads, keys]` (or 1 for a shared batch axis).

    A model's own sliding window is not in the mask of `Trajectory.from_records`.

    Raises:
      TypeError: a mask of all layers.
      ValueError: num_heads is no multiple of the interval's KV heads; the mask of a quantised cache.
    """
    from tokamax._src.ops.attention.base import Mask

    if not isinstance(interval, KeyInterval):
        raise TypeError(f"expected the mask of one layer, mask.layer(index); got {type(interval).__name__}")
    check_full_precision(interval)
    kv_heads = interval.evicted_at.shape[1]
    if num_heads % kv_heads:
        raise ValueError(f"expected num_heads to be a multiple of {kv_heads} KV heads; got {num_heads}")
    return Mask(q_end=jnp.repeat(to_int32(interval.evicted_at), num_heads // kv_heads, axis=1), is_causal=True)


def from_tokamax(mask: Mask, keys: int) -> KeyInterval:
    """The interval of a causal mask with `q_end` or a sliding window, one for every head that the mask has.

    Args:
      keys: of the sequence.

    Raises:
      ValueError: a mask that is no interval per key: with booleans, `q_start`, `k_start` or `k_end`, or not causal.
    """
    others = ("bool_mask", "q_start", "k_start", "k_end")
    found = [name for name in others if getattr(mask, name) is not None]
    if found:
        raise ValueError(f"expected a causal mask with q_end or a window only; got {', '.join(found)}")
    causal = mask.causal_mask
    if causal is None or not isinstance(causal.offset, int) or causal.offset != 0:
        raise ValueError(f"expected a causal mask with offset 0; got {causal}")
    evicted_at = jnp.full((1, 1, keys), NEVER, jnp.int32) if mask.q_end is None else mask.q_end
    if evicted_at.ndim != 3 or evicted_at.shape[-1] not in (1, keys):
        raise ValueError(f"expected q_end of the shape [batch, heads, {keys}]; got {evicted_at.shape}")
    evicted_at = jnp.broadcast_to(to_int32(evicted_at), (*evicted_at.shape[:2], keys))
    if causal.window_size is not None:
        evicted_at = jnp.minimum(
            evicted_at, jnp.arange(keys, dtype=jnp.int32)[None, None] + min(causal.window_size, keys)
        )
    return KeyInterval(evicted_at)
