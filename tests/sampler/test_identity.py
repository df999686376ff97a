"""The first test of the library: under the recorded mask the learner gives the sampler's own probabilities again.

Every policy runs with a budget far below the length, most of them in GQA and one of every kind in MHA, in batches whose
prompts differ in length and whose rows end at different times; two layers, 256 response tokens. The same tests show
that they can fail: a dense learner, a mask that heads or layers share and a mask that is one column off all miss.
"""

from __future__ import annotations

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
from tests.under_test import (
    POLICIES,
    POLISHED,
    SHAPES,
    gap,
    left_padded,
    make_params,
    polished_rollout,
    replay_jitted,
)

WIDTH, RESPONSE = 12, 256
LENGTHS = [12, 5, 9, 3, 12, 1, 7, 12, 2, 12, 4, 11]
KEY = 143
# One of 768 tokens: some rows end early, others never.
SMALL = RolloutConfig(RESPONSE, budget=16, buffer=8, eos_token_id=7, sampling=SamplingConfig(temperature=0.9))
ODD = dataclasses.replace(SMALL, budget=11, buffer=5)

BY_POSITION = {"Recent", "StreamingLLM", "Protect of StreamingLLM"}
SELECTIVE = set(POLICIES) - {"Dense"} - BY_POSITION  # their masks differ between layers
PER_HEAD = SELECTIVE - {"TOVA"}  # and between heads


@cache
def roll(
    shape: ModelConfig, policy: EvictionPolicy, config: RolloutConfig, sampler: Callable[..., Trajectory] = rollout
) -> tuple[Decoder, Trajectory]:
    """A batch with unequal prompts, of which some rows end early and others do not: asserted, not hoped."""
    model, prompts = Decoder(shape), left_padded(LENGTHS, WIDTH, shape.vocab_size)
    trajectory = sampler(model, make_params(shape), prompts, jax.random.key(KEY), policy=policy, config=config)
    lengths = np.asarray(trajectory.lengths())
    assert lengths.min() < RESPONSE == lengths.max(), f"choose another KEY: all or no rows end early, after {lengths}"
    return model, trajectory


def spoiled(mask: Any, name: str) -> dict[str, ShadowMask]:
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


# One of every kind where heads share nothing, with a budget and a buffer that divide neither each other nor the length.
IN_MHA = {"StreamingLLM", "SnapKV", "Random", "Pyramid of H2O"}
FAR_BELOW = [(name, "MHA", ODD) if name in IN_MHA else (name, "GQA", SMALL) for name in POLICIES]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "config"), FAR_BELOW, ids=[f"{name}-{shape}" for name, shape, _ in FAR_BELOW]
)
def test_budget_far_below_the_length(name: str, shape: str, config: RolloutConfig):
    run = roll(SHAPES[shape], POLICIES[name], config)
    difference = gap(*run)
    assert len(difference) > RESPONSE and difference.max() <= 2e-5
    if not POLICIES[name].evicts:
        return
    assert gap(*run, run[-1].dense_mask()).max() > 1e-2
    for kind, mask in spoiled(run[-1].mask, name).items():
        assert gap(*run, mask).max() > 1e-2, f"the learner does not notice that the mask is {kind}"


KEEPING = [case for case in FAR_BELOW if POLICIES[case[0]].evicts]
# By position, by attention, with budgets of its own; and in both shapes.
QUICK = {"StreamingLLM", "H2O", "Pyramid of H2O"}


@pytest.mark.parametrize(
    ("name", "shape", "config"),
    [pytest.param(*case, marks=() if case[0] in QUICK else pytest.mark.slow) for case in KEEPING],
)
def test_masks_keep_to_their_segments(name: str, shape: str, config: RolloutConfig):
    """What the learner's attention relies on when it gathers keys: also in rows that ended long before the others."""
    mask: Any = roll(SHAPES[shape], POLICIES[name], config)[-1].mask
    budgets = [segments.budget for segments in mask.segments]
    assert budgets == list(POLICIES[name].layer_budgets(config.budget, len(budgets)))
    assert {(s.first, s.length) for s in mask.segments} == {(WIDTH, config.buffer)}
    mask.with_segments(mask.segments)  # raises otherwise


ONE_LAYER = dataclasses.replace(SHAPES["GQA"], num_layers=1)


@pytest.mark.slow
def test_compiled_as_for_users():
    """With the compiler's polish, which reorders sums; the other tests do without. (H2O is compiled so in
    tests/sampler/test_quantized_rollout.py.)"""
    model, trajectory = roll(ONE_LAYER, POLICIES["SnapKV"], SMALL, polished_rollout)
    params = make_params(model.config)
    program = replay_jitted.lower(model, params, trajectory).compile(POLISHED)
    difference = np.abs(np.asarray(program(params, trajectory).logprobs - trajectory.logprobs))
    assert difference[np.asarray(trajectory.response_mask)].max() <= 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["H2O", "RKV"])
def test_float64(name: str):
    """Both kinds of statistic. (What layers do to masks is the same in every precision.)"""
    with jax.enable_x64(True):
        difference = gap(*roll(dataclasses.replace(ONE_LAYER, dtype="float64"), POLICIES[name], SMALL))
    assert difference.dtype == np.float64 and difference.max() <= 1e-10


def test_bfloat16():
    run = roll(dataclasses.replace(ONE_LAYER, dtype="bfloat16"), POLICIES["H2O"], SMALL)
    difference = gap(*run)
    print(f"H2O in bfloat16: mean |dlogp| {difference.mean():.1e}, max {difference.max():.1e}")
    assert difference.mean() <= 2e-2
    assert gap(*run, run[-1].dense_mask()).mean() > 3 * difference.mean()
