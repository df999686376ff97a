"""The terms of the objective: prepared from the whole minibatch, then summed up for one microbatch.

Weights have denominators, such as the tokens of the minibatch, and a correction may divide by a mean over it. Computed
from a microbatch, they would depend on its size.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from smd_jax.config import check_instance
from smd_jax.learner.accumulation import Objective
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.evictions import response_hidden_and_evictions
from smd_jax.learner.forward import (
    Replay,
    Visibility,
    learner_mask,
    learner_replay,
    replay,
    replay_hidden,
    response_hidden_and_router,
)
from smd_jax.learner.state import Metrics, TrainBatch, TrainState, reference_params
from smd_jax.learner.terms import ComputedLogprobs, Minibatch, Term, TermInputs, TermOutputs
from smd_jax.message.trajectory import Trajectory
from smd_jax.metrics import SAMPLER_LEARNER_METRICS, STEP_WEIGHTS
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.model.value_head import values
from smd_jax.pytrees import PyTreeNode
from smd_jax.shapes import check_shape

RowOutputs = tuple[Replay, tuple[Any, ...]]  # per row, for the metrics

# Metrics of every update, whose names no term may use.
UPDATE_METRICS = frozenset(
    {"loss", "grad_norm", "learning_rate", "entropy", "update/skipped", "update/padding", "update/shared"}
).union(SAMPLER_LEARNER_METRICS, STEP_WEIGHTS)


class Prepared(PyTreeNode):
    """A batch with the quantities that depend on all its rows.

    Attributes:
      batch: the unchanged batch.
      mask: `[batch, R]` counted tokens, without left-out rows and masked truncated completions.
      terms: results of `Term.prepare`, in the order of `UpdateConfig.objective`.
    """

    batch: TrainBatch
    mask: Bool[Array, "batch R"]
    terms: tuple[Any, ...]


def prepare(model: LanguageModel, config: UpdateConfig, params: Params, batch: TrainBatch) -> Prepared:
    """Prepares every term, with an extra forward pass if a correction or entropies need one."""
    if config.needs.router and batch.trajectory.routing is None:
        raise ValueError("expected a trajectory with recorded routing, from a model with experts; got one without")
    mask = counted_tokens(config, batch.trajectory, batch.counted_rows)

    @functools.cache
    def replay(visibility: Visibility) -> Replay:
        # In microbatches like the update, so that this pass needs no more memory.
        sizes = config.microbatch_size, config.rows_per_prompt
        return jax.lax.stop_gradient(learner_replay(model, params, batch.trajectory, visibility, *sizes))

    minibatch = Minibatch(batch, mask, replay)
    return Prepared(batch, mask, tuple(term.prepare(minibatch) for term in config.objective))


def counted_tokens(
    config: UpdateConfig, trajectory: Trajectory, counted_rows: Bool[Array, " batch"] | None
) -> Bool[Array, "batch R"]:
    """The counted response tokens of a step; `counted_rows` as in TrainBatch.

    Truncated completions are left out before the weighting (overlong filtering, arXiv:2503.14476): their tokens do not
    count in denominators, while their rows still count as sequences of grpo and dr_grpo, as in TRL.
    """
    mask = trajectory.response_mask
    if config.mask_truncated_completions:
        check_shape("terminated", trajectory.terminated, mask.shape[:1])
        mask = mask & trajectory.terminated[:, None]
    return mask if counted_rows is None else mask & counted_rows[:, None]


def make_objective(model: LanguageModel, config: UpdateConfig, state: TrainState) -> Objective:
    """`(params, microbatch) -> (loss, (scalars to sum, (Replay, rows)))`: one forward pass, then the sum of all terms.
    The replay is the learner's, and `rows` are `TermOutputs.rows` of every term.

    The state provides the reference and the step, which have no gradient. Of its parameters only the base of LoRA
    adapters is read, which may be the reference.
    """

    def objective(params: Params, part: Prepared) -> tuple[Array, tuple[Metrics, RowOutputs]]:
        inputs = _term_inputs(model, config, state, params, part)
        loss, sums, rows = jnp.float32(0), Metrics(), []
        for term, prepared in zip(config.objective, part.terms, strict=True):
            entropy = inputs.entropy
            if not term.needs.entropy_gradient:
                entropy = _without_gradient(entropy, inputs.logprobs)
            outputs = term.evaluate(replace(inputs, prepared=prepared, entropy=entropy))
            _check_outputs(term, outputs, sums)
            loss = loss + term.coefficient(state.step) * outputs.loss
            sums |= outputs.metrics
            rows.append(outputs.rows)
        learner = Replay(inputs.logprobs, inputs.entropy)
        return loss, jax.lax.stop_gradient((sums, (learner, tuple(rows))))

    return objective


def _term_inputs(
    model: LanguageModel, config: UpdateConfig, state: TrainState, params: Params, part: Prepared
) -> TermInputs:
    """Computes the needs of all terms once."""
    needs = config.needs
    trajectory = part.batch.trajectory
    visibility = config.learner_visibility
    mask = learner_mask(trajectory, visibility)
    evictions = router = None
    if needs.evictions:  # under the sampler's mask, as the term has checked
        hidden, evictions = response_hidden_and_evictions(model, params, trajectory)
    else:
        hidden, router = response_hidden_and_router(model, params, trajectory, mask, read_router=needs.router)
    learner = replay_hidden(model, params, hidden, trajectory, entropy_gradient=needs.entropy_gradient)

    def logprobs(of: Params, seen: Visibility) -> Array:
        return replay(model, of, trajectory, learner_mask(trajectory, seen)).logprobs

    reference = reference_params(state)
    under: dict[Visibility, Array] = {visibility: learner.logprobs}
    under |= {seen: logprobs(params, seen) for seen in sorted(needs.logprobs - under.keys())}
    of_reference: dict[Visibility, Array] = {
        seen: logprobs(reference, seen) for seen in sorted(needs.reference_logprobs)
    }
    return TermInputs(
        batch=part.batch,
        mask=part.mask,
        prepared=(),
        logprobs=learner.logprobs,
        entropy=learner.entropy,
        hidden=hidden,
        logprobs_under=ComputedLogprobs("logprobs", under),
        reference_logprobs=ComputedLogprobs("reference_logprobs", jax.lax.stop_gradient(of_reference)),
        values=values(params, hidden) if needs.values else None,
        evictions=evictions,
        router=router,
        model=model,
        params=params,
        reference=reference,
        step=state.step,
    )


def _check_outputs(term: Term, outputs: Any, logged: Metrics) -> None:
    name = type(term).__name__
    check_instance(f"the result of {name}.evaluate", outputs, TermOutputs)
    check_shape(f"the loss of {name}", outputs.loss, ())
    for metric, value in outputs.metrics.items():
        if jnp.shape(value):
            raise ValueError(f"expected a number as metric {metric!r} of {name}; got shape {list(jnp.shape(value))}")
    check_new_metrics(term, outputs.metrics, logged)


def check_new_metrics(term: Term, metrics: Metrics, logged: Metrics) -> None:
    """Raises ValueError if a term logs a metric of the update itself, or one that is logged already."""
    if both := sorted(metrics.keys() & (logged.keys() | UPDATE_METRICS)):
        name = type(term).__name__
        raise ValueError(f"expected metrics from {name} that neither another term nor the update logs; got {both}")


@jax.custom_vjp
def _without_gradient(entropy: Array, logprobs: Array) -> Array:
    """The entropies for a term that does not need their gradient. Differentiating them raises, because a loss with
    constant entropies would train nothing; for this they are a function of the log-probabilities."""
    return entropy


def _refuse_gradient(residuals: None, cotangent: Array) -> tuple[Array, Array]:
    raise ValueError(
        "expected a term whose loss contains inputs.entropy to declare its gradient, needs = "
        "Needs(entropy_gradient=True), or to have none, jax.lax.stop_gradient(inputs.entropy); got neither"
    )


_without_gradient.defvjp(lambda entropy, logprobs: (entropy, None), _refuse_gradient)
