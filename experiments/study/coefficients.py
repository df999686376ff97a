"""Gradients of many arms from one rollout: every arm is a table of coefficients on log-probabilities.

At the rollout's parameters every ratio is 1, and the direction in which an arm pushes is

    g = Σ_tokens Σ_vocab  C[row, token, word] ∇ log p(word | what the arm's learner sees)

A policy loss has its weight times its correction times the advantage at the drawn word; a divergence to a teacher has
the teacher's probabilities at all words. So two forward passes, with the sampler's mask and without, serve all arms,
and all arms see the same rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import smd_jax as smd
from smd_jax.learner.forward import response_hidden, response_logits
from smd_jax.learner.prepare import prepare
from smd_jax.learner.state import TrainBatch
from smd_jax.losses.advantages import EPSILON, group_relative
from smd_jax.message.masks import Mask
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import Params
from smd_jax.ratios import overlap
from study.arms import arms_of
from study.token_rewards import leave_one_out_to_go, relative_to_go

# Arms of the studies as they are: the learner takes the first step of a rollout.
DENSE_LEARNERS = ("naive", "tis", "mis-sequence", "icepop", "sparse-rl")
# What might lower the noise of guesses, on top of the replayed mask. Weights are of single tokens.
SHADOW_LEARNERS = (
    "shadow",  # GRPO's advantage, whole responses
    "anchor",  # descent on KL(dense policy ‖ shadow policy) alone, with coefficient 1
    "to-go",  # reward to go in place of the whole reward, over the batch's deviation
    "overlap",  # weight 1 - TV(dense, shadow)
    "ratio",  # weight min(1, p_dense / p_shadow) of the drawn word
    "oracle",  # weight p_dense(drawn word) / max p_dense
    "certain",  # weight exp(-entropy) of the shadow policy
    "entropy-0.2",  # the fifth of the tokens with the highest entropy: top_entropy_quantile
    "variate",  # control variate: p_dense(word) as a guess of the step's reward; its mean is added exactly
    "to-go-variate",
    "to-go-oracle",
    "exact",  # the gradient of the mean reward itself: reward to go, leave one out, sum over tokens
)
FULL_CACHE = ("full-cache", "full-cache-exact")  # of a sampler that evicts nothing
NAMES = (*DENSE_LEARNERS, *SHADOW_LEARNERS, *FULL_CACHE)
# What the others are compared with, from many more rollouts: GRPO's gradient and that of the mean reward, of the policy
# that samples and of the same with its full cache.
REFERENCES = ("shadow", "exact", *FULL_CACHE)
GROUP = 8


class Rolled(NamedTuple):
    """A rollout with the rewards of its tokens, `[batch, R]`."""

    trajectory: Trajectory
    rewards: Float[Array, "batch R"]


@partial(jax.jit, static_argnums=0)
def arm_gradients(model: smd.Decoder, params: Params, sparse: Rolled, full: Rolled) -> Float[Array, "names size"]:
    """The ascent direction of every arm in NAMES, flat.

    Args:
      sparse: of a sampler that evicts; groups of GROUP.
      full: of one that does not, for the arms in FULL_CACHE.
    """
    trajectory = sparse.trajectory
    dense_logp, dense_back = jax.vjp(partial(_logprobs, model, trajectory, trajectory.dense_mask()), params)
    shadow_logp, shadow_back = jax.vjp(partial(_logprobs, model, trajectory, trajectory.mask), params)
    full_logp, full_back = jax.vjp(partial(_logprobs, model, full.trajectory, full.trajectory.mask), params)

    advantages = group_relative(sparse.rewards.sum(1), GROUP)
    dense = [
        _at_drawn(trajectory, library_weights(model, name, params, trajectory, advantages, dense_logp), dense_logp)
        for name in DENSE_LEARNERS
    ]
    of_shadow = shadow_coefficients(model, params, sparse, shadow_logp, dense_logp)
    whole = _whole_response(full, full_logp)
    return jnp.concatenate(
        [
            _pulled_back(dense_back, dense),
            _pulled_back(shadow_back, [of_shadow[name] for name in SHADOW_LEARNERS]),
            _pulled_back(full_back, [whole[name] for name in FULL_CACHE]),
        ]
    )


@partial(jax.jit, static_argnums=0)
def reference_gradients(
    model: smd.Decoder, params: Params, sparse: Rolled, full: Rolled
) -> Float[Array, "references size"]:
    """The ascent direction of REFERENCES alone, flat; arguments as `arm_gradients`."""
    found = []
    for rolled in (sparse, full):
        logp, back = jax.vjp(partial(_logprobs, model, rolled.trajectory, rolled.trajectory.mask), params)
        whole = _whole_response(rolled, logp)
        found.append(_pulled_back(back, [whole[name] for name in FULL_CACHE]))
    return jnp.concatenate(found)


def shadow_coefficients(
    model: smd.Decoder,
    params: Params,
    rolled: Rolled,
    shadow_logp: Float[Array, "batch R vocab"],
    dense_logp: Float[Array, "batch R vocab"],
) -> Mapping[str, Float[Array, "batch R vocab"]]:
    """Coefficients of SHADOW_LEARNERS, `[batch, R, vocab]`."""
    trajectory, rewards = rolled
    inside = trajectory.response_mask
    uniform = jnp.where(inside, 1.0, 0.0) / inside.sum()  # the mean over tokens, the default of the library
    whole = group_relative(rewards.sum(1), GROUP)[:, None]
    ahead = relative_to_go(rewards, GROUP)
    shadow, dense = jnp.exp(shadow_logp), jnp.exp(dense_logp)
    of_dense = _drawn(trajectory, dense)
    oracle = of_dense / dense.max(-1)

    # A right step is worth 1 / steps of the reward; its mean under the policy is no advantage of any word.
    steps = rewards.shape[1] - 1
    guess = (dense - (shadow * dense).sum(-1, keepdims=True)) * (jnp.arange(steps + 1) < steps)[:, None] / steps
    # In the units of the advantage: of a group, but for one without a deviation, whose advantages are 0 (up to
    # rounding); or of the batch.
    of_group = rewards.sum(1).reshape(-1, GROUP).std(1, ddof=1)
    worth = jnp.repeat(jnp.where(of_group > 1e-6, 1 / (of_group + EPSILON), 0.0), GROUP)[:, None]
    worth_to_go = 1 / (rewards.sum(1).std(ddof=1) + EPSILON)
    # The gradient of Σ p guess is Σ p guess ∇ log p.
    known = uniform[..., None] * shadow * guess

    quantile = library_weights(model, "entropy-0.2", params, trajectory, whole[:, 0], shadow_logp)
    certainty = jnp.exp((shadow * shadow_logp).sum(-1))
    per_token = {
        "shadow": uniform * whole,
        "to-go": uniform * ahead,
        "overlap": uniform * whole * overlap(dense_logp, shadow_logp),
        "ratio": uniform * whole * jnp.minimum(1.0, of_dense / _drawn(trajectory, shadow)),
        "oracle": uniform * whole * oracle,
        "certain": uniform * whole * certainty,
        "entropy-0.2": quantile,
        "variate": uniform * (whole - worth * _drawn(trajectory, guess)),
        "to-go-variate": uniform * (ahead - worth_to_go * _drawn(trajectory, guess)),
        "to-go-oracle": uniform * ahead * oracle,
        "exact": jnp.where(inside, leave_one_out_to_go(rewards, GROUP), 0.0) / inside.shape[0],
    }
    coefficients = {name: _at_drawn(trajectory, weights, shadow_logp) for name, weights in per_token.items()}
    coefficients["variate"] += worth[..., None] * known
    coefficients["to-go-variate"] += worth_to_go * known
    coefficients["anchor"] = uniform[..., None] * dense
    return jax.lax.stop_gradient(coefficients)


def library_weights(
    model: smd.Decoder,
    name: str,
    params: Params,
    trajectory: Trajectory,
    advantages: Float[Array, " batch"],
    logp: Float[Array, "batch R vocab"],
) -> Float[Array, "batch R"]:
    """What the library's update multiplies ∇ log p of each drawn token with, in an arm of the studies."""
    if name == "entropy-0.2":
        config = replace(arms_of(("shadow",))[0].update, top_entropy_quantile=0.2)
    else:
        config = arms_of((name,))[0].update
    batch = TrainBatch(trajectory, advantages, old_logprobs=_drawn(trajectory, logp))
    prepared = prepare(model, config, params, batch)
    weights = prepared.weights * prepared.correction.weights * advantages[:, None]
    return weights if prepared.chosen is None else jnp.where(prepared.chosen, weights, 0.0)


def _whole_response(rolled: Rolled, logp: Float[Array, "batch R vocab"]) -> dict[str, Float[Array, "batch R vocab"]]:
    """Coefficients of FULL_CACHE."""
    trajectory, rewards = rolled
    inside = trajectory.response_mask
    grpo = jnp.where(inside, group_relative(rewards.sum(1), GROUP)[:, None], 0.0) / inside.sum()
    exact = jnp.where(inside, leave_one_out_to_go(rewards, GROUP), 0.0) / inside.shape[0]
    both = {"full-cache": grpo, "full-cache-exact": exact}
    return {name: _at_drawn(trajectory, weights, logp) for name, weights in both.items()}


def _logprobs(model: smd.Decoder, trajectory: Trajectory, mask: Mask, params: Params) -> Float[Array, "batch R vocab"]:
    hidden = response_hidden(model, params, trajectory, mask)
    logits = response_logits(model, params, hidden, trajectory, jnp.arange(hidden.shape[1]))
    return jax.nn.log_softmax(logits, axis=-1)


def _drawn(trajectory: Trajectory, of_words: Float[Array, "batch R vocab"]) -> Float[Array, "batch R"]:
    return jnp.take_along_axis(of_words, trajectory.response[..., None], axis=-1)[..., 0]


def _at_drawn(
    trajectory: Trajectory, weights: Float[Array, "batch R"], like: Float[Array, "batch R vocab"]
) -> Float[Array, "batch R vocab"]:
    return weights[..., None] * jax.nn.one_hot(trajectory.response, like.shape[-1], dtype=like.dtype)


def _pulled_back(back: Callable[[Array], Any], tables: list[Float[Array, "batch R vocab"]]) -> Array:
    """The gradient for each table, `[tables, size]`, parameters in the order of `ravel_pytree`."""

    def flat(table: Array) -> Array:
        return jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(back(table))])

    # One after another: side by side (vmap) they took 2.4 times as long on one core, and the memory of all.
    return jax.lax.map(flat, jnp.stack(tables))
