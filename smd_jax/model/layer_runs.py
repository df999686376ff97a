"""Runs of equal layers in one loop, so that compile time and program size do not grow with the depth of a model.

    layers_0 … layers_29   ─ stack ─►   layers_0_to_29 [30, …]      x, states[i] = layer(weights[i], x) for i in 0 … 29

`smd_jax.model.stacked_params` has the two forms of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from smd_jax.model.protocol import AtLayer, LayerRun, LayerState, Routed
from smd_jax.pytrees import stack

LEAST = 4  # layers of a loop; a shorter run compiles fast enough one by one

# Static and hashable: a layer's variables, the encoded positions of all layers, its input and its state ─► its
# output and new state.
OneLayer = Callable[[Any, Any, Array, LayerState], tuple[Array, LayerState]]


@partial(jax.jit, static_argnums=0, inline=True)
def run_layers(
    layer: OneLayer, weights: Any, shared: Any, x: Float[Array, "batch tokens hidden"], states: Any
) -> tuple[Float[Array, "batch tokens hidden"], Any]:
    """Loops over layers with a state each.

    Args:
      weights, states: pytrees of arrays with one entry per layer on their first axis.

    Returns:
      The last output, and the new states, stacked alike.
    """

    def step(x: Array, inputs: tuple[Any, Any]) -> tuple[Array, Any]:
        return layer(inputs[0], shared, x, inputs[1])

    return jax.lax.scan(step, x, (weights, states))


@partial(jax.jit, static_argnums=0, inline=True)
def carry_layers(
    layer: OneLayer, weights: Any, shared: Any, x: Float[Array, "batch tokens hidden"], run: Any
) -> tuple[Float[Array, "batch tokens hidden"], Any]:
    """Loops over layers that share one state, which is updated in place.

    Args:
      weights: with one entry per layer on the first axis. Or a list of one entry per layer, if their structures differ;
        there is no loop then.
      run: a LayerRun, or Routed around one.

    Returns:
      The last output and the new state of the run. Routing has one entry per layer on the first axis.
    """
    routed = isinstance(run, Routed)
    given = run.state if routed else run

    def step(carry: tuple[Array, Any], inputs: tuple[Any, Int[Array, ""] | int]) -> tuple[tuple[Array, Any], Any]:
        x, state = carry
        here = AtLayer(state, inputs[1])
        x, new = layer(inputs[0], shared, x, Routed(here) if routed else here)
        return ((x, new.state), (new.experts, new.logits)) if routed else ((x, new), None)

    carry = (x, given.state)
    if isinstance(weights, list):
        routings = []
        for index, own in enumerate(weights):
            carry, routing = step(carry, (own, index))
            routings.append(routing)
        routing = stack(routings)
    else:
        carry, routing = jax.lax.scan(step, carry, (weights, jnp.arange(given.layers, dtype=jnp.int32)))
    x, state = carry
    new = LayerRun(state, given.layers)
    return x, Routed(new, *routing) if routed else new


def run_of(state: LayerState) -> LayerRun | None:
    """The run with this state; None for a single layer."""
    state = state.state if isinstance(state, Routed) else state
    return state if isinstance(state, LayerRun) else None


def state_kind(state: LayerState, index: int) -> Any:
    """Equal for layers whose states can be stacked. Boolean masks cannot, because all layers may share one."""
    shared = any(jnp.ndim(x) == 4 and x.dtype == jnp.bool_ for x in jax.tree.leaves(state))
    return index if shared else structure(state)


def equal_runs(kinds: Sequence[Any], *, first: int = 0) -> Iterator[range]:
    """Splits layers into runs of at least `LEAST` equal consecutive ones, and single ones.

    Args:
      kinds: of the layers from `first` on.
    """
    for _, equal in groupby(kinds):
        layers = range(first, first + len(list(equal)))
        yield from [layers] if len(layers) >= LEAST else (range(layer, layer + 1) for layer in layers)
        first = layers.stop


def structure(tree: Any) -> Any:
    """Structure, shapes and dtypes, which pytrees must share to be stacked."""
    return jax.tree.structure(tree), tuple((jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(tree))


def run_name(layers: range) -> str:
    """The key of a stacked run in the parameters."""
    return f"layers_{layers.start}_to_{layers.stop - 1}"


def layers_in_name(name: str) -> range | None:
    """The inverse of `run_name`; None for other keys."""
    parts = name.split("_")
    if len(parts) != 4 or parts[0] != "layers" or parts[2] != "to":
        return None
    return range(int(parts[1]), int(parts[3]) + 1)
