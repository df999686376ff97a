"""A user-defined weighting, surrogate and corrections: by hand, and in the update."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.corrections import (
    DPPOTV,
    OPSM,
    Chain,
    Correction,
    CorrectionInputs,
    CorrectionTerms,
    CorrectionTraits,
    Veto,
)
from smd_jax.learner.config import UpdateConfig
from smd_jax.losses import LossConfig, Surrogate, SurrogateInputs, SurrogateTerms, TokenWeighting
from tests.bigram_update import PARAMS, batch, explicit_token_logprobs, metrics_and_gradients, trajectory
from tests.correction_cases import inputs_of
from tests.tiny_update import ADVANTAGES, LENGTH, ROWS, distance


@dataclass(frozen=True)
class RootLength(TokenWeighting):
    """Between grpo and dapo: a response weighs as the square root of its length."""

    def weights(self, mask, counted_rows=None):
        lengths = jnp.maximum(mask.sum(axis=1, keepdims=True), 1)
        rows = mask.shape[0] if counted_rows is None else jnp.maximum(counted_rows.sum(), 1)
        return mask / (jnp.sqrt(lengths) * rows)


@dataclass(frozen=True)
class Gate(Surrogate):
    """A sigmoid in place of clipping (SAPO, arXiv:2511.20347): 4 / tau * sigmoid(tau (r - 1)) * A."""

    tau: float = 2.0

    def terms(self, inputs: SurrogateInputs) -> SurrogateTerms:
        gate = jax.nn.sigmoid(self.tau * (inputs.ratio - 1.0))
        return SurrogateTerms(4.0 / self.tau * gate * inputs.advantages, {"gate_mean": gate})


@dataclass(frozen=True)
class RootRatio(Correction):
    """The weight is the square root of xi."""

    @property
    def traits(self) -> CorrectionTraits:
        return CorrectionTraits(weighs=True)

    def terms(self, inputs: CorrectionInputs) -> CorrectionTerms:
        assert inputs.sampler_logprobs is not None
        half = jnp.where(inputs.mask, (inputs.old_logprobs - inputs.sampler_logprobs) / 2, 0.0)
        return CorrectionTerms(jnp.where(inputs.mask, jnp.exp(half), 0.0), inputs.mask)


@dataclass(frozen=True)
class WithoutFirst(Correction):
    """Rejects the first token of every response. Its traits are the defaults."""

    def terms(self, inputs: CorrectionInputs) -> CorrectionTerms:
        return CorrectionTerms(inputs.mask.astype(jnp.float32), inputs.mask & (jnp.cumsum(inputs.mask, axis=1) > 1))


LOSS = LossConfig(weighting=RootLength(), surrogate=Gate())


def test_a_chain_of_corrections_by_hand():
    inputs = inputs_of([[4.0, 0.25, 1.0], [1.0, 9.0, 1e-6]], mask=[[1, 1, 0], [1, 1, 1]])
    chain = Chain((RootRatio(), WithoutFirst(), Veto()))
    terms = chain.terms(inputs)
    np.testing.assert_allclose(terms.weights, [[2, 0.5, 0], [1, 3, 1e-3]], rtol=1e-5)
    np.testing.assert_array_equal(terms.counted, [[False, True, False], [False, False, False]])
    assert chain.traits == CorrectionTraits(weighs=True)
    assert Chain((WithoutFirst(), OPSM())).traits == CorrectionTraits(uses_present=True, judges_responses=True)
    with pytest.raises(ValueError, match=r"at most one .* weights by xi in a Chain; got \['RootRatio', 'RootRatio'\]"):
        Chain((RootRatio(), RootRatio()))


@jax.jit
@jax.value_and_grad
def explicit_loss(params, old):
    """The same loss without the library: mean over rows of the token sum divided by the root of the token count."""
    logprobs = explicit_token_logprobs(params)
    mask = trajectory().response_mask
    counted = mask & (jnp.cumsum(mask, axis=1) > 1)
    xi = jnp.where(counted, jnp.exp(old - trajectory().logprobs), 1.0)
    ratio = jnp.where(counted, jnp.exp(logprobs - old), 1.0)
    objective = jnp.sqrt(xi) * 2.0 / (1.0 + jnp.exp(-2.0 * (ratio - 1.0))) * ADVANTAGES[:, None]
    tokens = jnp.maximum(counted.sum(axis=1), 1)
    return -jnp.mean(jnp.where(counted, objective, 0.0).sum(axis=1) / jnp.sqrt(tokens))


@pytest.mark.parametrize("size", [None, 2])
def test_update_matches_the_explicit_loss(size):
    noise = jnp.asarray(np.random.default_rng(4).normal(size=(ROWS, LENGTH)), jnp.float32)
    old = jax.jit(explicit_token_logprobs)(PARAMS) + 0.1 * noise
    config = UpdateConfig(
        visibility="dense", loss=LOSS, correction=Chain((RootRatio(), WithoutFirst())), microbatch_size=size
    )
    metrics, found = metrics_and_gradients(config, batch().replace(old_logprobs=old))
    loss, expected = explicit_loss(PARAMS, old)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    assert distance(found, expected) < 1e-5
    assert 0 < metrics["gate_mean"] < 1 and "clip_ratio/low_mean" not in metrics


def test_custom_surrogate_with_a_trust_region_raises():
    with pytest.raises(ValueError, match="expected .* with DPPOTV.*Gate"):
        UpdateConfig(visibility="dense", loss=LOSS, correction=DPPOTV())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TokenWeighting().weights(jnp.ones((1, 2), bool)), "TokenWeighting has no weights"),
        (lambda: Correction().terms(inputs_of([1.0])), "Correction has no terms"),
        (lambda: Surrogate().terms(SurrogateInputs(*[jnp.ones((1, 2))] * 3)), "Surrogate has no terms"),
    ],
)
def test_base_classes_raise(call, message):
    with pytest.raises(TypeError, match=message):
        call()
