"""Sampled evictions: replay, Plackett-Luce log-probabilities, and gradients of the gate."""

import dataclasses
import itertools
import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.cache.compression import Compression, CompressionRecord, RowProgress
from smd_jax.cache.slots import EMPTY, LayerCache
from smd_jax.config import ModelConfig
from smd_jax.corrections.base import Naive
from smd_jax.eviction.policies import H2O, LearnedGate, Random
from smd_jax.eviction.wrappers import Protect
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.evictions import recorded_draws, replay_evictions
from smd_jax.learner.state import TrainBatch
from smd_jax.losses.policy import eviction_loss, eviction_weights
from smd_jax.message.draws import STAYED, ordered_logprob
from smd_jax.message.gate import EVICTION_GATE, KEPT, AttentionGate, Gate, LinearGate, add_gate
from smd_jax.message.masks import NEVER
from smd_jax.message.quantization import QuantConfig
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.attention import attend
from smd_jax.model.decoder import Decoder
from smd_jax.model.teacher_forced import layer_masks
from smd_jax.model.weights import save_checkpoint
from smd_jax.sampler.engine import Engine
from smd_jax.sampler.fixed_batch import RolloutConfig, rollout
from smd_jax.testing import tiny_model_config
from smd_jax.text.prompts import repeat_prompts
from tests.tiny_update import distance, metrics_and_gradients
from tests.under_test import SHAPES, gap, left_padded, make_params

WIDTH, RESPONSE = 12, 30
LENGTHS = [12, 5, 9, 3, 12, 1, 7, 12]
LIMITS = np.array([30, 4, 30, 17, 9, 30, 1, 30])  # some rows end within a segment, one with the first token
CONFIG = RolloutConfig(max_new_tokens=RESPONSE, budget=7, buffer=3, eos_token_id=7)
# Rounding of float32: sums over up to five draws, log-probabilities of up to ten nats.
BOUND = 3e-5

CASES: dict[str, tuple[ModelConfig, RolloutConfig]] = {
    "GQA": (dataclasses.replace(SHAPES["GQA"], sliding_windows=(9, None)), CONFIG),  # a window in the first layer
    "MHA": (dataclasses.replace(SHAPES["MHA"], num_layers=1), dataclasses.replace(CONFIG, budget=6, buffer=4)),
}

# The temperature is low enough that queries of random parameters prefer some keys.
GATES = {"linear": LinearGate(), "attention": AttentionGate(temperature=0.3)}


def with_gate(config: ModelConfig) -> dict[str, Any]:
    """Parameters with a gate whose logits are a few nats apart."""
    params = add_gate(
        make_params(config),
        LinearGate(),
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    keys = iter(jax.random.split(jax.random.key(5), config.num_layers))
    gate = jax.tree.map(lambda x: 0.5 * jax.random.normal(next(keys), x.shape, x.dtype), params[EVICTION_GATE])
    return {**params, EVICTION_GATE: gate}


def test_compute_params_leave_the_gate_in_float32():
    config = dataclasses.replace(SHAPES["GQA"], dtype="bfloat16")
    params = with_gate(config)
    converted = Decoder(config).compute_params(params)
    equal = jax.tree.map(
        lambda x, y: x.dtype == y.dtype and bool((x == y).all()), converted[EVICTION_GATE], params[EVICTION_GATE]
    )
    assert all(jax.tree.leaves(equal)) and any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(converted))


@cache
def roll_out(case: str, gate: str = "linear") -> tuple[Decoder, Any, Trajectory]:
    shape, config = CASES[case]
    model, params = Decoder(shape), with_gate(shape) if GATES[gate].has_parameters else make_params(shape)
    prompts = left_padded(LENGTHS, WIDTH, shape.vocab_size)
    key = jax.random.key(3)
    trajectory = rollout(model, params, prompts, key, policy=LearnedGate(GATES[gate]), config=config, limits=LIMITS)
    return model, params, trajectory


evictions_jitted = jax.jit(replay_evictions, static_argnums=0)


def differences(model: Decoder, params: Any, trajectory: Any) -> tuple[float, float]:
    """Largest |log p_sampler - log p_learner| of tokens and of evictions."""
    draws = np.abs(np.asarray(evictions_jitted(model, params, trajectory) - trajectory.evictions.logprobs))
    return float(gap(model, trajectory, params=params).max()), float(draws.max())


@pytest.mark.slow
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("case", CASES)
def test_identity(case: str, gate: str):
    """Covers unequal prompts, rows that end early, and compressions of prompts and responses."""
    model, params, trajectory = roll_out(case, gate)
    draws: Any = trajectory.evictions
    tokens, evictions = differences(model, params, trajectory)
    print(f"{case}: |dlogp| tokens {tokens:.1e}, evictions {evictions:.1e}")
    assert tokens <= 2e-5 and evictions <= BOUND
    counted = np.asarray(draws.counted(trajectory.valid))
    by_compression = np.moveaxis(np.asarray(draws.logprobs), 3, 1)
    assert (by_compression[counted] < -0.1).mean() > 0.5, "most draws must be uncertain"
    assert not by_compression[~counted].any() and counted.sum(axis=1).min() == 0
    shuffled = draws.replace(order=jnp.where(draws.order == STAYED, STAYED, -draws.order))
    assert differences(model, params, trajectory.replace(evictions=shuffled))[1] > 0.1, "the order must matter"
    moved = jax.tree.map(lambda x: 1.1 * x, {EVICTION_GATE: params[EVICTION_GATE]} if gate == "linear" else params)
    assert differences(model, {**params, **moved}, trajectory)[1] > 0.05, "the gate must matter"


def plackett_luce(logits: dict[int, float], evicted: list[int]) -> float:
    """Log-probability that these keys are evicted in this order, by the definition in float64."""
    weights = {key: math.exp(-logit) for key, logit in logits.items()}
    total = 0.0
    for key in evicted:
        total += math.log(weights[key] / sum(weights.values()))
        del weights[key]
    return total


def numpy_gate(kernel: np.ndarray, key: np.ndarray, value: np.ndarray, position: int, newest: int) -> float:
    features = np.concatenate([key, value, [1.0, math.log1p(position)]])
    constant, with_age = features @ kernel
    return float(constant + with_age * math.log1p(newest - position))


def numpy_attention(queries: np.ndarray, key: np.ndarray) -> float:
    """Mean over the query heads of a KV head, at temperature 0.3."""
    return float(np.mean([query @ key for query in queries]) / math.sqrt(len(key)) / 0.3)


class Recorder:
    """Attention that also returns queries, keys and values."""

    def __call__(self, q: Any, k: Any, v: Any, layer: Any, /) -> tuple[Any, Any]:
        return attend(q, k, v, layer, "reference"), (q, k, v)


@pytest.mark.parametrize("gate", GATES)
def test_recorded_logprobs_match_the_definition(gate: str):
    """Expected values follow from the mask, the order and the keys of a plain pass, in float64."""
    model, params, trajectory = roll_out("GQA", gate)
    t: Any = jax.tree.map(np.asarray, trajectory)
    masks = layer_masks(model.shape, trajectory.tokens, trajectory.mask)
    positions = model.encode_positions(trajectory.positions)
    _, states = jax.jit(model.hidden, static_argnums=3)(params, trajectory.tokens, positions, Recorder(), masks)
    checked = 0
    for row, layer, head in itertools.product(range(len(LENGTHS)), range(2), range(2)):
        queries, keys, values = (np.asarray(x[row], np.float64) for x in states[layer])
        queries, keys, values = queries.reshape(2, -1, *keys.shape[1:])[head], keys[head], values[head]

        evicted_at = t.mask.evicted_at[row, layer, head]
        order = t.evictions.order[row, layer, head]
        start, length = WIDTH - LENGTHS[row], int(t.valid[row].sum())
        end = start + length
        window = model.shape.window(layer) or NEVER
        for number, boundary in enumerate(range(WIDTH, WIDTH + RESPONSE, t.evictions.length)):
            recorded = t.evictions.logprobs[row, layer, head, number]
            if boundary + 1 >= end:
                assert recorded == 0, "no query follows"
                continue
            cached = [s for s in range(start, boundary) if evicted_at[s] >= boundary and s + window > boundary]
            evicted = sorted((s for s in cached if evicted_at[s] == boundary), key=lambda s: order[s])
            if gate == "linear":
                kernel = np.asarray(params[EVICTION_GATE][f"layers_{layer}"]["kernel"][head], np.float64)
                logits = {s: numpy_gate(kernel, keys[s], values[s], s - start, boundary - 1 - start) for s in cached}
            else:
                logits = {s: numpy_attention(queries[:, boundary - 1], keys[s]) for s in cached}
            assert len(cached) - len(evicted) <= 7 and all(order[s] >= 0 for s in evicted)
            assert abs(recorded - plackett_luce(logits, evicted)) <= BOUND
            checked += len(evicted)
    assert checked > 100


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_gradient_of_a_draw(scale: float):
    """Against finite differences; nothing overflows if logits are hundreds of nats apart."""
    logits, evicted = scale * np.array([0.3, -1.0, 2.0, 0.7, 9.0, -4.0]), [1, 3, 0]
    order = jnp.full(6, STAYED).at[jnp.asarray(evicted)].set(jnp.asarray([2, 5, 6]))
    candidate = jnp.asarray([True] * 5 + [False])

    def logprob(logits: np.ndarray) -> float:
        return plackett_luce(dict(enumerate(logits[:5])), evicted)

    expected = [(logprob(logits + step) - logprob(logits - step)) / 2e-4 for step in 1e-4 * np.eye(6)]
    gradient = jax.grad(ordered_logprob)(jnp.asarray(logits, jnp.float32), order, candidate, order != STAYED)
    np.testing.assert_allclose(gradient, expected, atol=1e-5)
    assert scale > 1 or np.abs(expected).max() > 0.5


def test_draw_frequencies_match_the_recorded_logprobs():
    """Two of four keys are evicted. The share of every ordered pair in 8,000 rows is within five standard deviations of
    its probability, and the recorded log-probability is that of the sampled order."""
    rows, logits = 8000, np.array([0.0, 1.0, -1.0, 0.5])
    kernel = np.zeros((1, 6, 2), np.float32)
    kernel[0, 0, 0] = 1.0  # a key's first channel is its logit
    slot_logits = jnp.asarray([7.0, *logits], jnp.float32)  # the first slot is empty
    keys = jnp.broadcast_to(jnp.stack([slot_logits, jnp.zeros(5)], -1), (rows, 1, 5, 2))
    columns = jnp.broadcast_to(jnp.asarray([EMPTY, 0, 1, 2, 3], jnp.int32), (rows, 1, 5))
    statistics = LearnedGate().statistics
    states = (jnp.zeros((rows, 1, 1, 2)),)  # the newest query, which a linear gate does not read
    cache = LayerCache(keys, jnp.zeros_like(keys), columns, states=states, statistics=statistics)
    zeros = jnp.zeros(rows, jnp.int32)
    progress = RowProgress(zeros, zeros + 3, zeros, zeros, jax.random.split(jax.random.key(0), rows))
    params = {EVICTION_GATE: {"layers_0": {"kernel": jnp.asarray(kernel)}}}

    def compressed(policy: LearnedGate) -> CompressionRecord:
        compression = Compression(policy, budget=2, buffer=1)
        own = compression.of_layers(params, range(1))
        return jax.jit(lambda cache: compression(cache, progress, jnp.int32(3), own)[1])(cache)

    record: Any = compressed(LearnedGate())
    dropped = np.asarray(record.dropped)[:, 0]
    assert (dropped[:, 0] == EMPTY).all(), "the empty slot is never drawn"
    for pair in itertools.permutations(range(4), 2):
        probability = math.exp(plackett_luce(dict(enumerate(logits)), list(pair)))
        drawn = (dropped[:, 1:] == pair).all(axis=1)
        assert abs(drawn.mean() - probability) <= 5 * math.sqrt(probability * (1 - probability) / rows)
        np.testing.assert_allclose(np.asarray(record.logprob)[drawn, 0], math.log(probability), atol=1e-5)
    greedy: Any = compressed(LearnedGate(greedy=True))
    assert (np.asarray(greedy.dropped) == [EMPTY, 0, 2]).all() and greedy.logprob is None


@pytest.mark.slow
@pytest.mark.parametrize("gate", GATES)
def test_engine_records_the_same_draws(gate: str):
    """With rows that start late, and prompt batches of other widths."""
    shape, config = CASES["MHA"]
    model, params, trajectory = roll_out("MHA", gate)
    prompts = left_padded(LENGTHS, WIDTH, shape.vocab_size)
    engine = Engine(model, LearnedGate(GATES[gate]), config, decode_rows=5, prefill_rows=3)
    result: Any = engine.run(params, prompts, jax.random.key(3), limits=LIMITS).trajectory
    draws: Any = trajectory.evictions
    np.testing.assert_array_equal(result.tokens, trajectory.tokens)
    np.testing.assert_array_equal(result.evictions.order >= 0, draws.order >= 0)
    np.testing.assert_allclose(result.evictions.logprobs, draws.logprobs, atol=BOUND)


def test_first_columns():
    """A narrower trajectory has only the draws before its last query."""
    _, _, trajectory = roll_out("GQA")
    draws: Any = trajectory.evictions
    short: Any = trajectory.first_columns(16).evictions
    assert short.boundaries.tolist() == [12, 15, 18, 21, 24, 27] and short.order.shape[-1] == 28
    np.testing.assert_array_equal(short.logprobs, draws.logprobs[..., :6])


MODEL = Decoder(tiny_model_config(vocab_size=32, max_positions=32, num_layers=1))


@cache
def batch(group_size: int = 2, gate: str = "linear") -> tuple[dict[str, Any], TrainBatch]:
    params = with_gate(MODEL.config) if GATES[gate].has_parameters else make_params(MODEL.config)
    prompts = repeat_prompts(left_padded([8, 5, 3, 8], 8, 32), 2 // group_size)
    config = RolloutConfig(max_new_tokens=8, budget=5, buffer=2, eos_token_id=5)
    key = jax.random.key(1)
    policy = LearnedGate(GATES[gate])
    trajectory = rollout(MODEL, params, prompts, key, policy=policy, config=config, group_size=group_size)
    advantages = jnp.asarray([1.0, -2.0, 0.5, 1.5, 0.1, 0.3, -1.0, 1.0])
    return params, TrainBatch(trajectory, advantages, trajectory.logprobs)


@pytest.mark.slow
@pytest.mark.parametrize(("group_size", "gate"), [(1, "linear"), (2, "linear"), (2, "attention")])
def test_gradient_matches_reinforce(group_size: int, gate: str):
    """The gradient of the definition: advantage times log p of each draw, over the number of tokens. The prompt's draw
    counts only in groups of one row."""
    params, data = batch(group_size, gate)
    t: Any = data.trajectory
    first = 0 if group_size == 1 else 1

    def expected(params: Any) -> Any:
        logprobs = replay_evictions(MODEL, params, t)[..., first:].sum(axis=(1, 2, 3))
        return -(data.advantages * logprobs).sum() / t.response_mask.sum()

    config = UpdateConfig(policy_coef=0.0, eviction_coef=2.0, microbatch_size=4)
    metrics, gradient = metrics_and_gradients(config, data=data, model=MODEL, params=params)
    assert distance(gradient, jax.tree.map(lambda x: 2 * x, jax.jit(jax.grad(expected))(params))) <= 1e-5
    assert metrics["evictions/logp_difference/max"] <= BOUND
    trained = gradient[EVICTION_GATE]["layers_0"] if gate == "linear" else gradient["layers_0"]["attention"]["q_proj"]
    assert np.linalg.norm(trained["kernel"]) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("gate", GATES)
def test_shared_prompts_give_the_same_gradients(gate: str):
    params, data = batch(gate=gate)
    by_row = UpdateConfig(eviction_coef=1.0, microbatch_size=4)
    (metrics, gradient), (shared_metrics, shared_gradient) = (
        metrics_and_gradients(config, data=data, model=MODEL, params=params)
        for config in (by_row, dataclasses.replace(by_row, rows_per_prompt=2))
    )
    assert distance(shared_gradient, gradient) <= 1e-5
    trained = EVICTION_GATE if gate == "linear" else "layers_0"
    assert distance(shared_gradient[trained], gradient[trained]) <= 1e-5
    assert shared_metrics["evictions/loss"] == pytest.approx(metrics["evictions/loss"], abs=1e-6)
    assert shared_metrics["evictions/logp_difference/max"] <= BOUND


@pytest.mark.slow
def test_rows_of_a_group_share_the_draw_of_their_prompt():
    """In groups of one row, each row has its own draw."""
    shared, own = (np.asarray(recorded_draws(batch(size)[1].trajectory)[1].logprobs) for size in (2, 1))
    np.testing.assert_array_equal(shared[::2, ..., 0], shared[1::2, ..., 0])
    assert (shared[::2, ..., 1] != shared[1::2, ..., 1]).any()
    assert (own[::2, ..., 0] != own[1::2, ..., 0]).any()


@pytest.mark.slow
@pytest.mark.parametrize("truncated", [False, True])
def test_a_shared_draw_has_no_gradient(truncated: bool):
    """Even if only some rows of the group count, whose advantages do not sum to zero."""
    params = with_gate(MODEL.config)
    sizes = RolloutConfig(max_new_tokens=4, budget=3, buffer=4, eos_token_id=None)  # only the prompt is compressed
    prompts, key = left_padded([8], 8, 32), jax.random.key(0)
    trajectory = rollout(MODEL, params, prompts, key, policy=LearnedGate(), config=sizes, group_size=4)
    assert (np.asarray(recorded_draws(trajectory)[1].logprobs) < -0.1).all()
    advantages = jnp.asarray([1.0, 1.0, -1.0, -1.0])
    config = UpdateConfig(policy_coef=0.0, eviction_coef=1.0, mask_truncated_completions=truncated)
    data = TrainBatch(trajectory.replace(terminated=advantages > 0), advantages, None)
    _, gradient = metrics_and_gradients(config, data=data, model=MODEL, params=params)
    assert not np.asarray(gradient[EVICTION_GATE]["layers_0"]["kernel"]).any()


def test_loss_by_hand():
    """Two rows, one draw each: a ratio of 1.5 is clipped to 1.2 only where the advantage is positive."""
    logprobs = jnp.log(jnp.asarray([1.5, 1.5])).reshape(2, 1, 1, 1)
    weights = eviction_weights(jnp.ones((2, 1), bool), jnp.ones((2, 4), bool))
    np.testing.assert_allclose(weights, 1 / 8)
    loss = eviction_loss(logprobs, jnp.zeros((2, 1, 1, 1)), jnp.asarray([1.0, -1.0]), weights)
    assert float(loss) == pytest.approx(-(1.2 - 1.5) / 8)
    nothing = eviction_weights(jnp.ones((2, 1), bool), jnp.zeros((2, 4), bool))
    assert not nothing.any()
    # Rows without weight may hold NaN.
    weights = eviction_weights(jnp.asarray([[True], [False]]), jnp.ones((2, 4), bool))
    bad = jnp.asarray([0.0, jnp.nan]).reshape(2, 1, 1, 1)
    loss, gradient = jax.value_and_grad(eviction_loss)(logprobs + bad, bad, jnp.asarray([1.0, jnp.nan]), weights)
    assert float(loss) == pytest.approx(-1.2 / 8) and np.isfinite(gradient).all()
    # The ratio of a compression of many draws may overflow float32.
    far = jnp.full((2, 1, 1, 1), 100.0)
    weights = eviction_weights(jnp.ones((2, 1), bool), jnp.ones((2, 4), bool))
    for advantage in (1.0, 0.0, -1.0):
        loss, gradient = jax.value_and_grad(eviction_loss)(far, -far, jnp.full(2, advantage), weights)
        assert np.isfinite(loss) and np.isfinite(gradient).all()


def test_fresh_gate_has_zero_logits():
    """So each of n candidates is evicted first with probability 1 / n."""
    gate = LinearGate()
    keys = jax.random.normal(jax.random.key(0), (1, 2, 3, 8))
    positions = jnp.arange(3).reshape(1, 1, 3)
    queries = jnp.ones((1, 2, 1, 8))
    assert not gate.logits(gate.init(2, 8, jnp.float32), keys, keys, positions, jnp.asarray([[2]]), queries).any()


def test_a_gate_without_logits_is_named():
    one = jnp.ones((1, 1, 1, 1))
    with pytest.raises(TypeError, match="Gate has no logits: its class must define them"):
        Gate().logits((), one, one, jnp.zeros((1, 1, 1), int), jnp.zeros((1, 1), int), one)


def test_sinks_of_a_gate_without_parameters():
    keys = jnp.ones((1, 1, 3, 4))
    positions, queries = jnp.arange(3).reshape(1, 1, 3), -jnp.ones((1, 2, 1, 4))
    gate = AttentionGate(sinks=1)
    logits = gate.keep_sinks(gate.logits((), keys, keys, positions, jnp.asarray([[2]]), queries), positions)
    np.testing.assert_array_equal(logits, [[[[KEPT, -2.0, -2.0]]]])
    params = make_params(MODEL.config)
    added = add_gate(params, AttentionGate(), num_layers=2, num_kv_heads=2, head_dim=8)
    assert added == params
    for wrong in (0.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="expected a positive, finite temperature"):
            AttentionGate(temperature=wrong)


def test_unsupported_options_are_refused(tmp_path: Any):
    params, data = batch()
    prompts = left_padded([8, 5, 3, 8], 8, 32)
    with pytest.raises(ValueError, match="without a gate"):
        add_gate(params, LinearGate(), num_layers=1, num_kv_heads=2, head_dim=8)
    quant = QuantConfig(bits=4, group=2)
    unsupported: list[dict[str, Any]] = [{"prefill_chunk": 4}, {"quant": quant}]
    for options in unsupported:
        with pytest.raises(ValueError, match=r"expected .* with LearnedGate, whose draws the learner recomputes"):
            config = RolloutConfig(max_new_tokens=4, budget=5, buffer=2, **options)
            rollout(MODEL, params, prompts, jax.random.key(0), policy=LearnedGate(), config=config)
    with pytest.raises(ValueError, match="expected visibility 'shadow' with an eviction_coef"):
        UpdateConfig(visibility="dense", eviction_coef=1.0, correction=Naive())
    with pytest.raises(ValueError, match="expected a finite eviction_coef >= 0; got -1"):
        UpdateConfig(eviction_coef=-1.0)
    with pytest.raises(ValueError, match="expected a trajectory with recorded draws of evictions"):
        without = data.replace(trajectory=data.trajectory.replace(evictions=None))
        metrics_and_gradients(UpdateConfig(eviction_coef=1.0), data=without, model=MODEL, params=params)
    with pytest.raises(ValueError, match=r"without eviction_gate, .*: smd.eviction.drop_gate\(params\)"):
        save_checkpoint(tmp_path / "with", params, MODEL.config)
    assert LearnedGate(greedy=True).gate is None and Protect(LearnedGate(), sinks=1).gate is None
    assert H2O().gate is None and Random().gate is None
