"""GRPO on conversations: exact, resumed bitwise in the middle of one, and learning from sampled tokens alone."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from smd_jax.devices.sharding import make_mesh, shard_tree
from smd_jax.environments.processes import EnvironmentsHere
from smd_jax.eviction.policies import SnapKV
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.state import TrainState, init_state
from smd_jax.message.sampling import SamplingConfig
from smd_jax.model.decoder import Decoder
from smd_jax.sampler.config import RolloutConfig
from smd_jax.sampler.conversation_loop import ConversationConfig
from smd_jax.tasks.rewards import TooManyFailures
from smd_jax.testing import byte_tokenizer, random_params, tiny_model_config
from smd_jax.train.conversations import EnvironmentConfig
from smd_jax.train.debug_dump import RefusedRolloutError
from smd_jax.train.grpo import GRPOConfig, GRPOLoop
from tests.bitwise import assert_bitwise_equal
from tests.toy_loop import run, shared_replay, shared_update

TOKENIZER = byte_tokenizer(chat=False)
MODEL = Decoder(tiny_model_config(num_layers=1, max_positions=80, tie_embeddings=False))
# One of six bytes ends a turn; the filter shows that sets of drawable tokens keep to their columns.
ROLLOUT = RolloutConfig(
    max_new_tokens=64,
    budget=12,
    buffer=4,
    eos_token_id=tuple(range(0, 256, 6)),
    pad_token_id=256,
    sampling=SamplingConfig(top_k=64),
)
CONFIG = GRPOConfig(
    prompts_per_step=2, group_size=4, prompt_width=8, policy=SnapKV(window=4), rollout=ROLLOUT, minibatches=1
)
CALLS = [0]


class Rows:
    """Rows that name what their environment does."""

    def __init__(self, kind: str = "judges") -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"prompt": f"{index}?", "kind": self.kind}

    def reward(self, prompts: Any, completions: Any, **columns: Any) -> list[float]:
        raise AssertionError("the environment gives the rewards")


class Judge:
    """Likes small bytes; interrupts a run at its tenth call, or fails, if the row says so."""

    def reset(self, row: dict[str, Any]) -> str:
        self.row, self.turn = row, 0
        return row["prompt"]

    def step(self, text: str) -> tuple[str, float, bool]:
        self.turn += 1
        CALLS[0] += 1
        if self.row["kind"] == "fails":
            raise OSError("no disk")
        if self.row["kind"] == "interrupts" and CALLS[0] == 10:
            raise KeyboardInterrupt
        return f"({self.turn})", float(sum(ord(c) < 80 for c in text)) / 4, self.turn == 3


@functools.cache
def optimizer() -> optax.GradientTransformation:
    return optax.adam(1e-3)


def new_loop(config: GRPOConfig = CONFIG, kind: str = "judges", **options: Any) -> GRPOLoop:
    environment = EnvironmentConfig(
        environments=EnvironmentsHere(Judge), conversation=ConversationConfig(turns=4), **options
    )
    loop = GRPOLoop(MODEL, Rows(kind), TOKENIZER, optimizer(), config, make_mesh(1, 1, 1), environment=environment)
    from smd_jax.train import policy_learner

    with pytest.MonkeyPatch.context() as patch:  # loops that ask for the same programs compile them once
        patch.setattr(policy_learner, "make_update", shared_update)
        patch.setattr(policy_learner, "make_replay", shared_replay)
        assert loop.learner.update is not None and loop.learner.replay is not None
    return loop


def new_state() -> TrainState:
    state = init_state(random_params(MODEL.config), optimizer(), jax.random.key(4))
    return shard_tree(jax.tree.map(jnp.copy, state), make_mesh(1, 1, 1))


@functools.cache
def two_steps() -> tuple[TrainState, list[dict[str, float]]]:
    return run(new_loop(), new_state(), 2)


def test_a_rollout_is_exact_and_learnt_from():
    _, rows = two_steps()
    for row in rows:
        assert row["sampling/sampling_logp_difference/max"] <= 2e-5
        assert row["grad_norm"] > 0 and row["update/skipped"] == 0
        assert 1 < row["conversations/turns"] <= 4 and row["conversations/read_tokens"] > 3
        assert row["rollout/tokens"] == 8 * row["completions/mean_length"] and row["rollout/evicted_share"] > 0


def test_a_run_interrupted_in_a_conversation_resumes_bitwise():
    whole, rows = two_steps()
    state, first = run(new_loop(), new_state(), 1)
    kept = jax.tree.map(jnp.copy, state)
    CALLS[0] = 0
    with pytest.raises(KeyboardInterrupt):
        run(new_loop(kind="interrupts"), state, 1)
    assert CALLS[0] == 10
    resumed, second = run(new_loop(), kept, 1)
    assert first + second == rows
    assert_bitwise_equal(resumed, whole)


def test_tokens_that_were_read_have_no_loss():
    """Whatever stands where the policy sampled nothing, the step is the same, bit for bit."""
    loop = new_loop()
    samples = loop.sample(new_state().params, jax.random.key(0), 0)
    trajectory = samples.trajectory
    sampled = np.asarray(trajectory.response_mask)
    read = np.asarray(trajectory.valid)[:, trajectory.prompt_width :] & ~sampled
    assert read.sum() > 30 and sampled.sum() > 30
    assert trajectory.entropy is not None
    other = trajectory.replace(
        logprobs=jnp.where(sampled, trajectory.logprobs, -7.0), entropy=jnp.where(sampled, trajectory.entropy, 9.0)
    )
    states = [loop.learn(new_state(), samples._replace(trajectory=each))[0] for each in (trajectory, other)]
    assert_bitwise_equal(*states)
    moved, first = (np.asarray(jax.tree.leaves(x.params)[0]) for x in (states[0], new_state()))
    assert not np.array_equal(moved, first)


@pytest.mark.slow
def test_packed_rows_learn_the_same():
    update = UpdateConfig(microbatch_size=4)
    loops = [
        new_loop(dataclasses.replace(CONFIG, update=x)) for x in (update, dataclasses.replace(update, pack_columns=80))
    ]
    samples = loops[0].sample(new_state().params, jax.random.key(0), 0)
    (one, metrics), (two, packed) = (loop.learn(new_state(), samples) for loop in loops)
    assert float(packed["loss"]) == pytest.approx(float(metrics["loss"]), abs=1e-6)
    assert float(packed["grad_norm"]) == pytest.approx(float(metrics["grad_norm"]), rel=1e-5)
    assert float(packed["entropy"]) == pytest.approx(float(metrics["entropy"]), rel=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-4), one.params, two.params)


def test_each_turn_has_its_own_advantage():
    loop = new_loop(credit="turn")
    samples = loop.sample(new_state().params, jax.random.key(0), 0)
    _, metrics = loop.learn(new_state(), samples)
    assert float(metrics["grad_norm"]) > 0
    turns = np.asarray(samples.trajectory.turns())
    found = np.asarray(loop._turn_advantages(samples, None))
    for first in (0, 4):
        group = samples.conversations[first : first + 4]
        counts = [int(turns[first + i].max()) for i in range(4)]
        rewards = [list(each.rewards) + [0.0] * (n - len(each.rewards)) for each, n in zip(group, counts, strict=True)]
        together = np.concatenate(rewards)
        normalised = [(np.array(x) - together.mean()) / (together.std(ddof=1) + 1e-4) for x in rewards]
        for i in range(4):
            expected = np.array([0.0, *(normalised[i][k:].sum() for k in range(counts[i]))])
            np.testing.assert_allclose(found[first + i], expected[turns[first + i]], rtol=1e-4, atol=1e-5)


def test_failed_environments_end_the_run_and_a_few_do_not():
    with pytest.raises(TooManyFailures, match="25% of the completions without a reward; got 8 of 8.*OSError: no disk"):
        new_loop(kind="fails").step(new_state())
    loop = new_loop(kind="fails", max_failed=1.0)
    with pytest.warns(UserWarning, match="no disk"):
        state, metrics = loop.step(new_state())
    assert metrics["rewards/failed"] == 8 and int(state.step) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollouts_ahead": 1, "minibatches": 2}, "expected rollouts_ahead 0 with an environment"),
        ({"rollout": dataclasses.replace(ROLLOUT, eos_token_id=None)}, "to end a turn; got neither"),
    ],
)
def test_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        new_loop(dataclasses.replace(CONFIG, **changes))


@pytest.mark.slow
def test_the_guard_refuses_a_conversation_that_parts():
    """One log-probability of a later turn is off by more than the guard allows: the rollout is refused, and named."""
    loop = new_loop(dataclasses.replace(CONFIG, minibatches=2))

    def spoilt(params: Any, key: Any, batch: int) -> Any:
        samples = GRPOLoop.sample(loop, params, key, batch)
        turns = samples.trajectory.turns()
        row = int(jnp.argmax(turns.max(axis=1)))
        column = int(jnp.argmax(turns[row]))
        logprobs = samples.trajectory.logprobs.at[row, column].add(-0.5)
        return samples._replace(trajectory=samples.trajectory.replace(logprobs=logprobs))

    object.__setattr__(loop, "sample", spoilt)
    with pytest.raises(RefusedRolloutError, match=r"nats at every token; got 0\.5"):
        loop.step(new_state())
