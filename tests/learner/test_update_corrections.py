"""Corrections in the train step, against their pure functions."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.corrections import (
    DPPOTV,
    OPSM,
    TIS,
    Bypass,
    Chain,
    Correction,
    CorrectionInputs,
    CorrectionTerms,
    CorrectionTraits,
    Naive,
    Shadow,
    SparseRL,
    Veto,
)
from smd_jax.learner import objective
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.forward import Replay, learner_replay
from smd_jax.learner.policy_term import DenseLearner
from smd_jax.learner.state import TrainBatch, init_state
from smd_jax.learner.update import make_update
from smd_jax.losses.distillation import DistillConfig
from smd_jax.losses.named import bnpo, cispo, dr_grpo, grpo, gspo
from smd_jax.losses.policy import LossConfig, LossInputs, policy_loss
from smd_jax.losses.surrogates import Clip, SurrogateInputs, SurrogateTerms
from tests import tiny_update
from tests.bigram_update import PARAMS, REFERENCE, batch, explicit_token_logprobs, metrics_and_gradients, trajectory
from tests.corrections.test_corrections import CORRECTIONS
from tests.tiny_update import ADVANTAGES, LENGTH, RECORD, ROWS, distance, norm, rows_of

NOISE = np.random.default_rng(4).normal(size=(ROWS, LENGTH)).astype(np.float32)


# One correction per set of traits; then sequence rejection, IcePop and a Chain.
DENSE_CASES = {c.traits: (name, c) for name, c in reversed(CORRECTIONS.items()) if not isinstance(c, Shadow)}
DENSE_CASES = dict(DENSE_CASES.values()) | {name: CORRECTIONS[name] for name in ("sequence rejection", "IcePop")}
DENSE_CASES["geometric rejection and token TIS"] = CORRECTIONS["geometric rejection and token TIS"]


@dataclasses.dataclass(frozen=True)
class HalfClip(Clip):
    """A subclass that does more than clip."""

    def terms(self, inputs: SurrogateInputs) -> SurrogateTerms:
        return dataclasses.replace(super().terms(inputs), objective=0.5 * super().terms(inputs).objective)


@functools.cache
def current_logprobs():
    """The learner's log-probabilities, and their pullback to the parameters."""
    return jax.vjp(jax.jit(explicit_token_logprobs), PARAMS)


def stale_batch(noise: float = 0.1) -> TrainBatch:
    """The learner has moved a little since the rollout: some ratios are clipped."""
    return batch().replace(old_logprobs=jnp.asarray(np.asarray(current_logprobs()[0]) + np.float32(noise) * NOISE))


def pure_loss(correction: Correction, data: TrainBatch, loss: LossConfig):
    """Loss and gradients of the whole batch at once, from the pure functions."""
    assert data.old_logprobs is not None
    old, (logprobs, pull) = data.old_logprobs, current_logprobs()
    mask = trajectory().response_mask
    terms = correction.terms(CorrectionInputs(trajectory().logprobs, old, logprobs, data.advantages, mask))
    ratio_to = trajectory().logprobs if correction.traits.ratio_to == "sampler" else old

    clipped = loss if correction.traits.clips else loss.unclipped()

    def value_of(logprobs):
        weights = loss.weighting.weights(terms.counted)
        return policy_loss(LossInputs(logprobs, ratio_to, None, data.advantages, weights, terms.weights), clipped)[0]

    value, cotangent = jax.value_and_grad(value_of)(logprobs)
    return value, pull(cotangent)[0], terms


def assert_near(found, expected):
    """Geometric rejection rejects this whole batch, so its gradient is 0."""
    if norm(expected) == 0:
        assert norm(found) == 0
    else:
        assert distance(found, expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("correction", DENSE_CASES.values(), ids=DENSE_CASES.keys())
def test_corrections_match_their_pure_functions(correction):
    loss = grpo()
    config = UpdateConfig(visibility="dense", loss=loss, correction=correction, microbatch_size=2)
    expected, gradients, terms = pure_loss(correction, stale_batch(), loss)
    metrics, found = metrics_and_gradients(config, stale_batch())
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5, atol=1e-6)
    assert_near(found, gradients)
    mask = np.asarray(trajectory().response_mask)
    lost = mask & (~np.asarray(terms.counted) | (np.asarray(terms.weights) == 0))
    np.testing.assert_allclose(metrics["rollout_corr/rollout_rs_masked_fraction"], lost.sum() / mask.sum(), atol=1e-6)
    order = np.array([3, 1, 7, 0, 2, 6, 5, 4])
    shuffled = rows_of(stale_batch(), order)
    metrics, found = metrics_and_gradients(config, shuffled)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5, atol=1e-6)
    assert_near(found, gradients)


def test_missing_old_logprobs_default_to_the_current_learner():
    config = UpdateConfig(visibility="dense", correction=SparseRL(), microbatch_size=4)
    expected, gradients, _ = pure_loss(SparseRL(), batch().replace(old_logprobs=current_logprobs()[0]), LossConfig())
    metrics, found = metrics_and_gradients(config, batch().replace(old_logprobs=None))
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    assert distance(found, gradients) < 1e-5


@pytest.mark.parametrize(
    ("correction", "expected"),
    [(Shadow(), "shadow"), (Chain((Shadow(), Veto())), "shadow"), (TIS(), "dense"), (Naive(), "dense")],
)
def test_the_correction_decides_the_mask_unless_it_is_given(correction, expected):
    assert UpdateConfig(correction=correction).learner_visibility == expected
    assert UpdateConfig(visibility="shadow", correction=correction).learner_visibility == "shadow"
    replaced = dataclasses.replace(UpdateConfig(), correction=correction)
    assert replaced.learner_visibility == expected


@pytest.mark.slow
@pytest.mark.parametrize("correction", [SparseRL(), Chain((DPPOTV(), OPSM()))])
def test_corrections_are_neutral_under_shadow_masks(correction):
    """One correction before the forward pass, one after it."""
    expected = tiny_update.metrics_and_gradients()
    data = tiny_update.batch().replace(old_logprobs=None)
    metrics, found = tiny_update.metrics_and_gradients(UpdateConfig(visibility="shadow", correction=correction), data)
    assert metrics["mismatch_kl"] <= 1e-6
    assert metrics["rollout_corr/chi2_token"] == pytest.approx(0, abs=1e-5)
    assert metrics["rollout_corr/agreement_p5"] == pytest.approx(1, abs=1e-5)
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1, abs=1e-6)
    for name in ("min", "mean", "max"):
        assert metrics[f"rollout_corr/rollout_is_{name}"] == pytest.approx(1, abs=1e-4)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0
    np.testing.assert_allclose(metrics["loss"], expected[0]["loss"], rtol=1e-5)
    assert distance(found, expected[1]) < 1e-5


# --- uncounted rows


@pytest.mark.slow
@pytest.mark.parametrize("loss", [grpo(), bnpo(), dr_grpo(), gspo()], ids=["grpo", "bnpo", "dr_grpo", "gspo"])
def test_uncounted_rows_match_removed_rows(loss):
    config = UpdateConfig(loss=loss)
    counted = np.array([True, False, True, True, False, False, True, True])
    remaining = rows_of(batch(), counted)
    one, expected = metrics_and_gradients(config, remaining)
    other, found = metrics_and_gradients(config, batch().replace(counted_rows=jnp.asarray(counted)))
    assert distance(found, expected) < 1e-5
    for name, value in one.items():
        np.testing.assert_allclose(other[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_truncated_completions_are_masked():
    terminated = np.asarray(trajectory().terminated)
    assert 0 < terminated.sum() < ROWS
    config = UpdateConfig(mask_truncated_completions=True, microbatch_size=4)
    data = batch().replace(old_logprobs=current_logprobs()[0])  # so that no ratio is clipped
    metrics, found = metrics_and_gradients(config, data)
    # A mean over tokens: rows without tokens have no effect.
    _, expected = metrics_and_gradients(UpdateConfig(), data.replace(counted_rows=jnp.asarray(terminated)))
    assert distance(found, expected) < 1e-5
    assert metrics["clip_ratio/region_mean"] == 0
    one = data.replace(trajectory=data.trajectory.replace(terminated=jnp.ones(1, bool)))
    with pytest.raises(ValueError, match=r"expected terminated of shape \[8\]; got \[1\]"):
        metrics_and_gradients(config, one)


# --- distillation only, and late corrections


def test_distillation_alone():
    both = UpdateConfig(distill=DistillConfig(direction="anchor", coef=0.5))
    alone = dataclasses.replace(both, policy_coef=0.0)
    metrics, found = metrics_and_gradients(alone, reference=REFERENCE)
    np.testing.assert_allclose(metrics["loss"], 0.5 * metrics["distill"], rtol=1e-6)
    _, expected = metrics_and_gradients(both, batch().replace(advantages=jnp.zeros(ROWS)), reference=REFERENCE)
    assert distance(found, expected) < 1e-5


@dataclasses.dataclass(frozen=True)
class KeepLikely(Correction):
    """Keeps the tokens that are likely under the current learner."""

    @property
    def traits(self) -> CorrectionTraits:
        return CorrectionTraits(uses_present=True)

    def terms(self, inputs: CorrectionInputs) -> CorrectionTerms:
        assert inputs.logprobs is not None
        return CorrectionTerms(inputs.mask.astype(jnp.float32), inputs.mask & (inputs.logprobs > -3.0))


def test_late_rejection_does_not_change_the_denominator():
    """Denominators are computed before the forward pass."""
    logprobs, pull = current_logprobs()
    mask = np.asarray(trajectory().response_mask)
    kept = mask & (np.asarray(logprobs) > -3.0)
    assert mask.sum() > kept.sum() > 0
    config = UpdateConfig(visibility="dense", correction=KeepLikely(), microbatch_size=4)
    metrics, found = metrics_and_gradients(config, batch().replace(old_logprobs=None))
    assert distance(found, pull(jnp.float32(-(kept / mask.sum()) * np.asarray(ADVANTAGES)[:, None]))[0]) < 1e-5
    lost = 1 - kept.sum() / mask.sum()
    np.testing.assert_allclose(metrics["rollout_corr/rollout_rs_masked_fraction"], lost, rtol=1e-5)


@dataclasses.dataclass(frozen=True)
class LateTIS(TIS):
    """The same weights, computed after the forward pass."""

    @property
    def traits(self) -> CorrectionTraits:
        return dataclasses.replace(super().traits, uses_present=True)


def dense_learner_config(correction: Correction) -> UpdateConfig:
    return UpdateConfig(dense_learner=DenseLearner(0.5, correction))


def dense_update_config(correction: Correction) -> UpdateConfig:
    return UpdateConfig(visibility="dense", correction=correction, microbatch_size=2)


def packed_config(correction: Correction) -> UpdateConfig:
    return dataclasses.replace(dense_update_config(correction), pack_columns=24)


@pytest.mark.parametrize("config_of", [dense_update_config, dense_learner_config, packed_config])
def test_late_correction_can_use_the_mismatch(config_of):
    """With one step per rollout, old log-probabilities are the current ones."""
    data = batch().replace(old_logprobs=None)
    one, expected = metrics_and_gradients(config_of(TIS()), data)
    other, found = metrics_and_gradients(config_of(LateTIS()), data)
    np.testing.assert_allclose(other["loss"], one["loss"], rtol=1e-5)
    assert distance(found, expected) < 1e-5
    assert distance(expected, metrics_and_gradients(config_of(Naive()), data)[1]) > 1e-2


def test_ratios_are_exactly_one_without_old_logprobs(monkeypatch: pytest.MonkeyPatch):
    """The replay for a correction may round differently, here by more than GSPO's bounds."""

    def rounded(*arguments: Any) -> Replay:
        found = learner_replay(*arguments)
        return found.replace(logprobs=found.logprobs + 1e-3)

    monkeypatch.setattr(objective, "learner_replay", rounded)
    config = UpdateConfig(visibility="dense", correction=TIS(), loss=gspo())
    metrics, _ = metrics_and_gradients(config, batch().replace(old_logprobs=None))
    assert metrics["clip_ratio/region_mean"] == 0


# --- bad input


def test_batch_can_be_a_constant_of_a_jit():
    update = make_update(tiny_update.MODEL, RECORD, dense_update_config(TIS()))
    data = tiny_update.batch().replace(old_logprobs=tiny_update.batch().trajectory.logprobs - 0.5)
    state = init_state(jax.tree.map(jnp.copy, tiny_update.PARAMS), RECORD, jax.random.key(3))
    assert jnp.isfinite(jax.jit(lambda state: update(state, data))(state)[1]["loss"])


def test_sampler_logprobs_as_old_logprobs_raise():
    """A correction that compares both would have no effect."""
    data = batch()
    assert data.old_logprobs is data.trajectory.logprobs
    message = r"expected old_logprobs of the learner, or None, .* correction TIS\(.*; got the sampler's own"
    with pytest.raises(ValueError, match=message):
        metrics_and_gradients(dense_update_config(TIS()), data)
    with pytest.raises(ValueError, match=message.replace("old", "dense_old", 1)):
        dense = data.replace(old_logprobs=None, dense_old_logprobs=data.trajectory.logprobs)
        metrics_and_gradients(dense_learner_config(TIS()), dense)
    with pytest.raises(ValueError, match=message):
        metrics_and_gradients(packed_config(TIS()), data)
    # A copy, such as a minibatch: with evicted keys a dense learner cannot have equal log-probabilities.
    with pytest.raises(ValueError, match=message):
        tiny_update.metrics_and_gradients(dense_update_config(TIS()), jax.tree.map(jnp.copy, tiny_update.batch()))
    # Tokens of probability 1 are no evidence.
    certain = tiny_update.batch()
    zeros = jnp.zeros_like(certain.trajectory.logprobs)
    certain = certain.replace(trajectory=certain.trajectory.replace(logprobs=zeros), old_logprobs=zeros + 0)
    tiny_update.metrics_and_gradients(dense_update_config(TIS()), certain)
    # Corrections without a weight by xi use the ratio to the sampler.
    naive, bypass = (metrics_and_gradients(dense_update_config(c), data)[1] for c in (Naive(), Bypass()))
    assert distance(naive, bypass) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"visibility": "dense"}, r"expected visibility 'shadow' with the correction Shadow.*Naive\(\) ignores the"),
        ({"visibility": "dense", "correction": Chain((Shadow(), Veto()))}, "'shadow' with the correction Shadow"),
        ({"policy_coef": 0.0, "distill": DistillConfig(), "loss": LossConfig(beta=0.1)}, "beta 0 with policy_coef 0"),
        ({"policy_coef": 0.0}, "expected policy_coef > 0, or 0 with another term to learn from; got 0.0"),
        ({"policy_coef": -1.0}, "expected a finite policy_coef > 0"),
        ({"policy_coef": float("inf")}, "expected a finite policy_coef > 0"),
        ({"correction": DPPOTV(), "loss": cispo()}, "expected the plain token ratio.*DPPOTV"),
        ({"correction": DPPOTV(), "loss": LossConfig(ratio_level="geometric")}, "plain token ratio"),
        ({"correction": DPPOTV(), "loss": LossConfig(surrogate=HalfClip())}, "plain token ratio.*HalfClip"),
        (
            {"correction": Naive(), "visibility": "dense", "distill": DistillConfig()},
            "expected visibility 'shadow' with distillation.*got 'dense' with",
        ),
        ({"correction": Naive(), "distill": DistillConfig()}, r"got 'dense' \(implied by Naive\(\)\) with"),
        ({"correction": Bypass(), "eviction_coef": 1.0}, r"got 'dense' \(implied by Bypass\(\)\) and None"),
        (
            {"correction": Naive(), "dense_learner": DenseLearner(0.5)},
            r"got 'dense' \(implied by Naive\(\)\), 1.0",
        ),
    ],
)
def test_invalid_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        UpdateConfig(**options)


def test_missing_sampler_logprobs_raise():
    data = batch().replace(trajectory=trajectory().replace(logprobs=None))
    with pytest.raises(ValueError, match="expected the sampler's log-probabilities in the trajectory.*got None"):
        metrics_and_gradients(UpdateConfig(visibility="dense", correction=TIS("sequence")), data)
