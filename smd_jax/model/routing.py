"""Routing of a model with experts: the sampler records it as integers, and the learner replays it exactly.

    sampler    layers ─► wrapped without experts ─► model ─► experts that each token went to       int8 or int16
    learner    layers ─► wrapped with these      ─► model computes only the gates, with a gradient

A token with -1 was not recorded (padding, a response's last token, tokens an engine left out): the learner routes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from smd_jax.model.mixture import routing_dtype
from smd_jax.model.protocol import LayerState, ModelShape, Routed

NOT_RECORDED = -1


def routed_layers(
    shape: ModelShape, layers: Sequence[LayerState], routing: Int[Array, "batch tokens mixtures per_token"] | None
) -> tuple[LayerState, ...]:
    """Wraps the layers' states so that tokens go to these experts; unchanged for None.

    Raises:
      ValueError: the routing is of another number of layers or experts, or the model has no experts.
    """
    if routing is None:
        return tuple(layers)
    if shape.routing is None:
        raise ValueError(f"expected no routing, because the model has no experts; got one of shape {routing.shape}")
    expected = (len(shape.routing.layers), shape.routing.per_token)
    if routing.shape[2:] != expected:
        raise ValueError(
            f"expected routing of {expected[0]} layers with experts and {expected[1]} experts of a token; got "
            f"{routing.shape[2]} and {routing.shape[3]}"
        )
    places = {layer: place for place, layer in enumerate(shape.routing.layers)}
    return tuple(
        Routed(state, routing[:, :, places[layer]] if layer in places else None) for layer, state in enumerate(layers)
    )


def expert_count(shape: ModelShape) -> int | None:
    """Experts of a layer; None of a model without experts."""
    return None if shape.routing is None else shape.routing.count


def check_expert_count(shape: ModelShape, recorded: int | None) -> None:
    """Raises ValueError if routing was recorded with another number of experts. None: not known."""
    if recorded is not None and shape.routing is not None and recorded != shape.routing.count:
        raise ValueError(f"expected routing of a model with {shape.routing.count} experts a layer; got {recorded}")


def recording_layers(shape: ModelShape, layers: Sequence[LayerState]) -> tuple[LayerState, ...]:
    """Wraps the layers' states so that a model with experts returns its routing; unchanged for other models."""
    return tuple(layers) if shape.routing is None else tuple(Routed(state) for state in layers)


def not_recorded(shape: ModelShape, rows: int, tokens: int) -> Int[Array, "rows tokens mixtures per_token"] | None:
    """Routing of unrecorded tokens; None for a model without experts."""
    if shape.routing is None:
        return None
    sides = (rows, tokens, len(shape.routing.layers), shape.routing.per_token)
    return jnp.full(sides, NOT_RECORDED, routing_dtype(shape.routing.count))


def read_routing(
    shape: ModelShape, layers: Sequence[Any]
) -> tuple[tuple[LayerState, ...], Int[Array, "batch tokens mixtures per_token"] | None]:
    """The states and the routing that a model returned for `recording_layers`."""
    if shape.routing is None:
        return tuple(layers), None
    given = [layer.experts for layer in layers if layer.experts is not None]
    # Of a run of layers: [layers, batch, tokens, per_token].
    chosen = [experts[:, :, None] if experts.ndim == 3 else jnp.moveaxis(experts, 0, 2) for experts in given]
    routing = jnp.concatenate(chosen, axis=2).astype(routing_dtype(shape.routing.count))
    return tuple(layer.state for layer in layers), routing


def router_logits(shape: ModelShape, layers: Sequence[Any]) -> Float[Array, "batch tokens mixtures count"]:
    """The returned router logits of every layer with experts.

    Raises:
      ValueError: a layer has returned none.
    """
    assert shape.routing is not None, "the layers have routing"
    found = [layers[layer].logits for layer in shape.routing.layers]
    if any(logits is None for logits in found):
        raise ValueError("expected Routed.logits of every layer with experts, as the model returns; got None")
    return jnp.stack(found, axis=2)
