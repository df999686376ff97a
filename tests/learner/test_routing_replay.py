"""Mixtures of experts: routing is recorded by the sampler and replayed by the learner, under eviction."""

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

# The second layer is dense, so routing has two layers.
EXPERTS = Experts(count=6, per_token=2, intermediate_size=24, layers=(True, False, True))
CONFIG = replace(tiny_model_config(num_layers=3, qkv_bias=False, vocab_size=96, tie_embeddings=False), experts=EXPERTS)
SIZES = RolloutConfig(max_new_tokens=20, budget=10, buffer=6)
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


def differences(config: ModelConfig, trajectory: Trajectory) -> np.ndarray:
    """|log p_sampler - log p_learner| of the response tokens."""
    scores = replay_jitted(Decoder(config), params_of(config), trajectory)
    difference = np.abs(np.asarray(scores.logprobs) - np.asarray(trajectory.logprobs))
    return difference[np.asarray(trajectory.response_mask)]


def test_routing_is_recorded_for_every_token_read():
    """All but padding and the last token of a response."""
    trajectory = sampled(CONFIG, "H2O")
    assert trajectory.routing is not None and trajectory.routing.dtype == jnp.int8
    assert trajectory.routing.shape == (6, 32, 2, 2)
    routing, valid = np.asarray(trajectory.routing), np.asarray(trajectory.valid)
    read = valid & np.pad(valid[:, 1:], [(0, 0), (0, 1)])
    assert (routing[~read] == -1).all() and (routing[read] >= 0).all() and routing.max() == 5
    assert (routing[read][..., 0] != routing[read][..., 1]).all()


@pytest.mark.slow
def test_replay_is_exact_with_budgets_per_layer():
    assert differences(CONFIG, sampled(CONFIG, "Pyramid of H2O")).max() <= 2e-5


@pytest.mark.parametrize("chunk", [None, pytest.param(4, marks=pytest.mark.slow)])
def test_replay_uses_the_recorded_experts(chunk: int | None):
    """A token without a record, -1, uses the router's choice."""
    sizes = replace(SIZES, prefill_chunk=chunk)
    trajectory = sampled(CONFIG, "H2O", sizes)
    assert differences(CONFIG, trajectory).max() <= 2e-5 and trajectory.routing is not None
    other = trajectory.replace(routing=(trajectory.routing + 1) % 6)
    assert differences(CONFIG, other).max() > 1e-2
    unrecorded = trajectory.replace(routing=jnp.full_like(trajectory.routing, -1))
    assert differences(CONFIG, unrecorded).max() <= 2e-5, "in float32 the learner's router chooses the same"


@pytest.mark.slow
def test_engine_records_the_same_routing():
    engine = Engine(Decoder(CONFIG), POLICIES["H2O"], SIZES, decode_rows=4, prefill_rows=2)
    found = engine.run(params_of(CONFIG), PROMPTS, jax.random.key(3), group_size=2).trajectory
    expected = sampled(CONFIG, "H2O")
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.routing, expected.routing)


@pytest.mark.slow
def test_routing_replay_reduces_the_bfloat16_mismatch():
    """Sampler and learner round differently, so without replay near ties choose other experts. With replay the largest
    difference is that of a dense model in bfloat16."""
    config = replace(CONFIG, dtype="bfloat16", experts=Experts(count=32, per_token=4, intermediate_size=24))
    trajectory = sampled(config, "H2O", replace(SIZES, max_new_tokens=60))
    replayed, chosen = differences(config, trajectory), differences(config, trajectory.replace(routing=None))
    assert replayed.max() < 0.1
    assert chosen.max() > 2 * replayed.max() and chosen.mean() > 1.2 * replayed.mean()


def test_gate_values_and_gradients():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(5, 6)), jnp.float32)
    chosen = jnp.asarray([[0, 1], [2, 3], [4, 5], [1, 0], [5, 2]], jnp.int32)
    experts = Experts(count=6, per_token=2, intermediate_size=1)
    whole = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    shares = np.take_along_axis(whole, np.asarray(chosen), -1)
    np.testing.assert_allclose(gates_of(logits, chosen, replace(experts, normalised=False)), shares, rtol=1e-5)
    normalised = shares / shares.sum(-1, keepdims=True)
    np.testing.assert_allclose(gates_of(logits, chosen, experts), normalised, rtol=1e-5)
    gradient = jax.grad(lambda x: gates_of(x, chosen, experts)[:, 0].sum())(logits)
    nonzero = np.abs(np.asarray(gradient)) > 0
    assert (nonzero == (np.arange(6)[None, :, None] == np.asarray(chosen)[:, None]).any(-1)).all()


def test_shared_prompt_replays_its_routing():
    trajectory = sampled(CONFIG, "H2O")
    once = shared_prompt(Decoder(CONFIG), 2, trajectory.prompt_width)
    expected = replay_jitted(Decoder(CONFIG), params_of(CONFIG), trajectory).logprobs
    found = replay_jitted(once, params_of(CONFIG), trajectory).logprobs
    valid = np.asarray(trajectory.response_mask)
    np.testing.assert_allclose(np.asarray(found)[valid], np.asarray(expected)[valid], atol=2e-5)


@pytest.mark.parametrize("tensor", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_experts_over_the_tensor_axis(tensor: int):
    """Two devices divide six experts; four do not, so each holds all six."""
    batch = left_padded([12, 12, 5, 3], 12, 96)
    mask, places = dense_mask(batch.valid), positions(batch.valid)
    params = params_of(CONFIG)
    expected = apply_jitted(Decoder(CONFIG), params, batch.tokens, places, mask)
    mesh = make_mesh(data=2, fsdp=4 // tensor, tensor=tensor)
    with jax.set_mesh(mesh):
        sharded = shard_tree(params, mesh)
        found = apply_jitted(Decoder(CONFIG), sharded, batch.tokens, places, mask)
    shard_shape = sharded["layers_0"]["mlp"]["experts"]["gate_proj"].addressable_shards[0].data.shape
    assert shard_shape[0] == (3 if tensor == 2 else 6)
    valid = np.asarray(batch.valid)
    np.testing.assert_allclose(np.asarray(found)[valid], np.asarray(expected)[valid], atol=2e-5)


# --- routing of other engines

FOREIGN_SIZES = ExpertSizes(layers=2, count=6, per_token=2)


def records(trajectory: Trajectory) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Arguments of `from_records`, and the routing of each row's tokens."""
    rows = zip(np.asarray(trajectory.routing), np.asarray(trajectory.valid), strict=True)
    return records_of(trajectory), [routing[valid].astype(np.int32) for routing, valid in rows]


def from_engine(trajectory: Trajectory) -> Trajectory:
    arguments, routed = records(trajectory)
    return Trajectory.from_records(**arguments, routed_experts=routed, experts=FOREIGN_SIZES)


@pytest.mark.parametrize("layout", ["vllm", "vllm without the last token", "sglang", "tunix"])
def test_from_records_accepts_every_engine_format(layout: str):
    trajectory = sampled(CONFIG, "H2O")
    arguments, routed = records(trajectory)
    layouts = {
        "vllm": lambda x: x,
        "vllm without the last token": lambda x: x[:-1],
        "sglang": lambda x: x[:-1].reshape(-1),
        "tunix": lambda x: np.pad(x, [(0, 5), (0, 0), (0, 0)], constant_values=-1),
    }
    given = [layouts[layout](x) for x in routed]
    found = Trajectory.from_records(**arguments, routed_experts=given, experts=FOREIGN_SIZES)
    np.testing.assert_array_equal(found.routing, trajectory.routing)
    plain: Any = tuple(FOREIGN_SIZES)
    again = unwrap(Trajectory.from_records)(Trajectory, **arguments, routed_experts=given, experts=plain)
    np.testing.assert_array_equal(again.routing, trajectory.routing)
    assert again.expert_count == found.expert_count
    assert differences(CONFIG, found).max() <= 2e-5


def with_entry(routed: np.ndarray, place: Any, value: Any) -> np.ndarray:
    copy = routed.copy()
    copy[place] = value
    return copy


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:-2], "of 32 tokens, or of 31 without the last; got 30 in row 0"),
        (lambda x: np.concatenate([x, x[:1]]), "of 32 tokens, or of 31 without the last; got 33 in row 0"),
        (lambda x: np.pad(x[:-1], ((1, 1), (0, 0), (0, 0)), constant_values=-1), "of row 0 from its first token on"),
        (lambda x: x[:, :1], r"of 2 layers and 2 experts; got \(32, 1, 2\) in row 0"),
        (lambda x: x[..., :1], r"of 2 layers and 2 experts; got \(32, 2, 1\) in row 0"),
        (lambda x: x.astype(np.float32), "as integers; got float32 in row 0"),
        (
            lambda x: with_entry(x.astype(np.uint64), (3, 1), 2**64 - 1),
            r"below 2\^63; got 18446744073709551615 \(routed_experts of row 0\)",
        ),
        (lambda x: with_entry(x, (3, 1, 0), 6), "from 0 to 5, or -1; got 6 in row 0, token 3, layer 1"),
        (lambda x: with_entry(x, (3, 1), (4, 4)), r"2 different experts.*got \[4, 4\] in row 0, token 3, layer 1"),
        (lambda x: with_entry(x, (3, 1), (4, -1)), r"2 different experts.*got \[4, -1\] in row 0, token 3, layer 1"),
    ],
)
def test_invalid_foreign_routing_raises(change: Any, message: str):
    arguments, routed = records(sampled(CONFIG, "H2O"))
    with pytest.raises(ValueError, match=message):
        Trajectory.from_records(**arguments, routed_experts=[change(routed[0]), *routed[1:]], experts=FOREIGN_SIZES)


def test_routing_of_another_model_raises():
    trajectory = sampled(CONFIG, "H2O")
    assert trajectory.routing is not None
    dense = replace(CONFIG, experts=None)
    with pytest.raises(ValueError, match="expected no routing, because the model has no experts; got one of shape"):
        replay(Decoder(dense), random_params(dense), trajectory)
    with pytest.raises(ValueError, match="of 2 layers with experts and 2 experts of a token; got 1 and 2"):
        replay(Decoder(CONFIG), params_of(CONFIG), trajectory.replace(routing=trajectory.routing[:, :, :1]))
    more = replace(CONFIG, experts=replace(EXPERTS, count=8))
    for recorded in (trajectory, from_engine(trajectory)):
        with pytest.raises(ValueError, match="expected routing of a model with 8 experts a layer; got 6"):
            replay(Decoder(more), random_params(more), recorded)
    arguments, routed = records(trajectory)
    with pytest.raises(ValueError, match="expected experts and routed_experts together; got experts=None"):
        Trajectory.from_records(**arguments, routed_experts=routed)
    with pytest.raises(ValueError, match="expected routed_experts of 6 rows; got 5"):
        Trajectory.from_records(**arguments, routed_experts=routed[:-1], experts=FOREIGN_SIZES)
