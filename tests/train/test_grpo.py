"""The GRPO loop on a toy-sized task: metrics, files, minibatches, dynamic sampling, reproducibility, learning."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.corrections import TIS, Naive, Shadow
from smd_jax.devices.sharding import shard_batch
from smd_jax.eviction.policies import H2O, Dense
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.forward import replay
from smd_jax.learner.state import TrainBatch
from smd_jax.learner.terms import Minibatch, Term, TermInputs, TermOutputs, TermResults
from smd_jax.losses.advantages import group_relative
from smd_jax.losses.distillation import DistillConfig
from smd_jax.losses.dpo import DPOConfig
from smd_jax.losses.named import gspo
from smd_jax.losses.policy import LossConfig
from smd_jax.losses.value import ValueConfig
from smd_jax.losses.weighting import TokenMean
from smd_jax.message.masks import Mask
from smd_jax.message.sampling import SamplingConfig
from smd_jax.message.trajectory import Trajectory
from smd_jax.metrics import SAMPLER_LEARNER_METRICS
from smd_jax.model.decoder import Decoder
from smd_jax.model.protocol import Params
from smd_jax.monitor.completions import CompletionsLog, load_masks
from smd_jax.monitor.metrics_log import read_metrics
from smd_jax.runs.run import train
from smd_jax.runs.run_config import RunConfig
from smd_jax.tasks.dataset_task import DatasetTask
from smd_jax.tasks.rewards import RewardWarning
from smd_jax.tasks.task import Row
from smd_jax.testing import tiny_model_config
from smd_jax.train import grpo
from smd_jax.train.grpo import GRPOLoop
from smd_jax.train.minibatches import TOKEN_MEANS
from smd_jax.train.rollouts import encode_rows
from smd_jax.train.samples import Samples
from tests import reward_cases
from tests.bitwise import assert_bitwise_equal
from tests.documented_metrics import METRICS, documented
from tests.toy_loop import (
    CONFIG,
    DISTILLED,
    MODEL,
    PAD,
    ROLLOUT,
    SEVENS,
    TASK,
    TOKENIZER,
    Sevens,
    new_loop,
    new_state,
    optimizer,
    own_loop,
    run,
    share_programs,
    warm_params,
)
from tests.under_test import bos_tokenizer

# Metrics of TRL's GRPOTrainer, without `kl`, which needs a reference, and those of TRL's own set-up.
# `sampling/token_ratio/*` is ours: TRL logs the ratio after truncation.
TRL_METRICS = {
    "reward",
    "reward_std",
    "frac_reward_zero_std",
    "entropy",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
    "completions/mean_length",
    "completions/min_length",
    "completions/max_length",
    "completions/clipped_ratio",
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    "sampling/token_ratio/min",
    "sampling/token_ratio/mean",
    "sampling/token_ratio/max",
    "mismatch_kl",
    "grad_norm",
    "step_time",
}


# --- steps


@pytest.mark.parametrize(
    ("policy", "visibility", "minibatches"),
    [
        (H2O(), "shadow", 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((H2O(), "dense", 2), (Dense(), "shadow", 1))),
    ],
)
def test_steps_under_several_policies(policy, visibility, minibatches):
    update = UpdateConfig(visibility=visibility, correction=Shadow() if visibility == "shadow" else Naive())
    config = dataclasses.replace(CONFIG, policy=policy, update=update, minibatches=minibatches)
    state, metrics = new_loop(config).step(new_state(1))
    assert set(metrics) >= TRL_METRICS
    assert set(metrics) <= METRICS - {"kl", "distill"}
    assert all(np.shape(value) == () and math.isfinite(value) for value in metrics.values())
    assert int(state.step) == minibatches
    assert 0 < metrics["reward"] < 1 and metrics["reward_std"] > 0 and metrics["grad_norm"] > 0
    assert 1 <= metrics["completions/min_length"] <= metrics["completions/max_length"] <= 5
    on_policy = metrics["sampling/sampling_logp_difference/max"] < 2e-5
    assert on_policy == (visibility == "shadow")
    if minibatches == 1:
        assert metrics["clip_ratio/region_mean"] == 0, "the ratio of the first step is 1"


@pytest.mark.slow
def test_every_metric_is_documented():
    """A step with all loss terms logs every metric that does not need another mode."""
    update = UpdateConfig(loss=LossConfig(beta=0.1), distill=DistillConfig())
    state = new_state().replace(reference=jax.tree.map(jnp.copy, warm_params()))
    _, metrics = new_loop(dataclasses.replace(CONFIG, update=update)).step(state)
    absent = {"rewards/{name}/mean", "rewards/{name}/std", "dynamic_sampling/rollouts", "rollout/utilisation"}
    absent |= {"cispo_clip_ratio", "sapo_gate_mean", "learning_rate"}  # other surrogates, optimizers that log it
    absent |= {"update/shared", "time/environment"}  # packed rows, conversations
    # A second learner, learned eviction, experts.
    absent |= {"loss/dense_avg", "evictions/loss", "evictions/logp_difference/max", "experts/balance_loss"}
    absent |= documented("Conversations", "Staleness", "Critic", "Online DPO", "Evaluations", "Memory")
    assert set(metrics) == METRICS - absent
    assert metrics["kl"] == pytest.approx(0, abs=1e-6) and metrics["distill"] > 0


@pytest.mark.parametrize("chat", [False, True])
def test_a_prompt_begins_with_one_bos_token(chat):
    """The tokenizer adds BOS, unless a chat template has written it."""
    tokenizer = bos_tokenizer(chat=chat)
    batch = encode_rows(new_loop().model, tokenizer, [{"prompt": "31="}, {"prompt": "1="}], 30)
    for tokens, valid, text in zip(np.asarray(batch.tokens), np.asarray(batch.valid), (b"31=", b"1="), strict=True):
        row = tokens[valid].tolist()
        assert row[0] == 257 != row[1]
        if not chat:
            assert row[1:] == list(text)


def test_rewards_match_their_completions():
    loop, state = new_loop(), new_state()
    samples = loop.collect(state, 5)
    trajectory, rewards = samples.trajectory, samples.rewards
    texts = [
        bytes(row[keep & (row < 256)].tolist()).decode(errors="replace")
        for row, keep in zip(np.asarray(trajectory.response), np.asarray(trajectory.response_mask), strict=True)
    ]
    prompts = [bytes(row[row != PAD].tolist()).decode() for row in np.asarray(trajectory.tokens[:, :9])]
    assert prompts == [prompts[0]] * 4 + [prompts[4]] * 4 and prompts[0] != prompts[4]
    answers = ["".join(sorted(c for c in prompt if c.isdigit())) for prompt in prompts]
    share = [sum(a == b for a, b in zip(x.strip(), y, strict=False)) for x, y in zip(texts, answers, strict=True)]
    expected = [n / max(len(x.strip()), 3) for n, x in zip(share, texts, strict=True)]
    np.testing.assert_allclose(rewards, expected, rtol=1e-6)
    assert rewards.dtype == np.float32 and len(set(expected)) > 1
    assert samples.counted_rows.all() and samples.rewarded_rows.all() and samples.reward_parts == {}
    assert [name for name in samples.metrics if name.startswith("rewards/")] == ["rewards/failed"]
    assert samples.metrics["rewards/failed"] == 0


@pytest.mark.parametrize("minibatches", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_loss_and_metrics_of_minibatches_by_hand(minibatches):
    loop = new_loop(dataclasses.replace(CONFIG, minibatches=minibatches))
    samples = loop.collect(new_state(), 0)
    trajectory = samples.trajectory
    rewards = np.array([1, 0, 0, 0, 2, 5, 3, 2], np.float32)
    groups = rewards.reshape(2, 4)
    centred = groups - groups.mean(1, keepdims=True)
    advantages = (centred / (groups.std(1, ddof=1, keepdims=True) + 1e-4)).reshape(-1)[: 8 // minibatches]
    mask = np.asarray(trajectory.response_mask)[: 8 // minibatches]
    learned, metrics = loop.learn(new_state(), samples._replace(rewards=rewards))
    assert int(learned.step) == minibatches
    whole = TrainBatch(trajectory, group_relative(jnp.asarray(rewards), 4), trajectory.logprobs)
    state, steps = new_state(), []
    for i in range(minibatches):
        with jax.set_mesh(loop.mesh):
            rows = slice(i * 8 // minibatches, (i + 1) * 8 // minibatches)  # whole groups
            part = jax.tree.map(lambda x, rows=rows: x[rows], whole)
            state, step = loop.update(state, shard_batch(part, loop.mesh))
        steps.append(jax.device_get(step))
    assert sum(step["update/tokens"] for step in steps) == trajectory.response_mask.sum()
    # The sampler is the old policy, so the ratio is 1; every token of the minibatch has the same weight.
    np.testing.assert_allclose(steps[0]["loss"], -(advantages[:, None] * mask).sum() / mask.sum(), rtol=1e-4)
    for name, value in metrics.items():
        if minibatches == 2 and name in SAMPLER_LEARNER_METRICS:
            continue  # of the whole rollout, see below
        values = [step[name] for step in steps]
        extremes = {"rollout_corr/rollout_is_min": np.min, "rollout_corr/rollout_is_max": np.max}
        tokens = [step["update/tokens"] for step in steps] if name in TOKEN_MEANS else None
        expected = extremes[name](values) if name in extremes else np.average(values, weights=tokens)
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-6, err_msg=name)
    if minibatches == 2:
        assert steps[1]["mismatch_kl"] > 1e-5 > metrics["mismatch_kl"], "after a step the learner is another policy"


def test_several_passes_over_a_rollout():
    config = dataclasses.replace(CONFIG, num_iterations=3)
    samples = new_loop(config).collect(new_state(), 0)
    state, metrics = new_loop(config).learn(new_state(), samples)
    assert int(state.step) == 3 and metrics["mismatch_kl"] <= 1e-6, "sampler and learner are compared before any step"
    # The guard is off, because it would refuse the rollout after the first step.
    expected, once = new_state(), dataclasses.replace(new_loop(), guard=None)
    share_programs(once)
    for _ in range(3):
        expected, _ = once.learn(expected, samples)
    assert_bitwise_equal(state.params, expected.params)  # the sampler stays the old policy of all three
    following = new_loop(config).collect(state, int(state.step) // 3)
    np.testing.assert_array_equal(following.trajectory.tokens[:, :9], once.collect(state, 1).trajectory.tokens[:, :9])


@jax.jit
def replayed(params: Params, trajectory: Trajectory, mask: Mask) -> jax.Array:
    """Log-probabilities of the learner under this mask."""
    return replay(MODEL, params, trajectory, mask).logprobs


@pytest.mark.parametrize("visibility", ["shadow", "dense"])
def test_sampler_and_learner_are_compared_over_the_whole_rollout(visibility):
    """The sampler's log-probabilities are shifted in the rows of the first or of the second minibatch."""
    update = UpdateConfig(visibility=visibility, correction=Shadow() if visibility == "shadow" else TIS())
    loop = new_loop(dataclasses.replace(CONFIG, minibatches=2, num_iterations=2, update=update))
    samples = loop.collect(new_state(), 0)
    trajectory = samples.trajectory
    mask = np.asarray(trajectory.response_mask)
    learner_mask = trajectory.mask if visibility == "shadow" else trajectory.dense_mask()
    learner = np.asarray(replayed(warm_params(), trajectory, learner_mask))
    for first_row in (0, 4):
        shifted = np.zeros_like(mask)
        shifted[first_row : first_row + 4] = True
        sampler = np.where(shifted, np.asarray(trajectory.logprobs) - np.float32(0.5), trajectory.logprobs)
        altered = samples._replace(trajectory=trajectory.replace(logprobs=jnp.asarray(sampler)))
        _, metrics = loop.learn(new_state(), altered)
        delta = (learner - sampler)[mask].astype(np.float64)
        ratio = np.exp(delta)
        row_ratio = np.exp(np.where(mask, learner - sampler, 0.0).sum(1))
        expected = {
            "sampling/sampling_logp_difference/mean": np.abs(delta).mean(),
            "sampling/sampling_logp_difference/max": np.abs(delta).max(),
            "sampling/token_ratio/min": ratio.min(),
            "sampling/token_ratio/mean": ratio.mean(),
            "sampling/token_ratio/max": ratio.max(),
            "mismatch_kl": (np.expm1(delta) - delta).mean(),
            "rollout_corr/chi2_token": (ratio**2).mean() - 1,
            "rollout_corr/chi2_seq": (row_ratio**2).mean() - 1,
            "rollout_corr/eff_sample_size": ratio.mean() ** 2 / (ratio**2).mean(),
            "rollout_corr/agreement_p5": np.percentile(np.minimum(ratio, 1), 5),
        }
        for name, value in expected.items():
            np.testing.assert_allclose(metrics[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_advantages_of_rloo():
    loop = new_loop(dataclasses.replace(CONFIG, advantages="leave_one_out", scale_rewards="none"))
    rewards = np.array([1, 0, 0, 3, 2, 2, 2, 2], np.float32)
    np.testing.assert_allclose(grpo.advantages(loop.config, rewards), [0, -4 / 3, -4 / 3, 8 / 3, 0, 0, 0, 0], atol=1e-6)


def test_completions_masks_and_times_of_a_run(tmp_path):
    seen = []

    def watch(step: int, samples: Samples) -> None:
        seen.append((step, samples))
        log(step, samples)

    unwatched = new_loop()
    log = CompletionsLog(tmp_path, unwatched.tokenizer, table_rows=0, masks=3)
    loop = dataclasses.replace(unwatched, watch=watch, watch_every=2)
    share_programs(loop)
    train(loop, new_state(), RunConfig(steps=4), tmp_path)
    assert [step for step, _ in seen] == [0, 2, 3], "every second, and the last"
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    for row in metrics:
        assert documented("Times") - {"time/environment"} <= row.keys()
        assert 0 < row["time/rollout"] + row["time/grading"] + row["time/update"] <= row["step_time"] + 1e-3
        assert row["rollout/tokens"] == 8 * row["completions/mean_length"]
        assert row["rollout/tokens_per_second"] == pytest.approx(row["rollout/tokens"] / row["time/rollout"])
    for step, samples in seen:
        assert samples.rewards.mean() == pytest.approx(metrics[step]["reward"])
        groups = samples.advantages.reshape(-1, CONFIG.group_size)
        np.testing.assert_allclose(groups.mean(1), 0, atol=1e-6)
    assert sorted(path.name for path in (tmp_path / "completions").glob("*.parquet")) == [
        *("completions_00000.parquet", "completions_00002.parquet", "completions_00003.parquet")
    ]
    trajectory = seen[2][1].trajectory
    for row, mask in enumerate(load_masks(tmp_path / "completions" / "masks_00003.npz")):
        # Against the explicit mask of the same rollout, without its padding.
        keep = np.flatnonzero(trajectory.valid[row])
        expected = np.asarray(trajectory.mask.to_boolean())[row][..., keep[0] : keep[-1] + 1, keep[0] : keep[-1] + 1]
        causal = np.tril(np.ones(expected.shape[-2:], bool))
        for query in range(len(keep)):
            np.testing.assert_array_equal(mask.forgotten(query), causal[query] & ~expected[:, :, query])


# --- dynamic sampling


def uneven_reward(index: Any) -> list[float]:
    return [float(row % 3 == 0 and place % 2) for place, row in enumerate(index)]


# Only every third row has different rewards within its group.
UNEVEN = DatasetTask([TASK[index] | {"index": index} for index in range(len(TASK))], uneven_reward)


def test_dynamic_sampling_samples_until_the_batch_is_full():
    config = dataclasses.replace(CONFIG, dynamic_sampling=20)
    samples = new_loop(config, UNEVEN).collect(new_state(), 0)
    assert samples.counted_rows.all() and samples.counted_rows.shape == (8,)
    assert samples.rewards.tolist() == [0, 1, 0, 1] * 2
    indices = [row["index"] for row in samples.task_rows]
    assert all(index % 3 == 0 for index in indices) and indices[0] != indices[4]
    prompts = [bytes(row[row != PAD].tolist()).decode() for row in np.asarray(samples.trajectory.tokens[:, :9])]
    assert prompts == [TASK[index]["prompt"] for index in indices], "trajectories and rows must stay together"
    rollouts = float(samples.metrics["dynamic_sampling/rollouts"])
    assert 1 < rollouts <= 21
    assert 0 < samples.metrics["frac_reward_zero_std"] < 1, "over all rollouts"


def test_groups_without_signal_do_not_count():
    samples = new_loop(dataclasses.replace(CONFIG, dynamic_sampling=0), UNEVEN).collect(new_state(), 0)
    has_signal = [row["index"] % 3 == 0 for row in samples.task_rows]
    assert samples.counted_rows.tolist() == has_signal
    assert any(has_signal) and not all(has_signal)


def test_a_step_without_signal_changes_no_parameter():
    """Momentum and weight decay would change them."""
    config = dataclasses.replace(CONFIG, dynamic_sampling=0, num_iterations=2)
    state, _ = run(new_loop(config), new_state(), 1)
    params = jax.tree.map(jnp.copy, state.params)
    samples = new_loop(config).collect(state, 1)
    learned, metrics = new_loop(config).learn(state, samples._replace(counted_rows=np.zeros(8, bool)))
    assert_bitwise_equal(learned.params, params)
    assert int(learned.step) == 4 and metrics == {}


@dataclasses.dataclass(frozen=True)
class Likelihood(Term):
    """A custom term without rewards: the mean log-probability of all response tokens."""

    def prepare(self, minibatch: Minibatch) -> jax.Array:
        return TokenMean().weights(minibatch.trajectory.response_mask)

    def evaluate(self, inputs: TermInputs) -> TermOutputs:
        return TermOutputs(-jnp.sum(inputs.prepared * inputs.logprobs))

    def learns(self, results: TermResults) -> jax.Array:
        return (results.prepared > 0).any()


TEACHER, CUSTOM = UpdateConfig(distill=DistillConfig(coef=1.0)), UpdateConfig(terms=(Likelihood(),))


@pytest.mark.parametrize("update", [TEACHER, pytest.param(CUSTOM, marks=pytest.mark.slow)], ids=["distill", "custom"])
def test_distillation_and_custom_terms_need_no_signal(update: UpdateConfig):
    """They have a gradient even if no group has reward signal."""
    loop = new_loop(dataclasses.replace(CONFIG, dynamic_sampling=0, update=update))
    samples = loop.collect(new_state(), 0)
    nothing = samples._replace(rewards=np.zeros(8, np.float32), counted_rows=np.zeros(8, bool))
    before = jax.device_get(new_state().params)
    state, metrics = loop.learn(new_state(), nothing)
    assert metrics["grad_norm"] > 0 and np.isfinite(metrics["loss"])
    if update is TEACHER:
        assert metrics["loss"] == pytest.approx(float(metrics["distill"]), rel=1e-5) and metrics["distill"] > 0
    moved = jax.tree.map(lambda x, y: float(np.abs(x - y).max()), before, jax.device_get(state.params))
    assert max(jax.tree.leaves(moved)) > 1e-4


def test_old_logprobs_of_shadow_and_dense_learners():
    trajectory = new_loop().collect(new_state(), 0).trajectory
    dense = dataclasses.replace(CONFIG, update=UpdateConfig(visibility="dense", correction=Naive()))
    assert new_loop().old_logprobs(warm_params(), trajectory) is trajectory.logprobs
    assert new_loop(dense).old_logprobs(warm_params(), trajectory) is None
    twice = new_loop(dataclasses.replace(dense, minibatches=2)).old_logprobs(warm_params(), trajectory)
    expected = replayed(warm_params(), trajectory, trajectory.dense_mask())
    assert twice is not None
    np.testing.assert_allclose(twice, expected, atol=1e-5)
    difference = jnp.where(trajectory.response_mask, expected - trajectory.logprobs, 0.0)
    assert jnp.abs(difference).max() > 1e-3, "the dense learner must be another policy than the sampler"


@pytest.mark.slow
def test_gspo_takes_old_logprobs_from_the_learner():
    """In 16 bits, sampler and learner differ by more than GSPO's bounds, but an on-policy step clips nothing."""
    config = dataclasses.replace(CONFIG, update=UpdateConfig(loss=gspo()))
    trajectory = new_loop().collect(new_state(), 0).trajectory
    later = new_loop(dataclasses.replace(config, num_iterations=2)).old_logprobs(warm_params(), trajectory)
    assert later is not None
    np.testing.assert_allclose(later, replayed(warm_params(), trajectory, trajectory.mask), atol=1e-6)
    narrow = Decoder(dataclasses.replace(MODEL.config, dtype="bfloat16"))
    _, metrics = GRPOLoop(narrow, TASK, TOKENIZER, optimizer(), config).step(new_state())
    assert metrics["sampling/sampling_logp_difference/max"] > 1e-3
    assert metrics["clip_ratio/region_mean"] == 0


@pytest.mark.slow
def test_every_rollout_takes_the_next_rows_and_new_random_numbers():
    class Recording(Sevens):
        def __getitem__(self, index: int) -> Row:
            visited.append(index)
            return TASK[7]  # always one prompt, so that only the random numbers differ

    orders = []
    for minibatches in (1, 2):
        visited: list[int] = []
        loop = new_loop(dataclasses.replace(CONFIG, minibatches=minibatches), Recording())
        run(loop, new_state(), 3)
        orders.append(visited)
    assert orders[0] == orders[1], "the order of the rows must not depend on the number of optimizer steps"
    assert len(set(orders[0])) == 6
    first, second = (loop.collect(new_state(), step).trajectory for step in (0, 1))
    np.testing.assert_array_equal(first.tokens[:, :9], second.tokens[:, :9])
    assert (first.tokens != second.tokens).any()


# --- reproducibility


def test_a_step_depends_on_the_state_alone():
    loop = new_loop(DISTILLED)
    (one, first), (other, second) = (run(loop, new_state(), 2) for _ in range(2))
    assert first == second
    assert_bitwise_equal(one, other)
    _, third = run(loop, new_state(seed=2), 2)
    assert third != first


# --- learning


def test_an_easy_reward_rises():
    _, rows = run(new_loop(task=SEVENS), new_state(), 30)
    rewards = [row["reward"] for row in rows]
    assert np.mean(rewards[:3]) < 0.3
    assert np.mean(rewards[-3:]) > 0.7, rewards


# --- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 1}, "expected groups of at least 2 completions.*; got group_size 1"),
        ({"update": UpdateConfig(value=ValueConfig())}, r"update.value None.* no critic.*; got ValueConfig\("),
        ({"update": UpdateConfig(pairs=DPOConfig())}, r"update.pairs None, or OnlineDPOConfig; got DPOConfig\("),
        ({"minibatches": 0}, "expected minibatches >= 1; got 0"),
        ({"prompts_per_step": 0}, "expected prompts_per_step >= 1; got 0"),
        ({"prompt_width": -1}, "expected prompt_width >= 1; got -1"),
        ({"minibatches": 3}, "that divide into 3 minibatches, because a group is never split; got 2"),
        ({"num_iterations": 0}, "expected num_iterations >= 1; got 0"),
        ({"dynamic_sampling": -1}, "expected dynamic_sampling >= 0 further rollouts, or None; got -1"),
        ({"dynamic_sampling": 1, "scale_rewards": "batch"}, "scale_rewards 'group' or 'none' with dynamic_sam"),
        ({"advantages": "leave_one_out"}, "expected scale_rewards 'none' with advantages 'leave_one_out'.*got 'group'"),
        ({"rollout": dataclasses.replace(ROLLOUT, sampling=SamplingConfig(temperature=0.0))}, "> 0.*temperature=0.0"),
    ],
)
def test_bad_configurations(options, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **options)


def test_a_tokenizer_of_another_model_is_refused():
    small = Decoder(tiny_model_config(vocab_size=128))
    with pytest.raises(ValueError, match="tokenizer and embedding have different sizes.*got vocab_size 128"):
        GRPOLoop(small, TASK, TOKENIZER, optimizer(), CONFIG)


def test_a_missing_reference_is_refused_before_the_rollout(monkeypatch):
    monkeypatch.setattr(GRPOLoop, "collect", None)
    config = dataclasses.replace(CONFIG, update=UpdateConfig(loss=LossConfig(beta=0.1)))
    with pytest.raises(ValueError, match="expected reference parameters in the train state"):
        new_loop(config).step(new_state())


def test_a_microbatch_size_must_divide_the_rows():
    with pytest.raises(ValueError, match="expected a microbatch_size that divides 8 rows; got 3"):
        new_loop(dataclasses.replace(CONFIG, update=UpdateConfig(microbatch_size=3)))


def test_a_reward_warning_names_the_file_of_the_reward():
    """Not the file of the task, which calls it."""
    grader: Any = own_loop(task=DatasetTask([{"prompt": "p"}], reward_cases.as_number))._grader
    with pytest.warns(RewardWarning, match=r"convert string to float: 'bad' \(.*reward_cases.py, line \d+\)"):
        grader.grade_part(["p", "p"], ["1", "bad"], [[1], [2]], {})


def test_prefill_rows_are_rounded_up_to_the_devices():
    """The default is eight, which three devices cannot share."""
    config = dataclasses.replace(CONFIG, prompts_per_step=3, decode_rows=6)
    loop = own_loop(config, sizes=(3, 1, 1))
    assert loop.rollouts.engine.prefill_rows == 9


def test_advantages_with_kl_in_reward_need_more_than_rewards():
    config = dataclasses.replace(
        CONFIG, update=UpdateConfig(loss=LossConfig(beta=0.1, kl_estimator="k1"), kl_in_reward=True)
    )
    samples = new_loop().collect(new_state(), 0)
    assert new_loop().known_advantages(samples) is not None and own_loop(config).known_advantages(samples) is None
