"""Parameters for the sampler, converted once instead of at every token."""

from __future__ import annotations

from functools import partial

import jax

from smd_jax.devices.sharding import constrain_tree, gathered_tree
from smd_jax.model.lora import check_reads_lora
from smd_jax.model.protocol import LanguageModel, Params


def sampler_params(model: LanguageModel, params: Params) -> Params:
    """`model.compute_params`, with barriers that keep the conversion outside a decode loop.

    Raises:
      TypeError: as `check_reads_lora`.
    """
    check_reads_lora(model, params)
    # A leaf that is the same object was not converted, and needs no barrier.
    given = {id(leaf) for leaf in jax.tree.leaves(params)}

    def converted_here(leaf: jax.Array) -> jax.Array:
        # The compiler must not move the conversion into the decode loop.
        return leaf if id(leaf) in given else jax.lax.optimization_barrier(leaf)

    return jax.tree.map(converted_here, model.compute_params(params))


@partial(jax.jit, static_argnames="model")
def converted(model: LanguageModel, params: Params) -> Params:
    """Converts the parameters in a separate program, for a sampler in another program; keeps their sharding."""
    return constrain_tree(sampler_params(model, params))


@partial(jax.jit, static_argnames="model")
def gathered_params(model: LanguageModel, params: Params) -> Params:
    """`sampler_params`, gathered here and not in every step of a segment."""
    return gathered_tree(sampler_params(model, params))
