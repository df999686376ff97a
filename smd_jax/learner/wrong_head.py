"""Finds the layer and KV head whose recorded mask is most likely wrong.

Replays one row with the masks of common bugs, each in one head, and takes the mask that comes closest to the sampler.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from smd_jax.devices.processes import on_host
from smd_jax.learner.forward import replay
from smd_jax.learner.mismatch_guard import Difference
from smd_jax.message.masks import NEVER
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import LanguageModel, Params

# Masks that are replayed together. All masks would take gigabytes with a large model and a long sequence.
AT_ONCE = 16


class HeadMask(NamedTuple):
    """The recorded masks with that of one head changed; `evicted_at [layers, kv_heads, T]`."""

    layer: int
    head: int
    change: str
    evicted_at: np.ndarray


def find_wrong_head(model: LanguageModel, params: Params, trajectory: Trajectory, difference: Difference) -> str:
    """`likeliest layer 1, KV head 0: 2e-07 nats are left where it evicts a query earlier`, or why no head is named.

    All processes must call it and get the same result: every host receives the row of `difference`.

    Args:
      params: the parameters that sampled the trajectory.
    """
    one = jax.tree.map(lambda x: on_host(x[difference.row : difference.row + 1]), trajectory)
    shape = model.shape
    sides = (1, shape.num_layers, shape.num_kv_heads, one.tokens.shape[1])
    candidates = list(_masks_of_common_bugs(np.broadcast_to(one.mask.evicted_at, sides)[0]))
    logprobs = list[float]()
    for start in range(0, len(candidates), AT_ONCE):
        masks = [candidate.evicted_at for candidate in candidates[start : start + AT_ONCE]]
        # The last ones are padded, so that one program is compiled.
        filled = np.stack(masks + masks[-1:] * (AT_ONCE - len(masks)))
        # Parameters may be on devices of several processes; host arrays go to all of them.
        logprobs += on_host(_logprobs_under(model, params, one, filled, difference.column))[: len(masks)].tolist()
    left = np.abs(np.array(logprobs) - float(one.logprobs[0, difference.column]))
    best = int(np.nanargmin(left))
    # It must explain more than half: another bug may be compensated by chance.
    if left[best] > abs(difference.nats) / 2:
        return "no mask of a single head explains it: other parameters, or another attention"
    layer, head, change, _ = candidates[best]
    return f"likeliest layer {layer}, KV head {head}: {left[best]:.3g} nats are left where it {change}"


def _masks_of_common_bugs(recorded: Int[np.ndarray, "layers kv_heads T"]) -> Iterator[HeadMask]:
    layers, heads, _ = recorded.shape
    for layer, head in np.ndindex(layers, heads):
        own = recorded[layer, head]
        evicted = (own > 0) & (own < NEVER)
        changes = {
            "sees every key": np.where(own > 0, NEVER, 0),
            "evicts a query later": own + evicted,
            "evicts a query earlier": own - evicted,
        }
        if heads > 1:
            changes["sees what the next head does"] = recorded[layer, (head + 1) % heads]
        if layers > 1:
            changes["sees what its head of the next layer does"] = recorded[(layer + 1) % layers, head]
        for change, mask in changes.items():
            whole = recorded.copy()
            whole[layer, head] = mask
            yield HeadMask(layer, head, change, whole)


@partial(jax.jit, static_argnums=0)
def _logprobs_under(
    model: LanguageModel,
    params: Params,
    one: Trajectory,
    evicted_at: Int[Array, "masks layers kv_heads T"],
    column: Int[Array, ""] | int,
) -> Float[Array, " masks"]:
    """log p of one row's token at a response column, under each of the masks."""
    rows = jax.tree.map(lambda x: jnp.repeat(x, len(evicted_at), axis=0), one)
    # Changed masks do not respect the segments.
    return replay(model, params, rows, rows.mask.replace(evicted_at=evicted_at, segments=())).logprobs[:, column]
