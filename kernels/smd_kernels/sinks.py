"""Attention sinks: one more score in each row's softmax, whose weight is dropped (gpt-oss).

    weights of the keys    exp(score - lse')      lse' = log(exp(lse) + exp(sink))

A kernel computes a row without its sink. Output and log-sum-exp with the sink follow from those without, and the
backward pass recomputes the weights from the given log-sum-exp. So every `BlockKernel` supports sinks.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def add_sinks(
    out: Float[Array, "*rows head_dim"], lse: Float[Array, "*rows"], sinks: Float[Array, "*#rows"]
) -> tuple[Float[Array, "*rows head_dim"], Float[Array, "*rows"]]:
    """Output and lse of rows with a sink, from those without; a row that sees no key is unchanged."""
    sees_any = jnp.isfinite(lse)
    # inf - inf would be NaN, also where it is not used, and `jax_debug_nans` would raise.
    finite = jnp.where(sees_any, lse, 0.0)
    total = jnp.logaddexp(finite, sinks.astype(lse.dtype))
    share = jnp.where(sees_any, jnp.exp(finite - total), 0.0)
    return (out * share[..., None]).astype(out.dtype), jnp.where(sees_any, total, lse)


def sink_gradient(
    sinks: Float[Array, "*#rows"],
    out: Float[Array, "*rows head_dim"],
    lse: Float[Array, "*rows"],
    d_out: Float[Array, "*rows head_dim"],
) -> Float[Array, "*rows"]:
    """Gradient of each row's sink, from the row's output and lse with it; in the dtype of `lse`."""
    # The lse of a row that sees no key is `inf`: its share is 0.
    share = jnp.exp(sinks.astype(lse.dtype) - lse)
    return -share * jnp.sum(out.astype(lse.dtype) * d_out.astype(lse.dtype), axis=-1)
