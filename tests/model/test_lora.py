"""LoRA: forward pass, gradients, optimizer state, and the base as reference and teacher."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import PartitionSpec as P

from smd_jax.devices.sharding import make_mesh, param_spec, shard_batch, shard_tree
from smd_jax.eviction.policies import H2O
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.forward import replay
from smd_jax.learner.state import TrainBatch, init_state, reference_params
from smd_jax.learner.step import ReferenceSync, synchronised
from smd_jax.learner.update import make_update
from smd_jax.losses.distillation import DistillConfig
from smd_jax.losses.policy import LossConfig
from smd_jax.losses.value import ValueConfig
from smd_jax.memory.compiled import tree_bytes
from smd_jax.message.sampling import SamplingConfig
from smd_jax.model.decoder import Decoder
from smd_jax.model.lora import LORA, TARGETS, LoraConfig, add_lora, base_params, by_module, merge_lora, variables_of
from smd_jax.model.teacher_forced import apply_model
from smd_jax.model.value_head import VALUE_HEAD, add_value_head, drop_value_head
from smd_jax.model.weights import save_checkpoint
from smd_jax.sampler.fixed_batch import RolloutConfig, rollout
from smd_jax.testing import random_params, tiny_model_config
from tests import bigram_update
from tests.adapted import SMALL, adapted, merged_in_float64, scale_of
from tests.bitwise import assert_bitwise_equal
from tests.tiny_update import LENGTH, MODEL, PARAMS, RECORD, ROWS, batch, distance, metrics_and_gradients, trajectory
from tests.under_test import gap, left_padded, replay_jitted

ADAPTED = adapted(add_value_head(PARAMS, MODEL.config))
# KL to the reference and the anchor's divergence.
WITH_REFERENCE = UpdateConfig(loss=LossConfig(beta=0.2), distill=DistillConfig(direction="anchor", coef=0.5))
# Every other term whose gradient reaches the layers: the policy's, the dense policy's, the critic's.
WITHOUT_REFERENCE = UpdateConfig(distill=DistillConfig(direction="published"), value=ValueConfig(), microbatch_size=4)


def value_batch() -> TrainBatch:
    zeros = jnp.zeros(trajectory().logprobs.shape)
    return batch().replace(old_values=zeros, returns=zeros + 1.0)


def logprobs(params: Any, model: Decoder = MODEL) -> np.ndarray:
    return np.asarray(replay_jitted(model, params, trajectory()).logprobs)


# --- forward pass


def test_fresh_adapters_change_nothing():
    fresh = add_lora(PARAMS, LoraConfig(), jax.random.key(0))
    assert logprobs(fresh).tobytes() == logprobs(PARAMS).tobytes()
    assert fresh["layers_0"] is PARAMS["layers_0"], "the base must not be copied"
    for path, pair in by_module(fresh[LORA]).items():
        bound = pair["lora_A"].shape[0] ** -0.5
        largest = float(jnp.abs(pair["lora_A"]).max())
        assert 0.9 * bound < largest <= bound, path  # PEFT's Kaiming-uniform with a = sqrt(5)
        assert not pair["lora_B"].any()


def test_forward_pass_equals_merged_weights():
    expected = logprobs(merged_in_float64(ADAPTED))
    np.testing.assert_allclose(logprobs(ADAPTED), expected, atol=2e-5)
    np.testing.assert_allclose(logprobs(merge_lora(ADAPTED)), expected, atol=2e-5)
    assert np.abs(expected - logprobs(PARAMS)).max() > 0.1, "the adapters must do something"


def test_compute_params_give_bitwise_equal_logprobs():
    """The 16-bit copy keeps the scale of the adapters."""
    model = Decoder(dataclasses.replace(MODEL.config, dtype="bfloat16"))
    converted = model.compute_params(ADAPTED)
    assert {leaf.dtype for leaf in jax.tree.leaves(converted[LORA])} == {jnp.dtype("bfloat16")}
    assert logprobs(converted, model).tobytes() == logprobs(ADAPTED, model).tobytes()


SAMPLING = RolloutConfig(
    max_new_tokens=20, budget=6, buffer=3, eos_token_id=7, sampling=SamplingConfig(temperature=0.9)
)


@functools.cache
def sampled(dtype: Any) -> Any:
    """Model, parameters with adapters on a base of this dtype, and their rollout."""
    model = Decoder(dataclasses.replace(MODEL.config, dtype=dtype))
    base = jax.tree.map(lambda x: x.astype(dtype), PARAMS)
    params = adapted(base)
    prompts = left_padded([12, 5, 9, 3, 12, 1], 12, model.config.vocab_size)
    return model, params, rollout(model, params, prompts, jax.random.key(3), policy=H2O(), config=SAMPLING)


def test_sampler_and_learner_are_one_policy():
    model, params, drawn = sampled("float32")
    assert gap(model, drawn, params=params).max() <= 2e-5
    assert gap(model, drawn, params=base_params(params)).max() > 1e-2, "the adapters must matter"


def test_adapters_of_a_16_bit_base_are_float32():
    model, params, drawn = sampled("bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(params[LORA])} == {jnp.dtype("float32")}
    assert {leaf.dtype for leaf in jax.tree.leaves(base_params(params))} == {jnp.dtype("bfloat16")}
    assert gap(model, drawn, params=params).mean() < 0.02
    assert gap(model, drawn, params=base_params(params)).mean() > 0.1


# --- gradients


def chained(gradients: Any, params: Any) -> dict[str, np.ndarray]:
    """Gradients of A and B from those of the merged matrices, by hand: W' = W + s A B gives s G B^T and s A^T G."""
    flat: dict[Any, Any] = flatten_dict(gradients)
    dense = {path: np.float64(leaf) for path, leaf in flat.items()}
    scale = scale_of(params[LORA].config)
    expected = {}
    for path, pair in by_module(params[LORA]).items():
        of_kernel = dense[*path, "kernel"]
        expected["/".join((*path, "lora_A"))] = scale * of_kernel @ np.float64(pair["lora_B"]).T
        expected["/".join((*path, "lora_B"))] = scale * np.float64(pair["lora_A"]).T @ of_kernel
    return expected


@functools.cache
def gradients() -> Any:
    return metrics_and_gradients(WITHOUT_REFERENCE, value_batch(), params=ADAPTED)


@pytest.mark.slow
def test_gradients_match_merged_weights_by_the_chain_rule():
    metrics, grads = gradients()
    assert grads.keys() == {LORA, VALUE_HEAD}, "nothing else has a gradient"
    merged_metrics, merged = metrics_and_gradients(WITHOUT_REFERENCE, value_batch(), params=merged_in_float64(ADAPTED))
    np.testing.assert_allclose(metrics["loss"], merged_metrics["loss"], rtol=1e-4)
    found = flatten_dict(grads[LORA].matrices, sep="/")
    expected = chained(merged, ADAPTED)
    assert found.keys() == expected.keys() and len(found) == 2 * len(TARGETS)
    for name, gradient in expected.items():
        assert np.linalg.norm(gradient) > 1e-5, name
        assert distance(found[name], gradient) < 1e-4, name
    assert distance(grads[VALUE_HEAD], merged[VALUE_HEAD]) < 1e-4
    assert np.linalg.norm(grads[VALUE_HEAD]["kernel"]) > 1e-3


@pytest.mark.slow
def test_eight_devices_give_the_same_gradients():
    mesh = make_mesh(2, 2, 2)
    params = jax.tree.map(jnp.copy, ADAPTED)
    with jax.set_mesh(mesh):
        state = shard_tree(init_state(params, RECORD, jax.random.key(3)), mesh)
        spread, _ = make_update(MODEL, RECORD, WITH_REFERENCE)(state, shard_batch(jax.device_get(batch()), mesh))
    assert distance(jax.device_get(spread.opt_state)[LORA], reference_step()[1][LORA]) < 1e-5


@functools.cache
def reference_step() -> Any:
    return metrics_and_gradients(WITH_REFERENCE, params=ADAPTED)


@pytest.mark.parametrize("name", TARGETS)
def test_adapters_are_sharded_like_their_matrix(name: str):
    mesh = make_mesh(2, 2, 2)
    kernel = param_spec(("layers_0", name, "kernel"), (8, 16), mesh)
    assert param_spec((LORA, "layers_0", name, "lora_A"), (8, 4), mesh) == P(kernel[0], None)
    assert param_spec((LORA, "layers_0", name, "lora_B"), (4, 16), mesh) == P(None, kernel[1])


# --- optimizer state


def test_the_optimizer_has_moments_only_of_the_adapters():
    optimizer = optax.adam(1e-2)
    params = adapted(jax.tree.map(jnp.copy, PARAMS))
    state = init_state(params, optimizer, jax.random.key(0))
    adapters, base = jax.tree.leaves(params[LORA]), jax.tree.leaves(base_params(params))
    assert len(jax.tree.leaves(state.opt_state)) == 2 * len(adapters) + 1, "two moments each, and the count"
    assert tree_bytes(state.opt_state) == 2 * tree_bytes(adapters) + 4
    before = jax.device_get(params)
    update = make_update(MODEL, optimizer, WITH_REFERENCE)
    for _ in range(2):
        state, _ = update(state, batch())
    kept = tree_bytes((state.params, state.opt_state, state.reference))
    assert kept == tree_bytes(base) + 3 * tree_bytes(adapters) + 4, "one copy of the base"
    after = jax.device_get(state.params)
    assert_bitwise_equal(base_params(after), base_params(before))
    pairs = zip(jax.tree.leaves(after[LORA]), jax.tree.leaves(before[LORA]), strict=True)
    assert min(np.abs(new - old).max() for new, old in pairs) > 1e-3, "every adapter is trained"


# --- the base as reference and teacher


@pytest.mark.slow
def test_the_base_is_the_reference_and_the_anchor():
    metrics, grads = reference_step()
    explicit, explicit_grads = metrics_and_gradients(WITH_REFERENCE, params=ADAPTED, reference=PARAMS)
    assert metrics["kl"] > 0.01 and metrics["distill"] > 0.01
    assert_bitwise_equal(metrics, explicit)
    assert_bitwise_equal(jax.device_get(grads), jax.device_get(explicit_grads))


def test_a_reference_on_the_same_base_is_stored_as_its_adapters():
    first = adapted(PARAMS, seed=7)
    state = init_state(ADAPTED, RECORD, jax.random.key(0), reference=first)
    assert isinstance(state.reference, dict) and state.reference.keys() == {LORA}
    assert_bitwise_equal(reference_params(state), first)
    base_state = init_state(ADAPTED, RECORD, jax.random.key(0), reference=PARAMS)
    assert base_state.reference is None
    assert_bitwise_equal(reference_params(base_state), PARAMS)
    other_base = init_state(ADAPTED, RECORD, jax.random.key(0), reference=jax.tree.map(jnp.copy, first))
    assert isinstance(other_base.reference, dict) and other_base.reference.keys() == first.keys()
    assert_bitwise_equal(reference_params(other_base), first)


def test_reference_sync_averages_adapters():
    """A with A and B with B; the base stays."""
    sync = ReferenceSync(0.5, 1)
    state = init_state(ADAPTED, RECORD, jax.random.key(0), reference=adapted(PARAMS, seed=7))
    moved = synchronised(state, sync)
    middle = jax.tree.map(lambda x, y: 0.5 * x + 0.5 * y, ADAPTED[LORA], adapted(PARAMS, seed=7)[LORA])
    assert isinstance(moved.reference, dict)
    assert distance(moved.reference[LORA], middle) < 1e-6
    for reference, found in ((None, "their base"), (jax.tree.map(jnp.copy, PARAMS), "whole parameters")):
        with pytest.raises(ValueError, match=f"expected adapters as the reference that follows adapters.*{found}"):
            synchronised(init_state(ADAPTED, RECORD, jax.random.key(0), reference=reference), sync)


# --- invalid input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "expected a rank >= 1; got 0"),
        ({"alpha": 0.0}, "expected a finite alpha > 0; got 0.0"),
        ({"alpha": float("nan")}, "expected a finite alpha > 0; got nan"),
        ({"targets": ()}, r"expected targets, each once, of q_proj, .*; got \(\)"),
        ({"targets": ("q_proj", "q_proj")}, "each once"),
    ],
)
def test_invalid_configs_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        LoraConfig(**options)


def test_a_second_set_of_adapters_is_refused():
    with pytest.raises(ValueError, match=r"expected parameters without adapters.*merge_lora"):
        add_lora(ADAPTED, SMALL, jax.random.key(0))


def test_flax_refuses_adapters_among_the_params():
    t = trajectory()
    with pytest.raises(ValueError, match=r"expected adapters in a separate collection.*got 'lora' among the param"):
        MODEL.apply({"params": ADAPTED}, t.tokens, t.positions, t.mask)
    logits = MODEL.apply(variables_of(ADAPTED), t.tokens, t.positions, t.mask)
    assert_bitwise_equal(logits, apply_model(MODEL, ADAPTED, t.tokens, t.positions, t.mask))


@pytest.mark.parametrize("rows_per_prompt", [1, 2])
def test_a_model_that_does_not_read_adapters_is_refused(rows_per_prompt: int):
    matrices = {"q_proj": {"kernel": jnp.zeros((4, 4))}}
    params = add_lora(bigram_update.PARAMS | matrices, LoraConfig(targets=("q_proj",)), jax.random.key(0))
    message = "with reads_lora = True.* as Decoder does; got Bigram, whose adapters would never be trained"
    update = make_update(bigram_update.MODEL, RECORD, UpdateConfig(rows_per_prompt=rows_per_prompt))
    with pytest.raises(TypeError, match=message):
        pairs = jax.tree.map(lambda x: jnp.repeat(x[::2], 2, axis=0), bigram_update.batch())
        update(init_state(params, RECORD, jax.random.key(0)), pairs)
    with pytest.raises(TypeError, match=message):
        replay(bigram_update.MODEL, params, bigram_update.trajectory())
    prompts = left_padded([4, 2], 4, bigram_update.VOCAB)
    with pytest.raises(TypeError, match=message):
        rollout(bigram_update.MODEL, params, prompts, jax.random.key(3), policy=H2O(), config=SAMPLING)

    class Reads(bigram_update.Bigram):
        reads_lora = True

    assert replay(Reads(), params, bigram_update.trajectory()).logprobs.shape == (ROWS, LENGTH)


def test_missing_targets_are_refused():
    params = {"layers_0": {"q_proj": {"kernel": jnp.zeros((4, 4))}, "mix": {"kernel": jnp.zeros((4, 4))}}}
    with pytest.raises(ValueError, match=r"among the matrices of the model, \['q_proj'\]; got \['v_proj'\], too"):
        add_lora(params, LoraConfig(targets=("q_proj", "v_proj")), jax.random.key(0))
    # By default, the targets that the model has.
    assert add_lora(params, LoraConfig(), jax.random.key(0))[LORA].config.targets == ("q_proj",)
    with pytest.raises(ValueError, match=r"among the matrices of the model, \[\]; got \['q_proj', 'k_proj'"):
        add_lora({"mix": {"kernel": jnp.zeros((4, 4))}}, LoraConfig(), jax.random.key(0))


def test_checkpoints_of_unmerged_adapters_are_refused(tmp_path: Any):
    with pytest.raises(ValueError, match=r"without lora, .*: smd\.model\.merge_lora.*smd\.model\.save_peft"):
        save_checkpoint(tmp_path / "export", drop_value_head(ADAPTED), MODEL.config)
    assert not (tmp_path / "export").exists()


def test_initial_adapters_do_not_depend_on_other_targets():
    shallow, deep = (random_params(tiny_model_config(num_layers=layers)) for layers in (1, 2))
    shallow_params = add_lora(shallow, LoraConfig(rank=4, targets=("up_proj",)), jax.random.key(4))
    deep_params = add_lora(deep, LoraConfig(rank=4), jax.random.key(4))
    first, second = (params[LORA].matrices["layers_0"]["mlp"]["up_proj"] for params in (shallow_params, deep_params))
    assert_bitwise_equal(jax.device_get(first), jax.device_get(second))
    other = deep_params[LORA].matrices["layers_0"]["mlp"]["gate_proj"]
    assert np.any(np.asarray(other["lora_A"]) != np.asarray(first["lora_A"])), "matrices start differently"
