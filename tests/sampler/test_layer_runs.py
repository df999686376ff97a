"""A model that loops over equal layers is the same policy as one with unrolled layers."""

import dataclasses
from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.config import Experts, ModelConfig
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.eviction.policies import H2O, Dense, LearnedGate, SnapKV, StreamingLLM
from smd_jax.eviction.wrappers import OnTokens, Pyramid
from smd_jax.learner.evictions import recorded_draws, replay_evictions
from smd_jax.learner.forward import replay
from smd_jax.message.gate import AttentionGate, add_gate
from smd_jax.message.quantization import QuantConfig
from smd_jax.message.spans import TokenSpans
from smd_jax.message.trajectory import Trajectory
from smd_jax.model import layer_runs
from smd_jax.model.decoder import Decoder
from smd_jax.model.layer_runs import LEAST, equal_runs
from smd_jax.model.lora import LORA, LoraConfig, add_lora
from smd_jax.model.stacked_params import stack_params, unstack_params
from smd_jax.sampler.engine import Engine
from smd_jax.sampler.fixed_batch import RolloutConfig, rollout
from smd_jax.sampler.static import Sampler
from smd_jax.testing import random_params, tiny_model_config
from tests.sampler.test_conversation import SHAPE as CONVERSATION_SHAPE
from tests.sampler.test_conversation import Scripted, sample_conversations
from tests.under_test import gap, left_padded, make_params

# Two layers form a loop here; more would only enlarge the unrolled programs.
SHAPE = tiny_model_config(vocab_size=40, num_layers=2, tie_embeddings=False)
# Two equal layers, and one with a window.
MIXED = dataclasses.replace(SHAPE, num_layers=3, sliding_windows=(None, None, 6))
EXPERTS = dataclasses.replace(MIXED, experts=Experts(count=4, per_token=2, intermediate_size=32))
LENGTHS, WIDTH = [12, 5, 9], 12
SIZES = RolloutConfig(max_new_tokens=20, budget=8, buffer=4, eos_token_id=7)
QUANTISED = dataclasses.replace(SIZES, quant=QuantConfig(bits=4, group=4))
SPANS = TokenSpans(open=3, close=4, summary=(5, 6))
CASES: dict[str, tuple[ModelConfig, EvictionPolicy, RolloutConfig]] = {
    "per head": (MIXED, H2O(), SIZES),
    "budgets": (SHAPE, Pyramid(H2O(), beta=4.0), SIZES),
    "gate": (SHAPE, LearnedGate(), SIZES),
    "attention gate": (SHAPE, LearnedGate(AttentionGate()), SIZES),
    "spans": (SHAPE, OnTokens(SPANS, inner=SnapKV(window=3)), SIZES),
    "experts": (EXPERTS, StreamingLLM(sinks=2), SIZES),
    "chunks, experts": (EXPERTS, SnapKV(window=3), dataclasses.replace(SIZES, prefill_chunk=5)),
    "quantised": (SHAPE, SnapKV(window=3), QUANTISED),
    "quantised, dense": (SHAPE, Dense(), QUANTISED),
}


@pytest.fixture(scope="module", autouse=True)
def short_loops() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_runs, "LEAST", 2)
        yield


def params_of(config: ModelConfig, policy: EvictionPolicy) -> Mapping[str, Any]:
    params = make_params(config)
    if policy.gate is None:
        return params
    sizes = {name: getattr(config, name) for name in ("num_layers", "num_kv_heads", "head_dim")}
    return add_gate(params, policy.gate, **sizes)


def sample(model: Decoder, params: Any, policy: EvictionPolicy, config: RolloutConfig) -> Trajectory:
    prompts = left_padded(LENGTHS, WIDTH, model.config.vocab_size)
    return rollout(model, params, prompts, jax.random.key(5), policy=policy, config=config, group_size=2)


def assert_equal(one: Trajectory, other: Trajectory) -> None:
    def check(x: jax.Array, y: jax.Array) -> None:
        np.testing.assert_allclose(x, y, atol=2e-5 if jnp.issubdtype(x.dtype, jnp.inexact) else 0)

    jax.tree.map(check, one, other)


QUICK = ("per head",)


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in CASES])
def test_a_looped_rollout_equals_an_unrolled_one(name: str):
    shape, policy, config = CASES[name]
    params = params_of(shape, policy)
    looped = Decoder(shape, scan_layers=True)
    expected = sample(Decoder(shape), params, policy, config)
    sampled = sample(looped, params, policy, config)
    assert_equal(sampled, expected)
    assert gap(looped, sampled, params=params).max() <= 2e-5
    if policy.gate is not None:
        draws = jax.jit(replay_evictions, static_argnums=0)(looped, params, sampled)
        np.testing.assert_allclose(draws, recorded_draws(sampled)[1].logprobs, atol=3e-5)


@pytest.mark.slow
def test_stacked_parameters_sample_the_same():
    params = make_params(SHAPE)
    looped = Decoder(SHAPE, scan_layers=True)
    stacked = stack_params(params, looped.shape.layer_runs)
    assert set(stacked) == {"embed", "layers_0_to_1", "norm", "lm_head"}
    expected = sample(Decoder(SHAPE), params, H2O(), SIZES)
    for model in (looped, Decoder(SHAPE)):
        assert_equal(sample(model, stacked, H2O(), SIZES), expected)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Dense(), SnapKV(window=3)])
def test_a_looped_engine_equals_an_unrolled_one(policy: EvictionPolicy):
    params, prompts = make_params(SHAPE), left_padded(LENGTHS, WIDTH, SHAPE.vocab_size)
    engines = [
        Engine(Decoder(SHAPE, scan_layers=scan), policy=policy, config=SIZES, decode_rows=2) for scan in (False, True)
    ]
    expected, looped = (each.run(params, prompts, jax.random.key(5)) for each in engines)
    assert_equal(looped.trajectory, expected.trajectory)


@pytest.mark.slow
def test_looped_conversations_equal_unrolled_ones():
    """Under a policy with recent queries and spans."""
    policy = OnTokens(SPANS, inner=SnapKV(window=3))
    expected, looped = (
        sample_conversations(policy, Scripted(), model=Decoder(CONVERSATION_SHAPE, scan_layers=scan), decode_rows=2)
        for scan in (False, True)
    )
    assert_equal(looped.trajectory, expected.trajectory)


def test_layers_with_equal_caches_form_a_run():
    sampler = Sampler(Decoder(MIXED, scan_layers=True), H2O(), SIZES, WIDTH)
    assert sampler.runs == (range(0, 2), range(2, 3))
    pyramid = Sampler(Decoder(SHAPE, scan_layers=True), Pyramid(H2O(), beta=4.0), SIZES, WIDTH)
    assert pyramid.runs == (range(0, 1), range(1, 2)), "budgets differ"
    assert Sampler(Decoder(SHAPE), H2O(), SIZES, WIDTH).runs == (range(0, 1), range(1, 2))


def test_equal_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layer_runs, "LEAST", LEAST)
    assert list(equal_runs("aaaabaaaaa")) == [range(0, 4), range(4, 5), range(5, 10)]
    assert list(equal_runs("aaab", first=2)) == [range(2, 3), range(3, 4), range(4, 5), range(5, 6)]


@partial(jax.jit, static_argnums=2)
@jax.grad
def gradients(params: Any, trajectory: Trajectory, model: Decoder) -> jax.Array:
    return replay(model, params, trajectory).logprobs.sum()


@cache
def unrolled() -> tuple[Any, Trajectory, Any]:
    """Parameters, a trajectory and its gradients, with unrolled layers."""
    params = add_lora(make_params(MIXED), LoraConfig(rank=2), jax.random.key(1))
    trajectory = sample(Decoder(MIXED), params, H2O(), SIZES)
    return params, trajectory, gradients(params, trajectory, Decoder(MIXED))


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "none", "dots"])
def test_looped_gradients_equal_unrolled_ones(remat: Any):
    """With stacked parameters, and once with separate ones: remat does not depend on the form."""
    params, trajectory, expected = unrolled()
    looped = Decoder(MIXED, scan_layers=True, remat=remat)
    stacked = stack_params(params, looped.shape.layer_runs)
    for form in (params, stacked) if remat == "full" else (stacked,):
        gradient = unstack_params(gradients(form, trajectory, looped))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-4, rtol=2e-4), gradient, expected)


def test_stacked_parameters_unstack_to_the_same():
    params = add_lora(make_params(MIXED), LoraConfig(rank=2), jax.random.key(1))
    runs = Decoder(MIXED, scan_layers=True).shape.layer_runs
    stacked = stack_params(params, runs)
    assert {name for name in stacked if name.startswith("layers")} == {"layers_0_to_1", "layers_2"}
    assert stacked[LORA].matrices["layers_0_to_1"]["attention"]["q_proj"]["lora_A"].shape == (2, 32, 2)
    assert stack_params(stacked, runs).keys() == stacked.keys()
    back = unstack_params(stacked)
    jax.tree.map(np.testing.assert_array_equal, back, params)
    assert jax.tree.structure(back) == jax.tree.structure(params)


@pytest.mark.slow
def test_layers_with_other_adapters_are_not_stacked():
    """PEFT's `layers_to_transform` leaves layers out."""
    params = add_lora(make_params(SHAPE), LoraConfig(rank=2), jax.random.key(1))
    matrices = {name: part for name, part in params[LORA].matrices.items() if name != "layers_1"}
    matrices = jax.tree.map(lambda x: x + 0.1 * jnp.ones_like(x), matrices)
    params[LORA] = params[LORA].replace(matrices=matrices)
    looped = Decoder(SHAPE, scan_layers=True)
    assert set(stack_params(params, looped.shape.layer_runs)[LORA].matrices) == set(matrices)
    assert_equal(sample(looped, params, H2O(), SIZES), sample(Decoder(SHAPE), params, H2O(), SIZES))


@pytest.mark.slow
def test_the_program_does_not_grow_with_the_depth():
    def size(layers: int, scan: bool) -> int:
        model = Decoder(dataclasses.replace(SHAPE, num_layers=layers), scan_layers=scan)
        params = jax.eval_shape(lambda: stack_params(random_params(model.config), model.shape.layer_runs))
        lowered = jax.jit(lambda params: sample(model, params, SnapKV(window=3), SIZES)).lower(params)
        return len(lowered.as_text())

    assert size(8, True) <= 1.05 * size(2, True)
    assert size(8, False) > 1.5 * size(2, False)
