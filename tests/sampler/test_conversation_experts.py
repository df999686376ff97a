"""Conversations of a mixture of experts: the routing of every token that the model read is recorded and replayed."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.config import Experts
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.forward import response_hidden_and_router
from smd_jax.learner.state import TrainBatch, init_state
from smd_jax.learner.update import make_update
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.decoder import Decoder
from smd_jax.sampler.compaction import Compacted
from tests.sampler.test_compaction import compact
from tests.sampler.test_conversation import CONFIG, SHAPE, Scripted, sample_conversations
from tests.tiny_update import RECORD
from tests.under_test import gap, make_params

MIXTURE = replace(SHAPE, experts=Experts(count=6, per_token=2, intermediate_size=24, layers=(False, True)))
MODEL = Decoder(MIXTURE)
SIZES = replace(CONFIG, max_new_tokens=60)


@cache
def conversed(name: str, decode_rows: int | None = None) -> Trajectory:
    """Turns of several segments, and answers of several chunks."""
    return sample_conversations(name, Scripted(), SIZES, MODEL, decode_rows=decode_rows).trajectory


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SnapKV", "Dense", "H2O"])
def test_exact_over_turns(name: str):
    trajectory = conversed(name)
    assert (np.asarray(trajectory.turns()).max(axis=1) >= 3).sum() >= 2
    difference = gap(MODEL, trajectory)
    assert len(difference) > 60 and difference.max() <= 2e-5
    assert trajectory.routing is not None
    other = trajectory.replace(routing=jnp.where(trajectory.routing < 0, -1, (trajectory.routing + 1) % 6))
    assert gap(MODEL, other).max() > 1e-2, "the learner ignores the recorded routing"


@pytest.mark.slow
@pytest.mark.parametrize("decode_rows", [None, 2])
def test_routing_is_recorded_for_every_token_read(decode_rows: int | None):
    """It is the router's own choice, and -1 for padding and a row's last token."""
    trajectory = conversed("SnapKV", decode_rows)
    routing, valid = np.asarray(trajectory.routing), np.asarray(trajectory.valid)
    assert routing.dtype == np.int8 and routing.shape == (4, 70, 1, 2)
    read = valid & np.pad(valid[:, 1:], [(0, 0), (0, 1)])
    recorded = np.amin(routing, axis=(2, 3)) >= 0
    # A conversation may end with an answer that was read whole, or with a turn whose last token was not.
    assert (recorded >= read).all() and not (recorded & ~valid).any() and (routing[~recorded] == -1).all()
    sampled = np.asarray(trajectory.sampled)
    ends = sampled[:, :-1] & ~sampled[:, 1:] & valid[:, 11:]
    assert ends.sum() > 4 and recorded[:, 10:-1][ends].all(), "tokens that end a turn are read with the answer"
    read_jitted = jax.jit(response_hidden_and_router, static_argnums=0)
    _, router = read_jitted(MODEL, make_params(MIXTURE), trajectory, trajectory.mask)
    chosen = np.argsort(-np.asarray(router), axis=-1)[..., :2]
    np.testing.assert_array_equal(np.sort(routing[recorded]), np.sort(chosen[recorded]))


@cache
def compacted(policy: str) -> Compacted:
    return compact(MODEL, make_params(MIXTURE), policy, SIZES, seed=7)


def gradients_and_metrics(policy: str, config: UpdateConfig) -> tuple[Any, dict[str, Any]]:
    result = compacted(policy)
    state = init_state(jax.tree.map(jnp.copy, make_params(MIXTURE)), RECORD, jax.random.key(0))
    advantages = jnp.linspace(-1, 1, len(result.present))
    batch = TrainBatch(result.trajectory, advantages, None, jnp.asarray(result.present))
    state, metrics = make_update(MODEL, RECORD, config)(state, batch)
    return jax.device_get(state.opt_state), metrics


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["Dense", "SnapKV"])
def test_contexts_share_their_beginnings_in_packed_updates(policy: str):
    """Contexts replay exactly, and the packed update has the gradients of separate rows."""
    assert compacted(policy).present.sum() > 3 and gap(MODEL, compacted(policy).trajectory).max() <= 2e-5
    rows, metrics = gradients_and_metrics(policy, UpdateConfig())
    packed = UpdateConfig(microbatch_size=2, pack_columns=160, rows_per_prompt=2)
    packed_rows, shared = gradients_and_metrics(policy, packed)
    assert (shared["update/shared"] > 0) == (policy == "Dense"), "contexts with different evictions share no beginning"
    assert float(shared["loss"]) == pytest.approx(float(metrics["loss"]), abs=2e-5)
    scale = max(np.abs(x).max() for x in jax.tree.leaves(rows))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x / scale, y / scale, atol=2e-5), rows, packed_rows)
