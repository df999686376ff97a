"""Packed rows of a model with experts: recorded routing is replayed, also in shared beginnings."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.packed import packs_of
from smd_jax.learner.packs import ABSENT
from smd_jax.learner.state import TrainBatch
from smd_jax.message.foreign import ExpertSizes
from smd_jax.message.tree import Branch, to_trajectory
from smd_jax.model.decoder import Decoder
from tests.learner.test_routing_replay import CONFIG, params_of, replay_jitted, sampled
from tests.tiny_update import assert_equal_steps, metrics_and_gradients

MODEL = Decoder(CONFIG)
ROWS, WIDTH, LENGTH = 6, 12, 20
PACKED = UpdateConfig(microbatch_size=1, pack_columns=64)
BRANCHES = UpdateConfig(microbatch_size=1, pack_columns=24, rows_per_prompt=2)
EXPERTS = ExpertSizes(layers=2, count=6, per_token=2)


@cache
def batch() -> TrainBatch:
    """Groups of two with one prompt. Nearly all recorded experts differ from the router's choice; some ratios are
    clipped on either side."""
    original = sampled(CONFIG, "H2O")
    assert original.routing is not None
    changed = original.replace(routing=jnp.where(original.routing < 0, original.routing, (original.routing + 1) % 6))
    rng = np.random.default_rng(0)
    logprobs = replay_jitted(MODEL, params_of(CONFIG), changed).logprobs
    difference = np.abs(logprobs - original.logprobs)[np.asarray(original.response_mask)]
    assert difference.max() > 1e-2, "the recorded experts must matter"
    old = logprobs + jnp.asarray(0.3 * rng.normal(size=logprobs.shape), jnp.float32)
    return TrainBatch(changed.replace(logprobs=logprobs), jnp.asarray(rng.normal(size=ROWS), jnp.float32), old)


def run_update(config: UpdateConfig, data: TrainBatch) -> Any:
    return metrics_and_gradients(config, data, model=MODEL, params=params_of(CONFIG))


@pytest.mark.parametrize("rows_per_prompt", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_update_matches_unpacked_rows(rows_per_prompt: int):
    expected = run_update(UpdateConfig(), batch())
    got = run_update(replace(PACKED, rows_per_prompt=rows_per_prompt), batch())
    assert (got[0].get("update/shared", 0) > 0.05) == (rows_per_prompt == 2)
    assert_equal_steps(got, expected, 6e-6)


def branches(rerouted: int | None) -> list[Branch]:
    """Two branches that share eight tokens; token `rerouted` of the second has different experts."""
    rng = np.random.default_rng(5)
    beginning, ends = rng.integers(0, 96, 8), rng.integers(0, 96, (2, 4))
    routed = np.argsort(rng.random((2, 12, 2, 6)), axis=-1)[..., :2]
    routed[1, :8] = routed[0, :8]
    if rerouted is not None:
        routed[1, rerouted] = (routed[0, rerouted] + 1) % 6
    sampled = np.arange(12) >= 5
    return [Branch([*beginning, *end], sampled, routed_experts=to) for end, to in zip(ends, routed, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(("rerouted", "shared"), [(None, 8), (6, 6), (0, 0)])
def test_branches_share_tokens_up_to_a_difference_of_experts(rerouted: int | None, shared: int):
    rows = to_trajectory(branches(rerouted), experts=EXPERTS, layers=1, kv_heads=1)
    packs = packs_of(rows, BRANCHES)
    assert (packs.tokens != ABSENT).sum() == 24 - shared
    data = TrainBatch(rows, jnp.asarray([1.0, -1.0]), None)
    assert_equal_steps(run_update(BRANCHES, data), run_update(UpdateConfig(), data), 6e-6)


def test_routing_of_only_some_branches_raises():
    first, second = branches(None)
    with pytest.raises(ValueError, match="expected routed_experts in all 2 branches or in none; got 1"):
        to_trajectory([first, replace(second, routed_experts=None)], experts=EXPERTS)
    with pytest.raises(ValueError, match="expected experts and routed_experts together; got experts=None"):
        to_trajectory([first, second])
