"""Parameters as the sampler reads them: converted once, not at every token."""

from __future__ import annotations

from functools import partial

import jax

from smd_jax.devices.sharding import constrain_tree
from smd_jax.model.protocol import LanguageModel, Params


def sampler_params(model: LanguageModel, params: Params) -> Params:
    """`model.compute_params`, such that a program with a decode loop converts them before the loop.

    Args:
      params: of the model.
    """
    # A leaf that is the same object was not converted, and needs no barrier.
    given = {id(leaf) for leaf in jax.tree.leaves(params)}

    def converted_here(leaf: jax.Array) -> jax.Array:
        # In one program with the decode loop, the compiler must not move a conversion to where the matrix is read.
        return leaf if id(leaf) in given else jax.lax.optimization_barrier(leaf)

    return jax.tree.map(converted_here, model.compute_params(params))


@partial(jax.jit, static_argnames="model")
def converted(model: LanguageModel, params: Params) -> Params:
    """The parameters in a program of their own, for a sampler that lies elsewhere; each where its original is."""
    return constrain_tree(sampler_params(model, params))
