"""Sequence parallelism: results, memory and communication with the columns of a row on several devices."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lib.hlo import array_bytes, parse
from smd_jax.corrections.mismatch import TIS
from smd_jax.devices.sharding import (
    batch_sharding,
    constrain_tokens,
    make_mesh,
    over_heads,
    shard_tree,
    split_heads,
    tree_shardings,
)
from smd_jax.eviction.policies import StreamingLLM
from smd_jax.learner import blocks
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.forward import make_replay
from smd_jax.learner.state import TrainBatch, init_state
from smd_jax.learner.update import make_update
from smd_jax.memory.compiled import param_shapes
from smd_jax.message.masks import ShadowMask
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.decoder import Decoder
from smd_jax.sampler.fixed_batch import RolloutConfig
from smd_jax.sampler.records import segments_of
from smd_jax.testing import tiny_model_config
from smd_jax.train.evaluation import Decode, EvaluationConfig, Evaluator
from smd_jax.train.minibatches import LEAST_STEP, response_widths
from tests.devices.test_sharding import FULL, LENGTH, MODEL, ONE, PLAIN, ROWS, distance, updated
from tests.toy_loop import CONFIG, TASK, TOKENIZER, new_loop, new_state, own_loop, run, warm_params

SEQUENCE_HALVES = (1, 1, 1, 2)
MESSAGES = {"all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-permute"}
EVERY_AXIS = (1, 2, 2, 2)


def assert_same_gradients(got, expected, at_most: float = 1e-5):
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(got), strict=True):
        name = jax.tree_util.keystr(path)
        if "k_proj" in name and "bias" in name:
            continue  # zero up to rounding: softmax ignores a shift of all keys
        assert distance(y, x) < at_most, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "config"),
    [
        (EVERY_AXIS, FULL),  # with a teacher
        (SEQUENCE_HALVES, UpdateConfig(visibility="dense", correction=TIS(), entropy_coef=0.1)),
    ],
    ids=["every axis", "dense learner"],
)
def test_update_matches_single_device(sizes, config):
    (one, one_grads), (many, many_grads) = updated(ONE, config), updated(sizes, config)
    np.testing.assert_allclose(many["loss"], one["loss"], rtol=1e-6, atol=1e-7)
    assert many.keys() == one.keys()
    assert_same_gradients(many_grads, one_grads)


@pytest.mark.slow
def test_blockwise_update_matches_single_device(monkeypatch: pytest.MonkeyPatch):
    """Blocks of three columns on each of two devices."""
    _, expected = updated(ONE, PLAIN)
    monkeypatch.setattr(blocks, "LOGIT_BYTES", ROWS * 32 * 4 * 3)
    with jax.set_mesh(make_mesh(*SEQUENCE_HALVES)):
        assert blocks.columns_at_once(MODEL.shape, ROWS, LENGTH) == 2 * 3
    assert_same_gradients(updated.__wrapped__(SEQUENCE_HALVES, PLAIN)[1], expected)


def compiled_program(model: Decoder, mesh, rows: int, columns: int, update: bool = False):
    """A replay, or an SGD update, of rows under StreamingLLM."""
    optimizer, policy, shape = optax.sgd(1.0), StreamingLLM(), model.config
    config, response = RolloutConfig(max_new_tokens=columns - 16, budget=16, buffer=8), columns - 16

    def array(*sizes: int, dtype: Any = jnp.float32) -> Any:
        sharding = jax.NamedSharding(mesh, jax.P(("data", "fsdp")))
        return jax.ShapeDtypeStruct((rows, *sizes), dtype, sharding=sharding)

    segments = segments_of(policy, config, shape.num_layers, 16)
    evicted_at = array(shape.num_layers, shape.num_kv_heads, columns, dtype=jnp.int32)
    trajectory = Trajectory(
        tokens=array(columns, dtype=jnp.int32),
        valid=array(columns, dtype=bool),
        logprobs=array(response),
        terminated=array(dtype=bool),
        mask=ShadowMask(evicted_at, segments),
    )
    batch = TrainBatch(trajectory, array(), array(response))
    state = jax.eval_shape(lambda params: init_state(params, optimizer, jax.random.key(0)), param_shapes(model))
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, tree_shardings(state, mesh)
    )
    with jax.set_mesh(mesh):
        if update:
            return make_update(model, optimizer, UpdateConfig()).lower(state, batch).compile()
        return make_replay(model, "shadow").lower(state.params, batch.trajectory).compile()


def test_communication_is_all_to_all_between_tokens_and_heads():
    """Each layer exchanges q, k, v and the attention output. Other messages are a few columns at shard boundaries,
    because the response does not begin at one."""
    model = Decoder(tiny_model_config(vocab_size=32, max_positions=128, num_layers=2, num_kv_heads=4))
    text = compiled_program(model, make_mesh(sequence=4), rows=2, columns=128).as_text()
    sent = [(op.kind, sum(array_bytes(op.shapes))) for ops in parse(text).values() for op in ops if op.kind in MESSAGES]
    exchanged = [size for kind, size in sent if kind == "all-to-all"]
    others = [(kind, size) for kind, size in sent if kind != "all-to-all"]
    assert all(kind == "collective-permute" and size <= 2 * 16 * 32 * 4 for kind, size in others), others
    # 256 tokens on four devices, four heads of eight float32 numbers.
    assert exchanged == [256 // 4 * 4 * 8 * 4] * 4 * 2


@pytest.mark.slow
def test_temporary_memory_falls_with_sequence_shards():
    config = tiny_model_config(vocab_size=32, max_positions=1024, num_layers=1, num_kv_heads=4)
    model = Decoder(config)
    whole, part = (
        compiled_program(model, make_mesh(sequence=ways), rows=2, columns=1024, update=True).memory_analysis()
        for ways in (1, 4)
    )
    assert part.temp_size_in_bytes < 0.3 * whole.temp_size_in_bytes


@pytest.mark.slow
def test_sampler_shards_rows_where_the_learner_shards_columns():
    """Eight rows over four devices; in the learner, two devices share a row. Fixed batch and engine."""
    loop, single_device = own_loop(sizes=(2, 1, 1, 2)), own_loop()
    assert dict(loop.placement.own_mesh.shape) == {"data": 4, "fsdp": 1, "sequence": 1, "tensor": 1}
    expected = single_device.collect(new_state(), 0).trajectory
    refilled = own_loop(dataclasses.replace(CONFIG, decode_rows=4), sizes=(2, 1, 1, 2))
    for sharded_loop in (loop, refilled):
        got = sharded_loop.collect(shard_tree(new_state(), sharded_loop.mesh), 0).trajectory
        np.testing.assert_array_equal(got.tokens, expected.tokens)
        jax.tree.map(np.testing.assert_array_equal, got.mask, expected.mask)
        assert got.tokens.sharding == batch_sharding(sharded_loop.mesh)


@pytest.mark.slow
def test_evaluation_matches_single_device():
    config = EvaluationConfig(decodes=(Decode("short", CONFIG.policy),), rollout=CONFIG.rollout, prompt_width=9, rows=4)
    tokens = [
        Evaluator(loop.model, TASK, TOKENIZER, config, mesh=loop.mesh).run(warm_params())[0].completions
        for loop in (new_loop(), new_loop(sizes=(2, 1, 1, 2)))
    ]
    assert tokens[0] == tokens[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "update",
    [
        UpdateConfig(microbatch_size=4, rows_per_prompt=4),
        UpdateConfig(pack_columns=32, microbatch_size=2, rows_per_prompt=4),
    ],
    ids=["shared prompt", "trees"],
)
def test_shared_prompts_and_trees_match_single_device(update: UpdateConfig):
    rollout = dataclasses.replace(CONFIG.rollout, max_new_tokens=6)
    config = dataclasses.replace(CONFIG, prompt_width=10, rollout=rollout, update=update)
    (one,), (many,) = (run(own_loop(config, sizes=sizes), new_state(), 1)[1] for sizes in (ONE, SEQUENCE_HALVES))
    for name in ("loss", "reward", "entropy", "grad_norm"):
        np.testing.assert_allclose(many[name], one[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_indivisible_columns_are_not_sharded():
    mesh = make_mesh(2, sequence=4)
    with jax.set_mesh(mesh):
        x = jax.jit(constrain_tokens)(jnp.ones((2, 18, 4)))
    assert x.sharding.is_equivalent_to(batch_sharding(mesh), 3)


def test_indivisible_shared_prompt_raises():
    """Nine prompt columns and two responses of five are 19, which two devices do not divide."""
    update = UpdateConfig(microbatch_size=4, rows_per_prompt=2)
    with pytest.raises(ValueError, match=r"rows_per_prompt.*the sequence axis divides, 2; got 19"):
        own_loop(dataclasses.replace(CONFIG, update=update), sizes=SEQUENCE_HALVES)


@pytest.mark.parametrize(
    ("rollout", "sizes", "message"),
    [
        ({"max_new_tokens": 6}, SEQUENCE_HALVES, r"columns .* that the sequence axis divides, 2; got 15"),
        ({"max_new_tokens": 7}, (1, 1, 1, 8), r"heads that sequence axis \* tensor axis = 8 divides.*got 4"),
        ({}, (1, 1, 4, 2), r"heads that sequence axis \* tensor axis = 8 divides.*got 4"),
    ],
)
def test_indivisible_columns_and_heads_raise(rollout, sizes, message):
    config = dataclasses.replace(CONFIG, rollout=dataclasses.replace(CONFIG.rollout, **rollout))
    with pytest.raises(ValueError, match=message):
        own_loop(config, sizes=sizes)


@pytest.mark.parametrize(("longest", "ways"), [(3 * LEAST_STEP + 1, 2), (4096, 8), (1000, 3), (5, 2), (100, 64)])
def test_response_widths_differ_from_the_longest_by_multiples_of_the_axis(longest: int, ways: int):
    widths = response_widths(longest, 4, ways)
    assert widths[-1] == longest and list(widths) == sorted(set(widths))
    assert {(longest - width) % ways for width in widths} == {0}
    plain = response_widths(longest, 4)
    assert all(width >= plain[i] for i, width in enumerate(widths)) or len(plain) != len(widths)


def test_indivisible_kv_heads_are_repeated():
    """Six query heads, three KV heads, two devices: KV heads are repeated to six, three per device."""
    q, k = jnp.ones((1, 6, 4, 2)), jnp.arange(3.0)[None, :, None, None]
    with jax.set_mesh(make_mesh(sequence=2)):
        repeated = split_heads(k, 6)
        assert repeated[0, :, 0, 0].tolist() == [0, 0, 1, 1, 2, 2]
        assert over_heads(lambda q, k: jnp.full_like(q, k.shape[1]), q, repeated)[0, 0, 0, 0] == 3
        assert split_heads(jnp.zeros((1, 2, 4, 2)), 6).shape[1] == 2, "two KV heads divide already"


def test_indivisible_completions_raise():
    """Six completions divide over the learner's data axis of two, but not over the four sampling devices."""
    config = dataclasses.replace(CONFIG, prompts_per_step=3, group_size=2)
    with pytest.raises(ValueError, match=r"divide over data axis \* fsdp axis \* sequence axis = 4.*got 6"):
        own_loop(config, sizes=(2, 1, 1, 2))
