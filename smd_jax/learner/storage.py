"""Parameters stored in 16 bits, without a float32 copy.

Bytes per parameter, with AdamW (8; 6 with a bfloat16 momentum) and without a reference:

    parameters                 stored   copy in bfloat16   gradient   AdamW   in all
    float32, computed in it    4        -                  4          8       16
    float32 masters            4        2                  4          8       18      compute dtype bfloat16
    bfloat16 without masters   2        -                  2 (4)      8       12 (14) 4 if microbatches are summed

bfloat16 has 8 significant bits: with rounding to nearest, a number changes only if it moves by at least 1/512 of
itself. RL's learning rates move it less (1e-6 is 1/20000 of a weight of 0.02), so the policy would never change.
Therefore the float32 result of a step is rounded stochastically: up with the probability of the truncated part. The
mean is exact and small steps add up. The cost is noise: a weight that small steps moved by d has a standard deviation
of sqrt(d * gap), with the gap to the next value.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from smd_jax.model.protocol import Params

# Folded into the train state's key before the step. Rollouts fold in their number, which never reaches this value.
PARAMS = np.uint32(2**32 - 1)
REFERENCE = np.uint32(2**32 - 2)


VECTORS = ("bias", "scale", "sinks")  # ends of names


def is_vector(path: tuple[Any, ...], leaf: jax.Array) -> bool:
    """Whether a leaf of the parameters is a norm, a bias or sinks, also stacked by layers or experts."""
    name = jax.tree_util.keystr(path[-1:], simple=True) if path else ""
    return leaf.ndim <= 1 or name.endswith(VECTORS)


def stored(params: Params, dtype: DTypeLike) -> Params:
    """Casts matrices to another dtype. Vectors (norms, biases, sinks) keep theirs, because they are small."""
    return jax.tree_util.tree_map_with_path(lambda path, x: x if is_vector(path, x) else x.astype(dtype), params)


def widened(tree: Any) -> Any:
    """Casts 16-bit floats to float32; other leaves are unchanged."""

    def wide(x: Array) -> Array:
        return x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x

    return jax.tree.map(wide, tree)


def rounded(wide: Any, like: Any, key: Key[Array, ""], step: Int[Array, ""], what: np.uint32) -> Any:
    """Rounds the leaves of `wide` to the dtypes of `like`: bfloat16 stochastically, others to nearest.

    Args:
      key: key of the train state.
      step: folded into the key, so that a resumed run uses the same random numbers.
      what: PARAMS or REFERENCE, folded into the key.
    """
    leaves, structure = jax.tree.flatten(like)
    of_step = jax.random.fold_in(jax.random.fold_in(key, what), step)
    new = [
        stochastic_round(x, jax.random.fold_in(of_step, i)) if old.dtype == jnp.bfloat16 else x.astype(old.dtype)
        for i, (x, old) in enumerate(zip(structure.flatten_up_to(wide), leaves, strict=True))
    ]
    return structure.unflatten(new)


def stochastic_round(x: Float[Array, "*shape"], key: Key[Array, ""]) -> Float[Array, "*shape"]:
    """Rounds float32 to one of its two neighbours in bfloat16, so that the mean is `x`; the key is consumed. Values
    that bfloat16 can represent, infinities and NaN are unchanged."""
    # bfloat16 is the upper half of a float32. Adding a random 16-bit number to the lower half carries into the upper
    # half with the right probability. The sign is a separate bit, so a carry is always away from 0.
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    carried = bits + jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    neighbour = jax.lax.bitcast_convert_type((carried >> 16).astype(jnp.uint16), jnp.bfloat16)
    # The carry could turn a NaN into a number.
    return jnp.where(jnp.isfinite(x), neighbour, x.astype(jnp.bfloat16))
