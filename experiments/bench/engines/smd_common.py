"""Shared by our own engines: the model of the comparison, random batches, and the difference of sampler and learner.

Imports JAX, so import it after `common.one_thread()`.
"""

from __future__ import annotations

from dataclasses import asdict

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax

import smd_jax as smd
from smd_jax.learner.state import TrainBatch
from smd_jax.message.masks import Segments, dense_mask
from smd_jax.testing import random_evictions


def model_config(max_tokens: int) -> smd.ModelConfig:
    """The model that every engine runs."""
    more = {"max_positions": max_tokens, "rope_theta": common.ROPE_THETA, "norm_eps": common.NORM_EPS}
    return smd.ModelConfig(**asdict(common.MODEL), **more)


def adamw() -> optax.GradientTransformation:
    return optax.adamw(common.LEARNING_RATE, *common.BETAS, eps=common.ADAM_EPS, weight_decay=common.WEIGHT_DECAY)


def random_batch(
    config: smd.ModelConfig, tokens: np.ndarray, prompt: int, budget: int | None, buffer: int | None
) -> TrainBatch:
    """Builds a batch of `tokens` `[rows, columns]` without padding; with a budget, random evictions give the mask."""
    rows, columns = tokens.shape
    valid = jnp.ones(tokens.shape, bool)
    mask = dense_mask(valid)
    if budget is not None and buffer is not None:
        segments = Segments(prompt, buffer, budget)
        sizes = {"batch": rows, "layers": config.num_layers, "kv_heads": config.num_kv_heads}
        mask = random_evictions(columns, segments, **sizes)
    trajectory = smd.Trajectory(
        tokens=jnp.asarray(tokens, jnp.int32),
        valid=valid,
        logprobs=jnp.full((rows, columns - prompt), -np.log(config.vocab_size), jnp.float32),
        terminated=jnp.zeros(rows, bool),
        mask=mask,
    )
    return TrainBatch(trajectory, jnp.asarray(common.advantages(rows), jnp.float32), None)


def max_difference(
    model: smd.model.LanguageModel, params: smd.model.Params, trajectory: smd.Trajectory, rows: int
) -> float:
    """Largest |log p of the learner - log p of the sampler| in nats over the first `rows` rows.

    Replaying only a few rows keeps the learner's memory independent of the batch.
    """
    part = jax.tree.map(lambda x: x[:rows], trajectory)
    replayed = jax.jit(smd.replay, static_argnums=0)(model, params, part)
    return float(np.abs(replayed.logprobs - part.logprobs)[np.asarray(part.response_mask)].max())
