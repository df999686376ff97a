"""Minibatches of whole groups, and the learner over the columns that a rollout needs: fewer give the same step."""

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
from smd_jax.monitor.metrics_log import MACHINE_METRICS
from smd_jax.sampler.fixed_batch import RolloutConfig, rollout
from smd_jax.train.grpo import GRPOConfig, GRPOLoop
from smd_jax.train.minibatches import LEAST_STEP, minibatches, over_steps, response_widths, shortened
from smd_jax.train.samples import Samples
from tests.toy_loop import CONFIG, EOS, MODEL, PAD, TASK, TOKENIZER, new_loop, new_state, warm_params
from tests.under_test import left_padded

LONG = 3 * LEAST_STEP
MODEL_LONG = dataclasses.replace(MODEL, config=dataclasses.replace(MODEL.config, max_positions=256))
WIDTH = 9
# Two sizes of update, of which the responses below need the shorter one.
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
    """Four responses, the longest exactly as long as the least width."""
    prompts = left_padded([9, 4, 7, 9], WIDTH, MODEL.config.vocab_size)
    key = jax.random.key(3)
    return rollout(MODEL_LONG, warm_params(), prompts, key, policy=H2O(), config=config, limits=LIMITS)


def given(trajectory: Trajectory, rewards: np.ndarray, config: GRPOConfig) -> GRPOLoop:
    """A loop whose only rollout is this one."""

    class Given(GRPOLoop):
        def collect(self, state: TrainState, index: int) -> Samples:
            return Samples(trajectory, rewards, [], [], None, {})

    # Plain steps, which are as near to each other as the gradients are.
    return Given(MODEL_LONG, TASK, TOKENIZER, OPTIMIZER, config)


@pytest.mark.parametrize(
    ("longest", "sizes", "expected"),
    [
        (256, 4, (64, 128, 192, 256)),
        (100, 3, (34, 67, 100)),
        (100, 8, (34, 67, 100)),  # no smaller steps than LEAST_STEP
        (256, 1, (256,)),
        (9, 4, (9,)),
    ],
)
def test_bucketing(longest: int, sizes: int, expected: tuple[int, ...]):
    assert response_widths(longest, sizes) == expected


def test_the_least_width_that_holds_the_longest_response():
    trajectory = sampled(SIZES)
    assert int(trajectory.lengths().max()) == LEAST_STEP
    for widths, expected in [((LEAST_STEP, LONG), LEAST_STEP), ((LEAST_STEP - 1, LONG), LONG), ((LONG,), LONG)]:
        assert shortened(trajectory, widths).response.shape[1] == expected
    # Nothing is made anew where all columns stay.
    assert shortened(trajectory, (LONG,)) is trajectory


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{}, {"quant": QuantConfig(bits=4, group=8), "sampling": SamplingConfig()}],
    ids=["filtered", "quantised"],
)
def test_the_same_log_probabilities(changes: dict):
    """The replay of the shorter trajectory is the longer one's, column by column."""
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
    """Dr. GRPO, whose denominator is the longest response allowed: it must not become the longest one drawn."""
    config = dataclasses.replace(CONFIG, rollout=SIZES, group_size=2, update=UpdateConfig(loss=dr_grpo()))
    trajectory = sampled(SIZES)
    rewards = np.array([1.0, 0.0, 0.5, 2.0], np.float32)
    found = []
    for sizes, width in ((4, LEAST_STEP), (1, LONG)):
        loop = given(trajectory, rewards, dataclasses.replace(config, update_widths=sizes))
        assert loop.response_widths[0] == width
        found.append(loop.step(init_state(jax.tree.map(jnp.copy, warm_params()), OPTIMIZER, jax.random.key(1))))
    (short, of_short), (whole, of_whole) = found
    for name in of_whole.keys() - MACHINE_METRICS.keys() - {"update/padding"}:
        np.testing.assert_allclose(of_short[name], of_whole[name], rtol=2e-4, atol=2e-6, err_msg=name)
    assert of_short["update/padding"] < of_whole["update/padding"]
    assert of_whole["loss"] != 0 and of_whole["grad_norm"] > 0
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
    parts = [np.asarray(part["group"]) for part in minibatches(batch, state, config, make_mesh(), counted_rows)]
    groups = [part.reshape(-1, rows_per_group) for part in parts]
    assert all((part == part[:, :1]).all() for part in groups), "a group was split"
    return [part[:, 0].tolist() for part in groups]


@pytest.mark.parametrize("rows_per_group", [4, 1])
def test_minibatches_are_whole_groups_in_another_order_in_every_pass(rows_per_group: int):
    seen = groups_of_steps(rows_per_group=rows_per_group)
    assert seen[:4] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    passes = [seen[first : first + 4] for first in (0, 4, 8)]
    assert all(sorted(sum(of_pass, [])) == list(range(8)) for of_pass in passes)
    assert passes[0] != passes[1] != passes[2] != passes[0]


def test_the_order_of_minibatches_depends_on_key_step_and_pass():
    assert groups_of_steps(1, 2) == groups_of_steps(1, 2)
    assert groups_of_steps(1, 2)[4:] != groups_of_steps(1, 3)[4:]
    assert groups_of_steps(1, 2)[4:] != groups_of_steps(2, 2)[4:]


def test_groups_that_count_are_spread_over_the_minibatches_of_every_pass():
    counted = [True] * 4 + [False] * 4
    assert all(sum(counted[group] for group in groups) == 1 for groups in groups_of_steps(counted=counted))


# --- metrics of several steps

OF_STEPS = {
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


def over(rows: dict[str, list[float]]) -> dict[str, float]:
    steps = [{name: jnp.float32(values[i]) for name, values in rows.items()} for i in range(len(rows["entropy"]))]
    return {name: float(value) for name, value in over_steps(steps, {}).items()}


def test_a_step_without_tokens_is_in_no_mean_and_others_weigh_by_their_tokens():
    expected = {
        "entropy": (6 * 1.0 + 2 * 3.0) / 8,
        "clip_ratio/low_mean": (6 * 0.5 + 2 * 0.1) / 8,
        "rollout_corr/rollout_is_mean": (6 * 0.5 + 2 * 0.9) / 8,
        "rollout_corr/rollout_is_min": 1.25,
        "rollout_corr/rollout_is_max": 0.75,
        "critic/values/mean": (6 * 2.0 + 2 * 4.0) / 8,
        # Of two steps that learn, and of all.
        "loss": 1.5,
        "grad_norm": 3.5,
        "mine": 1.5,
        "learning_rate": 0.5,
        "update/skipped": 1 / 3,
        "evictions/logp_difference/max": 0.5,
    }
    assert over(OF_STEPS) == pytest.approx(expected)


def test_steps_without_any_token_say_what_each_of_them_says():
    nothing = {name: [values[1]] * 2 for name, values in OF_STEPS.items() if name != "critic/values/mean"}
    found = over(nothing)
    assert found == {name: values[0] for name, values in nothing.items() if name in found}
    assert found["entropy"] == 0 and found["rollout_corr/rollout_is_min"] == 1
    # An update of one's own has no weights.
    assert over({"entropy": [1.0, 2.0], "loss": [0.0, 3.0]}) == {"entropy": 1.5, "loss": 1.5}


def test_masked_truncated_completions_leave_the_entropy_as_it_is():
    """Of two minibatches without a token, or with unequally many: what one batch of all says."""
    update = UpdateConfig(mask_truncated_completions=True)
    # Steps that change nothing, so that the second minibatch sees the parameters of the first.
    loops = [
        GRPOLoop(MODEL, TASK, TOKENIZER, optax.sgd(0.0), dataclasses.replace(CONFIG, update=update, minibatches=count))
        for count in (1, 2)
    ]
    samples = new_loop().collect(new_state(), 0)
    names = ("entropy", "rollout_corr/rollout_is_mean", "rollout_corr/rollout_is_min", "clip_ratio/region_mean")
    for ended in ([1, 1, 1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 1, 1, 1, 0]):
        trajectory = samples.trajectory.replace(terminated=jnp.asarray(ended, bool))
        found = []
        for loop in loops:
            state = init_state(jax.tree.map(jnp.copy, warm_params()), loop.optimizer, jax.random.key(0))
            found.append(jax.device_get(loop.learn(state, samples._replace(trajectory=trajectory))[1]))
        whole, parts = found
        assert whole["entropy"] > 0.1 and not {"update/tokens", "update/learns"} & parts.keys()
        for name in names:
            np.testing.assert_allclose(parts[name], whole[name], rtol=1e-4, err_msg=name)
        if not any(ended[4:]):
            np.testing.assert_allclose(parts["grad_norm"], whole["grad_norm"], rtol=1e-3)
