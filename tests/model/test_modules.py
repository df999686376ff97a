"""Modules of flax.nnx and Equinox as language models, and our masks in other libraries' attention."""

import dataclasses
import runpy
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.flatten_util import ravel_pytree

import smd_jax as smd
from smd_jax.message.masks import head_mask
from smd_jax.testing import random_params, tiny_model_config

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"


@pytest.fixture(scope="module", params=["with_nnx", "with_equinox"])
def example(request):
    """Globals of the example script after it has run."""
    return runpy.run_path(str(EXPERIMENTS / f"{request.param}.py"))


@pytest.mark.slow
def test_the_example_is_short_and_exact(example):
    assert len(Path(example["__file__"]).read_text(encoding="utf-8").splitlines()) <= 80
    trajectory = example["trajectory"]
    assert (trajectory.mask.evicted_at < trajectory.tokens.shape[1]).any(), "nothing was evicted"
    assert example["off"] <= 1e-5


@pytest.mark.slow
def test_logits_without_evictions_equal_the_modules(example):
    """With jax.nn.dot_product_attention and a causal mask."""
    model, params = example["model"], example["params"]
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 1, 64)
    positions = jnp.broadcast_to(jnp.arange(9), tokens.shape)
    module = model.with_params(params)

    def attention(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    expected = model.logits_of(module, model.hidden_of(module, tokens, positions, attention))
    mask = smd.dense_mask(jnp.ones(tokens.shape, bool))
    result = smd.model.apply_model(model, params, tokens, positions, mask)
    np.testing.assert_allclose(result, expected, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_an_update_changes_the_modules_parameters(example):
    model, params, trajectory = example["model"], example["params"], example["trajectory"]
    params = jax.tree.map(jnp.copy, params)
    before, _ = ravel_pytree(params)
    optimizer = example["optax"].sgd(0.1)
    update = smd.make_update(model, optimizer, smd.UpdateConfig())
    logprobs = smd.replay(model, params, trajectory).logprobs
    advantages = jnp.linspace(-1, 1, len(trajectory.tokens))
    batch = smd.TrainBatch(trajectory.replace(logprobs=logprobs), advantages, logprobs)
    state, metrics = update(smd.init_state(params, optimizer, jax.random.key(3)), batch)
    assert float(metrics["sampling/sampling_logp_difference/max"]) <= 1e-5
    after, _ = ravel_pytree(state.params)
    assert np.isfinite(after).all() and float(abs(after - before).max()) > 0


@pytest.mark.parametrize("count", [1, 3])
def test_a_wrong_number_of_attention_calls_is_refused(count):
    module = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    shape = smd.model.ModelShape(2, 1, 1, 2, 2, 4, max_positions=8)

    def hidden(module, tokens, positions, attention):
        x = jnp.ones((*tokens.shape, 1, 2))
        for _ in range(count):
            x = attention(x, x, x)
        return x[:, :, 0]

    model, params = smd.model.from_equinox(module, shape, hidden, lambda module, x: x @ jnp.ones((2, 4)))
    tokens = jnp.ones((1, 3), int)
    with pytest.raises(ValueError, match="expected one attention call per layer, 2 of them; got"):
        smd.model.apply_model(model, params, tokens, tokens, smd.dense_mask(tokens > 0))


class WrongShape(smd.Decoder):
    """A decoder whose shape has twice its query heads."""

    @property
    def shape(self) -> smd.model.ModelShape:
        return dataclasses.replace(super().shape, num_heads=2 * self.config.num_heads)


@pytest.mark.parametrize("chunk", [None, 2])
def test_a_model_that_calls_attend_with_other_sizes_is_refused(chunk):
    """Heads come before tokens in `attend`, after them in the calls of a module."""
    model = WrongShape(tiny_model_config(num_layers=1, num_heads=2, num_kv_heads=2))
    params, tokens = random_params(model.config, 0), jnp.ones((1, 4), int)
    message = r"expected q of shape \[batch, 4, tokens, \d+\] in attend, with num_heads .*; got \[1, 2, "
    prompts, config = (
        smd.PromptBatch(tokens, tokens > 0),
        smd.RolloutConfig(max_new_tokens=2, budget=2, buffer=2, prefill_chunk=chunk),
    )
    with pytest.raises(ValueError, match=message):
        smd.rollout(model, params, prompts, jax.random.key(0), policy=smd.eviction.Knorm(), config=config)
    with pytest.raises(ValueError, match=message):
        smd.model.apply_model(model, params, tokens, tokens, smd.dense_mask(tokens > 0))


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_heads": 2}, r"expected q of shape \[batch, tokens, 2, 2\] in attend, with num_heads .*; got \[1, "),
        ({"num_kv_heads": 4}, r"k of shape \[batch, tokens, 4, 2\] in attend, with num_kv_heads .*; got \[1, "),
        ({"head_dim": 4}, r"expected q of shape \[batch, tokens, 4, 4\] in attend"),
        ({"vocab_size": 3}, r"expected logits of width 3, the vocab_size of ModelShape; got \[1, 5\]"),
    ],
)
def test_sizes_that_contradict_the_shape_are_refused(sizes, message, chunk):
    """Otherwise sampling would work, and training would fail later or never."""
    right = {"num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 2, "hidden_size": 8, "vocab_size": 5}
    shape = smd.model.ModelShape(**(right | sizes), max_positions=8)

    def hidden(module, tokens, positions, attention):
        x = jnp.ones((*tokens.shape, 4, 2))
        return attention(x, x[:, :, :2], x[:, :, :2]).reshape(*tokens.shape, 8)

    linear = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    model, params = smd.model.from_equinox(linear, shape, hidden, lambda module, x: x @ jnp.ones((8, 5)))
    tokens = jnp.ones((1, 4), int)
    prompts, config = (
        smd.PromptBatch(tokens, tokens > 0),
        smd.RolloutConfig(max_new_tokens=2, budget=2, buffer=2, prefill_chunk=chunk),
    )
    with pytest.raises(ValueError, match=message):
        smd.rollout(model, params, prompts, jax.random.key(0), policy=smd.eviction.Knorm(), config=config)
    if "vocab_size" not in sizes:
        with pytest.raises(ValueError, match=message):
            smd.model.apply_model(model, params, tokens, tokens, smd.dense_mask(tokens > 0))


def test_dropout_is_switched_off():
    """Sampler and learner would drop different activations: 1 nat apart at a rate of 0.1."""
    shape = smd.model.ModelShape(1, 1, 1, 2, 2, 4, max_positions=8)

    def hidden(module, tokens, *_):
        return module(jnp.ones((*tokens.shape, 2)))

    def with_dropout(module, tokens, *_):
        return module(jnp.ones((*tokens.shape, 2)), deterministic=False)

    def logits(*_):
        return jnp.zeros(1)

    tokens = jnp.ones((3, 4), int)
    unused: Any = None
    module = nnx.Sequential(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    model, params = smd.model.from_nnx(module, shape, hidden, logits)
    assert (model.hidden_of(model.with_params(params), tokens, tokens, unused) == 1).all()
    assert module.layers[0].rate == 0.5, "the user's module trains on with dropout"
    model, params = smd.model.from_nnx(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), shape, with_dropout, logits)
    assert (model.hidden_of(model.with_params(params), tokens, tokens, unused) == 1).all()
    layers = eqx.nn.Sequential([eqx.nn.Dropout(0.5)])
    model, params = smd.model.from_equinox(layers, shape, hidden, logits)
    assert (model.hidden_of(model.with_params(params), tokens, tokens, unused) == 1).all()
    assert layers[0].p == 0.5


def test_a_shape_with_runs_is_refused():
    shape = smd.model.ModelShape(2, 1, 1, 2, 2, 4, max_positions=8, runs=(2,))
    module = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"without routing and without runs of several layers, .* runs \(2,\)"):
        smd.model.from_equinox(module, shape, lambda *_: jnp.ones((1, 3, 2)), lambda module, x: x)


def test_modules_of_another_library_are_refused():
    shape = smd.model.ModelShape(1, 1, 1, 2, 2, 4, max_positions=8)
    equinox: Any = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    flax = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"expected a module of flax.nnx; got equinox.*\.Linear"):
        smd.model.from_nnx(equinox, shape, lambda *_: jnp.ones(1), lambda *_: jnp.ones(1))
    with pytest.raises(TypeError, match=r"expected a module of equinox; got flax.*\.Linear"):
        smd.model.from_equinox(flax, shape, lambda *_: jnp.ones(1), lambda *_: jnp.ones(1))


def recorded_mask() -> smd.ShadowMask:
    """Four columns; KV head 0 evicts key 0 after query 1, head 1 evicts key 1 after query 2."""
    return smd.ShadowMask(jnp.array([[[[2, 9, 9, 9], [9, 3, 9, 9]]]], jnp.int32))


def test_a_mask_for_every_query_head():
    """Equals a mask written by hand; query heads 0 and 1 share KV head 0."""
    mask = np.asarray(head_mask(recorded_mask(), 0, num_heads=4)).astype(int)
    assert mask.shape == (1, 4, 4, 4)
    first = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]
    second = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1]]
    assert mask[0].tolist() == [first, first, second, second]
    with pytest.raises(ValueError, match="expected num_heads to be a multiple of the mask's 2 KV heads; got 3"):
        head_mask(recorded_mask(), 0, num_heads=3)


@pytest.mark.slow
def test_other_attentions_take_the_mask():
    """Attention of jax.nn, flax.nnx and Equinox under `head_mask` equals `attend`."""
    mask = recorded_mask()
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 4, 2, 8))  # [batch, tokens, heads, head_dim]
    heads = head_mask(mask, 0, num_heads=2)
    expected = smd.attend(q.swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2), mask.layer(0)).swapaxes(1, 2)
    by_jax = jax.nn.dot_product_attention(q, k, v, mask=heads)
    np.testing.assert_allclose(by_jax, expected, rtol=0, atol=1e-6)
    by_flax = nnx.dot_product_attention(q, k, v, mask=heads)
    np.testing.assert_allclose(by_flax, expected, rtol=0, atol=1e-6)
    layer = eqx.nn.MultiheadAttention(2, 16, key=jax.random.key(1))
    x = jax.random.normal(jax.random.key(2), (1, 4, 16))
    by_equinox = jax.vmap(layer)(x, x, x, heads)
    projections = (layer.query_proj, layer.key_proj, layer.value_proj)
    q, k, v = (jax.vmap(jax.vmap(p))(x).reshape(1, 4, 2, 8).swapaxes(1, 2) for p in projections)
    ours = smd.attend(q, k, v, mask.layer(0)).swapaxes(1, 2).reshape(1, 4, 16)
    np.testing.assert_allclose(jax.vmap(jax.vmap(layer.output_proj))(ours), by_equinox, rtol=0, atol=1e-6)
