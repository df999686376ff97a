"""Log-probabilities of sampled evictions in the learner's forward pass, and their loss term.

    layer i    q, k, v ─► attention under the mask ─► …                  as in every teacher-forced pass
                  └─► gate ─► logits at every compression ─┐
    layer j    …                                       ────┴─► log p of the evictions, layer by layer in one loop

Under the mask, keys and values equal those in the sampler's cache, so the gate gives the same logits. The extra cost is
compressions × columns numbers per row, layer and KV head, and their sort.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from smd_jax.learner.state import Metrics
from smd_jax.learner.terms import Minibatch, Needs, Term, TermInputs, TermOutputs, TermResults
from smd_jax.losses.policy import eviction_loss, eviction_weights
from smd_jax.message.draws import EvictionDraws, candidates, ordered_logprob
from smd_jax.message.gate import Gate, gate_parameters
from smd_jax.message.masks import LayerMask, ShadowMask
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.attention import AttentionConfig
from smd_jax.model.lora import check_reads_lora
from smd_jax.model.protocol import LanguageModel, Params, forward
from smd_jax.model.routing import check_expert_count, routed_layers
from smd_jax.model.teacher_forced import layer_masks
from smd_jax.pytrees import PyTreeNode
from smd_jax.typed_fields import check_types


class GatedLayer(PyTreeNode):
    """A layer's mask and the inputs of its gate.

    Attributes:
      mask: mask of the layer for attention.
      parameters: parameters of the layer's gate.
      positions: `[batch, 1, T]` positions of the keys.
      newest: `[batch, compressions]` position of the newest query.
      boundaries: `[compressions]` first column after each compression.
    """

    mask: LayerMask
    parameters: Any
    positions: Int[Array, "batch 1 T"]
    newest: Int[Array, "batch compressions"]
    boundaries: Int[Array, " compressions"]


@dataclass(frozen=True)
class GatedAttend:
    """Teacher-forced attention that also runs the gate. A layer's state is a GatedLayer; the new state is the gate's
    logits for every key at every compression, `[batch, kv_heads, compressions, T]`."""

    attention: AttentionConfig
    gate: Gate

    def __call__(
        self,
        q: Float[Array, "batch heads tokens head_dim"],
        k: Float[Array, "batch kv_heads tokens head_dim"],
        v: Float[Array, "batch kv_heads tokens head_dim"],
        layer: GatedLayer,
        /,
        sinks: Float[Array, " heads"] | None = None,
    ) -> tuple[Float[Array, "batch heads tokens head_dim"], Float[Array, "batch kv_heads compressions tokens"]]:
        out = self.attention.attend(q, k, v, layer.mask, sinks)
        queries = jnp.take(q, layer.boundaries - 1, axis=2)
        logits = self.gate.logits(layer.parameters, k, v, layer.positions, layer.newest, queries)
        return out, self.gate.keep_sinks(logits, layer.positions)


def recorded_draws(trajectory: Trajectory) -> tuple[ShadowMask, EvictionDraws]:
    """The mask and the draws of a trajectory.

    Raises:
      ValueError: if there are none.
    """
    if trajectory.evictions is None:
        raise ValueError(
            "expected a trajectory with recorded draws of evictions, from a rollout with smd.eviction.LearnedGate; "
            "got one without"
        )
    return trajectory.mask, trajectory.evictions


def response_hidden_and_evictions(
    model: LanguageModel, params: Params, trajectory: Trajectory
) -> tuple[Float[Array, "batch R hidden"], Float[Array, "batch layers kv_heads compressions"]]:
    """Hidden states that predict the response tokens, and the log-probability of every draw, 0 for uncounted draws. One
    pass under the sampler's mask.

    Raises:
      ValueError: if the trajectory has no draws, or the parameters no gate.
    """
    check_reads_lora(model, params)
    mask, draws = recorded_draws(trajectory)
    boundaries = draws.boundaries
    start = jnp.argmax(trajectory.valid, axis=1).astype(jnp.int32)
    positions = jnp.where(trajectory.valid, trajectory.positions, -1)
    newest = boundaries[None] - 1 - start[:, None]
    layers = [
        GatedLayer(layer, gate_parameters(params, draws.gate, index), positions[:, None], newest, boundaries)
        for index, layer in enumerate(layer_masks(model.shape, trajectory.tokens, mask))
    ]
    attention = GatedAttend(model.shape.attention, draws.gate)
    places = model.encode_positions(trajectory.positions)
    check_expert_count(model.shape, trajectory.expert_count)
    layers = routed_layers(model.shape, layers, trajectory.routing)
    hidden, logits = forward(model, params, trajectory.tokens, places, attention, layers)
    if trajectory.routing is not None:
        logits = tuple(layer.state for layer in logits)

    def logprobs_of_layer(
        layer: tuple[Float[Array, "batch kv_heads compressions T"], Array, Array],
    ) -> Float[Array, "batch kv_heads compressions"]:
        logits, evicted_at, order = layer
        candidate, goes = candidates(evicted_at, order, boundaries)
        return ordered_logprob(logits, jnp.broadcast_to(order[:, :, None], goes.shape), candidate, goes)

    # A loop over layers compiles sums and sorts once.
    by_layer = jnp.stack(logits), jnp.moveaxis(mask.evicted_at, 1, 0), jnp.moveaxis(draws.order, 1, 0)
    logprobs = jnp.moveaxis(jax.lax.map(logprobs_of_layer, by_layer), 0, 1)
    counted = draws.counted(trajectory.valid)[:, None, None]
    return hidden[:, trajectory.prompt_width - 1 : -1], jnp.where(counted, logprobs, 0.0)


def replay_evictions(
    model: LanguageModel, params: Params, trajectory: Trajectory
) -> Float[Array, "batch layers kv_heads compressions"]:
    """Recomputes `trajectory.evictions.logprobs` in the learner: the log-probability of every draw, in nats.

    Raises:
      ValueError: if the trajectory has no draws, or the parameters no gate.
    """
    return response_hidden_and_evictions(model, params, trajectory)[1]


@dataclass(frozen=True)
class EvictionTerm(Term):
    """Policy loss of the evictions sampled by `smd.eviction.LearnedGate`.

    Attributes:
      coef: weight relative to tokens; 1 treats evictions and tokens as one policy.
    """

    coef: float = 1.0
    needs = Needs(evictions=True)

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 <= self.coef < math.inf:
            raise ValueError(f"expected a finite eviction_coef >= 0; got {self.coef}")

    def coefficient(self, step: Array) -> float:
        return self.coef

    def prepare(self, minibatch: Minibatch) -> Float[Array, "batch compressions"]:
        draws = recorded_draws(minibatch.trajectory)[1]
        return eviction_weights(draws.trained(minibatch.trajectory.valid), minibatch.mask)

    def evaluate(self, inputs: TermInputs) -> TermOutputs:
        assert inputs.evictions is not None  # it needs them
        sampled = recorded_draws(inputs.trajectory)[1].logprobs
        loss = eviction_loss(inputs.evictions, sampled, inputs.batch.advantages, inputs.prepared)
        # The largest |log p_learner - log p_sampler| of a row's draws.
        return TermOutputs(loss, {"evictions/loss": loss}, jnp.abs(inputs.evictions - sampled).max(axis=(1, 2, 3)))

    def metrics(self, results: TermResults) -> Metrics:
        return {"evictions/logp_difference/max": results.rows.max()}
