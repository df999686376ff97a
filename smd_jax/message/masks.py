"""Builds, stores and converts attention masks.

Columns number the tokens of a left-padded batch: prompt 0 … P-1, response P … T-1. An evicted key never comes back, so
each key is visible for an interval of queries, and one integer per key describes the mask:

    visible[b, l, h, t, s]  =  (s <= t)  and  (t < evicted_at[b, l, h, s])

Six tokens; key 0 is padding (evicted_at 0), key 2 was evicted after query 3 (evicted_at 4):

              key  0 1 2 3 4 5
    query 0        . . . . . .        a query that sees nothing attends to nothing: its output is zero
    query 1        . 1 . . . .
    query 2        . 1 1 . . .
    query 3        . 1 1 1 . .
    query 4        . 1 . 1 1 .
    query 5        . 1 . 1 1 1
"""

from __future__ import annotations

import dataclasses
from math import prod
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from flax import serialization, struct
from jaxtyping import Array, Bool, Int

from smd_jax.message.quantization import QuantizedReplay
from smd_jax.pytrees import PyTreeNode
from smd_jax.shapes import check_shape
from smd_kernels.blocks import to_int32
from smd_kernels.reference import interval_mask
from smd_kernels.segments import Segments as Segments

NEVER = np.iinfo(np.int32).max  # evicted_at of a key that is still in the cache at the end

EVICTED_AT = ("batch", "layers", "kv_heads", "keys")

_ARRAYS = ("evicted_at", "quantized")  # fields of masks

MaskClass = TypeVar("MaskClass")


def _clip_numpy(mask: KeyInterval | ShadowMask) -> None:
    """Converts the `evicted_at` of a new mask from NumPy integers to int32."""
    # Converted here, because a user's jitted function would convert without clipping and hide keys that stayed.
    if isinstance(mask.evicted_at, np.ndarray) and np.issubdtype(mask.evicted_at.dtype, np.integer):
        object.__setattr__(mask, "evicted_at", to_int32(mask.evicted_at))


def _drops_segments(mask_class: MaskClass) -> MaskClass:
    """Decorates a mask whose `replace(evicted_at=...)` drops `segments` unless it gets them, too: those of the old
    columns would let attention skip visible keys."""
    kind: Any = mask_class
    plain, unknown = kind.replace, kind.segments  # flax gives every class its own `replace`; the field's default

    def replace(self: Any, **changes: Any) -> Any:
        return plain(self, **({"segments": unknown} | changes if "evicted_at" in changes else changes))

    def state_of(mask: Any) -> dict[str, Any]:
        return {name: serialization.to_state_dict(getattr(mask, name)) for name in _ARRAYS}

    def restored(mask: Any, state: dict[str, Any]) -> Any:
        if set(state) != set(_ARRAYS):
            raise ValueError(f"expected a mask's fields {sorted(_ARRAYS)}; got {sorted(state)}")
        parts = {name: serialization.from_state_dict(getattr(mask, name), state[name], name) for name in _ARRAYS}
        return plain(mask, **parts)

    kind.replace = replace
    # flax restores by `replace`, which would drop the segments of the mask that it fills.
    serialization.register_serialization_state(kind, state_of, restored, override=True)
    return mask_class


@_drops_segments
class KeyInterval(PyTreeNode):
    """Visibility of one layer: query t sees key s iff `s <= t < evicted_at[s]`.

    Attributes:
      evicted_at: `[batch, kv_heads, keys]` first column whose query cannot see the key; the first two axes may be 1.
      segments: as in ShadowMask, of this layer; None if unknown. Static.
      quantized: as in ShadowMask, of this layer.
    """

    evicted_at: Int[Array, "batch kv_heads keys"]
    segments: Segments | None = struct.field(pytree_node=False, default=None)
    quantized: QuantizedReplay | None = None

    def __post_init__(self) -> None:
        _clip_numpy(self)

    def to_boolean(self) -> Bool[Array, "batch kv_heads keys keys"]:
        check_whole_columns(self.evicted_at)
        return interval_mask(self.evicted_at)


@_drops_segments
class ShadowMask(PyTreeNode):
    """The keys that each query of a rollout could see, per layer and KV head, as one integer per key.

    Attributes:
      evicted_at: `[batch, layers, kv_heads, keys]` first column whose query cannot see the key: 0 for padding, `NEVER`
        for a key that was never evicted. The layer and head axes may be 1, for a shared mask.
      segments: per layer, or one for all layers: where the sampler compressed its cache, and to how many keys. It lets
        the learner's attention skip keys. Static. `with_segments` checks it, the constructor does not.
        `replace(evicted_at=...)` drops it unless it is given, too.
      quantized: description of the quantised cache, whose keys later segments see quantised; None: full precision.
    """

    evicted_at: Int[Array, "batch layers kv_heads keys"]
    segments: tuple[Segments, ...] = struct.field(pytree_node=False, default=())
    quantized: QuantizedReplay | None = None

    def __post_init__(self) -> None:
        _clip_numpy(self)

    def layer(self, index: int) -> KeyInterval:
        """The mask of one layer.

        Raises:
          TypeError: evicted_at of booleans or floats.
          ValueError: a layer that the mask does not have; a mask that all layers share has every layer.
        """
        check_shape("evicted_at", self.evicted_at, EVICTED_AT)
        check_whole_columns(self.evicted_at)
        _check_layer(index, max(self.evicted_at.shape[1], len(self.segments)))
        # A single entry is shared by all layers.
        segments = self.segments[min(index, len(self.segments) - 1)] if self.segments else None
        quantized = None if self.quantized is None else self.quantized.layer(index)
        return KeyInterval(self.evicted_at[:, min(index, self.evicted_at.shape[1] - 1)], segments, quantized)

    def first_columns(self, columns: int) -> ShadowMask:
        """The mask of the first `columns` columns."""
        quantized = None if self.quantized is None else self.quantized.first_columns(columns)
        evicted_at = self.evicted_at[..., :columns]
        return self.replace(evicted_at=evicted_at, segments=self.segments, quantized=quantized)

    def with_segments(self, segments: tuple[Segments, ...]) -> ShadowMask:
        """The same mask with these segments, after a check of its values; cannot run under jit.

        Raises:
          TypeError: for anything but a tuple of Segments.
          ValueError: if more keys than the budget are visible at a boundary, or the number of segments is neither one
            nor the number of layers.
        """
        if not isinstance(segments, tuple) or not all(isinstance(each, Segments) for each in segments):
            raise TypeError(f"expected a tuple of Segments, one for all layers or one for each; got {segments!r}")
        layers = self.evicted_at.shape[1]
        if len(segments) not in (1, layers):
            raise ValueError(f"expected segments of 1 or {layers} layers; got {len(segments)}")
        if self.quantized is not None:
            self.quantized.check_segments(segments)
        evicted_at = np.asarray(self.evicted_at)
        for layer in range(max(layers, len(segments))):
            keys, given = evicted_at[:, min(layer, layers - 1)], segments[min(layer, len(segments) - 1)]
            columns, visible = _visible_at_boundaries(keys, given)
            for at, batch, head in np.argwhere(visible > given.budget)[:1]:
                raise ValueError(
                    f"expected at most {given.budget} earlier keys visible at column {columns[at]} for {given}; got "
                    f"{visible[at, batch, head]} (batch {batch}, layer {layer}, kv head {head})"
                )
        return self.replace(segments=segments)

    def to_boolean(self) -> Bool[Array, "batch layers kv_heads keys keys"]:
        """The explicit mask, `[batch, layers, kv_heads, queries, keys]`: T² bytes per layer and head."""
        check_shape("evicted_at", self.evicted_at, EVICTED_AT)
        batch, layers, kv_heads, keys = self.evicted_at.shape
        flat = KeyInterval(self.evicted_at.reshape(batch * layers, kv_heads, keys)).to_boolean()
        return flat.reshape(batch, layers, kv_heads, keys, keys)

    @classmethod
    def from_boolean(cls, mask: Bool[Array, "batch layers kv_heads queries keys"]) -> ShadowMask:
        """Converts an explicit boolean mask; reads its values, so it cannot run under jit.

        Raises:
          TypeError: for numbers instead of booleans.
          ValueError: if a query sees a later key, or an evicted key comes back. Such a mask has no interval form and
            must stay boolean.
        """
        visible = np.asarray(mask)
        check_shape("mask", visible, ("batch", "layers", "kv_heads", "queries", "keys"))
        check_booleans(visible)
        queries, keys = visible.shape[-2:]
        if queries != keys:
            raise ValueError(f"expected as many queries as keys; got {queries} queries and {keys} keys")
        # Without gaps, the key's column plus the number of queries that see it is the first that does not.
        evicted_at = np.where(visible.any(-2), np.arange(keys) + visible.sum(-2), 0)
        evicted_at = np.where(evicted_at >= queries, NEVER, evicted_at).astype(np.int32)
        query = np.arange(queries)[:, None]
        rebuilt = (np.arange(keys) <= query) & (query < evicted_at[..., None, :])
        for batch, layer, head, at, key in np.argwhere(visible != rebuilt)[:1]:
            where = f"batch {batch}, layer {layer}, kv head {head}, key {key}"
            if key > at:
                raise ValueError(f"expected a causal mask; got query {at} seeing the later key ({where})")
            raise ValueError(
                "expected every key to be visible from its own query on without a gap, because an evicted key never "
                f"comes back; got queries {_runs(np.flatnonzero(visible[batch, layer, head, :, key]))} seeing it "
                f"({where}). Keep such a mask in its boolean form."
            )
        return cls(jnp.asarray(evicted_at))


Mask = ShadowMask | Bool[Array, "#batch #layers #kv_heads queries keys"]
LayerMask = KeyInterval | Bool[Array, "#batch #kv_heads queries keys"]


def _runs(indices: np.ndarray) -> str:
    """`[3, 4, 5, 9]` -> `3-5, 9`."""
    runs = np.split(indices, np.flatnonzero(np.diff(indices) > 1) + 1)
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs)


def _visible_at_boundaries(
    evicted_at: Int[np.ndarray, "batch kv_heads keys"], segments: Segments
) -> tuple[Int[np.ndarray, " boundaries"], Int[np.ndarray, "boundaries batch kv_heads"]]:
    """The first column of each segment, and the earlier keys that its query sees: those with `evicted_at` after it."""
    batch, heads, keys = evicted_at.shape
    columns = np.arange(segments.first, keys, segments.length)
    gone = np.maximum(evicted_at, np.arange(1, keys + 1))  # a key counts from the column after its own
    # The number of the first boundary that does not see the key: counted, not compared with every boundary.
    number = np.clip(-(-(gone - segments.first) // segments.length), 0, len(columns)).reshape(batch * heads, keys)
    number += (len(columns) + 1) * np.arange(batch * heads)[:, None]
    counts = np.bincount(number.ravel(), minlength=batch * heads * (len(columns) + 1))
    left = counts.reshape(batch, heads, -1)[..., :-1].cumsum(-1)
    return columns, np.moveaxis(columns - left, -1, 0)


def dense_mask(valid: Bool[Array, "batch keys"]) -> ShadowMask:
    """The mask without eviction: causal, padding invisible; shared by all layers and heads.

    Raises:
      TypeError: unless `valid` is an array, and for floating-point numbers, such as Hugging Face's 0 and -1e9.
      ValueError: for an array of another rank.
    """
    check_shape("valid", valid, ("batch", "keys"))
    if jnp.issubdtype(valid.dtype, jnp.floating):
        check_booleans(valid)
    return ShadowMask(jnp.where(valid, NEVER, 0).astype(jnp.int32)[:, None, None, :])


def record_evictions(
    evicted_at: Int[Array, "batch *layers kv_heads columns"],
    dropped: Int[Array, "batch *layers kv_heads slots"],
    now: Int[Array, "#batch 1 #slots"],
) -> Int[Array, "batch *layers kv_heads columns"]:
    """Records in the shadow mask of one layer or of several that the keys of the columns `dropped` are invisible from
    column `now` on; negative columns are ignored."""

    def heads_together(x: Array) -> Array:
        return x.reshape(x.shape[0], prod(x.shape[1:-1]), x.shape[-1])

    outside = evicted_at.shape[-1]  # where scattered numbers are dropped
    target = heads_together(jnp.where(dropped < 0, outside, dropped))
    batch, heads, _ = target.shape
    rows, heads = jnp.arange(batch)[:, None, None], jnp.arange(heads)[None, :, None]
    found = heads_together(evicted_at).at[rows, heads, target]
    return found.set(jnp.broadcast_to(now, target.shape), mode="drop").reshape(evicted_at.shape)


def layer_mask(mask: Mask, index: int) -> LayerMask:
    """The mask of one layer, still broadcastable over batch and KV heads."""
    if isinstance(mask, ShadowMask):
        return mask.layer(index)
    _check_layer(index, mask.shape[1])
    return mask[:, min(index, mask.shape[1] - 1)]


def _check_layer(index: int, layers: int) -> None:
    if not -layers <= index < layers and layers > 1:
        raise ValueError(f"expected a layer from {-layers} to {layers - 1}; got {index}")


def windowed(mask: LayerMask, window: int | None) -> LayerMask:
    """Restricts a layer's mask to a sliding window: each query sees only the `window` newest columns, including its
    own. None: no window.

    A sliding window is an eviction known in advance, `evicted_at <= s + window`, so all implementations of attention
    support it. Applying a window twice has no effect.

    Raises:
      ValueError: for a window below 1.
    """
    if window is None:
        return mask
    if window < 1:
        raise ValueError(f"expected a window >= 1, because a query always sees its own key; got {window}")
    columns = mask.evicted_at.shape[-1] if isinstance(mask, KeyInterval) else max(mask.shape[-2:])
    # A wider window hides nothing either, and adding it to a column could exceed int32.
    window = min(window, max(columns, 1))
    key = jnp.arange(mask.evicted_at.shape[-1] if isinstance(mask, KeyInterval) else mask.shape[-1], dtype=jnp.int32)
    if not isinstance(mask, KeyInterval):
        query = jnp.arange(mask.shape[-2], dtype=jnp.int32)
        return mask & (query[None, None, :, None] < key[None, None, None] + window)
    # Padding stays 0. At a boundary a window shows fewer than `window` earlier keys, so budgets may shrink.
    segments = mask.segments
    if segments is not None:
        segments = dataclasses.replace(segments, budget=min(segments.budget, window))
    # A window without segments defines segments, except for a quantised cache, which already has some.
    elif mask.quantized is None:
        segments = Segments(first=window, length=window, budget=window)
    evicted_at = jnp.minimum(to_int32(mask.evicted_at), key[None, None] + window)
    return mask.replace(evicted_at=evicted_at, segments=segments)


def to_visible(mask: LayerMask) -> Bool[Array, "#batch #kv_heads queries keys"]:
    """One layer's mask as booleans."""
    return mask.to_boolean() if isinstance(mask, KeyInterval) else mask


def head_mask(mask: Mask, layer: int, num_heads: int) -> Bool[Array, "#batch heads queries keys"]:
    """One layer's mask in the layout of other libraries' attention: one boolean per query head, query and key.

    `jax.nn.dot_product_attention` and `flax.nnx.MultiHeadAttention` take it directly; `equinox.nn.MultiheadAttention`
    takes it under a `jax.vmap` over the batch. It holds `queries * keys` booleans per head; `attend` needs none. For a
    query that sees no key, such as padding, these functions return the mean of all values or NaN; `attend` returns 0.
    The mask of a rollout here has the layer's sliding window; that of `Trajectory.from_records` lacks it.

    Raises:
      ValueError: num_heads is not a multiple of the mask's KV heads; the mask of a quantised cache.
    """
    chosen = layer_mask(mask, layer)
    check_full_precision(chosen)
    visible = to_visible(chosen)
    kv_heads = visible.shape[1]
    if num_heads % kv_heads:
        raise ValueError(f"expected num_heads to be a multiple of the mask's {kv_heads} KV heads; got {num_heads}")
    return jnp.repeat(visible, num_heads // kv_heads, axis=1)


def check_full_precision(mask: LayerMask) -> None:
    """Raises ValueError for the mask of a quantised cache, because booleans and columns cannot describe rounding."""
    if isinstance(mask, KeyInterval) and mask.quantized is not None:
        raise ValueError(
            "expected the mask of a cache in full precision, because other attention reads no quantised keys; got one "
            "with them. `smd.attend` reads them; mask.replace(quantized=None) leaves them out, for an inexact replay"
        )


def check_booleans(mask: Array | np.ndarray) -> None:
    """Raises TypeError for a mask of numbers: Hugging Face adds 0 or -1e9 to the scores, which as booleans would be the
    opposite."""
    if mask.dtype != np.bool_:
        raise TypeError(f"expected a mask of booleans, true where a query sees a key; got {mask.dtype}")


def check_whole_columns(evicted_at: Array | np.ndarray) -> None:
    """Raises TypeError unless a mask's `evicted_at` has integers. Not in the constructor, because `jax.tree.map` makes
    masks of anything."""
    if not jnp.issubdtype(evicted_at.dtype, jnp.integer):
        raise TypeError(
            f"expected evicted_at as integers, the first query that cannot see each key; got {evicted_at.dtype}. "
            "Booleans: ShadowMask.from_boolean"
        )


def check_mask(mask: Mask, *, batch: int, layers: int, kv_heads: int, columns: int) -> None:
    """Checks a mask of all layers.

    Raises:
      TypeError: for numbers instead of booleans, or an evicted_at without integers.
      ValueError: unless `mask` broadcasts to `[batch, layers, kv_heads, columns, columns]`.
    """
    sizes = (batch, layers, kv_heads, columns)
    if isinstance(mask, ShadowMask):
        check_whole_columns(mask.evicted_at)
        shape, expected = mask.evicted_at.shape, sizes
    else:
        check_booleans(mask)
        shape, expected = mask.shape, (*sizes, columns)
    fits = len(shape) == len(expected) and all(got in (1, want) for got, want in zip(shape, expected, strict=True))
    if not fits or shape[3:] != expected[3:]:
        raise ValueError(
            f"expected a mask that broadcasts to {expected} (batch, layers, kv heads, columns); got {tuple(shape)}"
        )
    if isinstance(mask, ShadowMask) and mask.quantized is not None:
        shape = mask.quantized.parity.keys.shape[:4]
        if shape != sizes:
            raise ValueError(f"expected parities {sizes} (batch, layers, kv heads, columns); got {tuple(shape)}")


def positions(valid: Bool[Array, "batch columns"]) -> Int[Array, "batch columns"]:
    """Position of each token in its own sequence: 0 for the first valid column of a row and for padding before it."""
    # argmax of booleans returns the first true index.
    start = jnp.argmax(valid, axis=-1, keepdims=True)
    column = jnp.arange(valid.shape[-1], dtype=jnp.int32)[None]
    return jnp.maximum(column - start.astype(jnp.int32), 0)
