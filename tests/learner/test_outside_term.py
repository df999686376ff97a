"""User-defined loss terms: values and gradients, microbatches, packed rows, and errors."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import smd_jax as smd
from smd_jax.learner import Needs, Term, TermInputs, TermOutputs, TermResults
from smd_jax.learner.auxiliary_terms import EntropyTerm, TokenChoice
from smd_jax.losses.surrogates import Surrogate, SurrogateInputs, SurrogateTerms
from tests import bigram_update, tiny_update
from tests.bigram_update import PARAMS, explicit_token_logprobs, metrics_and_gradients, trajectory
from tests.tiny_update import ADVANTAGES, distance


@dataclass(frozen=True)
class Imitation(Term):
    """Cross-entropy of the responses with a positive advantage, a mean over all tokens."""

    coef: float = 0.1
    scheduled: bool = False

    def coefficient(self, step: jax.Array) -> float | jax.Array:
        return jnp.asarray(optax.linear_schedule(0.0, self.coef, 5)(step)) if self.scheduled else self.coef

    def evaluate(self, inputs: TermInputs) -> TermOutputs:
        loss = jnp.sum(jnp.where(inputs.advantages > 0, -inputs.prepared, 0.0) * inputs.logprobs)
        return TermOutputs(loss, {"loss/imitation": loss}, rows=inputs.logprobs)

    def metrics(self, results: TermResults) -> dict[str, jax.Array]:
        return {"imitation/lowest": jnp.where(results.mask, results.rows, 0.0).min()}


@dataclass(frozen=True)
class Distance(Term):
    """Squared differences of log-probabilities, from the learner to the reference and to the dense policy."""

    def evaluate(self, inputs: TermInputs) -> TermOutputs:
        others = [inputs.reference_logprobs["dense"], inputs.logprobs_under["dense"]]
        loss = jnp.stack([(inputs.prepared * (inputs.logprobs - other) ** 2).sum() for other in others]).sum()
        return TermOutputs(loss, {"loss/distance": loss})

    @property
    def needs(self) -> Needs:
        visibilities: Any = frozenset({"dense"})
        return Needs(logprobs=visibilities, reference_logprobs=visibilities)


def imitation_loss(params: Any) -> jax.Array:
    mask = trajectory().response_mask
    good = mask & (ADVANTAGES > 0)[:, None]
    return -jnp.where(good, explicit_token_logprobs(params), 0.0).sum() / mask.sum()


@pytest.mark.parametrize("size", [None, 2])
def test_single_term_matches_its_formula(size: int | None):
    config = smd.UpdateConfig(policy_coef=0.0, terms=(Imitation(0.5),), microbatch_size=size)
    metrics, gradient = metrics_and_gradients(config)
    loss, expected = jax.jit(jax.value_and_grad(imitation_loss))(PARAMS)
    np.testing.assert_allclose(metrics["loss/imitation"], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], 0.5 * loss, rtol=1e-5)
    assert distance(gradient, jax.tree.map(lambda x: 0.5 * x, expected)) < 1e-5
    logprobs = np.asarray(explicit_token_logprobs(PARAMS))[np.asarray(trajectory().response_mask)]
    np.testing.assert_allclose(metrics["imitation/lowest"], logprobs.min(), rtol=1e-5)


def test_terms_add_up():
    """The scheduled coefficient is 0 at step 0."""
    alone, with_term, without = (
        metrics_and_gradients(smd.UpdateConfig(policy_coef=coef, terms=terms))
        for coef, terms in ((0.0, (Imitation(),)), (1.0, (Imitation(),)), (1.0, (Imitation(scheduled=True),)))
    )
    plain = metrics_and_gradients(smd.UpdateConfig())
    total = jax.tree.map(jnp.add, alone[1], plain[1])
    assert distance(with_term[1], total) < 1e-5 and distance(without[1], plain[1]) < 1e-6
    np.testing.assert_allclose(with_term[0]["loss"], alone[0]["loss"] + plain[0]["loss"], rtol=1e-5)


@pytest.mark.slow
def test_update_computes_the_logprobs_that_a_term_needs():
    """The term reads the dense policy and the reference. The model has attention, so the mask matters."""
    t = tiny_update.trajectory()
    config = smd.UpdateConfig(policy_coef=0.0, terms=(Distance(),), microbatch_size=4)
    assert config.needs_reference and smd.UpdateConfig(terms=(Imitation(),)).needs_reference is False
    reference = tiny_update.REFERENCE
    metrics, gradient = tiny_update.metrics_and_gradients(config, reference=reference)

    def formula(params: Any) -> jax.Array:
        dense = t.dense_mask()
        shadow, full = (tiny_update.explicit_token_logprobs(params, mask) for mask in (t.mask, dense))
        fixed = tiny_update.explicit_token_logprobs(reference, dense)
        squares = (shadow - fixed) ** 2 + (shadow - full) ** 2
        return jnp.where(t.response_mask, squares, 0.0).sum() / t.response_mask.sum()

    loss, expected = jax.jit(jax.value_and_grad(formula))(tiny_update.PARAMS)
    np.testing.assert_allclose(metrics["loss/distance"], loss, rtol=1e-4)
    assert distance(gradient, expected) < 1e-4


def test_missing_reference_raises():
    message = (
        r"expected reference parameters in the train state for Distance: init_state\(params, …, reference=params\)"
    )
    with pytest.raises(ValueError, match=message):
        metrics_and_gradients(smd.UpdateConfig(terms=(Distance(),)))


def test_packed_rows_match_separate_rows():
    """Arrays that a term prepares move with their tokens."""
    config = smd.UpdateConfig(terms=(Imitation(),), microbatch_size=2)
    metrics, gradient = metrics_and_gradients(config)
    packed, packed_gradient = metrics_and_gradients(dataclasses.replace(config, pack_columns=24))
    assert distance(packed_gradient, gradient) < 1e-5
    for name in ("loss", "loss/imitation", "imitation/lowest"):
        np.testing.assert_allclose(packed[name], metrics[name], rtol=1e-5, err_msg=name)


@dataclass(frozen=True)
class PerRow(Imitation):
    def prepare(self, minibatch: Any) -> jax.Array:
        return minibatch.mask.any(axis=1)


@dataclass(frozen=True)
class LogsPerRow(Term):
    """Returns one number per row instead of per token."""

    def evaluate(self, inputs: TermInputs) -> TermOutputs:
        return TermOutputs(jnp.float32(0.0), rows=inputs.logprobs.sum(axis=1))


@dataclass(frozen=True)
class PerToken(Term):
    def evaluate(self, inputs: TermInputs) -> TermOutputs:
        return TermOutputs(inputs.logprobs)


@dataclass(frozen=True)
class LogsOwn(Term):
    """Logs metrics that the update logs too, from `evaluate` or from `metrics`."""

    from_metrics: bool

    def evaluate(self, inputs: TermInputs) -> TermOutputs:
        return TermOutputs(inputs.logprobs.sum(), {} if self.from_metrics else {"loss": jnp.float32(7)})

    def metrics(self, results: TermResults) -> dict[str, jax.Array]:
        return {"grad_norm": jnp.float32(7), "entropy": jnp.float32(7)} if self.from_metrics else {}


@dataclass(frozen=True)
class LogsLoss(Surrogate):
    def terms(self, inputs: SurrogateInputs) -> SurrogateTerms:
        return SurrogateTerms(inputs.ratio * inputs.advantages, {"loss": inputs.ratio})


@dataclass(frozen=True)
class Entropy(Term):
    """The mean entropy, with a gradient, as a constant, or only as a metric."""

    use: str

    @property
    def needs(self) -> Needs:
        return Needs(entropy_gradient=self.use == "trained")

    def evaluate(self, inputs: TermInputs) -> TermOutputs:
        mean = jnp.sum(inputs.prepared * inputs.entropy)
        used = {"constant": jax.lax.stop_gradient(mean), "metric": jnp.float32(0)}.get(self.use, mean)
        return TermOutputs(used + jnp.sum(inputs.prepared * inputs.logprobs), {"entropy/own": mean}, inputs.entropy)


@pytest.mark.parametrize("size", [None, 2])
def test_entropy_gradient_must_be_declared(size: int | None):
    def gradient(*terms: Term) -> Any:
        config = smd.UpdateConfig(policy_coef=0.0, terms=terms, microbatch_size=size)
        metrics, gradients = metrics_and_gradients(config)
        np.testing.assert_allclose(metrics["entropy/own"], metrics["entropy"], rtol=1e-5)
        return gradients

    trained, constant, logged = (gradient(Entropy(use)) for use in ("trained", "constant", "metric"))
    assert distance(constant, logged) == 0 and distance(trained, constant) > 1e-3
    # Another term's declaration does not help.
    for others in ((), (EntropyTerm(0.1, TokenChoice(1.0, "shadow", recorded=True)),)):
        with pytest.raises(
            ValueError, match=r"declare its gradient, needs = Needs\(entropy_gradient=True\).*; got neither"
        ):
            gradient(Entropy("undeclared"), *others)


@dataclass(frozen=True)
class NeedsEvictions(Imitation):
    @property
    def needs(self) -> Needs:
        return Needs(evictions=True)


def test_invalid_terms_raise():
    with pytest.raises(ValueError, match=r"expected the loss of PerToken of shape \[\]; got \[8, 10\]"):
        metrics_and_gradients(smd.UpdateConfig(terms=(PerToken(),)))
    with pytest.raises(ValueError, match="expected visibility 'shadow' with .* term that needs evictions.*got 'dense'"):
        smd.UpdateConfig(visibility="dense", correction=smd.corrections.Naive(), terms=(NeedsEvictions(),))
    with pytest.raises(ValueError, match=r"from Imitation that neither another term.* got \['loss/imitation'\]"):
        metrics_and_gradients(smd.UpdateConfig(terms=(Imitation(), Imitation())))
    for from_metrics, names in ((False, r"\['loss'\]"), (True, r"\['entropy', 'grad_norm'\]")):
        with pytest.raises(
            ValueError, match=f"from LogsOwn that neither another term nor the update logs; got {names}"
        ):
            metrics_and_gradients(smd.UpdateConfig(terms=(LogsOwn(from_metrics),)))
    with pytest.raises(ValueError, match=r"from PolicyTerm that neither another term.* got \['loss'\]"):
        metrics_and_gradients(smd.UpdateConfig(loss=smd.LossConfig(surrogate=LogsLoss())))
    with pytest.raises(TypeError, match="Term has no evaluate"):
        metrics_and_gradients(smd.UpdateConfig(terms=(Term(),)))
    config = smd.UpdateConfig(terms=(PerRow(),), microbatch_size=2, pack_columns=24)
    with pytest.raises(ValueError, match=r"expected terms that prepare arrays \(8, 10\), one number a token.*\(8,\)"):
        metrics_and_gradients(config)
    config = dataclasses.replace(config, terms=(LogsPerRow(),), microbatch_size=1)
    with pytest.raises(
        ValueError, match=r"expected terms whose rows are arrays \(1, \d+\), one number a token.*\(1,\)"
    ):
        metrics_and_gradients(config)
    data = bigram_update.batch()
    booleans = data.replace(trajectory=data.trajectory.replace(mask=data.trajectory.mask.to_boolean()))
    with pytest.raises(ValueError, match=r"expected a mask in interval form \(ShadowMask.from_boolean\)"):
        metrics_and_gradients(config, booleans)
    mask = data.trajectory.mask
    shared = data.trajectory.replace(mask=mask.replace(evicted_at=mask.evicted_at[:1]))
    with pytest.raises(ValueError, match="expected the mask's evicted_at"):
        metrics_and_gradients(config, data.replace(trajectory=shared))


# --- parts without @dataclass


def undecorated_part(base: Any) -> Any:
    """Without `@dataclass(frozen=True)` all instances compare equal."""

    class Part(base):
        def __init__(self) -> None:
            self.setting = 1

    return Part()


@pytest.mark.parametrize(
    "make",
    [
        lambda: smd.eviction.Protect(undecorated_part(smd.eviction.EvictionPolicy), sinks=1),
        lambda: smd.eviction.Pyramid(undecorated_part(smd.eviction.EvictionPolicy)),
        lambda: smd.UpdateConfig(correction=undecorated_part(smd.corrections.Correction)),
        lambda: smd.corrections.Chain((undecorated_part(smd.corrections.Correction),)),
        lambda: smd.UpdateConfig(terms=(undecorated_part(Term),)),
        lambda: smd.LossConfig(surrogate=undecorated_part(smd.losses.Surrogate)),
        lambda: smd.LossConfig(weighting=undecorated_part(smd.losses.TokenWeighting)),
    ],
)
def test_parts_must_be_frozen_dataclasses(make: Any):
    message = "expected Part to be a frozen dataclass.*; got attributes that are no fields: setting"
    with pytest.raises(TypeError, match=message):
        make()
