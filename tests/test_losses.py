"""The policy loss by hand, against a NumPy reference with numerical gradients, and against TRL's own loss.

`golden/make_losses.py` says how `golden/losses.json` was made and what stands in it.
"""

import json
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.losses.advantages import group_relative
from smd_jax.losses.policy import (
    LossConfig,
    LossInputs,
    LossType,
    k3,
    mask_truncated_completions,
    policy_loss,
    token_weights,
)

GOLDEN = json.loads((Path(__file__).parent / "golden" / "losses.json").read_text(encoding="utf-8"))
LOSS_TYPES = get_args(LossType)
MASK = jnp.array([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]], bool)  # 3, 1, 0 and 2 tokens


def one_token(ratio: float, advantage: float, weight: float = 1.0) -> LossInputs:
    """A single token with the given ratio of new to old probability."""
    old = jnp.log(jnp.full((1, 1), 0.25))
    return LossInputs(old + jnp.log(ratio), old, None, jnp.array([advantage]), jnp.array([[weight]]))


def loss_of(logprobs, inputs: LossInputs, config: LossConfig):
    return policy_loss(inputs.replace(logprobs=logprobs), config)[0]


def gradient(inputs: LossInputs, config: LossConfig):
    return jax.grad(loss_of)(inputs.logprobs, inputs, config)


# --- clipping


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        # d ratio / d log p = ratio, so where nothing is clipped the slope equals the loss
        (1.0, 2.0, -2.0, -2.0, ""),
        (1.1, 1.0, -1.1, -1.1, ""),
        (0.9, -3.0, 2.7, 2.7, ""),
        (1.5, 1.0, -1.2, 0.0, "high"),  # already likelier by more than epsilon: no more of it
        (1.5, -1.0, 1.5, 1.5, ""),  # likelier but bad: the way back is open
        (0.5, 1.0, -0.5, -0.5, ""),  # rarer but good: the way back is open
        (0.5, -1.0, 0.8, 0.0, "low"),
        (1.5, 0.0, 0.0, 0.0, ""),
    ],
)
def test_clipping_by_hand(ratio, advantage, loss, slope, clipped):
    inputs, config = one_token(ratio, advantage), LossConfig(epsilon=0.2)
    value, terms = policy_loss(inputs, config)
    np.testing.assert_allclose(value, loss, rtol=1e-6)
    np.testing.assert_allclose(gradient(inputs, config), [[slope]], rtol=1e-6)
    np.testing.assert_allclose(terms.ratio, [[ratio]], rtol=1e-6)
    assert (bool(terms.clipped_low[0, 0]), bool(terms.clipped_high[0, 0])) == (clipped == "low", clipped == "high")


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.5, 1.0, -1.5, -1.5),  # within 1 + 0.6
        (1.7, 1.0, -1.6, 0.0),
        (0.85, -1.0, 0.85, 0.85),
        (0.5, -1.0, 0.8, 0.0),  # the lower bound stays 1 - 0.2
    ],
)
def test_the_upper_bound_by_itself(ratio, advantage, loss, slope):
    inputs, config = one_token(ratio, advantage), LossConfig(epsilon=0.2, epsilon_high=0.6)
    np.testing.assert_allclose(policy_loss(inputs, config)[0], loss, rtol=1e-6)
    np.testing.assert_allclose(gradient(inputs, config), [[slope]], rtol=1e-6)


def test_bounds():
    assert LossConfig(epsilon=0.25).bounds == (0.75, 1.25)
    assert LossConfig(epsilon=0.25, epsilon_high=0.5).bounds == (0.75, 1.5)
    assert LossConfig("cispo", epsilon=0.25, epsilon_high=0.5).bounds == (0.0, 1.5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (2.5, -1.0, 2.5, 2.5),  # bad and likelier: PPO lets the ratio grow without a bound
        (3.5, -1.0, 3.0, 0.0),  # but not above delta
        (0.5, -1.0, 0.8, 0.0),
        (3.5, 1.0, -1.2, 0.0),  # the upper bound of a good token comes first
    ],
)
def test_the_dual_clip_by_hand(ratio, advantage, loss, slope):
    inputs, config = one_token(ratio, advantage), LossConfig(delta=3.0)
    np.testing.assert_allclose(policy_loss(inputs, config)[0], loss, rtol=1e-6)
    np.testing.assert_allclose(gradient(inputs, config), [[slope]], rtol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "clipped"),
    [(0.1, 1.0, 0.1, False), (0.1, -1.0, 0.1, False), (1.5, 2.0, 1.5, False), (4.0, 2.0, 3.0, True)],
)
def test_cispo_by_hand(ratio, advantage, weight, clipped):
    """The clipped ratio weighs the token's log-probability and has no gradient itself."""
    inputs, config = one_token(ratio, advantage), LossConfig("cispo", epsilon_high=2.0)
    value, terms = policy_loss(inputs, config)
    np.testing.assert_allclose(value, -weight * advantage * np.log(0.25 * ratio), rtol=1e-6)
    np.testing.assert_allclose(gradient(inputs, config), [[-weight * advantage]], rtol=1e-6)
    assert (bool(terms.clipped_low[0, 0]), bool(terms.clipped_high[0, 0])) == (False, clipped)


def test_the_ratio_of_a_sequence_by_hand():
    # Ratios 0.5 and 4.5, geometric mean 1.5; each token moves it by half. The third column is padding.
    old = jnp.log(jnp.array([[0.2, 0.1, 0.5]]))
    new = old + jnp.log(jnp.array([[0.5, 4.5, 7.0]]))
    inputs = LossInputs(new, old, None, jnp.array([-2.0]), jnp.array([[0.5, 0.5, 0.0]]))
    config = LossConfig("grpo", importance_sampling_level="sequence")
    value, terms = policy_loss(inputs, config)
    np.testing.assert_allclose(terms.ratio, [[1.5, 1.5, 1.0]], rtol=1e-6)
    np.testing.assert_allclose(value, 1.5 * 2, rtol=1e-6)
    np.testing.assert_allclose(gradient(inputs, config), [[1.5, 1.5, 0.0]], rtol=1e-6)
    good = inputs.replace(advantages=jnp.array([2.0]))
    np.testing.assert_allclose(policy_loss(good, config)[0], -1.2 * 2, rtol=1e-6)
    np.testing.assert_array_equal(gradient(good, config), np.zeros((1, 3)))
    np.testing.assert_array_equal(policy_loss(good, config)[1].clipped_high, [[True, True, False]])


# --- corrections


def corrected(weights) -> LossInputs:
    """Two tokens with ratios 1.1 and 0.9, advantage 1, and a reference half as likely."""
    old = jnp.log(jnp.full((1, 2), 0.25))
    new = old + jnp.log(jnp.array([[1.1, 0.9]]))
    weights = None if weights is None else jnp.array([weights])
    return LossInputs(new, old, new + jnp.log(0.5), jnp.array([1.0]), jnp.full((1, 2), 0.5), weights)


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize(
    ("weights", "factors"), [(None, [1, 1]), ([0.5, 3.0], [0.5, 3.0]), ([1.0, 0.0], [1, 0]), ([0.0, 3.0], [0, 3.0])]
)
def test_corrections_multiply_the_surrogate_and_not_the_kl(weights, factors, beta):
    inputs, config = corrected(weights), LossConfig(beta=beta)
    kl = 0.5 - 1 + np.log(2)
    value, terms = policy_loss(inputs, config)
    # The denominator stays 2 tokens, those of weight 0 included.
    np.testing.assert_allclose(value, beta * kl - 0.5 * (1.1 * factors[0] + 0.9 * factors[1]), rtol=1e-6)
    slopes = [0.5 * (beta * 0.5 - 1.1 * factors[0]), 0.5 * (beta * 0.5 - 0.9 * factors[1])]
    np.testing.assert_allclose(gradient(inputs, config), [slopes], rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(terms.ratio, [[1.1, 0.9]], rtol=1e-6)


def test_a_rejected_token_is_in_no_term_and_no_denominator():
    """Its weight in the loss is 0, and what stands there may be anything."""
    inputs = corrected([0.5, np.inf]).replace(weights=jnp.array([[1.0, 0.0]]))
    assert inputs.reference_logprobs is not None
    inputs = inputs.replace(reference_logprobs=jnp.where(inputs.weights > 0, inputs.reference_logprobs, -jnp.inf))
    config = LossConfig(beta=0.1)
    value, terms = policy_loss(inputs, config)
    np.testing.assert_allclose(value, 0.1 * (0.5 - 1 + np.log(2)) - 0.5 * 1.1, rtol=1e-6)
    assert gradient(inputs, config)[0, 1] == 0 and terms.kl[0, 1] == 0 and terms.ratio[0, 1] == 1


def test_no_gradient_flows_through_the_correction():
    inputs = corrected(None)
    both = jax.grad(lambda x: loss_of(x, inputs.replace(correction_weights=jnp.exp(x)), LossConfig()))
    fixed = inputs.replace(correction_weights=jnp.exp(inputs.logprobs))
    np.testing.assert_array_equal(both(inputs.logprobs), gradient(fixed, LossConfig()))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["bnpo", "cispo"])
def test_a_rejected_token_may_have_any_ratio(loss_type, level):
    """What a veto rejects is just what overflows: 200 nats."""
    inputs = corrected([2.0, 2.0]).replace(weights=jnp.array([[0.5 * (level == "token"), 0.0]]))
    inputs = inputs.replace(old_logprobs=inputs.old_logprobs.at[0, 1].add(-200.0))
    config = LossConfig(loss_type, importance_sampling_level=level)
    value, grad = jax.value_and_grad(loss_of)(inputs.logprobs, inputs, config)
    assert np.isfinite(value) and np.isfinite(grad).all()
    assert float(grad[0, 1]) == 0.0 and bool(grad[0, 0] != 0.0) == (level == "token")


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [-200.0, 200.0])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_kept_token_may_have_any_ratio(loss_type, level, log_ratio, advantage):
    """Also with a reference that is as far away on the other side."""
    inputs = one_token(1.0, advantage)
    inputs = inputs.replace(old_logprobs=inputs.logprobs - log_ratio, reference_logprobs=inputs.logprobs - log_ratio)
    config = LossConfig(loss_type, beta=0.1, importance_sampling_level=level)
    value, grad = jax.value_and_grad(loss_of)(inputs.logprobs, inputs, config)
    assert np.isfinite(value) and np.isfinite(grad).all()
    np.testing.assert_allclose(policy_loss(inputs, config)[1].ratio, np.exp(np.sign(log_ratio) * 20), rtol=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.7, 1.0, -1.7, -1.7, False),  # the bound is 1.2 * 1.5 = 1.8
        (2.0, 1.0, -1.8, 0.0, True),
        (2.0, -1.0, 2.0, 2.0, False),
        (0.5, -1.0, 0.8, 0.0, False),  # the lower bound stays
    ],
)
@pytest.mark.parametrize("delta", [None, 2.5])
def test_the_upper_bound_of_a_token_scaled(ratio, advantage, loss, slope, clipped, delta):
    inputs, config = one_token(ratio, advantage).replace(high_scale=jnp.array([[1.5]])), LossConfig(delta=delta)
    value, terms = policy_loss(inputs, config)
    np.testing.assert_allclose(value, loss, rtol=1e-6)
    np.testing.assert_allclose(gradient(inputs, config), [[slope]], rtol=1e-6)
    assert bool(terms.clipped_high[0, 0]) == clipped


def test_delta_bounds_bad_tokens_alone():
    """A scaled bound may be above it."""
    inputs, config = one_token(2.7, 1.0).replace(high_scale=jnp.array([[3.0]])), LossConfig(delta=2.5)
    np.testing.assert_allclose(policy_loss(inputs, config)[0], -2.7, rtol=1e-6)
    bad = inputs.replace(advantages=-inputs.advantages)
    np.testing.assert_allclose(policy_loss(bad, config)[0], 2.5, rtol=1e-6)


@pytest.mark.parametrize("config", [LossConfig("cispo"), LossConfig("grpo", importance_sampling_level="sequence")])
def test_only_the_ratio_of_a_token_has_a_scaled_bound(config):
    inputs = one_token(1.0, 1.0).replace(high_scale=jnp.ones((1, 1)))
    with pytest.raises(ValueError, match="expected a loss that clips the ratio of single tokens.*got"):
        policy_loss(inputs, config)


def test_rejected_tokens_are_not_counted_as_clipped():
    inputs = one_token(1.5, 1.0).replace(weights=jnp.zeros((1, 1)))
    assert not policy_loss(inputs, LossConfig())[1].clipped_high[0, 0]


# --- the KL to the reference


def test_k3_by_hand():
    # log ratio = log(reference / policy): exp(r) - 1 - r
    policy, reference = jnp.log(jnp.array([0.5, 0.25, 0.5])), jnp.log(jnp.array([0.25, 0.5, 0.5]))
    expected = [0.5 - 1 + np.log(2), 2 - 1 - np.log(2), 0.0]
    np.testing.assert_allclose(k3(policy, reference), expected, rtol=1e-5, atol=1e-7)


def test_the_mean_of_k3_over_the_policy_is_the_kl():
    policy, reference = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    estimate = np.asarray(k3(jnp.log(jnp.asarray(policy)), jnp.log(jnp.asarray(reference))))
    np.testing.assert_allclose((policy * estimate).sum(), (policy * np.log(policy / reference)).sum(), rtol=1e-5)


def test_beta_adds_the_kl_to_the_loss():
    inputs = one_token(1.0, 2.0, weight=0.5)
    inputs = inputs.replace(reference_logprobs=inputs.logprobs + jnp.log(0.5))
    value, terms = policy_loss(inputs, LossConfig(beta=0.1))
    kl = 0.5 - 1 + np.log(2)
    np.testing.assert_allclose(terms.kl, [[kl]], rtol=1e-5)
    np.testing.assert_allclose(value, 0.5 * (0.1 * kl - 2.0), rtol=1e-6)
    # d k3 / d log p = 1 - reference / policy
    np.testing.assert_allclose(gradient(inputs, LossConfig(beta=0.1)), [[0.5 * (0.1 * 0.5 - 2.0)]], rtol=1e-5)


def test_beta_needs_a_reference():
    with pytest.raises(ValueError, match="expected reference log-probabilities, because beta is 0.1; got None"):
        policy_loss(one_token(1.0, 1.0), LossConfig(beta=0.1))


# --- weights of tokens


def test_grpo_is_the_mean_over_sequences_of_means_over_tokens():
    third, half = 1 / 3, 1 / 2
    expected = np.array([[third, third, third, 0], [1, 0, 0, 0], [0, 0, 0, 0], [half, half, 0, 0]]) / 4
    np.testing.assert_allclose(token_weights(MASK, "grpo"), expected, rtol=1e-6)


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo", "cispo"])
def test_the_mean_over_tokens(loss_type):
    np.testing.assert_allclose(token_weights(MASK, loss_type), np.asarray(MASK) / 6, rtol=1e-6)


def test_dr_grpo_divides_by_a_constant():
    np.testing.assert_allclose(token_weights(MASK, "dr_grpo"), np.asarray(MASK) / (4 * 4), rtol=1e-6)
    np.testing.assert_allclose(token_weights(MASK, "dr_grpo", 10), np.asarray(MASK) / (4 * 10), rtol=1e-6)


@pytest.mark.parametrize(("loss_type", "length"), [("dr_grpo", 0), ("dapo", 4)])
def test_a_length_that_means_nothing(loss_type, length):
    with pytest.raises(ValueError, match=f"max_length >= 1, with dr_grpo alone; got {length} with {loss_type}"):
        token_weights(MASK, loss_type, length)


def test_truncated_completions_leave_the_mask():
    kept = mask_truncated_completions(MASK, jnp.array([False, True, True, True]))
    np.testing.assert_array_equal(kept, np.asarray(MASK) & np.array([[0], [1], [1], [1]], bool))
    assert float(token_weights(kept, "dapo")[3, 0]) == pytest.approx(1 / 3)
    assert float(token_weights(kept, "grpo")[3, 0]) == pytest.approx(1 / 2 / 4), "the row still counts"


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_batch_without_tokens_weighs_nothing(loss_type):
    np.testing.assert_array_equal(token_weights(jnp.zeros((2, 3), bool), loss_type), np.zeros((2, 3)))


# --- against NumPy


def reference_loss(logprobs, old, reference, advantages, weights, config: LossConfig) -> float:
    """The formula token by token, in float64."""
    low, high = 1 - config.epsilon, 1 + (config.epsilon if config.epsilon_high is None else config.epsilon_high)
    total = 0.0
    for row, column in np.argwhere(weights > 0):
        ratio = np.exp(logprobs[row, column] - old[row, column])
        log_ratio = reference[row, column] - logprobs[row, column]
        surrogate = min(ratio * advantages[row], min(max(ratio, low), high) * advantages[row])
        total += weights[row, column] * (config.beta * (np.exp(log_ratio) - 1 - log_ratio) - surrogate)
    return total


def random_arrays(seed: int):
    rng = np.random.default_rng(seed)
    old = -rng.exponential(1.0, (4, 4))
    # Ratios from 0.6 to 1.6: some clipped on either side, none at the kink itself.
    arrays = (old + rng.uniform(-0.5, 0.5, (4, 4)), old, old + rng.normal(0, 0.5, (4, 4)), rng.normal(0, 1, 4))
    return *arrays, np.asarray(token_weights(MASK, "grpo"), np.float64)


@pytest.mark.parametrize("config", [LossConfig(), LossConfig(epsilon=0.1, epsilon_high=0.4, beta=0.3)])
def test_loss_and_gradient_against_numerical_differences(config):
    for seed in range(3):
        arrays = random_arrays(seed)
        with jax.enable_x64(True):
            inputs = LossInputs(*map(jnp.asarray, arrays))
            loss, grad = jax.value_and_grad(loss_of)(inputs.logprobs, inputs, config)
            loss, grad = float(loss), np.asarray(grad)
        np.testing.assert_allclose(loss, reference_loss(*arrays, config), rtol=1e-12)
        numerical = np.zeros((4, 4))
        for place in np.ndindex(4, 4):
            step = np.zeros((4, 4))
            step[place] = 1e-6
            above, below = (reference_loss(arrays[0] + s, *arrays[1:], config) for s in (step, -step))
            numerical[place] = (above - below) / 2e-6
        np.testing.assert_allclose(grad, numerical, atol=1e-8)


def test_only_the_policy_has_a_gradient():
    inputs = LossInputs(*(jnp.asarray(x, jnp.float32) for x in random_arrays(0)))
    terms = jax.grad(lambda x: policy_loss(inputs.replace(logprobs=x), LossConfig(beta=1.0))[1].kl.sum())
    np.testing.assert_array_equal(terms(inputs.logprobs), np.zeros((4, 4)))


# --- outside the response


@pytest.mark.parametrize("junk", [np.inf, -np.inf, np.nan, 1e30, -1e4, 1e4])
@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "reference_logprobs"])
def test_what_lies_outside_the_mask_does_not_leak(name, junk):
    config = LossConfig(beta=0.1)
    clean = LossInputs(*(jnp.asarray(x, jnp.float32) for x in random_arrays(1)))
    before = {
        "logprobs": clean.logprobs,
        "old_logprobs": clean.old_logprobs,
        "reference_logprobs": clean.reference_logprobs,
    }
    dirty = clean.replace(**{name: jnp.where(MASK, before[name], junk)})
    (loss, terms), (clean_loss, clean_terms) = policy_loss(dirty, config), policy_loss(clean, config)
    assert float(loss) == float(clean_loss)
    jax.tree.map(np.testing.assert_array_equal, terms, clean_terms)
    np.testing.assert_array_equal(gradient(dirty, config), gradient(clean, config))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 0.0}, "expected 0 < epsilon < 1; got 0.0"),
        ({"epsilon": 1.0}, "expected 0 < epsilon < 1; got 1.0"),
        ({"epsilon_high": 0.0}, "expected epsilon_high > 0; got 0.0"),
        ({"beta": -0.1}, "expected beta >= 0; got -0.1"),
        ({"delta": 1.2}, "expected delta above the upper bound 1.2 of the ratio; got 1.2"),
        ({"delta": 1.4, "epsilon_high": 0.5}, "expected delta above the upper bound 1.5 of the ratio; got 1.4"),
        ({"delta": 4.0, "loss_type": "cispo"}, "expected delta None with loss_type 'cispo'.*; got 4.0"),
    ],
)
def test_bad_configurations(options, message):
    with pytest.raises(ValueError, match=message):
        LossConfig(**options)


# --- against TRL

TRL_MASK = jnp.arange(6)[None] < jnp.array(GOLDEN["inputs"]["lengths"])[:, None]


def config_of(case: dict) -> LossConfig:
    """Our configuration for TRL's: its epsilon_high is the bound itself where the loss is cispo."""
    names = ("loss_type", "epsilon", "epsilon_high", "beta", "importance_sampling_level", "delta")
    ours = {name: case[name] for name in names}
    if case["loss_type"] == "cispo":
        ours["epsilon_high"] -= 1
    return LossConfig(**ours)


def golden_inputs(loss_type: LossType, correction: str | None = None, old: bool = True, mask=TRL_MASK) -> LossInputs:
    arrays = {name: jnp.array(value) for name, value in GOLDEN["inputs"].items()}
    return LossInputs(
        logprobs=arrays["logprobs"],
        old_logprobs=arrays["old_logprobs" if old else "logprobs"],
        reference_logprobs=arrays["reference_logprobs"],
        advantages=arrays["advantages"],
        weights=token_weights(mask, loss_type),
        correction_weights=None if correction is None else jnp.array(GOLDEN["corrections"][correction]),
    )


def default_config(loss_type: LossType) -> LossConfig:
    """That of the golden cases which differ in their batches."""
    return LossConfig(loss_type, epsilon_high=0.28, beta=0.1)


def assert_loss(inputs: LossInputs, config: LossConfig, loss, grad, rtol=1e-5) -> None:
    value, slopes = jax.value_and_grad(loss_of)(inputs.logprobs, inputs, config)
    np.testing.assert_allclose(value, loss, rtol=rtol)
    np.testing.assert_allclose(slopes, grad, rtol=rtol, atol=1e-8)


def case_id(case: dict) -> str:
    return "-".join(str(value) for value in case["config"].values())


@pytest.mark.parametrize("case", GOLDEN["losses"], ids=case_id)
def test_loss_and_gradient_are_those_of_trl(case):
    config = case["config"]
    inputs = golden_inputs(config["loss_type"], config["correction"], config["old"])
    assert_loss(inputs, config_of(config), case["loss"], case["grad"])


@pytest.mark.parametrize("case", [case for case in GOLDEN["losses"] if case["metrics"]], ids=case_id)
def test_clipping_is_counted_as_in_trl(case):
    config = case["config"]
    inputs = golden_inputs(config["loss_type"], config["correction"], config["old"])
    terms = policy_loss(inputs, config_of(config))[1]
    for side, clipped in (("low", terms.clipped_low), ("high", terms.clipped_high)):
        # TRL counts sequences where the ratio belongs to a sequence.
        tokens = config["importance_sampling_level"] == "token"
        share = clipped.sum() / TRL_MASK.sum() if tokens else clipped[:, 0].mean()
        np.testing.assert_allclose(share, case["metrics"][f"clip_ratio/{side}_mean"], rtol=1e-6)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_truncated_completions_are_masked_as_in_trl(loss_type):
    terminated = jnp.array([False, True, True, False])
    inputs = golden_inputs(loss_type, mask=mask_truncated_completions(TRL_MASK, terminated))
    assert_loss(inputs, default_config(loss_type), **GOLDEN["truncated"][loss_type])


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_accumulation_against_trl(loss_type):
    """Two microbatches of a step. TRL's bnpo is the mean of the means over each; ours does not depend on the split."""
    expected = GOLDEN["accumulation"][loss_type]
    inputs = golden_inputs(loss_type)
    if loss_type == "bnpo":
        halves = [token_weights(TRL_MASK[rows], "bnpo") / 2 for rows in (slice(0, 2), slice(2, 4))]
        inputs = inputs.replace(weights=jnp.concatenate(halves))
        assert abs(policy_loss(golden_inputs("bnpo"), default_config("bnpo"))[0] - sum(expected["losses"])) > 0.01
    assert_loss(inputs, default_config(loss_type), sum(expected["losses"]), expected["grad"])


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_minibatches_against_trl(loss_type):
    """Two steps of a rollout. TRL divides dapo and cispo by the mean tokens of a step, we by those of this one."""
    expected = GOLDEN["minibatches"][loss_type]
    for index, rows in enumerate((slice(0, 2), slice(2, 4))):
        weights = token_weights(TRL_MASK[rows], loss_type)
        if loss_type in ("dapo", "cispo"):
            weights = weights * TRL_MASK[rows].sum() / (TRL_MASK.sum() / 2)
        inputs = jax.tree.map(lambda x, rows=rows: x[rows], golden_inputs(loss_type)).replace(weights=weights)
        assert_loss(inputs, default_config(loss_type), expected["losses"][index], expected["grad"][rows])


# --- invariance

EVERY_LOSS = pytest.mark.parametrize(
    "config",
    [LossConfig(t, beta=0.1, importance_sampling_level=level) for t in LOSS_TYPES for level in ("token", "sequence")],
    ids=lambda config: f"{config.loss_type}-{config.importance_sampling_level}",
)


def hard_inputs(loss_type: LossType) -> LossInputs:
    """With weights and rejections that differ from token to token."""
    inputs = golden_inputs(loss_type, "token_truncate")
    assert inputs.correction_weights is not None
    keep = jnp.array(GOLDEN["corrections"]["token_mask"]) > 0
    return inputs.replace(correction_weights=jnp.where(keep, inputs.correction_weights, 0.0))


def loss_and_gradient(inputs: LossInputs, config: LossConfig):
    return jax.value_and_grad(loss_of)(inputs.logprobs, inputs, config)


@EVERY_LOSS
@pytest.mark.parametrize("size", [1, 2])
def test_microbatches_change_nothing(config, size):
    inputs = hard_inputs(config.loss_type)
    starts = range(0, 4, size)
    parts = [loss_and_gradient(jax.tree.map(lambda x, i=i: x[i : i + size], inputs), config) for i in starts]
    whole = loss_and_gradient(inputs, config)
    np.testing.assert_allclose(sum(loss for loss, _ in parts), whole[0], rtol=1e-5)
    np.testing.assert_allclose(jnp.concatenate([grad for _, grad in parts]), whole[1], rtol=1e-6)


@EVERY_LOSS
def test_the_order_of_rows_changes_nothing(config):
    inputs, order = hard_inputs(config.loss_type), jnp.array([2, 0, 3, 1])
    shuffled = jax.tree.map(lambda x: x[order], inputs)
    shuffled = shuffled.replace(weights=token_weights(TRL_MASK[order], config.loss_type))
    one, other = loss_and_gradient(inputs, config), loss_and_gradient(shuffled, config)
    np.testing.assert_allclose(other[0], one[0], rtol=1e-5)
    np.testing.assert_allclose(other[1], one[1][order], rtol=1e-6)


def padded(x, fill):
    """Three more columns on the right."""
    return jnp.pad(x, ((0, 0), (0, 3)), constant_values=fill)


@EVERY_LOSS
def test_padding_changes_nothing(config):
    """dr_grpo must be told the longest response allowed: from the columns of the mask it cannot know."""
    length = 6 if config.loss_type == "dr_grpo" else None
    inputs = hard_inputs(config.loss_type)
    wide = LossInputs(
        logprobs=padded(inputs.logprobs, -jnp.inf),
        old_logprobs=padded(inputs.old_logprobs, jnp.nan),
        reference_logprobs=padded(inputs.reference_logprobs, 1e4),
        advantages=inputs.advantages,
        weights=token_weights(padded(TRL_MASK, False), config.loss_type, length),
        correction_weights=padded(inputs.correction_weights, jnp.nan),
    )
    one, other = loss_and_gradient(inputs, config), loss_and_gradient(wide, config)
    np.testing.assert_allclose(other[0], one[0], rtol=1e-5)
    np.testing.assert_allclose(other[1], padded(one[1], 0.0), rtol=1e-6)


@EVERY_LOSS
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_the_layout_of_groups_changes_nothing(config, scale):
    """Groups in another order, and completions in another order within theirs."""
    order = jnp.array([3, 2, 0, 1])
    rewards = jnp.array([0.0, 1.0, 0.25, 0.5])

    def layout(rows) -> LossInputs:
        inputs = jax.tree.map(lambda x: x[rows], hard_inputs(config.loss_type))
        weights = token_weights(TRL_MASK[rows], config.loss_type)
        return inputs.replace(advantages=group_relative(rewards[rows], 2, scale), weights=weights)

    one, other = loss_and_gradient(layout(jnp.arange(4)), config), loss_and_gradient(layout(order), config)
    np.testing.assert_allclose(other[0], one[0], rtol=1e-5)
    np.testing.assert_allclose(other[1], one[1][order], rtol=1e-5)
