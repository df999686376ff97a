"""Reference sync: by hand, in updates, and as an EMA teacher."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from smd_jax.devices.sharding import make_mesh, shard_tree
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.state import init_state
from smd_jax.learner.step import ReferenceSync, skip_step, synchronised, take_step
from smd_jax.learner.update import make_update
from smd_jax.losses.distillation import DistillConfig
from smd_jax.losses.policy import LossConfig
from smd_jax.testing import count_compilations
from tests import bigram_update, tiny_update

KEY = jax.random.key(0)
KL = LossConfig(beta=0.1)


def state_of(policy: float, reference: float, optimizer=None):
    params = {"w": jnp.full(3, policy)}
    return init_state(params, optimizer or optax.sgd(1.0), KEY, {"w": jnp.full(3, reference)})


def first_element(params: Any) -> float:
    return float(params["w"][0])


def test_skipped_step_still_syncs_the_reference():
    state = skip_step(state_of(2.0, 0.0).replace(step=jnp.int32(3)), ReferenceSync(0.5, 4))
    assert int(state.step) == 4 and first_element(state.reference) == 1.0
    assert first_element(skip_step(state, ReferenceSync(0.5, 4)).reference) == 1.0
    assert first_element(skip_step(state).params) == 2.0


def test_bfloat16_ema_moves():
    """Rounding to nearest would drop steps of a thousandth. After 1,000 of them 1/e of the distance remains."""
    policy, reference = ({"w": jnp.full(4096, value, jnp.bfloat16)} for value in (2.0, 1.0))
    state, sync = init_state(policy, optax.sgd(1.0), KEY, reference), ReferenceSync.ema(0.999)

    @jax.jit
    def run(state):
        return jax.lax.fori_loop(0, 1000, lambda i, each: synchronised(each.replace(step=i), sync), state)

    after = np.asarray(run(state).reference["w"], np.float64)
    # Neighbours between 1 and 2 are 2**-7 apart; the noise of 1000 roundings is at most half of that each.
    assert abs(after.mean() - (2 - 0.999**1000)) < 4 * 2.0**-8 * np.sqrt(1000 / after.size)


# --- in an update


def update_state(optimizer):
    """The reference equals the policy, so only the advantages give a gradient."""
    params = jax.tree.map(jnp.copy, bigram_update.PARAMS)
    return init_state(params, optimizer, jax.random.key(0), params)


def test_update_syncs_the_reference_after_its_step():
    optimizer = optax.adam(1e-2)
    config = UpdateConfig(loss=KL, reference_sync=ReferenceSync(0.3, 2))
    update = make_update(bigram_update.MODEL, optimizer, config)
    state = update_state(optimizer)
    expected = jax.tree.map(np.asarray, state.reference)
    kls = []
    with count_compilations() as counts:
        for step in range(1, 4):
            state, metrics = update(state, bigram_update.batch())
            kls.append(float(metrics["kl"]))
            if step % 2 == 0:
                expected = jax.tree.map(lambda new, old: 0.3 * np.asarray(new) + 0.7 * old, state.params, expected)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state.reference, expected)
    assert counts["update"] == 1
    assert kls[0] < 1e-9 < kls[1]


def test_ema_teacher_matches_an_anchor_with_the_same_parameters():
    moving = UpdateConfig(distill=DistillConfig(direction="ema", coef=0.5), reference_sync=ReferenceSync.ema(0.9))
    frozen = UpdateConfig(distill=DistillConfig(direction="anchor", coef=0.5))
    ema, anchor = (
        bigram_update.metrics_and_gradients(config, reference=bigram_update.REFERENCE) for config in (moving, frozen)
    )
    np.testing.assert_allclose(ema[0]["distill"], anchor[0]["distill"], rtol=1e-6)
    assert ema[0]["distill"] > 0.01
    assert tiny_update.distance(ema[1], anchor[1]) < 1e-6


def test_sync_keeps_the_sharding_of_the_reference():
    """Otherwise the next step would recompile and could not donate it."""
    mesh, optimizer, sync = make_mesh(2, 2, 2), optax.adam(1e-2), ReferenceSync(0.5, 2)
    state = shard_tree(update_state(optimizer), mesh)
    before = [x.sharding for x in jax.tree.leaves(state.reference)]
    step = jax.jit(lambda state: take_step(state, optimizer, state.params, sync)[0], donate_argnums=0)
    with jax.set_mesh(mesh):
        after = step(state)
    leaves = jax.tree.leaves(after.reference)
    assert all(x.sharding.is_equivalent_to(was, x.ndim) for x, was in zip(leaves, before, strict=True))
    assert not any(x.sharding.is_fully_replicated for x in leaves)
    assert all(x.is_deleted() for x in jax.tree.leaves(state.reference))


# --- invalid options


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ReferenceSync(0.0, 1), "expected 0 < alpha <= 1, the policy's share.*; got 0.0"),
        (lambda: ReferenceSync(1.5, 1), "expected 0 < alpha <= 1.*; got 1.5"),
        (lambda: ReferenceSync(0.5, 0), "expected every >= 1 optimizer steps; got 0"),
        (lambda: ReferenceSync.ema(1.0), "expected 0 <= decay < 1.*; got 1.0"),
        (lambda: UpdateConfig(reference_sync=ReferenceSync()), "expected beta > 0 or distillation in direction 'ema'"),
        (
            lambda: UpdateConfig(distill=DistillConfig(direction="anchor"), reference_sync=ReferenceSync()),
            "expected reference_sync None with distillation from the 'anchor', which is frozen",
        ),
        (lambda: UpdateConfig(distill=DistillConfig(direction="ema")), "reference_sync with direction 'ema'.*got None"),
    ],
)
def test_invalid_options_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_reference_with_other_leaves_raises():
    params, reference = {"w": jnp.ones(2), "head": jnp.ones(2)}, {"w": jnp.ones(2)}
    with pytest.raises(ValueError, match="expected reference parameters with the same leaves as the policy's"):
        synchronised(init_state(params, optax.sgd(1.0), KEY, reference), ReferenceSync())
