"""Parameters as the sampler reads them: converted once, not at every token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.typing import DTypeLike

from smd_jax.model.value_head import drop_value_head


def sampler_params(params: Mapping[str, Any], dtype: DTypeLike) -> dict[str, Any]:
    """The policy's parameters, with all that enters a matrix product converted to the compute dtype.

    A step of decoding reads every matrix once: float32 as the optimizer keeps it would be twice the bytes of bfloat16.
    Scales of norms stay as they are, because sampler and learner both multiply by them in float32. The decoder computes
    the same with these parameters, to the last bit.

    Args:
      params: of a `smd_jax.model.decoder.Decoder`, with or without a value head, which no sampler reads.
      dtype: the model's compute dtype.
    """

    def converted(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        if path[-1].key == "scale" or leaf.dtype == dtype:
            return leaf
        # In one program with the decode loop, the compiler must not move this to where the matrix is read.
        return jax.lax.optimization_barrier(leaf.astype(dtype))

    return jax.tree_util.tree_map_with_path(converted, drop_value_head(params))
