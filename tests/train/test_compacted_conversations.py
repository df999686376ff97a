"""GRPO on conversations of several contexts: exact, resumed bitwise in the middle of one, and left-out contexts."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet
import pytest

from smd_jax.devices.sharding import shard_tree
from smd_jax.environments.processes import EnvironmentsHere
from smd_jax.eviction.policies import Dense
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.state import TrainState
from smd_jax.monitor.completions import CompletionsLog
from smd_jax.monitor.saved_masks import load_masks
from smd_jax.sampler.compaction import COMPACTED
from smd_jax.sampler.conversation_loop import ConversationConfig
from smd_jax.train.conversations import EnvironmentConfig, TextCompaction
from smd_jax.train.debug_dump import RefusedRolloutError
from smd_jax.train.grpo import GRPOConfig, GRPOLoop, advantages
from smd_jax.train.policy_learner import PolicyLearner
from smd_jax.train.samples import Samples, select_groups
from tests.bitwise import assert_bitwise_equal
from tests.toy_loop import run, share_programs
from tests.train import test_conversations as single

COMPACTION = TextCompaction(contexts=3, after_tokens=6, ask="?!?", heading="#")
ROLLOUT = dataclasses.replace(single.ROLLOUT, max_new_tokens=48)
CONFIG = dataclasses.replace(single.CONFIG, prompt_width=32, rollout=ROLLOUT)
PLAN = {"calls": 0, "interrupt": -1}
TURNS = 4


class Judge:
    """Likes small bytes; interrupts the call that PLAN names, and fails if the row says so."""

    def reset(self, row: dict[str, Any]) -> str:
        self.row, self.turn = row, 0
        return row["prompt"]

    def step(self, text: str) -> tuple[str, float, bool]:
        self.turn += 1
        if PLAN["calls"] == PLAN["interrupt"]:
            raise KeyboardInterrupt
        PLAN["calls"] += 1
        if self.row["kind"] == "fails":
            raise OSError("no disk")
        return f"({self.turn})", float(sum(ord(c) < 80 for c in text)) / 4, self.turn == TURNS + 1


def new_loop(config: GRPOConfig = CONFIG, kind: str = "judges", **changes: Any) -> GRPOLoop:
    environment = EnvironmentConfig(
        environments=EnvironmentsHere(Judge), conversation=ConversationConfig(turns=TURNS), compaction=COMPACTION
    )
    environment = dataclasses.replace(environment, **changes)
    mesh = single.make_mesh(1, 1, 1)
    rows = single.Rows(kind)
    loop = GRPOLoop(single.MODEL, rows, single.TOKENIZER, single.optimizer(), config, mesh, environment=environment)
    share_programs(loop)
    return loop


@functools.cache
def two_steps() -> tuple[TrainState, list[dict[str, float]]]:
    return run(new_loop(), single.new_state(), 2)


@functools.cache
def sampled() -> Samples:
    return new_loop().sample(single.new_state().params, jax.random.key(0), 0)


def test_a_rollout_is_exact_and_learnt_from():
    _, rows = two_steps()
    for row in rows:
        assert row["sampling/sampling_logp_difference/max"] <= 2e-5
        assert row["grad_norm"] > 0 and row["update/skipped"] == 0
        assert 1.5 < row["conversations/contexts"] <= 3 and 1 < row["conversations/turns"] <= TURNS
        assert row["rollout/tokens"] == 8 * row["completions/mean_length"] and row["rollout/evicted_share"] > 0


def test_contexts_follow_each_other():
    """Each begins with the conversation's prompt and the summary before; all rows of one have its advantage."""
    samples = sampled()
    assert samples.contexts == 3 and len(samples.rewards) == 8 and samples.counted_rows is not None
    present = np.asarray(samples.trajectory.lengths()) > 0
    np.testing.assert_array_equal(samples.counted_rows, present)
    assert 8 < present.sum() < 24
    for number, conversation in enumerate(samples.conversations):
        assert len(conversation.contexts) == present[3 * number : 3 * number + 3].sum()
        assert len(conversation.turns) <= TURNS and conversation.ending != COMPACTED
        for before, after in zip(conversation.contexts, conversation.contexts[1:], strict=False):
            summary = before.rpartition("?!?")[2]
            assert after.startswith(f"{conversation.prompt}#{summary}")
    assert samples.completions[0].count("?!?") >= len(samples.conversations[0].contexts) - 1


def test_a_run_interrupted_in_a_later_context_resumes_bitwise():
    whole, rows = two_steps()
    state, first = run(new_loop(), single.new_state(), 1)
    kept = jax.tree.map(jnp.copy, state)
    PLAN["calls"] = 0
    resumed, second = run(new_loop(), jax.tree.map(jnp.copy, kept), 1)
    # The last call of a batch is in its last context.
    PLAN.update(calls=0, interrupt=PLAN["calls"] - 1)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(new_loop(), state, 1)
    finally:
        PLAN["interrupt"] = -1
    again, third = run(new_loop(), kept, 1)
    assert first + second == first + third == rows
    assert_bitwise_equal(resumed, whole)
    assert_bitwise_equal(again, whole)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Dense(), CONFIG.policy])
def test_one_tree_learns_what_rows_do(policy: Any):
    """The packed update, which reads shared beginnings once, against separate rows."""
    update = UpdateConfig(microbatch_size=4)
    tree = dataclasses.replace(update, pack_columns=160, rows_per_prompt=2)
    loops = [new_loop(dataclasses.replace(CONFIG, policy=policy, update=each)) for each in (update, tree)]
    samples = loops[0].sample(single.new_state().params, jax.random.key(0), 0)
    (one, metrics), (two, packed) = (loop.learn(single.new_state(), samples) for loop in loops)
    assert float(packed["loss"]) == pytest.approx(float(metrics["loss"]), abs=1e-6)
    assert float(packed["grad_norm"]) == pytest.approx(float(metrics["grad_norm"]), rel=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-4), one.params, two.params)
    if isinstance(policy, Dense):
        assert float(packed["update/shared"]) > 0.05


def test_each_context_has_the_advantage_of_its_conversation():
    """Against one batch of the present rows alone, with advantages made by hand."""
    loop, samples = new_loop(), sampled()
    batch = loop._batch
    seen = list[Any]()

    def noted(*args: Any) -> Any:
        seen.append(args)
        return batch(*args)

    object.__setattr__(loop, "_batch", noted)
    loop.learn(single.new_state(), samples)
    ((_, _, of_rows, counted),) = seen
    expected = np.asarray(advantages(CONFIG, samples.rewards))
    np.testing.assert_array_equal(np.asarray(of_rows).reshape(8, 3), np.repeat(expected[:, None], 3, axis=1))
    np.testing.assert_array_equal(np.asarray(counted), samples.counted_rows)


def test_the_penalty_of_all_contexts_is_in_the_reward(monkeypatch: pytest.MonkeyPatch):
    """With kl_in_reward, before the group's mean: here one for each sampled token."""
    loop, samples = new_loop(), sampled()
    seen = list[Any]()
    monkeypatch.setattr(
        PolicyLearner, "kl_penalty", lambda self, state, drawn, counted: (drawn.response_mask.astype(jnp.float32), {})
    )
    monkeypatch.setattr(
        PolicyLearner, "take_steps", lambda self, state, batch: (seen.append(batch.advantages) or state, {})
    )
    loop.learn(single.new_state(), samples)
    lengths = np.asarray(samples.trajectory.lengths()).reshape(8, 3).sum(axis=1)
    expected = np.asarray(advantages(CONFIG, samples.rewards - lengths))
    np.testing.assert_allclose(np.asarray(seen[0]).reshape(8, 3), np.repeat(expected[:, None], 3, axis=1), atol=1e-6)


@pytest.mark.slow
def test_a_mesh_gives_the_same_step():
    loop = new_loop()
    state, metrics = loop.step(single.new_state())
    other = dataclasses.replace(loop, mesh=single.make_mesh(2, 1, 1))
    with_mesh, over_mesh = other.step(shard_tree(jax.device_get(single.new_state()), other.mesh))
    for name in ("reward", "conversations/contexts", "completions/mean_length", "loss", "grad_norm"):
        assert over_mesh[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-4), state.params, with_mesh.params)


def test_groups_are_chosen_with_all_their_contexts():
    """Dynamic sampling: of two rollouts, the groups whose rewards differ, every context of them."""
    one = sampled()
    flat = one._replace(rewards=np.array([1, 1, 1, 1, 0, 1, 0, 1], np.float32))
    chosen = select_groups([flat, flat], 4, 2)
    second = np.arange(12, 24)
    for got, of in (
        (chosen.trajectory.tokens, one.trajectory.tokens),
        (chosen.counted_rows, one.counted_rows),
    ):
        np.testing.assert_array_equal(np.asarray(got), np.concatenate([np.asarray(of)[second]] * 2))
    assert chosen.contexts == 3 and [x.turns for x in chosen.conversations[:4]] == [
        x.turns for x in one.conversations[4:]
    ]


def test_failed_environments_leave_all_contexts_out():
    loop = new_loop(kind="fails", max_failed=1.0)
    with pytest.warns(UserWarning, match="no disk"):
        samples = loop.sample(single.new_state().params, jax.random.key(0), 0)
    assert samples.counted_rows is not None and not samples.counted_rows.any() and np.isnan(samples.rewards).all()


def test_files_show_the_contexts(tmp_path: Path):
    samples = sampled()
    CompletionsLog(tmp_path, single.TOKENIZER, table_rows=0, masks=2)(0, samples)
    table = pyarrow.parquet.read_table(tmp_path / "completions" / "completions_00000.parquet").to_pydict()
    assert len(table["prompt"]) == 8 and table["contexts"] == [each.contexts for each in samples.conversations]
    lengths = np.asarray(samples.trajectory.lengths()).reshape(8, 3).sum(axis=1)
    assert table["length"] == lengths.tolist()
    ended = [each.ending not in ("turns", "length", "room") for each in samples.conversations]
    assert table["truncated"] == [not each for each in ended]
    masks = load_masks(tmp_path / "completions" / "masks_00000.npz")
    expected = [(row, i + 1) for row in (0, 1) for i in range(len(samples.conversations[row].contexts))]
    assert [(mask.row, mask.context) for mask in masks] == expected
    text = samples.conversations[expected[1][0]].contexts[expected[1][1] - 1]
    assert "".join(masks[1].pieces) == text.replace("\ufffd", "")  # halves of characters, which no piece has


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"compaction": TextCompaction(after_tokens=47)}, "below max_new_tokens 48 together"),
        ({}, {"credit": "turn"}, "expected credit 'trajectory' with compaction"),
        ({"update": UpdateConfig(rows_per_prompt=2)}, {}, "expected pack_columns with rows_per_prompt and compaction"),
    ],
)
def test_refused(changes: dict[str, Any], options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        new_loop(dataclasses.replace(CONFIG, **changes), **options)


def test_compaction_needs_contexts_and_a_request():
    with pytest.raises(ValueError, match="contexts"):
        TextCompaction(contexts=1, after_tokens=4)
    with pytest.raises(ValueError, match="expected a text in ask"):
        TextCompaction(after_tokens=4, ask="")


@pytest.mark.slow
def test_the_guard_refuses_a_later_context_that_parts():
    loop = new_loop(dataclasses.replace(CONFIG, minibatches=2))

    def spoilt(params: Any, key: Any, batch: int) -> Any:
        samples = GRPOLoop.sample(loop, params, key, batch)
        row = int(np.flatnonzero(np.asarray(samples.trajectory.lengths()).reshape(-1, 3)[:, 1])[0]) * 3 + 1
        column = int(jnp.argmax(samples.trajectory.response_mask[row]))
        logprobs = samples.trajectory.logprobs.at[row, column].add(-0.5)
        return samples._replace(trajectory=samples.trajectory.replace(logprobs=logprobs))

    object.__setattr__(loop, "sample", spoilt)
    with pytest.raises(RefusedRolloutError, match=r"nats at every token; got 0\.5"):
        loop.step(single.new_state())
