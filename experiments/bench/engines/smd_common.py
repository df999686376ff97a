"""Shared by our own engines: the model of the comparison, and the difference of sampler and learner.

Imports JAX, so import it after `common.one_thread()`.
"""

from __future__ import annotations

import common
import jax
import numpy as np

import smd_jax as smd


def model_config(max_tokens: int) -> smd.ModelConfig:
    """The model that every engine runs."""
    return smd.ModelConfig(
        vocab_size=common.VOCABULARY,
        hidden_size=common.HIDDEN,
        intermediate_size=common.FFN,
        num_layers=common.LAYERS,
        num_heads=common.HEADS,
        num_kv_heads=common.KV_HEADS,
        head_dim=common.HEAD_DIM,
        max_positions=max_tokens,
        rope_theta=common.ROPE_THETA,
        norm_eps=common.NORM_EPS,
        qkv_bias=True,
        tie_embeddings=True,
    )


def max_difference(
    model: smd.model.LanguageModel, params: smd.model.Params, trajectory: smd.Trajectory, rows: int
) -> float:
    """Largest |log p of the learner - log p of the sampler| in nats over the first `rows` rows.

    A few rows show a difference, and the learner's memory does not grow with the batch.
    """
    part = jax.tree.map(lambda x: x[:rows], trajectory)
    replayed = jax.jit(smd.replay, static_argnums=0)(model, params, part)
    return float(np.abs(replayed.logprobs - part.logprobs)[np.asarray(part.response_mask)].max())
