"""Random query centers, without a model."""

import numpy as np

from smd_jax.message.query_centers import QueryCenters


def drawn_centers(*, heads: int, half: int, layers: int = 1, theta: float = 10_000.0) -> QueryCenters:
    """Random means, with lengths above them, and plain RoPE."""
    rng = np.random.default_rng(0)
    mean = rng.normal(size=(layers, heads, half)) + 1j * rng.normal(size=(layers, heads, half))
    length = np.abs(mean) * (1 + rng.random(mean.shape))
    return QueryCenters(mean, length, theta ** (-np.arange(half) / half))
