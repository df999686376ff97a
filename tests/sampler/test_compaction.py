"""Compacted conversations: every context replays exactly and begins with the prompt and a summary."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.state import TrainBatch, init_state
from smd_jax.learner.update import make_update
from smd_jax.message import tree
from smd_jax.model.decoder import Decoder
from smd_jax.model.protocol import Params
from smd_jax.sampler.compaction import COMPACTED, Compacted, CompactingRespondent, CompactionConfig, converse_compacting
from smd_jax.sampler.config import RolloutConfig
from smd_jax.sampler.conversation_loop import ABSENT, LENGTH, ROOM, TURNS, ConversationConfig, Reply, converse
from tests.sampler.test_conversation import CONFIG, MODEL, SHAPE, Scripted
from tests.tiny_update import rows_of
from tests.under_test import POLICIES, gap, make_params

WIDTH = 48
PROMPTS = [[12, 13, 14, 15, 16], [12, 13, 14, 15, 16], [20, 21, 22]]
COMPACTION = CompactionConfig(contexts=3, after_tokens=20, ask=(55, 56), heading=(57,))


def compact(model: Decoder, params: Params, policy: str, config: RolloutConfig, seed: int) -> Compacted:
    """Samples conversations of up to six turns over `PROMPTS`, in contexts of `COMPACTION`."""
    inner = Scripted(ending=lambda row, turn: "done" if turn == 5 else None)
    conversation = ConversationConfig(turns=8, turn_tokens=30)

    def sample(prompts: Any, keys: Any, respondent: Any, active: np.ndarray) -> Any:
        arguments: Any = {"policy": POLICIES[policy], "config": config, "conversation": conversation, "active": active}
        return converse(model, params, prompts, keys, respondent, **arguments)

    respondent = CompactingRespondent(inner, COMPACTION, PROMPTS, WIDTH)
    return converse_compacting(sample, respondent, jax.random.key(seed), 0)


@cache
def compacted() -> Compacted:
    return compact(MODEL, make_params(SHAPE), "SnapKV", CONFIG, seed=2)


def contexts() -> list[tree.Branch]:
    """The contexts without padding."""
    trajectory, branches = compacted().trajectory, []
    for row in np.flatnonzero(compacted().present):
        valid = np.asarray(trajectory.valid[row])
        sampled = np.concatenate([np.zeros(WIDTH, bool), np.asarray(trajectory.response_mask[row])])
        logprobs = np.concatenate([np.zeros(WIDTH), np.asarray(trajectory.logprobs[row])])
        branches.append(tree.Branch(np.asarray(trajectory.tokens[row])[valid], sampled[valid], logprobs[valid]))
    return branches


@pytest.mark.slow
def test_each_context_is_exact_and_begins_with_prompt_and_summary():
    result = compacted()
    assert result.present.sum() > 4 and gap(MODEL, result.trajectory).max() <= 2e-5
    assert len(result.stats) > 1 and COMPACTED not in result.endings
    branches = contexts()
    for index, row in enumerate(np.flatnonzero(result.present)):
        conversation, number = divmod(int(row), 3)
        tokens = np.asarray(branches[index].tokens).tolist()
        assert tokens[: len(PROMPTS[conversation])] == PROMPTS[conversation]
        if number == 0:
            continue
        before, sampled = np.asarray(branches[index - 1].tokens), np.asarray(branches[index - 1].sampled)
        summary = before[np.flatnonzero(~sampled)[-1] + 1 :].tolist()
        start = len(PROMPTS[conversation]) + 1
        assert before[np.flatnonzero(~sampled)[-2:]].tolist() == [55, 56]
        assert tokens[start - 1] == 57 and tokens[start : start + len(summary)] == summary
        assert not np.asarray(branches[index].sampled)[: start + len(summary)].any()


@pytest.mark.slow
def test_absent_contexts_have_no_tokens_and_no_keys():
    """Loss and update equal those of the present rows alone."""
    result = compacted()
    absent = ~result.present
    assert absent.any() and not np.asarray(result.trajectory.valid)[absent].any()
    assert not np.asarray(result.trajectory.mask.evicted_at)[absent].any()
    present = rows_of(result.trajectory, result.present)
    optimizer = optax.sgd(1.0)
    advantages = jnp.linspace(-1, 1, len(absent))
    results = []
    for trajectory, row_advantages, counted in (
        (result.trajectory, advantages, jnp.asarray(result.present)),
        (present, advantages[np.flatnonzero(result.present)], None),
    ):
        state = init_state(jax.tree.map(jnp.copy, make_params(SHAPE)), optimizer, jax.random.key(0))
        update = make_update(MODEL, optimizer, UpdateConfig())
        state, metrics = update(state, TrainBatch(trajectory, row_advantages, None, counted))
        results.append((state.params, float(metrics["loss"])))
    assert np.isclose(results[0][1], results[1][1], atol=1e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), results[0][0], results[1][0])


def test_a_summary_that_does_not_fit_ends_the_conversation():
    respondent = CompactingRespondent(Scripted(), COMPACTION, PROMPTS, WIDTH)
    respondent.begin_context(1)
    respondent.send(0, [30] * 18)
    respondent.receive(wait=True)
    respondent.send(0, [32] * WIDTH)
    assert respondent.receive(wait=True) == [
        (0, Reply([], "summary: expected a prompt of at most 48 tokens", cut=True))
    ]
    assert respondent.next_prompts == {} and respondent.summaries.tolist() == [1, 0, 0]


@pytest.mark.parametrize(("ending", "count"), [(LENGTH, 1), (ROOM, 0)])
def test_a_truncated_summary_counts_and_one_never_begun_does_not(ending: str, count: int):
    respondent = CompactingRespondent(Scripted(), COMPACTION, PROMPTS, WIDTH)
    respondent.begin_context(1)
    respondent.send(0, [30] * 18)
    respondent.receive(wait=True)
    respondent.end_context([ending, ABSENT, LENGTH])
    respondent.begin_context(2)
    respondent.end_context([ABSENT, ABSENT, LENGTH])
    assert respondent.summaries.tolist() == [count, 0, 0]


def test_summaries_do_not_count_as_turns():
    """The limit of three turns covers all contexts of the conversation."""
    respondent = CompactingRespondent(Scripted(), COMPACTION, PROMPTS, WIDTH, turns=3)
    replies = dict[int, Any]()
    respondent.begin_context(1)
    for tokens in ([30] * 18, [31] * 18):
        respondent.send(0, tokens)
        ((_, replies[0]),) = respondent.receive(wait=True)
        assert replies[0].tokens == [55, 56]
        respondent.send(0, [32, 7])  # the summary
        assert respondent.receive(wait=True) == [(0, Reply([], COMPACTED))]
        respondent.begin_context(2)
    assert respondent.summaries.tolist() == [2, 0, 0]
    respondent.send(0, [33, 7])
    assert respondent.receive(wait=True) == [(0, Reply([], TURNS, cut=True))]


def test_only_turns_that_end_with_the_end_token_are_compacted():
    respondent = CompactingRespondent(Scripted(), replace(COMPACTION, end_token=7), PROMPTS, WIDTH)
    respondent.begin_context(1)
    for row, last in ((0, 7), (1, 8)):
        respondent.send(row, [30] * 18 + [last])
    cut = Reply([], "summary: expected a turn that ends with token 7; got 8", cut=True)
    (_, asked), (_, other) = respondent.receive(wait=True)
    assert asked.tokens == [55, 56] and other == cut
    respondent.send(0, [32, 8])  # a summary with another last token
    assert respondent.receive(wait=True) == [(0, cut)] and respondent.next_prompts == {}
