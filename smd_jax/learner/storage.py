"""Parameters stored in 16 bits, without a float32 copy.

Bytes per parameter, with AdamW (8; 6 with a bfloat16 momentum) and without a reference:

    parameters                 stored   copy in bfloat16   gradient   AdamW   in all
    float32, computed in it    4        -                  4          8       16
    float32 masters            4        2                  4          8       18      compute dtype bfloat16
    bfloat16 alone             2        -                  2 (4)      8       12 (14) 4 where microbatches are summed

bfloat16 has 8 significant bits: rounded to nearest, a number changes only if it moves by at least 1/512 of itself. RL's
learning rates move it less (1e-6 is 1/20000 of a weight of 0.02), so the policy would never change. Therefore the
float32 result of a step is rounded stochastically: up with the probability of the part that is cut off. The mean is
exact and small steps add up. The price is noise: a weight that small steps have moved by d has a standard deviation of
sqrt(d * gap), with the gap to its neighbour.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from smd_jax.model.protocol import Params

# What a train state's key is folded with before the step: rollouts fold in their number, which never gets here.
PARAMS = np.uint32(2**32 - 1)
REFERENCE = np.uint32(2**32 - 2)


def stored(params: Params, dtype: DTypeLike) -> Params:
    """The matrices of the parameters in another dtype. Vectors (norms and biases) keep theirs: they are few."""
    return jax.tree.map(lambda x: x.astype(dtype) if x.ndim > 1 else x, params)


def widened(tree: Any) -> Any:
    """Floats of 16 bits as float32; everything else stays."""

    def wide(x: Array) -> Array:
        return x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x

    return jax.tree.map(wide, tree)


def rounded(wide: Any, like: Any, key: Key[Array, ""], step: Int[Array, ""], what: np.uint32) -> Any:
    """The leaves of `wide` in the dtypes of `like`: bfloat16 stochastically, everything else to nearest.

    Args:
      key: of the train state. step: by which the random numbers differ, so that a restored run draws the same ones.
      what: PARAMS or REFERENCE, whose random numbers differ.
    """
    leaves, structure = jax.tree.flatten(like)
    of_step = jax.random.fold_in(jax.random.fold_in(key, what), step)
    new = [
        stochastic_round(x, jax.random.fold_in(of_step, i)) if old.dtype == jnp.bfloat16 else x.astype(old.dtype)
        for i, (x, old) in enumerate(zip(structure.flatten_up_to(wide), leaves, strict=True))
    ]
    return structure.unflatten(new)


def stochastic_round(x: Float[Array, "*shape"], key: Key[Array, ""]) -> Float[Array, "*shape"]:
    """float32 to one of its two neighbours in bfloat16, with the probabilities that make the mean `x`; the key is
    consumed. What bfloat16 can hold stays as it is, infinities and NaN too."""
    # bfloat16 is the upper half of a float32. A random number of 16 bits, added to the lower half, carries into the
    # upper half with the probability of the lower half. The sign is a separate bit: a carry is always away from 0.
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    carried = bits + jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    neighbour = jax.lax.bitcast_convert_type((carried >> 16).astype(jnp.uint16), jnp.bfloat16)
    # The carry could turn a NaN into a number.
    return jnp.where(jnp.isfinite(x), neighbour, x.astype(jnp.bfloat16))
