"""Conversations replay exactly under every policy, in any order of answers."""

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.certify.record import arrays_of
from smd_jax.config import ModelConfig
from smd_jax.devices.sharding import make_mesh, shard_batch, shard_tree
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.eviction.policies import H2O, LearnedGate, SnapKV
from smd_jax.eviction.wrappers import OnTokens
from smd_jax.message.masks import NEVER, ShadowMask
from smd_jax.message.quantization import QuantConfig
from smd_jax.message.sampling import SamplingConfig
from smd_jax.message.spans import TokenSpans
from smd_jax.message.trajectory import NonFiniteLogitsError
from smd_jax.model.decoder import Decoder
from smd_jax.sampler.config import RolloutConfig, cache_bytes
from smd_jax.sampler.conversation import begin_conversations, conversation_sampler, sample_segment
from smd_jax.sampler.conversation_loop import LENGTH, ROOM, TURNS, ConversationConfig, Conversed, Reply, converse
from smd_jax.sampler.keys import row_keys
from tests.sampler.test_engine import WIDE
from tests.under_test import POLICIES, SHAPES, gap, left_padded, make_params

WIDTH, RESPONSE, VOCAB = 10, 96, 64
LENGTHS = [10, 4, 7, 1]
SHAPE = dataclasses.replace(SHAPES["GQA"], vocab_size=VOCAB)
# Four of 64 tokens end a turn, so turns have about 16 tokens.
CONFIG = RolloutConfig(
    max_new_tokens=RESPONSE, budget=14, buffer=5, eos_token_id=(7, 8, 9, 10), sampling=SamplingConfig(temperature=0.9)
)
MODEL, CONVERSATION = Decoder(SHAPE), ConversationConfig(turns=4)
Rule = Callable[[int, int], Any]


class Scripted:
    """Answers with tokens that depend on the row and the turn.

    Args:
      delay: polls before the answer. ending: reason for which the conversation ends, or None. size: tokens of the
        answer. All are functions of the row and the turn, which counts from 1.
    """

    def __init__(
        self,
        delay: Rule = lambda row, turn: 0,
        ending: Rule = lambda row, turn: None,
        size: Rule = lambda row, turn: 1 + (3 * row + 4 * turn) % 13,
    ):
        self.delay, self.ending, self.size = delay, ending, size
        self.turns: dict[int, list[list[int]]] = {}
        self.waiting: list[tuple[int, int]] = []

    def send(self, row: int, tokens: list[int]) -> None:
        self.turns.setdefault(row, []).append(tokens)
        self.waiting.append((row, self.delay(row, len(self.turns[row]))))

    def receive(self, wait: bool) -> list[tuple[int, Reply]]:
        while True:
            due = [row for row, polls in self.waiting if polls <= 0]
            self.waiting = [(row, polls - 1) for row, polls in self.waiting if polls > 0]
            if due or not wait:
                return [(row, self.reply(row, len(self.turns[row]))) for row in due]

    def reply(self, row: int, turn: int) -> Reply:
        tokens = np.random.default_rng([row, turn]).integers(11, VOCAB, self.size(row, turn))
        return Reply(tokens.tolist(), self.ending(row, turn))


def inputs(config: ModelConfig = SHAPE) -> tuple[Any, Any, jax.Array]:
    """Parameters, prompts and a key."""
    return make_params(config), left_padded(LENGTHS, WIDTH, VOCAB), jax.random.key(3)


def sample_conversations(
    name: str | EvictionPolicy,
    respondent: Scripted,
    config: RolloutConfig = CONFIG,
    model: Decoder = MODEL,
    arguments: Any = None,
    conversation: ConversationConfig = CONVERSATION,
    decode_rows: int | None = None,
) -> Conversed:
    policy = POLICIES[name] if isinstance(name, str) else name
    params, prompts, key = arguments or inputs(model.config)
    options: Any = {"policy": policy, "config": config, "conversation": conversation, "decode_rows": decode_rows}
    return converse(model, params, prompts, key, respondent, **options)


def second_row_ends(row: int, turn: int) -> str | None:
    return "done" if (row, turn) == (1, 3) else None


@cache
def default_conversations(name: str) -> tuple[Conversed, Scripted]:
    respondent = Scripted(ending=second_row_ends)
    return sample_conversations(name, respondent), respondent


FAST = ("Dense", "SnapKV")
# Similar to other policies; not run here.
SIMILAR = ("Recent", "TOVA", "KeyDiff", "Knorm", "Pyramid", "Protect of StreamingLLM")
OTHERS = tuple(name for name in POLICIES if name not in (*FAST, *SIMILAR))


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_exact_over_turns(name: str):
    trajectory = default_conversations(name)[0].trajectory
    turns = np.asarray(trajectory.turns())
    assert (turns.max(axis=1) >= 3).sum() >= 2, turns.max(axis=1)
    difference = gap(MODEL, trajectory)
    assert len(difference) > 60 and difference.max() <= 2e-5
    if not POLICIES[name].evicts:
        return
    mask: Any = trajectory.mask
    t = mask.evicted_at
    assert gap(MODEL, trajectory, trajectory.dense_mask()).max() > 1e-2
    assert gap(MODEL, trajectory, ShadowMask(jnp.where((t > 0) & (t < NEVER), t + 1, t))).max() > 1e-3
    mask.with_segments(mask.segments)  # raises unless the mask fits its segments


def test_an_ending_named_like_a_limit_terminates_the_row():
    respondent = Scripted(ending=lambda row, turn: second_row_ends(row, turn) and LENGTH)
    conversed = sample_conversations("SnapKV", respondent)
    assert conversed.endings[1] == LENGTH and bool(conversed.trajectory.terminated[1])
    assert np.asarray(conversed.trajectory.terminated).sum() == 1


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "expected an answer of at least one token, or an ending; got none in conversation"),
        ([11, VOCAB], f"expected ids of an answer from 0 to {VOCAB - 1}, the model's vocabulary; got {VOCAB} in"),
        ([-1], "got -1 in conversation"),
    ],
)
def test_empty_answers_and_invalid_ids_are_refused(tokens: list[int], message: str):
    respondent = Scripted()
    respondent.reply = lambda row, turn: Reply(tokens)
    with pytest.raises(ValueError, match=message):
        sample_conversations("SnapKV", respondent)


@pytest.mark.parametrize("other", [-1, 0, 1, len(LENGTHS)])
def test_a_reply_without_a_turn_is_refused(other: int):
    """For a row that has its reply, still samples or has ended, and for no row."""
    respondent = Scripted(ending=lambda row, turn: "done" if row == 1 else None)
    respondent.receive = lambda wait: [
        (row, respondent.reply(abs(row), 1)) for row in respondent.turns for row in (row, other)
    ]
    with pytest.raises(ValueError, match=f"one reply to each turn that was sent; got another of conversation {other}"):
        sample_conversations("SnapKV", respondent)


def test_turns_from_non_finite_logits_are_not_sent():
    params, prompts, key = inputs()
    respondent = Scripted()
    params = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params)
    with pytest.raises(NonFiniteLogitsError, match="expected finite logits in the sampler"):
        sample_conversations(
            "SnapKV",
            respondent,
            dataclasses.replace(CONFIG, eos_token_id=tuple(range(VOCAB))),
            arguments=(params, prompts, key),
        )
    assert not respondent.turns


def test_turns_and_answers_are_adjacent():
    conversed, respondent = default_conversations("SnapKV")
    trajectory = conversed.trajectory
    assert conversed.endings[1] == "done" and TURNS in conversed.endings
    assert np.asarray(trajectory.terminated).tolist() == [ending == "done" for ending in conversed.endings]
    for row, sent in respondent.turns.items():
        expected, turns = [], []
        for number, tokens in enumerate(sent, 1):
            answer = respondent.reply(row, number).tokens
            expected += tokens + answer
            turns += [number] * len(tokens) + [0] * len(answer)
        length = int(trajectory.columns_after_prompt()[row])
        # A turn that was cut off was never sent; an answer that came after the last turn was never read.
        shared = min(length, len(expected))
        assert shared > 20
        assert np.asarray(trajectory.response[row, :shared]).tolist() == expected[:shared]
        assert np.asarray(trajectory.turns()[row, :shared]).tolist() == turns[:shared]
        assert not np.asarray(trajectory.turns()[row, length:]).any()
    assert (np.asarray(trajectory.logprobs)[~np.asarray(trajectory.response_mask)] == 0).all()
    assert conversed.stats.read > 2 * CONFIG.buffer and conversed.stats.sampled == int(trajectory.lengths().sum())


@pytest.mark.parametrize("name", ["SnapKV", pytest.param("H2O", marks=pytest.mark.slow)])
def test_slow_answers_change_nothing(name: str):
    """Bitwise: a waiting row keeps its keys and statistics."""
    slow = Scripted(delay=lambda row, turn: (5 * row + 3 * turn) % 7, ending=second_row_ends)
    delayed, at_once = sample_conversations(name, slow).trajectory, default_conversations(name)[0].trajectory
    jax.tree.map(np.testing.assert_array_equal, delayed, at_once)


SPANS = TokenSpans(open=60, close=61, summary=(62, 63))


class Folding(Scripted):
    """Odd answers are spans, even ones their summaries, so spans are evicted while an answer is read."""

    def reply(self, row: int, turn: int) -> Reply:
        tokens = super().reply(row, turn).tokens
        tokens = [token for token in tokens if token < 60]
        return Reply([60, *tokens, 61] if turn % 2 else [62, *tokens, 63], self.ending(row, turn))


def span_evictions(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Per token: the column at which its span is evicted (`NEVER` outside a span), and the column that closes it."""
    evicted_at, closed = np.full((2, len(tokens)), NEVER)
    opened: int | None = None
    summary: int | None = None
    span: tuple[int, int] | None = None
    for column, token in enumerate(tokens.tolist()):
        if token == 60:
            opened = column
        elif token == 61 and opened is not None:
            span, opened, summary = (opened, column), None, None
        elif token == 62 and span is not None:
            summary = column
        elif token == 63 and summary is not None and span is not None:
            inside = slice(span[0] + 1, span[1])
            evicted_at[inside], closed[inside] = column, span[1]
            span = summary = None
    return evicted_at, closed


@pytest.mark.parametrize(
    "policy",
    [OnTokens(SPANS), pytest.param(OnTokens(SPANS, inner=SnapKV(window=4, kernel=3)), marks=pytest.mark.slow)],
    ids=["Dense", "SnapKV"],
)
def test_spans_of_a_conversation_replay_exactly(policy: OnTokens):
    """The end of its summary evicts a span. Two masks that are nearly right miss."""
    trajectory = sample_conversations(policy, Folding(size=lambda row, turn: 8 + row)).trajectory
    mask: Any = trajectory.mask
    t = np.asarray(mask.evicted_at)
    spans = np.stack([span_evictions(row) for row in np.asarray(trajectory.tokens)], axis=1)
    span_end, closed = np.broadcast_to(spans[:, :, None, None], (2, *t.shape))
    in_span = span_end < NEVER
    assert (in_span.sum(axis=-1) > 4).sum() > 2
    assert (t <= span_end).all() and (policy.inner.evicts or (t[in_span] == span_end[in_span]).all())
    assert gap(MODEL, trajectory).max() <= 2e-5
    kept = ShadowMask(jnp.asarray(np.where(t == span_end, NEVER, t)))  # spans are never evicted
    early = ShadowMask(jnp.asarray(np.where(t == span_end, closed + 1, t)))  # evicted before the summary is read
    assert gap(MODEL, trajectory, kept).max() > 1e-3 and gap(MODEL, trajectory, early).max() > 1e-3


def test_an_answer_that_does_not_fit_ends_the_conversation():
    conversed = sample_conversations("SnapKV", Scripted(size=lambda row, turn: 500 if row == 2 else 3))
    trajectory, row = conversed.trajectory, 2
    assert conversed.endings[row] == ROOM and not bool(trajectory.terminated[row])
    assert set(np.asarray(trajectory.turns()[row])) <= {0, 1} and gap(MODEL, trajectory).max() <= 2e-5


def test_a_turn_longer_than_its_limit_ends_the_conversation():
    short = ConversationConfig(turns=3, turn_tokens=2)
    conversed = sample_conversations("SnapKV", Scripted(), conversation=short)
    assert LENGTH in conversed.endings
    for ending, turns in zip(conversed.endings, np.asarray(conversed.trajectory.turns()), strict=True):
        tokens = np.bincount(turns[turns > 0])[1:]
        assert tokens.max() <= 2 and (ending != LENGTH or tokens[-1] == 2)


@pytest.mark.parametrize(
    ("changes", "options", "expected"),
    [
        ({"eos_token_id": None}, {}, "which ends a turn; got neither"),
        ({"quant": QuantConfig(bits=4, group=5)}, {}, "expected quant None in a conversation"),
        ({"min_new_tokens": 2}, {}, "expected min_new_tokens below turn_tokens and .*, 2, .*; got 2"),
        ({}, {"name": LearnedGate()}, "which records no draws; got LearnedGate"),
        ({}, {"decode_rows": 3}, "expected decode_rows that divide 4 conversations"),
    ],
)
def test_unsupported_options_are_refused(changes: dict[str, Any], options: dict[str, Any], expected: str):
    options = {"name": "SnapKV", "conversation": ConversationConfig(turn_tokens=2), **options}
    with pytest.raises(ValueError, match=expected):
        sample_conversations(respondent=Scripted(), config=dataclasses.replace(CONFIG, **changes), **options)


def test_a_respondent_of_another_number_of_conversations_is_refused():
    """With another `group_size` a row would get the answers of another one."""
    respondent: Any = Scripted()
    respondent.conversations = [None] * 3
    with pytest.raises(ValueError, match="expected a respondent of 4 conversations, with the same group_size; got 3"):
        sample_conversations("SnapKV", respondent)


def test_certify_refuses_conversations():
    with pytest.raises(ValueError, match="expected responses of sampled tokens only; got a conversation"):
        arrays_of(default_conversations("SnapKV")[0].trajectory)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SnapKV", "Dense"])
def test_waiting_conversations_free_their_rows(name: str):
    """Four conversations in two rows: the same tokens and masks, and fewer idle steps."""
    waits: dict[str, Any] = {"delay": lambda row, turn: 2 + row % 2, "ending": second_row_ends}
    moved = sample_conversations(name, Scripted(**waits), decode_rows=2)
    assert moved.stats.moved > 4 and gap(MODEL, moved.trajectory).max() <= 2e-5
    expected = default_conversations(name)[0]
    assert moved.endings == expected.endings
    for field in ("tokens", "valid", "sampled"):
        np.testing.assert_array_equal(getattr(moved.trajectory, field), getattr(expected.trajectory, field))
    np.testing.assert_array_equal(moved.trajectory.mask.evicted_at, expected.trajectory.mask.evicted_at)
    all_rows = sample_conversations(name, Scripted(**waits))
    assert moved.stats.utilisation > all_rows.stats.utilisation


def test_parked_conversations_return_to_the_device_of_the_model():
    """The first device of the host parks them; the model is on the second, as on an accelerator."""
    device, model = jax.devices()[1], Decoder(dataclasses.replace(SHAPE, num_layers=1))
    respondent = Scripted(delay=lambda row, turn: 2 + row % 2)
    arguments = jax.device_put(inputs(model.config), device)
    conversed = sample_conversations("SnapKV", respondent, model=model, arguments=arguments, decode_rows=2)
    assert conversed.stats.moved and conversed.trajectory.tokens.devices() == {device}


def test_decode_rows_are_refused_on_several_devices():
    mesh, (params, prompts, key) = make_mesh(2, 1, 1), inputs()
    arguments = shard_tree(params, mesh), shard_batch(prompts, mesh), key
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="expected decode_rows None .*; got 2 on 2 devices"):
        sample_conversations("SnapKV", Scripted(), arguments=arguments, decode_rows=2)


def test_a_segment_needs_no_second_cache():
    """17 rows do not divide into the 16 parts of `row_parts`."""
    config = RolloutConfig(max_new_tokens=248, budget=96, buffer=16, eos_token_id=7)
    sampler = conversation_sampler(Decoder(WIDE), H2O(), config, 8)

    def begun() -> Any:
        keys = row_keys(jax.random.key(0), 17)
        prompts = left_padded([8] * 17, 8, WIDE.vocab_size)
        return begin_conversations(sampler, make_params(WIDE), prompts, keys, keys, jnp.full(17, 9, jnp.int32))

    params = jax.eval_shape(lambda: make_params(WIDE))
    compiled = sample_segment.lower(sampler, params, jax.eval_shape(begun), None).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes <= 0.25 * cache_bytes(WIDE, H2O(), config, 8, 17)
