"""The online DPO loop on a toy-sized task: steps, pairs, learning."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.devices.sharding import make_mesh, shard_tree
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.state import TrainState, init_state
from smd_jax.losses.dpo import DPOConfig
from smd_jax.tasks.task import Task
from smd_jax.train import online_dpo
from smd_jax.train.online_dpo import OnlineDPOConfig, OnlineDPOLoop
from smd_jax.train.samples import Samples
from tests.documented_metrics import METRICS, documented
from tests.toy_loop import MODEL, SEVENS, SIZES, TASK, TOKENIZER, optimizer, run, share_programs, warm_params

CONFIG = OnlineDPOConfig(**SIZES | {"prompts_per_step": 4}, update=UpdateConfig(pairs=DPOConfig(beta=0.5)))


@functools.cache
def new_loop(config: OnlineDPOConfig = CONFIG, task: Task = TASK, sizes=(1, 1, 1)):
    """Loops with the same learner share its programs, as in tests/toy_loop.py."""
    loop = OnlineDPOLoop(MODEL, task, TOKENIZER, optimizer(), config, make_mesh(*sizes))
    share_programs(loop)
    return loop


def new_state(seed: int = 0) -> TrainState:
    """The policy starts as its own reference."""
    params = jax.tree.map(jnp.copy, warm_params())
    return shard_tree(init_state(params, optimizer(), jax.random.key(seed), reference=params), make_mesh())


@functools.cache
def samples() -> Samples:
    return new_loop().collect(new_state(), 0)


# --- steps


@pytest.mark.slow
def test_a_step_with_shadow_masks():
    state, metrics = new_loop().step(new_state())
    assert documented("Online DPO") | {"mismatch_kl", "kl", "entropy", "grad_norm", "loss", "reward"} <= metrics.keys()
    assert metrics.keys() <= METRICS
    assert all(np.shape(value) == () and math.isfinite(value) for value in metrics.values())
    assert int(state.step) == 1 and metrics["grad_norm"] > 0
    assert metrics["mismatch_kl"] <= 1e-6
    assert metrics["loss"] == pytest.approx(math.log(2), rel=1e-5), "the policy is still its reference"
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    jax.tree.map(np.testing.assert_array_equal, state.reference, warm_params())


@pytest.mark.slow
def test_several_steps_per_rollout():
    """`mismatch_kl` is of the first step."""
    config = dataclasses.replace(CONFIG, minibatches=2, num_iterations=2)
    state, metrics = new_loop(config).step(new_state())
    assert int(state.step) == 4
    assert metrics["mismatch_kl"] <= 1e-6
    assert metrics["kl"] > 1e-6, "after a step the policy is no longer its reference"
    assert metrics["rewards/margins"] > 0 and metrics["loss"] < math.log(2)


@pytest.mark.slow
def test_a_mesh_gives_the_same_step():
    """The reference is not the policy, so that margins are not 0."""

    def metrics(loop: OnlineDPOLoop) -> dict[str, float]:
        return run(loop, new_state().replace(reference=jax.tree.map(lambda x: 1.2 * x, warm_params())), 1)[1][0]

    one, many = metrics(new_loop()), metrics(new_loop(sizes=(2, 1, 1, 2)))
    assert abs(one["rewards/margins"]) > 1e-3
    for name in ("loss", "reward", "entropy", "grad_norm", *documented("Online DPO")):
        np.testing.assert_allclose(many[name], one[name], rtol=1e-4, atol=1e-5, err_msg=name)


# --- pairs


def test_pairs_are_the_best_and_worst_completions():
    pairs = new_loop().pairs(samples())
    groups = samples().rewards.reshape(4, 4)
    np.testing.assert_array_equal(samples().rewards[pairs.chosen], groups.max(1))
    np.testing.assert_array_equal(samples().rewards[pairs.rejected], groups.min(1))
    np.testing.assert_array_equal(pairs.signal, np.ptp(groups, axis=1) > 0)
    assert pairs.signal.any()
    batch = online_dpo.pair_batch(samples().trajectory, pairs)
    for first, rows in enumerate((pairs.chosen, pairs.rejected)):
        tokens = np.asarray(batch.trajectory.tokens)[first::2]
        np.testing.assert_array_equal(tokens, np.asarray(samples().trajectory.tokens)[np.asarray(rows)])
    np.testing.assert_array_equal(batch.advantages, np.outer(pairs.signal, [1, -1]).reshape(-1))


def test_missing_eos_penalty():
    loop = new_loop(dataclasses.replace(CONFIG, missing_eos_penalty=100.0))
    terminated = np.array([[1, 0, 1, 1], [0, 0, 0, 0], [0, 0, 1, 0], [1, 1, 1, 1]], bool)
    changed = samples()._replace(
        trajectory=samples().trajectory.replace(terminated=jnp.asarray(terminated.reshape(-1))),
        rewards=np.array([1, 9, 2, 3, 5, 6, 4, 7, 9, 9, 1, 8, 0, 0, 0, 1], np.float32),
    )
    pairs = loop.pairs(changed)
    assert (pairs.chosen.tolist(), pairs.rejected.tolist()) == ([3, 7, 10, 15], [1, 6, 11, 14])


# --- learning


@pytest.mark.slow
def test_a_rewarded_symbol_becomes_frequent():
    loop, state = new_loop(task=SEVENS), new_state()

    def share(state: TrainState) -> float:
        texts = loop.collect(state, 99).completions
        return sum(text.count("7") for text in texts) / sum(map(len, texts))

    before = share(state)
    state, rows = run(loop, state, 25)
    assert before < 0.3
    assert share(state) > 0.6
    assert max(row["rewards/margins"] for row in rows) > 1


# --- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 1}, "at least 2 completions, to compare them; got group_size 1"),
        ({"missing_eos_penalty": 0.0}, "expected missing_eos_penalty > 0, or None; got 0.0"),
        ({"update": UpdateConfig()}, r"expected a preference loss, UpdateConfig\(pairs=.*; got pairs None"),
    ],
)
def test_bad_configurations(options, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"minibatches": 3}, "a group is never split; got 4"),
        ({"minibatches": 4}, r"microbatch \(prompts_per_step \* 2 / minibatches\), .* in pairs, that .*; got 1"),
        ({"update": UpdateConfig(pairs=DPOConfig(), microbatch_size=2)}, r"microbatch \(microbatch_size\), .*; got 1"),
    ],
)
def test_pairs_that_do_not_divide_over_the_mesh(options, message):
    with pytest.raises(ValueError, match=message):
        new_loop(dataclasses.replace(CONFIG, **options), sizes=(2, 1, 1))


def test_a_completion_without_a_reward_is_in_no_pair():
    rewards = samples().rewards.copy()
    first = rewards[:4]
    best = int(first.argmax())
    rewards[best] = np.nan
    pairs = new_loop().pairs(samples()._replace(rewards=rewards))
    left = np.delete(np.arange(4), best)
    assert first[int(pairs.chosen[0])] == first[left].max() and int(pairs.chosen[0]) != best
    assert first[int(pairs.rejected[0])] == first[left].min() and int(pairs.rejected[0]) != best
    assert bool(pairs.signal[0]) == (first[left].max() > first[left].min())
    rewards[:4] = np.nan
    assert not new_loop().pairs(samples()._replace(rewards=rewards)).signal[0]
