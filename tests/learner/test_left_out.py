"""Uncounted rows do not affect the update; a batch without tokens leaves the state unchanged."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from smd_jax.corrections import OPSM, TIS, Bypass, Chain
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.state import TrainBatch, TrainState, init_state
from smd_jax.learner.update import make_update
from smd_jax.losses.distillation import DistillConfig
from smd_jax.losses.dpo import DPOConfig
from smd_jax.losses.policy import LossConfig
from smd_jax.losses.value import ValueConfig
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.value_head import add_value_head
from tests.tiny_update import LENGTH, MODEL, PARAMS, ROWS, WIDTH, batch, metrics_and_gradients, trajectory

COUNTED = np.arange(ROWS) != 2


def set_row_two(x: Any, value: float) -> jax.Array:
    return jnp.asarray(x).at[2].set(value)


def critic_batch() -> TrainBatch:
    """Per-token advantages, values and returns, as in PPO."""
    rng = np.random.default_rng(4)
    arrays = [jnp.asarray(rng.normal(size=(ROWS, LENGTH)), jnp.float32) for _ in range(3)]
    return TrainBatch(trajectory(), arrays[0], trajectory().logprobs, None, *arrays[1:])


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
def test_uncounted_row_does_not_change_the_update(case: str, value: float):
    """The row holds NaN or infinity in advantages, log-probabilities, values and returns."""
    params = add_value_head(PARAMS, MODEL.config) if case == "critic" else PARAMS
    clean = critic_batch() if case == "critic" else batch()
    if CASES[case].correction.traits.uses_mismatch:
        clean = clean.replace(old_logprobs=trajectory().logprobs + 0.1)
    clean = clean.replace(counted_rows=jnp.asarray(COUNTED))
    dirty = clean.replace(
        advantages=set_row_two(clean.advantages, value),
        old_logprobs=set_row_two(clean.old_logprobs, value),
        trajectory=clean.trajectory.replace(logprobs=set_row_two(clean.trajectory.logprobs, value)),
    )
    if case == "critic":
        dirty = dirty.replace(old_values=set_row_two(clean.old_values, value))
        dirty = dirty.replace(returns=set_row_two(clean.returns, value))
    (expected_metrics, expected), (metrics, gradients) = (
        metrics_and_gradients(CASES[case], data=data, params=params) for data in (clean, dirty)
    )
    assert metrics["update/skipped"] == 0 and expected_metrics["grad_norm"] > 0
    jax.tree.map(np.testing.assert_array_equal, gradients, expected)
    for name, number in expected_metrics.items():
        np.testing.assert_array_equal(metrics[name], number, err_msg=name)


def test_nan_advantage_of_a_counted_row_skips_the_update():
    data = batch().replace(advantages=set_row_two(batch().advantages, np.nan))
    assert metrics_and_gradients(data=data)[0]["update/skipped"] == 1


def empty_responses() -> Trajectory:
    """A trajectory whose responses have no tokens."""
    t = trajectory()
    mask = t.mask.replace(evicted_at=t.mask.evicted_at.at[..., WIDTH:].set(0), segments=())
    return t.replace(valid=t.valid.at[:, WIDTH:].set(False), mask=mask)


def state_changed(before: TrainState, after: TrainState) -> bool:
    leaves = zip(*(jax.tree.leaves((state.params, state.opt_state)) for state in (before, after)), strict=True)
    return not all(np.array_equal(a, b) for a, b in leaves)


def fresh_state(reference: bool) -> tuple[TrainState, TrainState]:
    """A state, and a copy to donate."""
    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    states = [
        init_state(jax.tree.map(jnp.copy, PARAMS), optimizer, jax.random.key(1), PARAMS if reference else None)
        for _ in range(2)
    ]
    return states[0], states[1]


@pytest.mark.slow
@pytest.mark.parametrize("distill", [None, DistillConfig(direction="forward")])
def test_empty_responses_leave_the_state_unchanged(distill: DistillConfig | None):
    """Weight decay and an entropy bonus are on; the update does not count as skipped."""
    config = UpdateConfig(distill=distill, entropy_coef=0.1)
    update = make_update(MODEL, optax.adamw(1e-2, weight_decay=0.1), config)
    before, donated = fresh_state(reference=False)
    after, metrics = update(donated, TrainBatch(empty_responses(), batch().advantages, None))
    assert not state_changed(before, after) and after.step == 1 and metrics["update/skipped"] == 0
    again, _ = update(after, batch())
    assert state_changed(before, again)


def test_pairs_of_empty_responses_leave_the_state_unchanged():
    update = make_update(MODEL, optax.adamw(1e-2, weight_decay=0.1), UpdateConfig(pairs=DPOConfig()))
    before, donated = fresh_state(reference=True)

    def pairs(rows: Trajectory) -> TrainBatch:
        return TrainBatch(rows, jnp.tile(jnp.array([1.0, -1.0]), ROWS // 2), None)

    after, metrics = update(donated, pairs(empty_responses()))
    assert not state_changed(before, after) and after.step == 1 and metrics["update/skipped"] == 0
    again, _ = update(after, pairs(trajectory()))
    assert state_changed(before, again)


def test_update_does_not_donate_the_callers_key_and_reference():
    key = jax.random.key(5)
    reference = jax.tree.map(jnp.copy, PARAMS)
    optimizer = optax.sgd(0.1)
    state = init_state(jax.tree.map(jnp.copy, PARAMS), optimizer, key, reference)
    make_update(MODEL, optimizer, UpdateConfig())(state, batch())
    assert jax.random.key_data(jax.random.fold_in(key, 1)).shape == (2,)
    assert all(not x.is_deleted() for x in jax.tree.leaves((key, reference)))
