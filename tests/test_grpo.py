"""The loop on a real task, in sizes of a toy: it runs, it repeats itself bitwise, it resumes bitwise, it learns."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from smd_jax import checkpoint
from smd_jax.distillation import DistillConfig
from smd_jax.eviction import H2O, Dense, KeyDiff, SnapKV
from smd_jax.grpo import GRPOConfig, GRPOLoop
from smd_jax.learner import score
from smd_jax.losses import LossConfig
from smd_jax.metrics import METRICS
from smd_jax.model import Decoder
from smd_jax.rollout import RolloutConfig
from smd_jax.sampling import SamplingConfig
from smd_jax.sharding import make_mesh
from smd_jax.supervised import encode_examples, make_supervised_update
from smd_jax.tasks import Prompt, ReasoningGymTask, Row, Task
from smd_jax.testing import byte_tokenizer, count_compilations, random_params, tiny_model_config
from smd_jax.update import TrainState, UpdateConfig, init_state

pytestmark = pytest.mark.usefixtures("quick_compilation")

TOKENIZER = byte_tokenizer(chat=False)
EOS, PAD = 258, 256
MODEL = Decoder(tiny_model_config(max_positions=32))
SORT = (("num_digits", 3), ("num_distractors", 4), ("partial_credit", True))
TASK = ReasoningGymTask("distractor_sort", seed=0, size=50, parameters=SORT)
ROLLOUT = RolloutConfig(max_new_tokens=5, budget=5, buffer=2, eos_token_id=EOS, pad_token_id=PAD)
CONFIG = GRPOConfig(prompts_per_step=2, group_size=4, prompt_width=9, policy=H2O(), rollout=ROLLOUT)
DISTILLED = dataclasses.replace(CONFIG, update=UpdateConfig(distill=DistillConfig(fraction=0.5), microbatch_size=4))

# TRL's names, from its GRPOTrainer, but for those that only its own set-up has.
NAMES = {
    "reward",
    "reward_std",
    "frac_reward_zero_std",
    "entropy",
    "kl",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
    "completions/mean_length",
    "completions/min_length",
    "completions/max_length",
    "completions/clipped_ratio",
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    "sampling/importance_sampling_ratio/min",
    "sampling/importance_sampling_ratio/mean",
    "sampling/importance_sampling_ratio/max",
    "mismatch_kl",
    "grad_norm",
    "step_time",
}


def optimizer():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


@functools.cache
def warm_params():
    """A model that has learned to answer in about three digits: then rewards differ and there is something to learn."""
    state = init_state(random_params(MODEL.config), optax.adam(1e-2), jax.random.key(0))
    update = make_supervised_update(MODEL, optax.adam(1e-2))
    for step in range(30):
        rows = [TASK[(8 * step + i) % 50] for i in range(8)]
        prompts, answers = [row["prompt"] for row in rows], [row["answer"] for row in rows]
        state, _ = update(state, encode_examples(TOKENIZER, prompts, answers, width=12))
    return state.params


def new_loop(config: GRPOConfig = CONFIG, task: Task = TASK, sizes=(1, 1, 1)) -> GRPOLoop:
    return GRPOLoop(MODEL, task, TOKENIZER, optimizer(), config, make_mesh(*sizes))


def new_state(seed: int = 0) -> TrainState:
    """Fresh buffers every time: a step takes them."""
    return init_state(jax.tree.map(jnp.copy, warm_params()), optimizer(), jax.random.key(seed))


def run(loop: GRPOLoop, state: TrainState, steps: int) -> tuple[TrainState, list[dict[str, float]]]:
    """Metrics of every step but for the wall time."""
    rows = []
    for _ in range(steps):
        state, metrics = loop.step(state)
        rows.append({name: float(value) for name, value in metrics.items() if name != "step_time"})
    return state, rows


def assert_bitwise_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        a, b = (jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (a, b))
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


# --- it runs


@pytest.mark.parametrize(
    ("policy", "visibility", "minibatches"),
    [(H2O(), "shadow", 1), (SnapKV(window=2), "dense", 2), (KeyDiff(), "shadow", 2), (Dense(), "shadow", 1)],
)
def test_steps_under_several_policies(policy, visibility, minibatches):
    update = UpdateConfig(visibility=visibility)
    config = dataclasses.replace(CONFIG, policy=policy, update=update, minibatches=minibatches)
    state, metrics = new_loop(config).step(new_state())
    assert set(metrics) >= NAMES
    assert set(metrics) <= METRICS.keys() | {"loss"}
    assert all(np.shape(value) == () and math.isfinite(value) for value in metrics.values())
    assert int(state.step) == minibatches
    assert 0 < metrics["reward"] < 1 and metrics["reward_std"] > 0 and metrics["grad_norm"] > 0
    assert 1 <= metrics["completions/min_length"] <= metrics["completions/max_length"] <= 5
    on_policy = metrics["sampling/sampling_logp_difference/max"] < 2e-5
    assert on_policy == (visibility == "shadow")
    assert metrics["clip_ratio/region_mean"] == 0, "metrics are those of the first minibatch, whose ratio is 1"


def test_rewards_belong_to_their_completions():
    loop, state = new_loop(), new_state()
    trajectory, rewards = loop.sample(state, step=3)
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


@pytest.mark.parametrize("minibatches", [1, 2])
def test_the_loss_of_the_first_minibatch_by_hand(minibatches):
    loop = new_loop(dataclasses.replace(CONFIG, minibatches=minibatches))
    trajectory, _ = loop.sample(new_state(), 0)
    rewards = np.array([1, 0, 0, 0, 2, 5, 3, 2], np.float32)
    groups = rewards.reshape(2, 4)
    centred = groups - groups.mean(1, keepdims=True)
    advantages = (centred / (groups.std(1, ddof=1, keepdims=True) + 1e-4)).reshape(-1)[::minibatches]
    mask = np.asarray(trajectory.response_mask)[::minibatches]
    state, metrics = loop.learn(new_state(), trajectory, rewards)
    # The sampler is the old policy and the ratio is 1: rows 0, 2, 4, 6 or all of them, each token weighing the same.
    np.testing.assert_allclose(metrics["loss"], -(advantages[:, None] * mask).sum() / mask.sum(), rtol=1e-4)
    assert int(state.step) == minibatches


def test_who_the_old_policy_is():
    trajectory, _ = new_loop().sample(new_state(), 0)
    dense = dataclasses.replace(CONFIG, update=UpdateConfig(visibility="dense"))
    assert new_loop().old_logprobs(warm_params(), trajectory) is trajectory.logprobs
    assert new_loop(dense).old_logprobs(warm_params(), trajectory) is None
    twice = new_loop(dataclasses.replace(dense, minibatches=2)).old_logprobs(warm_params(), trajectory)
    expected = jax.jit(lambda: score(MODEL, warm_params(), trajectory, trajectory.dense_mask()).logprobs)()
    assert twice is not None
    np.testing.assert_allclose(twice, expected, atol=1e-5)
    difference = jnp.where(trajectory.response_mask, expected - trajectory.logprobs, 0.0)
    assert jnp.abs(difference).max() > 1e-3, "the dense learner must be another policy than the sampler"


def test_every_rollout_takes_the_next_rows_and_new_random_numbers():
    class Recording(Letters):
        def __getitem__(self, index: int) -> Row:
            visited.append(index)
            return TASK[7]  # always one prompt, so that only the random numbers differ

    orders = []
    for minibatches in (1, 2):
        visited: list[int] = []
        loop = new_loop(dataclasses.replace(CONFIG, minibatches=minibatches), Recording("7"))
        run(loop, new_state(), 3)
        orders.append(visited)
    assert orders[0] == orders[1], "the order of the rows must not depend on the number of optimizer steps"
    assert len(set(orders[0])) == 6
    first, second = (loop.sample(new_state(), step)[0] for step in (0, 1))
    np.testing.assert_array_equal(first.tokens[:, :9], second.tokens[:, :9])
    assert (first.tokens != second.tokens).any()


def test_evaluation_is_the_mean_reward_over_all_rows():
    class LengthOfPrompt(Letters):
        def reward(self, prompts: Sequence[Prompt], completions: Sequence[str], **columns: Sequence[Any]):
            return [float(index) for index, _ in enumerate(completions)]

    greedy = dataclasses.replace(ROLLOUT, sampling=SamplingConfig(temperature=0.0))
    mean = new_loop().evaluate(warm_params(), LengthOfPrompt("x"), jax.random.key(0), policy=Dense(), config=greedy)
    assert mean == np.mean(range(50))


def test_a_mesh_gives_the_same_step():
    one, one_rows = run(new_loop(DISTILLED), new_state(), 1)
    many, many_rows = run(new_loop(DISTILLED, sizes=(2, 2, 2)), new_state(), 1)
    for name in ("loss", "reward", "entropy", "distill", "grad_norm"):
        np.testing.assert_allclose(many_rows[0][name], one_rows[0][name], rtol=1e-4, err_msg=name)
    assert len(many.params["embed"]["embedding"].sharding.device_set) == 8
    # AdamW's first step has the size of the learning rate whatever the gradient's: where that is rounding, so is it.
    close = [
        np.isclose(a, b, atol=1e-4).mean()
        for a, b in zip(*map(jax.tree.leaves, (many.params, one.params)), strict=True)
    ]
    assert np.mean(close) > 0.9


# --- it repeats itself


def test_rollout_and_update_compile_once():
    # A size of its own: `rollout` would find what another test has compiled.
    config = dataclasses.replace(DISTILLED, rollout=dataclasses.replace(ROLLOUT, max_new_tokens=6))
    loop, state = new_loop(config), new_state()
    with count_compilations() as counts:
        run(loop, state, 3)
    assert (counts["rollout"], counts["update"]) == (1, 1)


def test_a_step_depends_on_the_state_alone():
    loop = new_loop(DISTILLED)
    (one, first), (other, second) = (run(loop, new_state(), 2) for _ in range(2))
    assert first == second
    assert_bitwise_equal(one, other)
    _, third = run(loop, new_state(seed=1), 2)
    assert third != first


def test_six_steps_equal_three_and_three(tmp_path):
    whole, rows = run(new_loop(DISTILLED), new_state(), 6)
    half, first = run(new_loop(DISTILLED), new_state(), 3)
    checkpoint.save(tmp_path, 3, half, data_position={"step": 3}, config=DISTILLED)
    like = init_state(random_params(MODEL.config, seed=9), optimizer(), jax.random.key(9))
    restored = checkpoint.restore(tmp_path, like, config=dataclasses.replace(DISTILLED))
    resumed, second = run(new_loop(DISTILLED), restored.state, 3)
    assert first + second == rows
    assert len({row["loss"] for row in rows}) == 6
    assert_bitwise_equal(resumed, whole)


# --- it learns


@dataclass(frozen=True)
class Letters:
    """The prompts of the sorting task; the reward is the share of one symbol in the completion."""

    symbol: str

    def __len__(self) -> int:
        return len(TASK)

    def __getitem__(self, index: int) -> Row:
        return TASK[index]

    def reward(self, prompts: Sequence[Prompt], completions: Sequence[str], **columns: Sequence[Any]) -> list[float]:
        return [text.count(self.symbol) / max(len(text), 1) for text in completions]


def test_an_easy_reward_rises():
    config = dataclasses.replace(CONFIG, prompts_per_step=4)
    _, rows = run(new_loop(config, Letters("7")), new_state(), 30)
    rewards = [row["reward"] for row in rows]
    assert np.mean(rewards[:3]) < 0.3
    assert np.mean(rewards[-3:]) > 0.7, rewards


# --- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 1}, "expected group_size >= 2 for advantages normalised within the group; got 1"),
        ({"minibatches": 3}, "expected rows that divide into 3 minibatches; got 8"),
        ({"rollout": dataclasses.replace(ROLLOUT, sampling=SamplingConfig(top_p=0.9))}, r"without top-k.*top_p=0.9"),
        ({"rollout": dataclasses.replace(ROLLOUT, sampling=SamplingConfig(top_k=5))}, r"without top-k.*top_k=5"),
        ({"rollout": dataclasses.replace(ROLLOUT, sampling=SamplingConfig(0.0))}, "temperature > 0.*temperature=0.0"),
    ],
)
def test_bad_configurations(options, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **options)


def test_groups_of_one_need_no_deviation_elsewhere():
    assert dataclasses.replace(CONFIG, group_size=1, scale_rewards="none").rows == 2


def test_a_tokenizer_of_another_model():
    small = Decoder(tiny_model_config(vocab_size=128))
    with pytest.raises(ValueError, match="tokenizer and embedding have different sizes.*got vocab_size 128"):
        GRPOLoop(small, TASK, TOKENIZER, optimizer(), CONFIG)


def test_a_reference_that_is_missing():
    config = dataclasses.replace(CONFIG, update=UpdateConfig(loss=LossConfig(beta=0.1)))
    with pytest.raises(ValueError, match="expected reference parameters in the train state"):
        new_loop(config).step(new_state())


def test_a_prompt_that_is_too_long():
    with pytest.raises(ValueError, match=r"at most 7 tokens \(the width of the batch\); prompt 0 has 8"):
        new_loop(dataclasses.replace(CONFIG, prompt_width=7)).step(new_state())


def test_a_reward_that_is_no_number():
    class Broken(Letters):
        def reward(self, prompts: Sequence[Prompt], completions: Sequence[str], **columns: Sequence[Any]):
            return [float("nan")] * len(completions)

    with pytest.raises(ValueError, match="nan"):
        new_loop(task=Broken("7")).step(new_state())
