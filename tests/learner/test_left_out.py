"""Rows that are left out may hold anything, and a batch in which nothing counts moves nothing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from smd_jax.corrections import OPSM, TIS, Bypass, Chain
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.dpo_update import DPOUpdateConfig, PairBatch, make_dpo_update
from smd_jax.learner.state import TrainBatch, TrainState, init_state
from smd_jax.learner.update import make_update
from smd_jax.losses.distillation import DistillConfig
from smd_jax.losses.policy import LossConfig
from smd_jax.losses.value import ValueConfig
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.value_head import add_value_head
from tests.tiny_update import LENGTH, MODEL, PARAMS, ROWS, WIDTH, batch, metrics_and_gradients, rows_of, trajectory

COUNTED = np.arange(ROWS) != 2


def with_row_two(x: Any, value: float) -> jax.Array:
    return jnp.asarray(x).at[2].set(value)


def critic_batch() -> TrainBatch:
    """Advantages, values and returns of tokens, as PPO has them."""
    rng = np.random.default_rng(4)
    numbers = [jnp.asarray(rng.normal(size=(ROWS, LENGTH)), jnp.float32) for _ in range(3)]
    return TrainBatch(trajectory(), numbers[0], trajectory().logprobs, None, *numbers[1:])


CASES = {
    "plain": UpdateConfig(),
    "responses": UpdateConfig(loss=LossConfig(ratio_level="geometric"), microbatch_size=4),
    "TIS": UpdateConfig(visibility="dense", correction=TIS()),
    "OPSM": UpdateConfig(visibility="dense", correction=Chain((TIS(), OPSM()))),
    "Bypass": UpdateConfig(visibility="dense", correction=Bypass()),
    "distill": UpdateConfig(distill=DistillConfig(direction="forward")),
    "critic": UpdateConfig(value=ValueConfig()),
}


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("case", CASES)
def test_a_row_that_is_left_out_may_hold_anything(case: str, value: float):
    """Advantages, log-probabilities, values and returns: the update is that of any other numbers there."""
    params = add_value_head(PARAMS, MODEL.config) if case == "critic" else PARAMS
    clean = critic_batch() if case == "critic" else batch()
    if CASES[case].correction.traits.uses_mismatch:
        clean = clean.replace(old_logprobs=trajectory().logprobs + 0.1)
    clean = clean.replace(counted_rows=jnp.asarray(COUNTED))
    dirty = clean.replace(
        advantages=with_row_two(clean.advantages, value),
        old_logprobs=with_row_two(clean.old_logprobs, value),
        trajectory=clean.trajectory.replace(logprobs=with_row_two(clean.trajectory.logprobs, value)),
    )
    if case == "critic":
        dirty = dirty.replace(old_values=with_row_two(clean.old_values, value))
        dirty = dirty.replace(returns=with_row_two(clean.returns, value))
    (expected, gradient), (found, other) = (
        metrics_and_gradients(CASES[case], data=data, params=params) for data in (clean, dirty)
    )
    assert found["update/skipped"] == 0 and expected["grad_norm"] > 0
    jax.tree.map(np.testing.assert_array_equal, other, gradient)
    for name, number in expected.items():
        np.testing.assert_array_equal(found[name], number, err_msg=name)


def test_an_advantage_that_counts_must_be_a_number():
    data = batch().replace(advantages=with_row_two(batch().advantages, np.nan))
    assert metrics_and_gradients(data=data)[0]["update/skipped"] == 1


def empty() -> Trajectory:
    """Rows without a response."""
    t = trajectory()
    mask = t.mask.replace(evicted_at=t.mask.evicted_at.at[..., WIDTH:].set(0), segments=())
    return t.replace(valid=t.valid.at[:, WIDTH:].set(False), mask=mask)


def moved(before: TrainState, after: TrainState) -> bool:
    both = zip(*(jax.tree.leaves((state.params, state.opt_state)) for state in (before, after)), strict=True)
    return not all(np.array_equal(a, b) for a, b in both)


def fresh_state(reference: bool) -> tuple[TrainState, TrainState]:
    """A state, and a copy for an update to take."""
    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    states = [
        init_state(jax.tree.map(jnp.copy, PARAMS), optimizer, jax.random.key(1), PARAMS if reference else None)
        for _ in range(2)
    ]
    return states[0], states[1]


@pytest.mark.slow
@pytest.mark.parametrize("distill", [None, DistillConfig(direction="forward")])
def test_empty_responses_move_nothing(distill: DistillConfig | None):
    """Neither do weight decay and an entropy bonus; and it is no skipped update."""
    config = UpdateConfig(distill=distill, entropy_coef=0.1)
    update = make_update(MODEL, optax.adamw(1e-2, weight_decay=0.1), config)
    before, taken = fresh_state(reference=False)
    after, metrics = update(taken, TrainBatch(empty(), batch().advantages, None))
    assert not moved(before, after) and after.step == 1 and metrics["update/skipped"] == 0
    again, _ = update(after, batch())
    assert moved(before, again)


def test_pairs_of_empty_responses_move_nothing():
    update = make_dpo_update(MODEL, optax.adamw(1e-2, weight_decay=0.1), DPOUpdateConfig())
    before, taken = fresh_state(reference=True)

    def pairs(of: Trajectory) -> PairBatch:
        chosen, rejected = (rows_of(of, slice(i, None, 2)) for i in range(2))
        return PairBatch(chosen, rejected, jnp.ones(ROWS // 2, bool))

    after, metrics = update(taken, pairs(empty()))
    assert not moved(before, after) and after.step == 1 and metrics["update/skipped"] == 0
    again, _ = update(after, pairs(trajectory()))
    assert moved(before, again)


def test_the_callers_key_and_reference_outlive_an_update():
    key = jax.random.key(5)
    reference = jax.tree.map(jnp.copy, PARAMS)
    optimizer = optax.sgd(0.1)
    state = init_state(jax.tree.map(jnp.copy, PARAMS), optimizer, key, reference)
    make_update(MODEL, optimizer, UpdateConfig())(state, batch())
    assert jax.random.key_data(jax.random.fold_in(key, 1)).shape == (2,)
    assert all(not x.is_deleted() for x in jax.tree.leaves((key, reference)))
