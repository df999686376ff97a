"""Mixtures of experts: routing is recorded by the sampler and replayed by the learner, under eviction."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from inspect import unwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.config import Experts, ModelConfig
from smd_jax.devices.sharding import make_mesh, shard_tree
from smd_jax.learner.forward import replay
from smd_jax.message.foreign import ExpertSizes
from smd_jax.message.masks import dense_mask, positions
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.decoder import Decoder
from smd_jax.model.mixture import gates_of
from smd_jax.model.shared_prompt import shared_prompt
from smd_jax.model.teacher_forced import apply_model
from smd_jax.sampler.config import RolloutConfig
from smd_jax.sampler.engine import Engine
from smd_jax.sampler.fixed_batch import rollout
from smd_jax.testing import random_params, tiny_model_config
from tests.under_test import POLICIES, left_padded, records_of

# The second layer has an MLP: what is recorded has an entry for each of the other two.
EXPERTS = Experts(count=6, per_token=2, intermediate_size=24, layers=(True, False, True))
CONFIG = replace(tiny_model_config(num_layers=3, qkv_bias=False, vocab_size=96, tie_embeddings=False), experts=EXPERTS)
SIZES = RolloutConfig(20, budget=10, buffer=6)
PROMPTS = left_padded([12, 5, 3], 12, 96)

replay_jitted = jax.jit(replay, static_argnums=0)
apply_jitted = jax.jit(apply_model, static_argnums=0)


@cache
def params_of(config: ModelConfig) -> Any:
    return random_params(config)


@cache
def sampled(config: ModelConfig, policy: str, sizes: RolloutConfig = SIZES) -> Trajectory:
    arguments: Any = {"policy": POLICIES[policy], "config": sizes, "group_size": 2}
    return rollout(Decoder(config), params_of(config), PROMPTS, jax.random.key(3), **arguments)


def gap(config: ModelConfig, trajectory: Trajectory) -> np.ndarray:
    """|log p_sampler - log p_learner| of the response tokens."""
    scores = replay_jitted(Decoder(config), params_of(config), trajectory)
    difference = np.abs(np.asarray(scores.logprobs) - np.asarray(trajectory.logprobs))
    return difference[np.asarray(trajectory.response_mask)]


def test_what_is_recorded():
    """An expert for every token that was read: all but padding and the last token of a response."""
    trajectory = sampled(CONFIG, "H2O")
    assert trajectory.routing is not None and trajectory.routing.dtype == jnp.int8
    assert trajectory.routing.shape == (6, 32, 2, 2)
    routing, valid = np.asarray(trajectory.routing), np.asarray(trajectory.valid)
    read = valid & np.pad(valid[:, 1:], [(0, 0), (0, 1)])
    assert (routing[~read] == -1).all() and (routing[read] >= 0).all() and routing.max() == 5
    assert (routing[read][..., 0] != routing[read][..., 1]).all()


@pytest.mark.slow
def test_the_replay_is_exact():
    """Where each layer has a budget of its own. (One budget: below.)"""
    assert gap(CONFIG, sampled(CONFIG, "Pyramid of H2O")).max() <= 2e-5


@pytest.mark.parametrize("chunk", [None, pytest.param(4, marks=pytest.mark.slow)])
def test_the_record_decides(chunk: int | None):
    """Other experts give other log-probabilities; a token without any chooses itself."""
    sizes = replace(SIZES, prefill_chunk=chunk)
    trajectory = sampled(CONFIG, "H2O", sizes)
    assert gap(CONFIG, trajectory).max() <= 2e-5 and trajectory.routing is not None
    other = trajectory.replace(routing=(trajectory.routing + 1) % 6)
    assert gap(CONFIG, other).max() > 1e-2
    nothing = trajectory.replace(routing=jnp.full_like(trajectory.routing, -1))
    assert gap(CONFIG, nothing).max() <= 2e-5, "in float32 the learner's router chooses the same"


@pytest.mark.slow
def test_the_engine_records_the_same():
    engine = Engine(Decoder(CONFIG), POLICIES["H2O"], SIZES, decode_rows=4, prefill_rows=2)
    found = engine.run(params_of(CONFIG), PROMPTS, jax.random.key(3), group_size=2).trajectory
    expected = sampled(CONFIG, "H2O")
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.routing, expected.routing)


@pytest.mark.slow
def test_without_routing_replay_bfloat16_goes_elsewhere():
    """Sampler and learner round at other places, so near ties go to other experts. Replayed, the largest difference is
    that of bfloat16 in a dense model; chosen again, some tokens are computed by another expert."""
    config = replace(CONFIG, dtype="bfloat16", experts=Experts(count=32, per_token=4, intermediate_size=24))
    trajectory = sampled(config, "H2O", replace(SIZES, max_new_tokens=60))
    replayed, chosen = gap(config, trajectory), gap(config, trajectory.replace(routing=None))
    assert replayed.max() < 0.1
    assert chosen.max() > 2 * replayed.max() and chosen.mean() > 1.2 * replayed.mean()


def test_gates_have_a_gradient_and_the_choice_none():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(5, 6)), jnp.float32)
    chosen = jnp.asarray([[0, 1], [2, 3], [4, 5], [1, 0], [5, 2]], jnp.int32)
    experts = Experts(count=6, per_token=2, intermediate_size=1)
    whole = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    shares = np.take_along_axis(whole, np.asarray(chosen), -1)
    np.testing.assert_allclose(gates_of(logits, chosen, replace(experts, normalised=False)), shares, rtol=1e-5)
    normalised = shares / shares.sum(-1, keepdims=True)
    np.testing.assert_allclose(gates_of(logits, chosen, experts), normalised, rtol=1e-5)
    gradient = jax.grad(lambda x: gates_of(x, chosen, experts)[:, 0].sum())(logits)
    there = np.abs(np.asarray(gradient)) > 0
    assert (there == (np.arange(6)[None, :, None] == np.asarray(chosen)[:, None]).any(-1)).all()


def test_rows_that_share_a_prompt():
    """The learner reads the prompt once, and its tokens still go where they went."""
    trajectory = sampled(CONFIG, "H2O")
    once = shared_prompt(Decoder(CONFIG), 2, trajectory.prompt_width)
    expected = replay_jitted(Decoder(CONFIG), params_of(CONFIG), trajectory).logprobs
    found = replay_jitted(once, params_of(CONFIG), trajectory).logprobs
    there = np.asarray(trajectory.response_mask)
    np.testing.assert_allclose(np.asarray(found)[there], np.asarray(expected)[there], atol=2e-5)


@pytest.mark.parametrize("tensor", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_experts_over_the_tensor_axis(tensor: int):
    """Shared by two devices; by four they cannot be, and each has all."""
    batch = left_padded([12, 12, 5, 3], 12, 96)
    mask, places = dense_mask(batch.valid), positions(batch.valid)
    params = params_of(CONFIG)
    expected = apply_jitted(Decoder(CONFIG), params, batch.tokens, places, mask)
    mesh = make_mesh(data=2, fsdp=4 // tensor, tensor=tensor)
    with jax.set_mesh(mesh):
        sharded = shard_tree(params, mesh)
        found = apply_jitted(Decoder(CONFIG), sharded, batch.tokens, places, mask)
    part = sharded["layers_0"]["mlp"]["experts"]["gate_proj"].addressable_shards[0].data.shape
    assert part[0] == (3 if tensor == 2 else 6)
    there = np.asarray(batch.valid)
    np.testing.assert_allclose(np.asarray(found)[there], np.asarray(expected)[there], atol=2e-5)


# --- routing of other engines

FOREIGN = ExpertSizes(layers=2, count=6, per_token=2)


def records(trajectory: Trajectory) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The arguments of `from_records` for these rows, and the routing of their tokens."""
    rows = zip(np.asarray(trajectory.routing), np.asarray(trajectory.valid), strict=True)
    return records_of(trajectory), [routing[valid].astype(np.int32) for routing, valid in rows]


def from_engine(trajectory: Trajectory) -> Trajectory:
    arguments, routed = records(trajectory)
    return Trajectory.from_records(**arguments, routed_experts=routed, experts=FOREIGN)


@pytest.mark.parametrize("form", ["vllm", "vllm without the last", "sglang", "tunix"])
def test_every_form_is_taken(form: str):
    trajectory = sampled(CONFIG, "H2O")
    arguments, routed = records(trajectory)
    forms = {
        "vllm": lambda x: x,
        "vllm without the last": lambda x: x[:-1],
        "sglang": lambda x: x[:-1].reshape(-1),
        "tunix": lambda x: np.pad(x, [(0, 5), (0, 0), (0, 0)], constant_values=-1),
    }
    given = [forms[form](x) for x in routed]
    found = Trajectory.from_records(**arguments, routed_experts=given, experts=FOREIGN)
    np.testing.assert_array_equal(found.routing, trajectory.routing)
    plain: Any = tuple(FOREIGN)
    again = unwrap(Trajectory.from_records)(Trajectory, **arguments, routed_experts=given, experts=plain)
    np.testing.assert_array_equal(again.routing, trajectory.routing)
    assert again.expert_count == found.expert_count
    assert gap(CONFIG, found).max() <= 2e-5


def changed(routed: np.ndarray, place: Any, value: Any) -> np.ndarray:
    copy = routed.copy()
    copy[place] = value
    return copy


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:-2], "of 32 tokens, or of 31 without the last; got 30 in row 0"),
        (lambda x: np.concatenate([x, x[:1]]), "of 32 tokens, or of 31 without the last; got 33 in row 0"),
        (lambda x: x[:, :1], r"of 2 layers and 2 experts; got \(32, 1, 2\) in row 0"),
        (lambda x: x[..., :1], r"of 2 layers and 2 experts; got \(32, 2, 1\) in row 0"),
        (lambda x: x.astype(np.float32), "as integers; got float32 in row 0"),
        (lambda x: changed(x, (3, 1, 0), 6), "from 0 to 5, or -1; got 6 in row 0, token 3, layer 1"),
        (lambda x: changed(x, (3, 1), (4, 4)), r"2 different experts.*got \[4, 4\] in row 0, token 3, layer 1"),
        (lambda x: changed(x, (3, 1), (4, -1)), r"2 different experts.*got \[4, -1\] in row 0, token 3, layer 1"),
    ],
)
def test_foreign_routing_that_does_not_fit(change: Any, message: str):
    arguments, routed = records(sampled(CONFIG, "H2O"))
    with pytest.raises(ValueError, match=message):
        Trajectory.from_records(**arguments, routed_experts=[change(routed[0]), *routed[1:]], experts=FOREIGN)


def test_routing_of_another_model():
    trajectory = sampled(CONFIG, "H2O")
    assert trajectory.routing is not None
    dense = replace(CONFIG, experts=None)
    with pytest.raises(ValueError, match="expected no routing, because the model has no experts; got one of shape"):
        replay(Decoder(dense), random_params(dense), trajectory)
    with pytest.raises(ValueError, match="of 2 layers with experts and 2 experts of a token; got 1 and 2"):
        replay(Decoder(CONFIG), params_of(CONFIG), trajectory.replace(routing=trajectory.routing[:, :, :1]))
    more = replace(CONFIG, experts=replace(EXPERTS, count=8))
    for of in (trajectory, from_engine(trajectory)):
        with pytest.raises(ValueError, match="expected routing of a model with 8 experts a layer; got 6"):
            replay(Decoder(more), random_params(more), of)
    arguments, routed = records(trajectory)
    with pytest.raises(ValueError, match="expected experts and routed_experts together; got experts=None"):
        Trajectory.from_records(**arguments, routed_experts=routed)
    with pytest.raises(ValueError, match="expected routed_experts of 6 rows; got 5"):
        Trajectory.from_records(**arguments, routed_experts=routed[:-1], experts=FOREIGN)
