"""The value head: values, sharding and exports. Its loss is tested in tests/losses/test_gae.py."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from smd_jax.devices.sharding import make_mesh, shard_tree
from smd_jax.model.value_head import VALUE_HEAD, add_value_head, drop_value_head, values
from smd_jax.model.weights import load_checkpoint, save_checkpoint
from smd_jax.testing import random_params, tiny_model_config

CONFIG = tiny_model_config(vocab_size=32)
PARAMS = random_params(CONFIG)
WITH_HEAD = add_value_head(PARAMS, CONFIG)


def f32(x) -> jax.Array:
    return jnp.asarray(x, jnp.float32)


def head_of(kernel, bias) -> dict:
    return {VALUE_HEAD: {"kernel": f32(kernel)[:, None], "bias": f32([bias])}}


# --- the head


def test_a_fresh_head_gives_zeros_and_no_gradient_to_the_layers():
    hidden = jax.random.normal(jax.random.key(0), (2, 3, CONFIG.hidden_size))

    def error(params, hidden):
        return jnp.sum((values(params, hidden) - 1.0) ** 2)

    np.testing.assert_array_equal(values(WITH_HEAD, hidden), np.zeros((2, 3)))
    of_params, of_hidden = jax.grad(error, argnums=(0, 1))(WITH_HEAD, hidden)
    assert not of_hidden.any()
    assert bool(jnp.all(of_params[VALUE_HEAD]["kernel"] != 0)) and of_params[VALUE_HEAD]["bias"] == -12


def test_add_and_drop_value_head():
    assert set(WITH_HEAD) - set(PARAMS) == {VALUE_HEAD} and VALUE_HEAD not in PARAMS
    assert drop_value_head(WITH_HEAD) == PARAMS == drop_value_head(PARAMS)
    assert VALUE_HEAD in WITH_HEAD, "the original must not change"


def test_values_by_hand():
    params = head_of([2.0, -1.0, 0.5], 0.25)
    hidden = f32([[[1.0, 1.0, 1.0], [0.0, 3.0, -2.0]]])
    np.testing.assert_array_equal(values(params, hidden), [[1.75, -3.75]])


def test_the_head_computes_in_float32():
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    assert {x.dtype for x in jax.tree.leaves(add_value_head(half, CONFIG)[VALUE_HEAD])} == {jnp.dtype("float32")}
    head = jax.tree.map(lambda x: x.astype(jnp.bfloat16), head_of([1.0, 2.0**-12], 0.0))
    out = values(head, jnp.ones((1, 1, 2), jnp.bfloat16))
    assert out.dtype == jnp.float32 and float(out[0, 0]) == 1 + 2.0**-12  # more digits than bfloat16 has


def test_a_second_head_is_refused():
    with pytest.raises(ValueError, match=r"expected parameters without a value head.*; got \['embed', .*'value_head'"):
        add_value_head(WITH_HEAD, CONFIG)


def test_values_without_a_head_are_refused():
    message = r"PPO needs a value head: smd.model.add_value_head\(params, model.config\); got \['embed'"
    with pytest.raises(ValueError, match=message):
        values(PARAMS, jnp.zeros((1, 2, CONFIG.hidden_size)))


# --- devices and files


def test_every_device_has_the_whole_head():
    mesh = make_mesh(2, 2, 2)
    state = optax.adam(1e-3).init(WITH_HEAD)
    for tree in (shard_tree(WITH_HEAD, mesh), shard_tree(state, mesh)[0].mu):
        head = tree[VALUE_HEAD]
        assert {shard.data.shape for shard in head["kernel"].addressable_shards} == {(CONFIG.hidden_size, 1)}
        assert head["kernel"].sharding.is_fully_replicated and head["bias"].sharding.is_fully_replicated


def test_exports_with_the_head_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"without value_head, .*: smd.model.drop_value_head\(params\)"):
        save_checkpoint(tmp_path / "with", WITH_HEAD, CONFIG)
    assert not (tmp_path / "with").exists()
    save_checkpoint(tmp_path / "without", drop_value_head(WITH_HEAD), CONFIG, dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, load_checkpoint(tmp_path / "without")[1], PARAMS)
