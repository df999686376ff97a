"""Eight fake devices give the results of one, and each has an eighth of the arrays."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from smd_jax.config import Experts
from smd_jax.devices.process_rows import SamplerPlacement
from smd_jax.devices.sharding import (
    AXES,
    constrain,
    constrain_tree,
    make_mesh,
    over_heads,
    over_rows,
    param_spec,
    shard_batch,
    shard_tree,
)
from smd_jax.eviction.policies import H2O
from smd_jax.learner import blocks
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.forward import make_replay
from smd_jax.learner.state import TrainBatch, init_state
from smd_jax.learner.update import make_update
from smd_jax.losses.distillation import DistillConfig
from smd_jax.message.sampling import SamplingConfig
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.decoder import Decoder
from smd_jax.model.lora import LoraConfig, add_lora
from smd_jax.model.stacked_params import stack_params
from smd_jax.sampler.fixed_batch import RolloutConfig, rollout, rollout_program
from smd_jax.testing import count_compilations, random_params, tiny_model_config
from tests.tiny_update import RECORD, distance
from tests.under_test import left_padded

ROWS, WIDTH, LENGTH = 8, 8, 10
# One layer: all of them are sharded alike.
MODEL = Decoder(tiny_model_config(vocab_size=32, max_positions=32, num_layers=1, tie_embeddings=False))
ONE = (1, 1, 1)

PLAIN = UpdateConfig()
FULL = UpdateConfig(distill=DistillConfig(direction="forward"), microbatch_size=4)


def params():
    return random_params(MODEL.config)


@functools.cache
def sampled(sizes) -> Trajectory:
    """A rollout on a mesh of these sizes."""
    mesh = make_mesh(*sizes)
    config = RolloutConfig(
        max_new_tokens=LENGTH, budget=5, buffer=2, eos_token_id=5, sampling=SamplingConfig(temperature=0.9)
    )
    with jax.set_mesh(mesh):
        prompts = shard_batch(left_padded([8, 5, 3, 8, 2, 6, 7, 1], WIDTH, 32), mesh)
        return rollout(MODEL, shard_tree(params(), mesh), prompts, jax.random.key(2), policy=H2O(), config=config)


def train_batch(trajectory: Trajectory) -> TrainBatch:
    advantages = jnp.asarray(np.random.default_rng(1).normal(size=ROWS), jnp.float32)
    return TrainBatch(trajectory, advantages, trajectory.logprobs)


@functools.cache
def updated(sizes, config):
    """Loss and gradients on a mesh, from the trajectory that one device sampled."""
    mesh = make_mesh(*sizes)
    with jax.set_mesh(mesh):
        state = shard_tree(init_state(params(), RECORD, jax.random.key(3)), mesh)
        data = shard_batch(jax.device_get(train_batch(sampled(ONE))), mesh)
        if config.correction.traits.uses_mismatch:  # the update then computes them
            data = data.replace(old_logprobs=None)
        state, metrics = make_update(MODEL, RECORD, config)(state, data)
    return jax.device_get((metrics, state.opt_state))


# --- results


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2)])
def test_a_rollout_gives_the_same_tokens(sizes):
    one, many = sampled(ONE), sampled(sizes)
    assert len(many.tokens.sharding.device_set) == np.prod(sizes)
    assert 0 < int(one.terminated.sum()) < ROWS
    np.testing.assert_array_equal(many.tokens, one.tokens)
    np.testing.assert_array_equal(many.valid, one.valid)
    jax.tree.map(np.testing.assert_array_equal, many.mask, one.mask)
    np.testing.assert_allclose(many.logprobs, one.logprobs, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "config"), [((1, 4, 2), PLAIN), ((2, 2, 2), FULL)])
def test_an_update_gives_the_same_loss_and_gradients(sizes, config):
    (one, one_grads), (many, many_grads) = updated(ONE, config), updated(sizes, config)
    assert abs(one["loss"]) > 0.01
    np.testing.assert_allclose(many["loss"], one["loss"], rtol=1e-6)
    assert many["sampling/sampling_logp_difference/max"] < 2e-5
    for path, gradient in jax.tree_util.tree_leaves_with_path(one_grads):
        if "k_proj" in str(path) and "bias" in str(path):
            continue  # zero up to rounding: softmax ignores a shift of all scores
        name = jax.tree_util.keystr(path)
        (other,) = (g for p, g in jax.tree_util.tree_leaves_with_path(many_grads) if p == path)
        assert distance(other, gradient) < 1e-5, name


@pytest.mark.slow
def test_an_update_by_blocks_gives_the_same_gradients(monkeypatch):
    """Logits of two columns at a time on every device, the vocabulary in two parts."""
    expected_metrics, expected = updated(ONE, PLAIN)
    monkeypatch.setattr(blocks, "LOGIT_BYTES", ROWS * 32 * 4 // 4)
    metrics, grads = updated.__wrapped__((2, 2, 2), PLAIN)
    np.testing.assert_allclose(metrics["loss"], expected_metrics["loss"], rtol=1e-6)
    for name in ("embed", "lm_head"):
        jax.tree.map(lambda x, y: np.testing.assert_array_less(distance(x, y), 1e-5), grads[name], expected[name])


def test_blocks_send_sums_and_no_logits(monkeypatch):
    """The loop over blocks reduces the maximum and sum of the softmax, and the sampled token's logit. The head is
    gathered from fsdp before the loop; the vocabulary stays in two parts."""
    monkeypatch.setattr(blocks, "LOGIT_BYTES", ROWS * 32 * 4 // 4)
    mesh = make_mesh(1, 4, 2)
    with jax.set_mesh(mesh):
        data = shard_batch(jax.device_get(train_batch(sampled(ONE))), mesh)
        program = make_replay(MODEL, "shadow").lower(shard_tree(params(), mesh), data.trajectory).compile()
    hlo = program.as_text()
    bodies = [hlo.split(f"\n%{name} (")[1].split("\n}")[0] for name in re.findall(r"body=%([\w.-]+)", hlo)]
    of_blocks = [body for body in bodies if " all-reduce(" in body]
    assert len(of_blocks) == 1, "only the loop over blocks communicates"
    assert not re.search(r" all-(gather|to-all)\(", of_blocks[0])


# --- shards

SHARD_SHAPES = {  # for fsdp = 4, tensor = 2, by hand
    "embed/embedding": (16, 8),
    "lm_head/kernel": (8, 16),
    "norm/scale": (32,),
    "layers_0/attention_norm/scale": (32,),
    "layers_0/attention/q_proj/kernel": (8, 16),
    "layers_0/attention/q_proj/bias": (32,),
    "layers_0/attention/k_proj/kernel": (8, 8),
    "layers_0/attention/v_proj/kernel": (8, 8),
    "layers_0/attention/o_proj/kernel": (16, 8),
    "layers_0/mlp/gate_proj/kernel": (8, 32),
    "layers_0/mlp/up_proj/kernel": (8, 32),
    "layers_0/mlp/down_proj/kernel": (32, 8),
}


def by_name(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def shard_shape(leaf) -> tuple[int, ...]:
    """The shape on every device."""
    (shape,) = {shard.data.shape for shard in leaf.addressable_shards}
    assert len(leaf.addressable_shards) == 8
    return shape


def test_parameters_are_sharded_as_in_the_table():
    placed = by_name(shard_tree(params(), make_mesh(1, 4, 2)))
    assert {name: shard_shape(placed[name]) for name in SHARD_SHAPES} == SHARD_SHAPES
    for name, leaf in placed.items():
        assert leaf.ndim == 1 or shard_shape(leaf) != leaf.shape, f"{name} is replicated"


def test_optimizer_state_is_sharded_like_its_parameters():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = shard_tree(init_state(params(), optimizer, jax.random.key(0), params()), make_mesh(1, 4, 2))
    placed = by_name(state.opt_state)
    for name, shape in SHARD_SHAPES.items():
        moments = [leaf for path, leaf in placed.items() if path.endswith((f"/mu/{name}", f"/nu/{name}"))]
        assert [shard_shape(leaf) for leaf in moments] == [shape, shape], name
        assert shard_shape(by_name(state.reference)[name]) == shape


def test_axes_that_do_not_divide_are_left_out():
    mesh = make_mesh(1, 4, 2)
    assert param_spec(["q_proj", "kernel"], (8, 6), mesh) == P("fsdp", "tensor")
    assert param_spec(["q_proj", "kernel"], (6, 6), mesh) == P(None, "tensor")
    assert param_spec(["q_proj", "kernel"], (8, 5), mesh) == P("fsdp", None)
    assert param_spec(["somewhere", "kernel"], (8, 8), mesh) == P("fsdp", None)
    assert param_spec(["kernel"], (8, 8), mesh) == P("fsdp", None)
    placed = shard_tree({"q_proj": {"kernel": jnp.zeros((6, 6))}}, mesh)
    assert shard_shape(placed["q_proj"]["kernel"]) == (6, 3)


EXPERTS = Experts(count=4, per_token=2, intermediate_size=16, bias=True, clamp=7.0)


@pytest.mark.parametrize("experts", [None, EXPERTS], ids=["dense", "experts"])
def test_stacked_layers_are_sharded_like_single_ones(experts):
    config = dataclasses.replace(MODEL.config, num_layers=4, experts=experts)
    shapes = jax.eval_shape(lambda: add_lora(random_params(config), LoraConfig(rank=2), jax.random.key(0)))
    stacked = jax.eval_shape(lambda tree: stack_params(tree, [range(4)]), shapes)
    mesh = make_mesh(1, 4, 2)

    def specs(tree):
        return {name: tuple(param_spec(name.split("/"), x.shape, mesh)) for name, x in by_name(tree).items()}

    single = {name.replace("layers_0/", "layers_0_to_3/"): spec for name, spec in specs(shapes).items()}
    for name, spec in specs(stacked).items():
        assert spec == ((None, *single[name]) if "layers_0_to_3" in name else single[name]), name
    assert specs(stacked)["layers_0_to_3/attention/q_proj/kernel"] == (None, "fsdp", "tensor")


def test_unknown_parameters_are_sharded_on_their_longest_axis():
    mesh = make_mesh(data=2, fsdp=4)
    assert param_spec(("blocks", "block0", "wq"), (32, 32), mesh) == P("fsdp", None)
    assert param_spec(("blocks", "block0", "wo"), (30, 32), mesh) == P(None, "fsdp")
    assert param_spec(("blocks", "block0", "geglu"), (2, 32, 48), mesh) == P(None, None, "fsdp")
    assert param_spec(("last",), (32,), mesh) == P()
    assert param_spec(("value_head", "kernel"), (32, 1), mesh) == P()


def test_rows_are_sharded_over_data_and_fsdp():
    placed = shard_batch({"x": jnp.zeros((8, 3)), "y": jnp.zeros(8)}, make_mesh(2, 2, 2))
    assert (shard_shape(placed["x"]), shard_shape(placed["y"])) == ((2, 3), (2,))


def test_constraints_do_nothing_without_a_mesh():
    x = jnp.zeros((8, 4))
    tree = {"q_proj": {"kernel": x}}
    assert constrain(x) is x
    assert constrain_tree(tree) is tree
    mesh = make_mesh(2, 2, 2)
    with jax.set_mesh(mesh):
        assert shard_shape(jax.jit(constrain)(x)) == (2, 4)
        assert shard_shape(jax.jit(constrain_tree)(tree)["q_proj"]["kernel"]) == (4, 2)


# --- compiled programs


def test_the_update_compiles_once_and_keeps_the_shardings():
    mesh, optimizer = make_mesh(2, 2, 2), optax.adam(1e-3)
    update = make_update(MODEL, optimizer, PLAIN)
    with jax.set_mesh(mesh):
        state = shard_tree(init_state(params(), optimizer, jax.random.key(3)), mesh)
        data = shard_batch(jax.device_get(train_batch(sampled(ONE))), mesh)
        before = jax.tree.map(lambda leaf: leaf.sharding, state)
        with count_compilations() as counts:
            for _ in range(3):
                state, _ = update(state, data)
    assert counts["update"] == 1
    placed = zip(jax.tree.leaves(state), jax.tree.leaves(before), strict=True)
    assert all(leaf.sharding.is_equivalent_to(sharding, leaf.ndim) for leaf, sharding in placed)
    assert shard_shape(by_name(state.params)["embed/embedding"]) == (16, 16)


def loop_collectives(hlo: str) -> list[str]:
    """Shape and kind of the collectives in loops of a compiled program, and in computations that they call."""
    bodies = dict(re.findall(r"^(?:ENTRY )?%([\w.-]+) \(.*?\{\n(.*?)^\}", hlo, re.DOTALL | re.MULTILINE))
    pending, seen = re.findall(r"body=%([\w.-]+)", hlo), set[str]()
    while pending:
        name = pending.pop()
        if name not in seen:
            seen.add(name)
            pending += re.findall(r"(?:body|condition|calls)=%([\w.-]+)", bodies[name])
    kinds = r"= (.*? (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?)\("
    return [found for name in seen for found in re.findall(kinds, bodies[name])]


def test_decoding_gathers_no_weights():
    """Weights are gathered from fsdp once, before the loop. XLA's own code motion out of loops is disabled."""
    no_code_motion: dict[str, str | bool] = {
        "xla_disable_hlo_passes": "while-loop-invariant-code-motion,while-loop-expensive-invariant-code-motion"
    }
    mesh, config = make_mesh(1, 4, 1), RolloutConfig(max_new_tokens=LENGTH, budget=5, buffer=2, eos_token_id=5)
    with jax.set_mesh(mesh):
        prompts = shard_batch(left_padded([8, 5, 3, 8, 2, 6, 7, 1], WIDTH, 32), mesh)
        placed = shard_tree(params(), mesh)
        lowered = rollout_program.lower(MODEL, placed, prompts, jax.random.key(2), policy=H2O(), config=config)
        program = str(lowered.compile(compiler_options=no_code_motion).as_text())
    assert "f32[16,64]" in program, "parameters come in four parts"
    assert [kind.split("{")[0] for kind in loop_collectives(program)] == ["pred[] all-reduce"], "whether rows are done"


def gathers(lowered: jax.stages.Lowered) -> list[str]:
    return [line for line in (lowered.compile().as_text() or "").splitlines() if "all-gather" in line]


def test_sorting_rows_needs_no_gather():
    """Without `over_rows` XLA gathers all rows on every device; that assertion fails once XLA no longer does."""

    def top_five(x: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jax.lax.top_k(x, 5))

    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 4, 64)), jnp.float32)
    mesh = make_mesh(2, 2, 2)
    with jax.set_mesh(mesh):
        for spec, over in ((P(("data", "fsdp")), over_rows), (P(("data", "fsdp"), "tensor"), over_heads)):
            placed = jax.device_put(x, NamedSharding(mesh, spec))
            assert gathers(jax.jit(top_five).lower(placed))
            program = jax.jit(lambda x, over=over: over(top_five, x))
            assert not gathers(program.lower(placed))
            jax.tree.map(np.testing.assert_array_equal, program(placed), top_five(x))
        odd = jnp.arange(15.0).reshape(3, 5)
        jax.tree.map(np.testing.assert_array_equal, over_rows(top_five, odd), top_five(odd))
    assert over_rows(lambda x: x, x) is x


# --- bad input


def test_a_mesh_of_too_many_devices_is_refused():
    with pytest.raises(
        ValueError, match="expected 16 devices, .*data axis 4, fsdp axis 2, sequence axis 1 and tensor axis 2; got 8"
    ):
        make_mesh(4, 2, 2)
    with pytest.raises(
        ValueError, match="expected 2 devices, .*data axis 2, fsdp axis 1, sequence axis 1 and tensor axis 1; got 1"
    ):
        make_mesh(2, devices=jax.devices()[:1])


def test_a_repeated_device_is_refused():
    with pytest.raises(ValueError, match="expected different devices; got"):
        make_mesh(2, devices=jax.devices()[:1] * 2)


@pytest.mark.parametrize(
    ("axes", "kind"),
    [
        (("data", "fsdp", "tensor", "sequence"), AxisType.Auto),  # the order of axes assigns the rows
        (("data", "tensor"), AxisType.Auto),
        (AXES, AxisType.Explicit),
    ],
)
def test_a_sampler_refuses_meshes_unlike_those_of_make_mesh(axes: tuple[str, ...], kind: AxisType):
    devices = np.array(jax.devices()).reshape((2,) * (len(axes) - 1) + (-1,))
    with pytest.raises(ValueError, match="expected a mesh of smd.make_mesh, or one with the axes .* in this order"):
        SamplerPlacement(Mesh(devices, axes, axis_types=(kind,) * len(axes)))


@pytest.mark.parametrize("axis", ["data", "fsdp", "tensor", "sequence"])
def test_empty_axes_are_refused(axis):
    for size in (0, -2):
        sizes = {"data": 1, "fsdp": 1, "tensor": 1, "sequence": 1} | {axis: size}
        with pytest.raises(ValueError, match=f"expected at least 1 device on the {axis} axis; got {size}"):
            make_mesh(sizes["data"], sizes["fsdp"], sizes["tensor"], sequence=sizes["sequence"])


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"divides over data axis \* fsdp axis = 4; got 6 rows"):
        shard_batch({"x": jnp.zeros((8, 2)), "y": jnp.zeros(6)}, make_mesh(2, 2, 2))


def test_a_mesh_takes_the_first_devices():
    mesh = make_mesh(1, 2, 2)
    assert list(mesh.devices.flat) == jax.devices()[:4]
    assert NamedSharding(mesh, P("fsdp")).shard_shape((8,)) == (4,)
