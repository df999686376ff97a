"""First calls reuse programs that were compiled ahead."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest

from smd_jax.devices.sharding import make_mesh
from smd_jax.learner.state import init_state
from smd_jax.tasks.rewards import Rewards, RewardWarning
from smd_jax.testing import count_compilations
from smd_jax.train.compile_ahead import compiling
from smd_jax.train.online_dpo import OnlineDPOConfig, OnlineDPOLoop
from tests import toy_loop
from tests.toy_loop import CONFIG, MODEL, TASK, TOKENIZER, new_state, optimizer, own_loop, warm_params

SHAPE = jax.ShapeDtypeStruct((3,), jnp.float32)


def cube(x: jax.Array) -> jax.Array:
    return x**3


def test_a_program_compiled_under_the_mesh_is_reused():
    mesh = make_mesh(1, 1, 1)
    cubed = jax.jit(cube)
    numbers = jnp.arange(3.0)
    with count_compilations() as counts, jax.set_mesh(mesh):
        with compiling(cubed.lower(SHAPE), mesh):
            pass
        assert cubed(numbers).tolist() == [0, 1, 8]
    assert counts["cube"] == 1


def test_compiler_errors_are_raised():
    lowered = jax.jit(cube, compiler_options={"xla_no_such_option": True}).lower(SHAPE)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"), compiling(lowered, make_mesh(1, 1, 1)):
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"minibatches": 2, "dynamic_sampling": 0}, {"group_size": 2, "num_iterations": 2}],
    ids=["minibatches, some rows dropped", "two passes"],
)
def test_steps_reuse_the_update_compiled_ahead(changes: dict):
    loop = own_loop(dataclasses.replace(CONFIG, **changes), sizes=(1, 2, 1))
    state = new_state()
    with jax.set_mesh(loop.mesh):
        loop.lower_update(state).compile()
    with count_compilations() as counts:
        toy_loop.run(loop, state, 2)
    assert counts["update"] == 0 and counts["rollout_program"] == 1


@pytest.mark.slow
def test_the_first_completion_without_a_reward_compiles_no_second_update():
    calls = itertools.count()

    def fails_later(prompts, completions, **columns):
        rewards = TASK.reward(prompts, completions, **columns)
        return [None, *rewards[1:]] if next(calls) else rewards

    loop = dataclasses.replace(own_loop(), rewards=Rewards((fails_later,), seconds=None))
    state = new_state()
    with count_compilations() as counts, pytest.warns(RewardWarning, match="got None from all"):
        _, metrics = toy_loop.run(loop, state, 2)
    assert [each["rewards/failed"] for each in metrics] == [0, 1] and counts["update"] == 1


@pytest.mark.slow
def test_online_dpo_reuses_the_update_compiled_ahead():
    loop = OnlineDPOLoop(MODEL, TASK, TOKENIZER, optimizer(), OnlineDPOConfig(**toy_loop.SIZES))
    state = init_state(jax.tree.map(jnp.copy, warm_params()), optimizer(), jax.random.key(0), warm_params())
    with jax.set_mesh(loop.mesh):
        loop.lower_update(state).compile()
    with count_compilations() as counts:
        loop.step(state)
    assert counts["update"] == 0
