"""Minibatches of whole groups, updates over fewer response columns, and metrics of several steps."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from smd_jax.devices.sharding import make_mesh
from smd_jax.eviction.policies import H2O
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.forward import replay
from smd_jax.learner.state import TrainState, init_state
from smd_jax.losses.named import dr_grpo
from smd_jax.message.quantization import QuantConfig
from smd_jax.message.sampling import SamplingConfig
from smd_jax.message.trajectory import Trajectory
from smd_jax.sampler.fixed_batch import RolloutConfig, rollout
from smd_jax.train.grpo import GRPOConfig, GRPOLoop
from smd_jax.train.minibatches import LEAST_STEP, minibatches, over_steps, response_widths, shortened
from smd_jax.train.samples import Samples
from tests.documented_metrics import MACHINE_METRICS
from tests.toy_loop import CONFIG, EOS, MODEL, PAD, TASK, TOKENIZER, new_loop, new_state, warm_params
from tests.under_test import left_padded

LONG = 3 * LEAST_STEP
MODEL_LONG = dataclasses.replace(MODEL, config=dataclasses.replace(MODEL.config, max_positions=256))
WIDTH = 9
# Two update widths; the responses below need the shorter one.
SIZES = RolloutConfig(
    max_new_tokens=LONG,
    budget=16,
    buffer=8,
    eos_token_id=EOS,
    pad_token_id=PAD,
    sampling=SamplingConfig(top_k=12),
    min_new_tokens=LEAST_STEP,
)
OPTIMIZER = optax.sgd(1.0)
LIMITS = np.array([20, 31, 7, LEAST_STEP])


def sampled(config: RolloutConfig) -> Trajectory:
    """Four responses, the longest exactly as long as the shortest width."""
    prompts = left_padded([9, 4, 7, 9], WIDTH, MODEL.config.vocab_size)
    key = jax.random.key(3)
    return rollout(MODEL_LONG, warm_params(), prompts, key, policy=H2O(), config=config, limits=LIMITS)


def loop_with_rollout(trajectory: Trajectory, rewards: np.ndarray, config: GRPOConfig) -> GRPOLoop:
    class OneRollout(GRPOLoop):
        def collect(self, state: TrainState, index: int) -> Samples:
            return Samples(trajectory, rewards, [], [], np.ones(4, bool), {})

    # OPTIMIZER is plain SGD: steps differ by no more than gradients do.
    return OneRollout(MODEL_LONG, TASK, TOKENIZER, OPTIMIZER, config)


@pytest.mark.parametrize(
    ("longest", "sizes", "expected"),
    [
        (256, 4, (64, 128, 192, 256)),
        (100, 3, (34, 67, 100)),
        (100, 8, (34, 67, 100)),  # steps of at least LEAST_STEP
        (256, 1, (256,)),
        (9, 4, (9,)),
    ],
)
def test_response_widths(longest: int, sizes: int, expected: tuple[int, ...]):
    assert response_widths(longest, sizes) == expected


def test_shortened_takes_the_least_width_that_holds_all_responses():
    trajectory = sampled(SIZES)
    assert int(trajectory.lengths().max()) == LEAST_STEP
    for widths, expected in [((LEAST_STEP, LONG), LEAST_STEP), ((LEAST_STEP - 1, LONG), LONG), ((LONG,), LONG)]:
        assert shortened(trajectory, widths).response.shape[1] == expected
    # The same object if all columns stay.
    assert shortened(trajectory, (LONG,)) is trajectory


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{}, {"quant": QuantConfig(bits=4, group=8), "sampling": SamplingConfig()}],
    ids=["filtered", "quantised"],
)
def test_a_shortened_trajectory_has_the_same_logprobs(changes: dict):
    trajectory = sampled(dataclasses.replace(SIZES, **changes))
    short = shortened(trajectory, (LEAST_STEP, LONG))
    np.testing.assert_array_equal(short.response_mask, trajectory.response_mask[:, :LEAST_STEP])
    whole, part = (jax.jit(replay, static_argnums=0)(MODEL_LONG, warm_params(), x) for x in (trajectory, short))
    mask = np.asarray(short.response_mask)
    for name in ("logprobs", "entropy"):
        expected = np.asarray(getattr(whole, name))[:, :LEAST_STEP]
        np.testing.assert_allclose(np.asarray(getattr(part, name))[mask], expected[mask], atol=2e-5)
    np.testing.assert_allclose(np.asarray(part.logprobs)[mask], np.asarray(short.logprobs)[mask], atol=5e-5)


@pytest.mark.slow
def test_a_step_is_the_same_over_fewer_columns():
    """Dr. GRPO divides by the longest allowed response, which must not become the longest sampled one."""
    config = dataclasses.replace(CONFIG, rollout=SIZES, group_size=2, update=UpdateConfig(loss=dr_grpo()))
    trajectory = sampled(SIZES)
    rewards = np.array([1.0, 0.0, 0.5, 2.0], np.float32)
    results = []
    for sizes, width in ((4, LEAST_STEP), (1, LONG)):
        loop = loop_with_rollout(trajectory, rewards, dataclasses.replace(config, update_widths=sizes))
        assert loop.response_widths[0] == width
        results.append(loop.step(init_state(jax.tree.map(jnp.copy, warm_params()), OPTIMIZER, jax.random.key(1))))
    (short, short_metrics), (whole, whole_metrics) = results
    for name in whole_metrics.keys() - MACHINE_METRICS - {"update/padding"}:
        np.testing.assert_allclose(short_metrics[name], whole_metrics[name], rtol=2e-4, atol=2e-6, err_msg=name)
    assert short_metrics["update/padding"] < whole_metrics["update/padding"]
    assert whole_metrics["loss"] != 0 and whole_metrics["grad_norm"] > 0
    for x, y in zip(jax.tree.leaves(short.params), jax.tree.leaves(whole.params), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


# --- minibatches


def groups_of_steps(
    seed: int = 1, rollouts_before: int = 0, counted: Sequence[bool] | None = None, rows_per_group: int = 4
) -> list[list[int]]:
    """The groups that each optimizer step of a rollout sees: eight groups, four minibatches, three passes."""
    config = dataclasses.replace(CONFIG, prompts_per_step=8, minibatches=4, num_iterations=3)
    batch = {"group": jnp.repeat(jnp.arange(8), rows_per_group)}
    state = TrainState(jnp.int32(12 * rollouts_before), {}, (), None, jax.random.key(seed))
    counted_rows = None if counted is None else np.repeat(counted, rows_per_group)
    parts = list(minibatches(batch, state, config, make_mesh(), counted_rows))
    groups = [np.asarray(part["group"]).reshape(-1, rows_per_group) for part, _ in parts]
    assert all((part == part[:, :1]).all() for part in groups), "a group was split"
    for part, (_, counts) in zip(groups, parts, strict=True):
        assert counts == (counted is None or any(counted[group] for group in part[:, 0]))
    return [part[:, 0].tolist() for part in groups]


@pytest.mark.parametrize("rows_per_group", [4, 1])
def test_minibatches_are_whole_groups_in_another_order_in_every_pass(rows_per_group: int):
    seen = groups_of_steps(rows_per_group=rows_per_group)
    assert seen[:4] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    passes = [seen[first : first + 4] for first in (0, 4, 8)]
    assert all(sorted(sum(groups, [])) == list(range(8)) for groups in passes)
    assert passes[0] != passes[1] != passes[2] != passes[0]


def test_the_order_of_minibatches_depends_on_key_step_and_pass():
    assert groups_of_steps(1, 2) == groups_of_steps(1, 2)
    assert groups_of_steps(1, 2)[4:] != groups_of_steps(1, 3)[4:]
    assert groups_of_steps(1, 2)[4:] != groups_of_steps(2, 2)[4:]


def test_counted_groups_are_spread_over_the_minibatches_of_every_pass():
    counted = [True] * 4 + [False] * 4
    assert all(sum(counted[group] for group in groups) == 1 for groups in groups_of_steps(counted=counted))
    assert groups_of_steps(counted=[False] * 7 + [True])[0] == [0, 4], "some minibatches have no group that counts"


# --- metrics of several steps

STEP_METRICS = {
    "update/tokens": [6.0, 0.0, 2.0],
    "update/learns": [1.0, 0.0, 1.0],
    "entropy": [1.0, 0.0, 3.0],
    "clip_ratio/low_mean": [0.5, 0.0, 0.1],
    "rollout_corr/rollout_is_mean": [0.5, 1.0, 0.9],
    "rollout_corr/rollout_is_min": [1.25, 1.0, 1.5],
    "rollout_corr/rollout_is_max": [0.5, 1.0, 0.75],
    "critic/values/mean": [2.0, float("nan"), 4.0],
    "loss": [1.0, 0.0, 2.0],
    "grad_norm": [3.0, 0.0, 4.0],
    "learning_rate": [0.25, 0.5, 0.75],
    "update/skipped": [0.0, 0.0, 1.0],
    "evictions/logp_difference/max": [0.5, 9.0, 9.0],
    "mine": [1.0, 7.0, 2.0],
}


def averaged(rows: dict[str, list[float]]) -> dict[str, float]:
    steps = [{name: jnp.float32(values[i]) for name, values in rows.items()} for i in range(len(rows["entropy"]))]
    return {name: float(value) for name, value in over_steps(steps, {}).items()}


def test_means_over_steps_are_weighted_by_tokens():
    expected = {
        "entropy": (6 * 1.0 + 2 * 3.0) / 8,
        "clip_ratio/low_mean": (6 * 0.5 + 2 * 0.1) / 8,
        "rollout_corr/rollout_is_mean": (6 * 0.5 + 2 * 0.9) / 8,
        "rollout_corr/rollout_is_min": 1.25,
        "rollout_corr/rollout_is_max": 0.75,
        "critic/values/mean": (6 * 2.0 + 2 * 4.0) / 8,
        # Over the two steps that learn.
        "loss": 1.5,
        "grad_norm": 3.5,
        "mine": 1.5,
        # Over all steps.
        "learning_rate": 0.5,
        "update/skipped": 1 / 3,
        "evictions/logp_difference/max": 0.5,  # of the first step
    }
    assert averaged(STEP_METRICS) == pytest.approx(expected)


def test_metrics_of_steps_without_tokens():
    nothing = {name: [values[1]] * 2 for name, values in STEP_METRICS.items() if name != "critic/values/mean"}
    metrics = averaged(nothing)
    assert metrics == {name: values[0] for name, values in nothing.items() if name in metrics}
    assert metrics["entropy"] == 0 and metrics["rollout_corr/rollout_is_min"] == 1
    # A custom update logs no token counts.
    assert averaged({"entropy": [1.0, 2.0], "loss": [0.0, 3.0]}) == {"entropy": 1.5, "loss": 1.5}


@pytest.mark.slow
def test_metrics_of_unequal_minibatches_are_those_of_one_batch():
    """The second minibatch has no counted tokens, or the two have unequally many."""
    update = UpdateConfig(mask_truncated_completions=True)
    # Learning rate 0, so that the second minibatch sees the parameters of the first.
    loops = [
        GRPOLoop(MODEL, TASK, TOKENIZER, optax.sgd(0.0), dataclasses.replace(CONFIG, update=update, minibatches=count))
        for count in (1, 2)
    ]
    samples = new_loop().collect(new_state(), 0)
    names = ("entropy", "rollout_corr/rollout_is_mean", "rollout_corr/rollout_is_min", "clip_ratio/region_mean")
    for ended in ([1, 1, 1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 1, 1, 1, 0]):
        trajectory = samples.trajectory.replace(terminated=jnp.asarray(ended, bool))
        metrics = []
        for loop in loops:
            state = init_state(jax.tree.map(jnp.copy, warm_params()), loop.optimizer, jax.random.key(0))
            metrics.append(jax.device_get(loop.learn(state, samples._replace(trajectory=trajectory))[1]))
        whole, parts = metrics
        assert whole["entropy"] > 0.1 and not {"update/tokens", "update/learns"} & parts.keys()
        for name in names:
            np.testing.assert_allclose(parts[name], whole[name], rtol=1e-4, err_msg=name)
        if not any(ended[4:]):
            np.testing.assert_allclose(parts["grad_norm"], whole["grad_norm"], rtol=1e-3)
