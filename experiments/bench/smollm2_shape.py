"""The sizes of SmolLM2-135M, with any number of layers, for benchmarks that need no weights of its own."""

from __future__ import annotations

import smd_jax as smd


def smollm2_shape(layers: int) -> smd.ModelConfig:
    """SmolLM2-135M's configuration; the model itself has 30 layers."""
    return smd.ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=layers,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_positions=8192,
        rope_theta=1e5,
        norm_eps=1e-5,
        tie_embeddings=True,
    )
