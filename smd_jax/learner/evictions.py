"""The learner's log-probabilities of evictions, from the forward pass that gives those of tokens; and their term.

    layer i    q, k, v ─► attention under the mask ─► …                  as in every teacher-forced pass
                  └─► gate ─► logits at every compression ─┐
    layer j    …                                       ────┴─► log p of what went, layer by layer in one loop

Under the mask the keys and values of the pass are those in the sampler's cache, so the gate gives the same logits.
Extra work and memory: compressions × columns numbers a row, layer and KV head, and their sort.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from smd_jax.learner.state import Metrics
from smd_jax.learner.terms import Minibatch, Needs, Term, TermInputs, TermOutputs, TermResults
from smd_jax.losses.evictions import eviction_loss, eviction_weights
from smd_jax.message.draws import EvictionDraws, candidates, ordered_logprob
from smd_jax.message.gate import Gate, gate_parameters
from smd_jax.message.masks import LayerMask, ShadowMask
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.attention import AttentionConfig
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.model.teacher_forced import layer_masks
from smd_jax.pytrees import any_leaves
from smd_jax.typed_fields import check_types


@any_leaves
class JudgedLayer(struct.PyTreeNode):
    """Inputs of one layer: its mask, and what its gate reads.

    Attributes:
      mask: of the layer, as attention takes it. parameters: of the layer's gate.
      positions: `[batch, 1, T]` of the keys. newest: `[batch, compressions]` position of the newest query.
    """

    mask: LayerMask
    parameters: Any
    positions: Int[Array, "batch 1 T"]
    newest: Int[Array, "batch compressions"]


@dataclass(frozen=True)
class JudgingAttend:
    """The attention of a teacher-forced pass; a layer's state is a JudgedLayer, and becomes what its gate says of every
    key at every compression, `[batch, kv_heads, compressions, T]`."""

    attention: AttentionConfig
    gate: Gate

    def __call__(
        self,
        q: Float[Array, "batch heads tokens head_dim"],
        k: Float[Array, "batch kv_heads tokens head_dim"],
        v: Float[Array, "batch kv_heads tokens head_dim"],
        layer: JudgedLayer,
        /,
        sinks: Float[Array, " heads"] | None = None,
    ) -> tuple[Float[Array, "batch heads tokens head_dim"], Float[Array, "batch kv_heads compressions tokens"]]:
        out = self.attention.attend(q, k, v, layer.mask, sinks)
        return out, self.gate.logits(layer.parameters, k, v, layer.positions, layer.newest)


def recorded_draws(trajectory: Trajectory) -> tuple[ShadowMask, EvictionDraws]:
    """The mask and the draws of a trajectory.

    Raises:
      ValueError: if there are none.
    """
    if trajectory.evictions is None or not isinstance(trajectory.mask, ShadowMask):
        raise ValueError(
            "expected a trajectory with recorded draws of evictions, from a rollout under smd.eviction.LearnedGate; "
            "got one without"
        )
    return trajectory.mask, trajectory.evictions


def response_hidden_and_evictions(
    model: LanguageModel, params: Params, trajectory: Trajectory
) -> tuple[Float[Array, "batch R hidden"], Float[Array, "batch layers kv_heads compressions"]]:
    """Hidden states from which the response tokens are predicted, and the log-probability of every draw; 0 where none
    counts. One pass under the sampler's own mask.

    Raises:
      ValueError: if the trajectory has no draws, or the parameters no gate.
    """
    mask, draws = recorded_draws(trajectory)
    boundaries = draws.boundaries
    start = jnp.argmax(trajectory.valid, axis=1).astype(jnp.int32)
    columns = jnp.arange(trajectory.tokens.shape[1], dtype=jnp.int32)
    positions = jnp.where(trajectory.valid, columns[None] - start[:, None], -1)
    newest = boundaries[None] - 1 - start[:, None]
    layers = [
        JudgedLayer(layer, gate_parameters(params, index), positions[:, None], newest)
        for index, layer in enumerate(layer_masks(model.shape, trajectory.tokens, mask))
    ]
    attention = JudgingAttend(model.shape.attention, draws.gate)
    places = model.encode_positions(trajectory.positions)
    hidden, logits = model.hidden(params, trajectory.tokens, places, attention, tuple(layers))

    def logprobs_of_layer(
        layer: tuple[Float[Array, "batch kv_heads compressions T"], Array, Array],
    ) -> Float[Array, "batch kv_heads compressions"]:
        logits, evicted_at, order = layer
        candidate, goes = candidates(evicted_at, order, boundaries)
        return ordered_logprob(logits, jnp.broadcast_to(order[:, :, None], goes.shape), candidate, goes)

    # A loop, so that sums and sorts are compiled once, however many layers there are.
    by_layer = jnp.stack(logits), jnp.moveaxis(mask.evicted_at, 1, 0), jnp.moveaxis(draws.order, 1, 0)
    logprobs = jnp.moveaxis(jax.lax.map(logprobs_of_layer, by_layer), 0, 1)
    counted = draws.counted(trajectory.valid)[:, None, None]
    return hidden[:, trajectory.prompt_width - 1 : -1], jnp.where(counted, logprobs, 0.0)


def replay_evictions(
    model: LanguageModel, params: Params, trajectory: Trajectory
) -> Float[Array, "batch layers kv_heads compressions"]:
    """The learner's log-probability of every draw of evictions, in nats: `trajectory.evictions.logprobs` once more.

    Raises:
      ValueError: if the trajectory has no draws, or the parameters no gate.
    """
    return response_hidden_and_evictions(model, params, trajectory)[1]


@dataclass(frozen=True)
class EvictionTerm(Term):
    """Policy loss of the draws of an eviction policy with a gate, `smd.eviction.LearnedGate`.

    Attributes:
      coef: 1 weighs what is forgotten as tokens are.
    """

    coef: float = 1.0

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 <= self.coef < math.inf:
            raise ValueError(f"expected a finite eviction_coef >= 0; got {self.coef}")

    @property
    def needs(self) -> Needs:
        return Needs(evictions=True)

    def coefficient(self, step: Array) -> float:
        return self.coef

    def prepare(self, minibatch: Minibatch) -> Float[Array, "batch compressions"]:
        draws = recorded_draws(minibatch.trajectory)[1]
        return eviction_weights(draws.trained(minibatch.trajectory.valid), minibatch.mask)

    def evaluate(self, inputs: TermInputs) -> TermOutputs:
        assert inputs.evictions is not None  # it needs them
        sampled = recorded_draws(inputs.trajectory)[1].logprobs
        loss = eviction_loss(inputs.evictions, sampled, inputs.batch.advantages, inputs.prepared)
        # Of a row, the largest |log p_learner - log p_sampler| of its draws.
        return TermOutputs(loss, {"evictions/loss": loss}, jnp.abs(inputs.evictions - sampled).max(axis=(1, 2, 3)))

    def metrics(self, results: TermResults) -> Metrics:
        return {"evictions/logp_difference/max": results.rows.max()}
