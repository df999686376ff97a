"""Policy losses against TRL (golden/losses.json, see golden/README.md), in microbatches, and under padding."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.losses.entropy import high_entropy_tokens, weighted_entropy
from smd_jax.losses.named import cispo, luspo, sapo
from smd_jax.losses.policy import LossConfig, LossInputs, policy_loss, surrogate_metrics
from smd_jax.losses.weighting import FixedLength, TokenMean
from smd_jax.ratios import Level
from tests import paths
from tests.loss_cases import EVERY_LOSS, LOSSES, NAMES, loss_and_gradient, loss_of

GOLDEN = json.loads((paths.GOLDEN / "losses.json").read_text(encoding="utf-8"))
LEVELS: dict[str, Level] = {"token": "token", "sequence": "geometric"}  # TRL's names and ours
TRL_MASK = jnp.arange(6)[None] < jnp.array(GOLDEN["inputs"]["lengths"])[:, None]


def config_of(case: dict) -> LossConfig:
    """Our configuration for TRL's, whose epsilon_high is the bound itself for cispo."""
    name = case["loss_type"]
    if name == "cispo":
        config = cispo(case["epsilon_high"] - 1, case["beta"])
    elif name == "sapo":
        config = sapo(case["sapo_temperature_pos"], case["sapo_temperature_neg"], case["beta"])
    elif name == "luspo":
        config = luspo(case["epsilon"], case["epsilon_high"], case["beta"])
    else:
        config = LOSSES[name](case["epsilon"], case["epsilon_high"], case["beta"], case["delta"])
    unbiased = case.get("use_bias_correction_kl", False)
    return replace(config, ratio_level=LEVELS[case["importance_sampling_level"]], use_bias_correction_kl=unbiased)


def golden_inputs(config: LossConfig, correction: str | None = None, old: bool = True, mask=TRL_MASK) -> LossInputs:
    arrays = {name: jnp.array(value) for name, value in GOLDEN["inputs"].items()}
    return LossInputs(
        logprobs=arrays["logprobs"],
        old_logprobs=arrays["old_logprobs" if old else "logprobs"],
        reference_logprobs=arrays["reference_logprobs"],
        advantages=arrays["advantages"],
        weights=config.weighting.weights(mask),
        correction_weights=None if correction is None else jnp.array(GOLDEN["corrections"][correction]),
    )


def default_config(name: str) -> LossConfig:
    """Configuration of the golden cases that vary the batch."""
    cases = (case["config"] for case in GOLDEN["losses"])
    plain = {"importance_sampling_level": "token", "correction": None, "beta": 0.1, "old": True}
    return config_of(next(case for case in cases if case["loss_type"] == name and plain.items() <= case.items()))


def assert_loss(inputs: LossInputs, config: LossConfig, loss, grad, rtol=1e-5) -> None:
    value, slopes = jax.value_and_grad(loss_of)(inputs.logprobs, inputs, config)
    np.testing.assert_allclose(value, loss, rtol=rtol)
    np.testing.assert_allclose(slopes, grad, rtol=rtol, atol=1e-8)


def case_id(case: dict) -> str:
    return "-".join(str(value) for value in case["config"].values())


@pytest.mark.parametrize("case", GOLDEN["losses"], ids=case_id)
def test_loss_gradient_and_metrics_match_trl(case):
    config = config_of(case["config"])
    inputs = golden_inputs(config, case["config"]["correction"], case["config"]["old"])
    assert_loss(inputs, config, case["loss"], case["grad"])
    metrics = surrogate_metrics(policy_loss(inputs, config)[1], TRL_MASK, config)
    for name, share in case["metrics"].items():
        np.testing.assert_allclose(metrics[name], share, rtol=1e-6, err_msg=name)


@NAMES
def test_truncated_completions_are_masked_as_in_trl(name):
    terminated = jnp.array([False, True, True, False])
    config = default_config(name)
    inputs = golden_inputs(config, mask=TRL_MASK & terminated[:, None])
    assert_loss(inputs, config, **GOLDEN["truncated"][name])


@NAMES
def test_accumulation_against_trl(name):
    """Two microbatches of a step. TRL's bnpo is the mean of the means over each; ours does not depend on the split."""
    expected = GOLDEN["accumulation"][name]
    config = default_config(name)
    inputs = golden_inputs(config)
    if name == "bnpo":
        halves = [TokenMean().weights(TRL_MASK[rows]) / 2 for rows in (slice(0, 2), slice(2, 4))]
        inputs = inputs.replace(weights=jnp.concatenate(halves))
        assert abs(policy_loss(golden_inputs(config), config)[0] - sum(expected["losses"])) > 0.01
    assert_loss(inputs, config, sum(expected["losses"]), expected["grad"])


@NAMES
def test_minibatches_against_trl(name):
    """Two steps of a rollout. TRL divides dapo and cispo by the mean tokens of a step, we by those of this step."""
    expected = GOLDEN["minibatches"][name]
    config = default_config(name)
    for index, rows in enumerate((slice(0, 2), slice(2, 4))):
        weights = config.weighting.weights(TRL_MASK[rows])
        if name in ("dapo", "cispo"):
            weights = weights * TRL_MASK[rows].sum() / (TRL_MASK.sum() / 2)
        inputs = jax.tree.map(lambda x, rows=rows: x[rows], golden_inputs(config)).replace(weights=weights)
        assert_loss(inputs, config, expected["losses"][index], expected["grad"][rows])


@pytest.mark.parametrize("case", GOLDEN["entropy"]["cases"], ids=case_id)
def test_entropy_terms_match_trl(case):
    """The bonus, and the policy loss of the tokens with the highest entropies."""
    config = config_of(case["config"])
    entropies = jnp.array(GOLDEN["entropy"]["entropies"])
    chosen = high_entropy_tokens(entropies, TRL_MASK, case["config"]["top_entropy_quantile"])
    inputs = golden_inputs(config).replace(correction_weights=chosen.astype(jnp.float32))

    def loss(logprobs, entropies):
        bonus = weighted_entropy(entropies, TokenMean().weights(chosen))
        return loss_of(logprobs, inputs, config) - case["config"]["entropy_coef"] * bonus

    value, slopes = jax.value_and_grad(loss, argnums=(0, 1))(inputs.logprobs, entropies)
    np.testing.assert_allclose(value, case["loss"], rtol=1e-5)
    np.testing.assert_allclose(slopes[0], case["grad"], rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(slopes[1], case["entropy_grad"], rtol=1e-5, atol=1e-8)


# --- invariance


def hard_inputs(config: LossConfig) -> LossInputs:
    """Weights and rejections differ between tokens."""
    inputs = golden_inputs(config, "token_truncate")
    assert inputs.correction_weights is not None
    counted = jnp.array(GOLDEN["corrections"]["token_mask"]) > 0
    return inputs.replace(correction_weights=jnp.where(counted, inputs.correction_weights, 0.0))


@EVERY_LOSS
def test_microbatches_change_nothing(config):
    inputs = hard_inputs(config)
    parts = [loss_and_gradient(jax.tree.map(lambda x, i=i: x[i : i + 1], inputs), config) for i in range(4)]
    whole = loss_and_gradient(inputs, config)
    np.testing.assert_allclose(sum(loss for loss, _ in parts), whole[0], rtol=1e-5)
    np.testing.assert_allclose(jnp.concatenate([grad for _, grad in parts]), whole[1], rtol=1e-6)


def padded(x, fill):
    """Three more columns on the right."""
    return jnp.pad(x, ((0, 0), (0, 3)), constant_values=fill)


@EVERY_LOSS
def test_padding_changes_nothing(config):
    """dr_grpo needs max_length, because its default is the columns of the mask."""
    weighting = FixedLength(6) if config.weighting == FixedLength() else config.weighting
    inputs = hard_inputs(config)
    wide = LossInputs(
        logprobs=padded(inputs.logprobs, jnp.nan),
        old_logprobs=padded(inputs.old_logprobs, jnp.nan),
        reference_logprobs=padded(inputs.reference_logprobs, jnp.nan),
        advantages=inputs.advantages,
        weights=weighting.weights(padded(TRL_MASK, False)),
        correction_weights=padded(inputs.correction_weights, jnp.nan),
    )
    one, other = loss_and_gradient(inputs, config), loss_and_gradient(wide, config)
    np.testing.assert_allclose(other[0], one[0], rtol=1e-5)
    np.testing.assert_allclose(other[1], padded(one[1], 0.0), rtol=1e-6)
