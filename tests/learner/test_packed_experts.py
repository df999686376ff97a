"""Packed rows of a model with experts: tokens go to the recorded experts, also in shared beginnings."""

from __future__ import annotations

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
BRANCHES = UpdateConfig(microbatch_size=1, pack_columns=24)
EXPERTS = ExpertSizes(layers=2, count=6, per_token=2)


@cache
def batch() -> TrainBatch:
    """Groups of two that share a prompt. Nearly every token went to other experts than the router chooses, and the
    ratios are on both sides of the clipping."""
    drawn = sampled(CONFIG, "H2O")
    assert drawn.routing is not None
    moved = drawn.replace(routing=jnp.where(drawn.routing < 0, drawn.routing, (drawn.routing + 1) % 6))
    rng = np.random.default_rng(0)
    logprobs = replay_jitted(MODEL, params_of(CONFIG), moved).logprobs
    difference = np.abs(logprobs - drawn.logprobs)[np.asarray(drawn.response_mask)]
    assert difference.max() > 1e-2, "the record must decide"
    old = logprobs + jnp.asarray(0.3 * rng.normal(size=logprobs.shape), jnp.float32)
    return TrainBatch(moved.replace(logprobs=logprobs), jnp.asarray(rng.normal(size=ROWS), jnp.float32), old)


def stepped(config: UpdateConfig, of: TrainBatch) -> Any:
    arguments: Any = {"model": MODEL, "params": params_of(CONFIG), "share_beginnings": config == BRANCHES}
    return metrics_and_gradients(config, of, **arguments)


@pytest.mark.parametrize("rows_per_prompt", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_step_is_the_same(rows_per_prompt: int):
    expected = stepped(UpdateConfig(), batch())
    got = stepped(replace(PACKED, rows_per_prompt=rows_per_prompt), batch())
    assert (got[0].get("update/shared", 0) > 0.05) == (rows_per_prompt == 2)
    assert_equal_steps(got, expected, 6e-6)


def branches(other: int | None) -> list[Branch]:
    """Two branches that share eight tokens; in the second, the token `other` of them went to other experts."""
    rng = np.random.default_rng(5)
    beginning, ends = rng.integers(0, 96, 8), rng.integers(0, 96, (2, 4))
    routed = np.argsort(rng.random((2, 12, 2, 6)), axis=-1)[..., :2]
    routed[1, :8] = routed[0, :8]
    if other is not None:
        routed[1, other] = (routed[0, other] + 1) % 6
    sampled = np.arange(12) >= 5
    return [Branch([*beginning, *end], sampled, routed_experts=to) for end, to in zip(ends, routed, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(("other", "shared"), [(None, 8), (6, 6), (0, 0)])
def test_branches_share_tokens_of_the_same_experts(other: int | None, shared: int):
    rows = to_trajectory(branches(other), experts=EXPERTS, layers=1, kv_heads=1)
    packs = packs_of(rows, BRANCHES, share_beginnings=True)
    assert (packs.tokens != ABSENT).sum() == 24 - shared
    of = TrainBatch(rows, jnp.asarray([1.0, -1.0]), None)
    assert_equal_steps(stepped(BRANCHES, of), stepped(UpdateConfig(), of), 6e-6)


def test_branches_with_and_without_experts():
    one, other = branches(None)
    with pytest.raises(ValueError, match="expected routed_experts in all 2 branches or in none; got 1"):
        to_trajectory([one, replace(other, routed_experts=None)], experts=EXPERTS)
    with pytest.raises(ValueError, match="expected experts and routed_experts together; got experts=None"):
        to_trajectory([one, other])
