"""The identity: under the recorded mask the learner's probabilities equal the sampler's, for every policy.

Budgets are far below the length, prompts have unequal lengths, and rows end at different times. A dense learner and
masks that are nearly right must miss.
"""

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.config import ModelConfig
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.message.masks import NEVER, ShadowMask
from smd_jax.message.sampling import SamplingConfig
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.decoder import Decoder
from smd_jax.sampler.fixed_batch import RolloutConfig, rollout
from tests.under_test import POLICIES, POLISHED, SHAPES, gap, left_padded, make_params, polished_rollout, replay_jitted

WIDTH, RESPONSE = 12, 256
LENGTHS = [12, 5, 9, 3, 12, 1, 7, 12, 2, 12, 4, 11]
KEY = 143
# One of 768 tokens: some rows end early, others never.
SMALL = RolloutConfig(
    max_new_tokens=RESPONSE, budget=16, buffer=8, eos_token_id=7, sampling=SamplingConfig(temperature=0.9)
)
ODD = dataclasses.replace(SMALL, budget=11, buffer=5)

BY_POSITION = {"Recent", "StreamingLLM", "Protect of StreamingLLM"}
SELECTIVE = set(POLICIES) - {"Dense"} - BY_POSITION  # their masks differ between layers
PER_HEAD = SELECTIVE - {"TOVA"}  # and between heads


@cache
def roll(
    shape: ModelConfig, policy: EvictionPolicy, config: RolloutConfig, sampler: Callable[..., Trajectory] = rollout
) -> tuple[Decoder, Trajectory]:
    """Samples unequal prompts, and asserts that some rows end early and others do not."""
    model, prompts = Decoder(shape), left_padded(LENGTHS, WIDTH, shape.vocab_size)
    trajectory = sampler(model, make_params(shape), prompts, jax.random.key(KEY), policy=policy, config=config)
    lengths = np.asarray(trajectory.lengths())
    assert lengths.min() < RESPONSE == lengths.max(), f"choose another KEY: all or no rows end early, after {lengths}"
    return model, trajectory


def wrong_masks(mask: Any, name: str) -> dict[str, ShadowMask]:
    """Masks that are nearly right."""
    t = mask.evicted_at
    evicted = (t > 0) & (t < NEVER)
    masks = {
        "one query late": ShadowMask(jnp.where(evicted, t + 1, t)),
        "one query early": ShadowMask(jnp.where(evicted, t - 1, t)),
        "one key off": ShadowMask(jnp.concatenate([t[..., 1:], t[..., -1:]], axis=-1)),
    }
    if name in SELECTIVE:
        masks["the first layer's"] = ShadowMask(t[:, :1])
    if name in PER_HEAD:
        masks["the first head's"] = ShadowMask(t[:, :, :1])
    return masks


# One policy of every kind runs in MHA, with a budget and a buffer that divide neither each other nor the length.
IN_MHA = {"StreamingLLM", "SnapKV", "Random", "Pyramid of H2O"}
CASES = [(name, "MHA", ODD) if name in IN_MHA else (name, "GQA", SMALL) for name in POLICIES]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape", "config"), CASES, ids=[f"{name}-{shape}" for name, shape, _ in CASES])
def test_the_learner_replays_every_policy(name: str, shape: str, config: RolloutConfig):
    run = roll(SHAPES[shape], POLICIES[name], config)
    difference = gap(*run)
    assert len(difference) > RESPONSE and difference.max() <= 2e-5
    if not POLICIES[name].evicts:
        return
    assert gap(*run, run[-1].dense_mask()).max() > 1e-2
    for kind, mask in wrong_masks(run[-1].mask, name).items():
        assert gap(*run, mask).max() > 1e-2, f"the learner does not notice that the mask is {kind}"


EVICTING = [case for case in CASES if POLICIES[case[0]].evicts]
# By position, by attention, with budgets per layer; in both shapes.
QUICK = {"StreamingLLM", "H2O", "Pyramid of H2O"}


@pytest.mark.parametrize(
    ("name", "shape", "config"),
    [pytest.param(*case, marks=() if case[0] in QUICK else pytest.mark.slow) for case in EVICTING],
)
def test_masks_fit_their_segments(name: str, shape: str, config: RolloutConfig):
    """The learner's attention relies on this when it gathers keys, also in rows that ended early."""
    mask: Any = roll(SHAPES[shape], POLICIES[name], config)[-1].mask
    budgets = [segments.budget for segments in mask.segments]
    assert budgets == list(POLICIES[name].layer_budgets(config.budget, len(budgets)))
    assert {(s.first, s.length) for s in mask.segments} == {(WIDTH, config.buffer)}
    mask.with_segments(mask.segments)  # raises unless the mask fits its segments


ONE_LAYER = dataclasses.replace(SHAPES["GQA"], num_layers=1)


@pytest.mark.slow
def test_identity_with_compiler_optimizations():
    """Optimizations reorder sums; the other tests compile without them. For H2O see test_quantized_rollout.py."""
    model, trajectory = roll(ONE_LAYER, POLICIES["SnapKV"], SMALL, polished_rollout)
    params = make_params(model.config)
    program = replay_jitted.lower(model, params, trajectory).compile(POLISHED)
    difference = np.abs(np.asarray(program(params, trajectory).logprobs - trajectory.logprobs))
    assert difference[np.asarray(trajectory.response_mask)].max() <= 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["H2O", "RKV"])
def test_float64(name: str):
    """Both kinds of statistic, in one layer."""
    with jax.enable_x64(True):
        difference = gap(*roll(dataclasses.replace(ONE_LAYER, dtype="float64"), POLICIES[name], SMALL))
    assert difference.dtype == np.float64 and difference.max() <= 1e-10


def test_bfloat16():
    run = roll(dataclasses.replace(ONE_LAYER, dtype="bfloat16"), POLICIES["H2O"], SMALL)
    difference = gap(*run)
    print(f"H2O in bfloat16: mean |dlogp| {difference.mean():.1e}, max {difference.max():.1e}")
    assert difference.mean() <= 2e-2
    assert gap(*run, run[-1].dense_mask()).mean() > 3 * difference.mean()
