"""Optimizers against torch and transformers (`golden/optimizers.json`), schedules, weight decay, memory."""

import json
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from smd_jax.learner.state import init_state
from smd_jax.learner.step import take_step
from smd_jax.memory.compiled import tree_bytes
from smd_jax.model.stacked_params import stack_params, unstack_params
from smd_jax.model.value_head import add_value_head
from smd_jax.runs import checkpoint
from smd_jax.testing import random_params, tiny_model_config
from smd_jax.train import optimizers
from smd_jax.train.optimizers import OptimizerConfig, decayed, learning_rate_schedule, make_optimizer
from tests import paths
from tests.bitwise import assert_bitwise_equal

GOLDEN = json.loads((paths.GOLDEN / "optimizers.json").read_text(encoding="utf-8"))
STEPS = 6


def golden_params():
    return {name: jnp.array(GOLDEN[name]) for name in ("kernel", "bias")}


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: "-".join(map(str, case["config"].values())))
def test_steps_are_those_of_torch(case, monkeypatch):
    monkeypatch.setattr(optimizers, "LEAST_FACTORED", 2)  # so that a matrix of 4 x 3 is factored
    optimizer = make_optimizer(OptimizerConfig(**case["config"]), STEPS)
    state = init_state(golden_params(), optimizer, jax.random.key(0))
    step = jax.jit(lambda state, grads: take_step(state, optimizer, grads))
    for i in range(STEPS):
        state, metrics = step(state, {name: jnp.array(x[i]) for name, x in GOLDEN["grads"].items()})
        np.testing.assert_allclose(metrics["learning_rate"], case["rates"][i], rtol=1e-6, atol=1e-12)
        for name, leaf in state.params.items():
            # float32 here, float64 there; torch divides by the norm + 1e-6.
            np.testing.assert_allclose(leaf, case[name][i], rtol=2e-5, atol=2e-7, err_msg=f"{name}, step {i}")


@pytest.mark.parametrize("optim", ["adamw", "adafactor"])
def test_stacked_layers_take_the_same_steps(optim, monkeypatch):
    """Adafactor factors and clips every layer by itself."""
    monkeypatch.setattr(optimizers, "LEAST_FACTORED", 4)
    rng = np.random.default_rng(0)

    def layers(index):
        shapes = {"kernel": (4, 6), "narrow": (6, 2), "bias": (6,)}
        return {name: jnp.asarray(10.0**index * rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}

    params, *grads = ({f"layers_{index}": layers(index) for index in range(3)} for _ in range(STEPS + 1))
    optimizer = make_optimizer(OptimizerConfig(optim=optim, learning_rate=0.1, max_grad_norm=None), STEPS)
    runs = [range(3)]
    apart, together = params, stack_params(params, runs)
    states = [optimizer.init(apart), optimizer.init(together)]
    update = jax.jit(optimizer.update)
    for each in grads:
        steps, states[0] = update(each, states[0], apart)
        stacked, states[1] = update(stack_params(each, runs), states[1], together)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), unstack_params(stacked), steps)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 1, 1, 1, 1, 1]),
        ({"warmup_steps": 2}, [0, 1 / 2, 1, 1, 1, 1]),
        ({"lr_scheduler_type": "linear"}, [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ({"lr_scheduler_type": "linear", "warmup_steps": 0.3, "min_lr_rate": 0.2}, [0, 0.5, 1, 0.8, 0.6, 0.4]),
        ({"lr_scheduler_type": "cosine", "warmup_steps": 2}, [0, 1 / 2, 1, (2 + 2**0.5) / 4, 1 / 2, (2 - 2**0.5) / 4]),
        ({"lr_scheduler_type": "cosine", "min_lr_rate": 0.5, "warmup_steps": 4}, [0, 1 / 4, 1 / 2, 3 / 4, 1, 3 / 4]),
    ],
)
def test_schedules_by_hand(options, expected):
    schedule = learning_rate_schedule(OptimizerConfig(learning_rate=2.0, **options), STEPS)
    rates = jnp.asarray([schedule(i) for i in range(STEPS)])
    np.testing.assert_allclose(rates, 2 * np.array(expected), rtol=1e-6, atol=1e-7)


def test_steps_after_the_schedule_keep_the_lowest_rate():
    schedule = learning_rate_schedule(OptimizerConfig(lr_scheduler_type="cosine", min_lr_rate=0.25), STEPS)
    np.testing.assert_allclose(jnp.asarray([schedule(6), schedule(60)]), 0.25e-6, rtol=1e-6)


def test_weight_decay_applies_to_matrices():
    """Every matrix, including embeddings as in transformers; no norms or biases."""
    config = tiny_model_config(num_layers=1, qk_norm=True)
    params = add_value_head(random_params(config), config)
    flat = jax.tree_util.tree_flatten_with_path(decayed(params))[0]
    names = {jax.tree_util.keystr(path, simple=True, separator="/"): decays for path, decays in flat}
    assert {name for name, decays in names.items() if decays} == {
        "embed/embedding",
        "value_head/kernel",
        *(f"layers_0/attention/{name}_proj/kernel" for name in "qkvo"),
        *(f"layers_0/mlp/{name}_proj/kernel" for name in ("gate", "up", "down")),
    }
    # Biases of experts, stacked norms and stacked sinks have two axes, but are vectors.
    stacked = {"experts": {"gate_bias": jnp.ones((2, 3)), "gate": jnp.ones((2, 3, 3))}, "scale": jnp.ones((2, 3))}
    stacked["sinks"] = jnp.ones((2, 4))
    assert decayed(stacked) == {"experts": {"gate_bias": False, "gate": True}, "scale": False, "sinks": False}


@pytest.mark.parametrize(
    ("options", "least", "most"),
    [({}, 8, 8.01), ({"momentum_dtype": "bfloat16"}, 6, 6.01), ({"optim": "adafactor"}, 0, 0.1)],
)
def test_optimizer_bytes_per_parameter(options, least, most):
    """The numbers of the module's table, from shapes."""
    shape = tiny_model_config(hidden_size=256, intermediate_size=1024, head_dim=64, vocab_size=4096)
    params = jax.eval_shape(lambda: random_params(shape))
    state = jax.eval_shape(make_optimizer(OptimizerConfig(weight_decay=0.1, **options), 10).init, params)
    assert least <= tree_bytes(state) / sum(math.prod(x.shape) for x in jax.tree.leaves(params)) <= most


def test_bfloat16_momentum_changes_steps_by_less_than_1_percent():
    params, grads = golden_params(), GOLDEN["grads"]

    def after(momentum_dtype):
        optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2, momentum_dtype=momentum_dtype), STEPS)
        state = init_state(params, optimizer, jax.random.key(0))
        step = jax.jit(lambda state, grads: take_step(state, optimizer, grads))
        for i in range(STEPS):
            state, _ = step(state, {name: jnp.array(x[i]) for name, x in grads.items()})
        return state.params["kernel"]

    wide, narrow = np.asarray(after("float32")), np.asarray(after("bfloat16"))
    change, difference = np.abs(wide - params["kernel"]).max(), np.abs(wide - narrow).max()
    assert 0 < difference < 0.01 * change


def test_an_optimizer_without_a_rate_in_its_state_logs_no_rate():
    params = golden_params()
    state = init_state(params, optax.adam(1e-3), jax.random.key(0))
    assert set(take_step(state, optax.adam(1e-3), params)[1]) == {"grad_norm", "update/skipped"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": 0.0}, "expected a finite learning_rate > 0; got 0.0"),
        ({"adam_epsilon": math.inf}, "expected a finite adam_epsilon > 0; got inf"),
        ({"adam_beta2": 1.0}, "expected 0 <= adam_beta2 < 1; got 1.0"),
        ({"min_lr_rate": 2.0, "lr_scheduler_type": "linear"}, "expected 0 <= min_lr_rate <= 1, a share.*; got 2.0"),
        ({"min_lr_rate": 0.5}, "expected min_lr_rate 0 with the scheduler 'constant', which never falls; got 0.5"),
        ({"weight_decay": -0.1}, "expected a finite weight_decay >= 0; got -0.1"),
        ({"max_grad_norm": 0.0}, "expected max_grad_norm > 0, or None; got 0.0"),
        ({"warmup_steps": 1.5}, "expected warmup_steps to be whole steps, or a share of the run below 1; got 1.5"),
        ({"warmup_steps": -1}, "expected warmup_steps to be whole steps, or a share of the run below 1; got -1"),
        ({"optim": "adafactor", "momentum_dtype": "bfloat16"}, "expected momentum_dtype 'float32'.*; got 'bfloat16'"),
    ],
)
def test_bad_configurations(options, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**options)


def test_schedules_that_do_not_fit_the_run_are_refused():
    message = "expected fewer warmup_steps than the 6 optimizer steps of the run; got {}, so that the"
    for falling in ("linear", "cosine"):
        with pytest.raises(ValueError, match=message.format(6) + " learning rate never falls"):
            make_optimizer(OptimizerConfig(lr_scheduler_type=falling, warmup_steps=6), STEPS)
    with pytest.warns(UserWarning, match=message.format(10) + " last learning rate is 0.5, not 1"):
        rates = learning_rate_schedule(OptimizerConfig(learning_rate=1.0, warmup_steps=10), STEPS)
    assert rates(STEPS - 1) == 0.5
    # A share of a short run rounds up, but not to the whole run.
    short = OptimizerConfig(lr_scheduler_type="linear", warmup_steps=0.5, learning_rate=1.0)
    assert learning_rate_schedule(short, 1)(0) == 1
    with pytest.raises(ValueError, match="expected at least one optimizer step; got 0"):
        make_optimizer(OptimizerConfig(), 0)


@pytest.mark.parametrize("optim", ["adamw", "adafactor"])
def test_a_checkpoint_keeps_the_step_of_the_schedule(optim, tmp_path, monkeypatch):
    monkeypatch.setattr(optimizers, "LEAST_FACTORED", 2)
    config = OptimizerConfig(optim=optim, lr_scheduler_type="linear", warmup_steps=2)
    optimizer = make_optimizer(config, STEPS)
    grads = {name: jnp.array(x[0]) for name, x in GOLDEN["grads"].items()}
    step = jax.jit(lambda state: take_step(state, optimizer, grads)[0])
    start = init_state(golden_params(), optimizer, jax.random.key(0))
    half = step(step(step(start)))
    with checkpoint.Writer(tmp_path) as writer:
        writer.save(3, half, config=config)
    restored = checkpoint.restore(tmp_path, start, config=config).state
    assert_bitwise_equal(step(step(restored)), step(step(half)))
