"""Checkpoints of adapters hold a fingerprint of the frozen base instead of the base itself.

    writer.save(step, without_base(state), …)
    state = with_base(checkpoint.restore(directory, without_base(state), …).state, state)

Both leave the parameters of a state without adapters unchanged.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from smd_jax.learner.state import TrainState, frozen_params, trained_params
from smd_jax.model.lora import LORA
from smd_jax.model.protocol import Params

BASE = "base"  # key in the parameters of a saved state
_SHOWN = 4


def without_base(state: TrainState) -> TrainState:
    """The state to save, whose parameters are the trained ones and the fingerprint of the others under `base`."""
    return state.replace(params=params_without_base(state.params))


def with_base(saved: TrainState, state: TrainState) -> TrainState:
    """The saved state with the base of `state`; errors as `params_with_base`."""
    return saved.replace(params=params_with_base(saved.params, state.params))


def params_without_base(params: Params) -> Params:
    """The parameters as a checkpoint holds them."""
    frozen = frozen_params(params)
    if frozen is None:
        return params
    kept = {"fingerprint": fingerprint(frozen), "scale": _scale(params)}
    return {**trained_params(params), BASE: kept}


def params_with_base(saved: Params, params: Params) -> Params:
    """The saved parameters with the base of `params`.

    Raises:
      ValueError: if the adapters belong to another base, or had another scale.
    """
    frozen = frozen_params(params)
    if frozen is None:
        return saved
    trained = dict(saved)
    kept = trained.pop(BASE)
    differs = np.any(np.asarray(kept["fingerprint"]) != fingerprint(frozen), axis=1)
    if differs.any():
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(frozen)]
        names = [jax.tree_util.keystr(paths[i], simple=True, separator="/") for i in np.flatnonzero(differs)]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise ValueError(
            "expected the base that the checkpoint's adapters were trained on; got one that differs in "
            f"{', '.join(names[:_SHOWN])}{more}"
        )
    if kept["scale"] != _scale(params):
        raise ValueError(
            f"expected adapters scaled by {kept['scale']}, as in the checkpoint (alpha over rank); got {_scale(params)}"
        )
    return {**frozen, **trained}


def _scale(params: Params) -> np.ndarray:
    return np.array(params[LORA].config.scale, np.float32)


def fingerprint(params: Params) -> UInt32[np.ndarray, "leaves 2"]:
    """Two sums of the bits of every leaf, the second weighted by position, modulo 2^32.

    They are the same on every mesh, because sums of integers do not depend on the order.
    """
    return np.stack([np.asarray(_sums(leaf)) for leaf in jax.tree.leaves(params)])


@jax.jit
def _sums(leaf: Array) -> UInt32[Array, 2]:
    size = leaf.dtype.itemsize
    # 64 bits become two numbers of 32, along a new axis.
    bits = jax.lax.bitcast_convert_type(leaf, jnp.uint32 if size >= 4 else jnp.uint16 if size == 2 else jnp.uint8)
    bits = bits.astype(jnp.uint32)
    place = jnp.zeros_like(bits)
    # Without a reshape, which would gather a sharded matrix onto every device.
    for axis, side in enumerate(bits.shape):
        place = place * np.uint32(side) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    return jnp.stack([bits.sum(dtype=jnp.uint32), (bits * (2 * place + 1)).sum(dtype=jnp.uint32)])
