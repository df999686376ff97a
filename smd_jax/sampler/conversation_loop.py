"""The host loop of a batch of conversations: which rows sample, read, wait, or have ended.

              ┌─ read_chunk: rows that were answered read up to `buffer` tokens ◄── replies that have come
    rows ─► sample_segment: rows in a turn sample up to `buffer` tokens ─► turns that ended ─► Respondent.send ─┐
              ▲                                                                                               │
              └───────────────────────────────────────────────────────────────────────────────────────────────┘

The loop waits for a reply only if no row has anything to do. So rows are at different turns, and a slow environment
delays only its own row. A conversation that waits keeps its row of the cache, or gives it to another (`decode_rows`).

A trajectory does not depend on when replies arrive: a row depends only on its own tokens and keys.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key

from smd_jax.config import check_whole
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.message.trajectory import Trajectory, check_finite
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.sampler.config import RolloutConfig, check_sampler
from smd_jax.sampler.conversation import (
    Conversations,
    begin_conversations,
    conversation_sampler,
    read_chunk,
    sample_segment,
    to_trajectory,
)
from smd_jax.sampler.host_records import host_device
from smd_jax.sampler.keys import prompt_keys, row_keys
from smd_jax.sampler.static import Sampler, converted
from smd_jax.text.prompts import PromptBatch, check_prompts
from smd_jax.text.stop_strings import StopTable, check_stop_table
from smd_jax.typed_fields import check_types

# Endings of conversations that the respondent did not end.
TURNS = "turns"  # the last allowed turn was answered
LENGTH = "length"  # a turn reached its limit before it ended
ROOM = "room"  # the answer does not fit
ABSENT = "absent"  # there is no such conversation


@dataclass(frozen=True, kw_only=True)
class ConversationConfig:
    """Limits of a conversation; static.

    Attributes:
      turns: maximum turns of the policy.
      turn_tokens: maximum tokens of a turn, its end included; None: as many as there is room for. All tokens after the
        prompt, answers included, are at most `RolloutConfig.max_new_tokens`.
    """

    turns: int = 8
    turn_tokens: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        check_whole("turns", self.turns, 1)
        if self.turn_tokens is not None:
            check_whole("turn_tokens", self.turn_tokens, 1, "tokens, or None")


class Reply(NamedTuple):
    """A respondent's answer to a turn.

    Attributes:
      tokens: read by the policy before its next turn, at least one, unless the conversation ends.
      ending: why the conversation ends; None: it continues.
      cut: whether a limit ends it, so that `terminated` is false.
    """

    tokens: list[int]
    ending: str | None = None
    cut: bool = False


@runtime_checkable
class Respondent(Protocol):
    """Answers the turns of all rows, in any order and at any time."""

    def send(self, row: int, tokens: list[int]) -> None:
        """Takes the tokens of a turn that has ended, the last of which may be an end token. Must not wait."""
        ...

    def receive(self, wait: bool) -> list[tuple[int, Reply]]:
        """Replies that have arrived, as (row, reply); with `wait` at least one."""
        ...


@runtime_checkable
class CountedRespondent(Respondent, Protocol):
    """A Respondent that has its conversations, one for each row, as an EnvironmentRespondent does."""

    conversations: Sequence[object]


class ConversationStats(NamedTuple):
    """Statistics of a batch of conversations.

    Attributes:
      sampled, read: tokens. segments: of up to `buffer` steps. chunks: calls that read answers.
      utilisation: share of the cache's rows that sampled a token, the mean over all steps.
      waited_seconds: seconds in `Respondent.receive`.
      moved: how often a conversation took another one's row.
    """

    sampled: int
    read: int
    segments: int
    chunks: int
    utilisation: float
    waited_seconds: float
    moved: int


class Conversed(NamedTuple):
    """Conversations that have ended.

    Attributes:
      trajectory: one row per conversation; `terminated` where the respondent ended it without cutting it off.
      endings: why each ended: `TURNS`, `LENGTH`, `ROOM`, or the respondent's `Reply.ending`.
    """

    trajectory: Trajectory
    endings: list[str]
    stats: ConversationStats


def converse(
    model: LanguageModel,
    params: Params,
    prompts: PromptBatch,
    key: Key[Array, ""] | Key[Array, " rows"],
    respondent: Respondent,
    *,
    policy: EvictionPolicy,
    config: RolloutConfig,
    conversation: ConversationConfig = ConversationConfig(),
    group_size: int = 1,
    stop: StopTable | None = None,
    active: Bool[np.ndarray, " rows"] | None = None,
    decode_rows: int | None = None,
) -> Conversed:
    """Samples `group_size` conversations per prompt; arguments as in `smd_jax.rollout`.

    Args:
      active: conversations to sample; the others stay empty. None: all.
      decode_rows: rows of the cache, a multiple of `group_size` that divides the conversations. A conversation that
        waits for its answer gives its row to one that has something to do. None: every conversation keeps a row.

    `config.eos_token_id` and `stop` end a turn, and `config.max_new_tokens` counts all tokens after the prompt. An
    answer is read in chunks of `config.buffer` tokens, and the cache is compressed after each.

    Raises:
      TypeError: a model, policy, config or prompts of another class, as `rollout`.
      ValueError: a respondent of another number of conversations, decode_rows that do not divide them, `active` of
        another shape, neither `config.eos_token_id` nor `stop`, turns without room for the shortest response, a
        quantised cache, an answer without tokens or with ids outside the vocabulary, a reply without a turn, and the
        errors of `rollout`.
      NonFiniteLogitsError: the model's logits were NaN or infinite.
    """
    check_sampler(model, policy, config)
    check_whole("group_size", group_size, 1)
    check_prompts(prompts, model.shape.vocab_size)
    if stop is not None:
        check_stop_table(stop, model.shape.vocab_size)
    if stop is None and config.eos_token_id is None:
        raise ValueError("expected an eos_token_id or stop strings, one of which ends a turn; got neither")
    check_shortest_turn(config, conversation)
    sampler = conversation_sampler(model, policy, config, prompts.tokens.shape[1])
    rows = len(prompts.tokens) * group_size
    if isinstance(respondent, CountedRespondent) and (count := len(respondent.conversations)) != rows:
        raise ValueError(f"expected a respondent of {rows} conversations, with the same group_size; got {count}")
    active = np.ones(rows, bool) if active is None else np.asarray(active, bool)
    if active.shape != (rows,):
        raise ValueError(f"expected active of shape [{rows}], one value per conversation; got {list(active.shape)}")
    decode_rows = rows if decode_rows is None else decode_rows
    check_decode_rows(decode_rows, rows, group_size)
    loop = _Loop(sampler, params, prompts, key, respondent, conversation, group_size, stop, active, decode_rows)
    loop.run()
    return loop.result()


def check_decode_rows(decode_rows: int, rows: int, group_size: int) -> None:
    """Raises ValueError unless `decode_rows` divide the conversations, `rows`, into parts of whole groups."""
    check_whole("decode_rows", decode_rows, 1)
    if rows % decode_rows or decode_rows % group_size:
        raise ValueError(
            f"expected decode_rows that divide {rows} conversations into parts of whole groups of {group_size}; got "
            f"{decode_rows}"
        )


def check_shortest_turn(config: RolloutConfig, conversation: ConversationConfig) -> None:
    """Raises ValueError unless the first turn has room for `min_new_tokens` and its end."""
    least, most = config.min_new_tokens, min(conversation.turn_tokens or math.inf, config.max_new_tokens)
    if least and least >= most:
        raise ValueError(
            f"expected min_new_tokens below turn_tokens and max_new_tokens, {most}, so that the first turn can end; "
            f"got {least}"
        )


def check_answer(row: int, tokens: list[int], vocab_size: int) -> None:
    """Raises ValueError for an answer without tokens, after which two turns would look like one, and for ids outside
    the vocabulary, whose embeddings are not finite."""
    if not len(tokens):
        raise ValueError(f"expected an answer of at least one token, or an ending; got none in conversation {row}")
    outside = [token for token in tokens if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(
            f"expected ids of an answer from 0 to {vocab_size - 1}, the model's vocabulary; got {outside[0]} in "
            f"conversation {row}"
        )


class ConversationRows:
    """The rows of the cache. If there are more conversations than rows, the others are parked on the host.

        cache    [ 0 samples | 1 waits ]      parked  2 was answered, 3 has not begun
                 [ 0 samples | 2 reads ]              1 waits,        3 has not begun         1 gave its row away

    A row of the cache depends only on its own conversation, so it can be moved unchanged: see
    `smd_jax.cache.slots.settle`.

    Args:
      begin: begins the conversations of a slice, as many as there are rows.
      count: number of conversations. rows: of the cache; divide `count`.

    Raises:
      ValueError: more conversations than rows on several devices.

    Attributes:
      state: of the conversations in the cache, on the device.
      seats: `[rows]` number of each one's conversation.
      parked: the other conversations by their number, on the host.
      moved: how often a conversation took another one's row.
    """

    def __init__(self, begin: Callable[[slice], Conversations], count: int, rows: int) -> None:
        self.seats = np.arange(rows)
        self.moved = 0
        self.parked: dict[int, Conversations] = {}
        for first in range(rows, count, rows):
            others = begin(slice(first, first + rows))
            self.parked |= {first + row: _on_host(others, row) for row in range(rows)}
            del others  # before the next cache is made
        self.state = begin(slice(0, rows))
        devices = self.state.read.devices()
        if self.parked and len(devices) > 1:
            raise ValueError(
                f"expected decode_rows None on several devices, because conversations move between rows; got {rows} "
                f"on {len(devices)} devices"
            )
        self._device = next(iter(devices))

    def exchange(self, seat: int, conversation: int) -> None:
        """Parks the conversation of a row and seats a parked one there."""
        self.parked[int(self.seats[seat])] = _on_host(self.state, seat)
        row = jax.device_put(self.parked.pop(conversation), self._device)
        self.state = _put(self.state, row, jnp.int32(seat))
        self.seats[seat] = conversation
        self.moved += 1

    def records(self) -> Conversations:
        """All conversations in their order, without caches, on the device of the cache."""
        if not self.parked:
            return _without_cache(self.state)
        here = {int(number): _on_host(self.state, row) for row, number in enumerate(self.seats)}
        parts = [_without_cache(row) for _, row in sorted((here | self.parked).items())]
        joined = jax.tree.map(lambda *x: jnp.concatenate(x) if x[0].ndim else x[0], *parts)
        return jax.device_put(joined, self._device)


def _on_host(state: Conversations, row: int) -> Conversations:
    """A copy of one row."""
    return jax.device_put(_take(state, jnp.int32(row)), host_device())


def _without_cache(state: Conversations) -> Conversations:
    return state.replace(rows=state.rows.replace(cache=()))


@jax.jit
def _take(state: Conversations, row: Int[Array, ""]) -> Conversations:
    """One row; `cache_steps`, which has no rows, is unchanged."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1) if x.ndim else x, state)


@partial(jax.jit, donate_argnums=0)
def _put(state: Conversations, new: Conversations, row: Int[Array, ""]) -> Conversations:
    def put(x: Array, one: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(x, one, row, axis=0) if x.ndim else x

    return jax.tree.map(put, state, new)


class _Loop:
    """The host's view of a batch of conversations.

    Attributes:
      drawn: `[rows]` tokens after the prompt, those included that have not been read.
      begins: `[rows]` where the present turn begins, in tokens after the prompt.
      turn: `[rows]` number of the present turn.
      live: `[rows]` rows that sample.
      last: `[rows]` last token of the turn.
      unread: tokens of an answer that a row has not read yet, the last token of its turn first.
      endings: why rows ended; None for those that continue. terminated: `[rows]` rows that no limit ended.
      rows: of the cache; its state is donated to every program that changes it. In `[rows]` a row is a conversation.
    """

    def __init__(
        self,
        sampler: Sampler,
        params: Params,
        prompts: PromptBatch,
        key: Key[Array, ""] | Key[Array, " rows"],
        respondent: Respondent,
        conversation: ConversationConfig,
        group_size: int,
        stop: StopTable | None,
        active: Bool[np.ndarray, " rows"],
        decode_rows: int,
    ) -> None:
        rows = len(prompts.tokens) * group_size
        self.sampler = sampler
        self.params = converted(sampler.model, params, gathered=True)
        self.prompts = prompts
        self.respondent = respondent
        self.conversation = conversation
        self.stop = stop
        self.drawn = np.zeros(rows, np.int32)
        self.begins = np.zeros(rows, np.int32)
        self.last = np.zeros(rows, np.int32)
        self.turn = np.ones(rows, np.int32)
        self.live = active.copy()
        self.unread: dict[int, list[int]] = {}
        self.endings: list[str | None] = [None if each else ABSENT for each in active.tolist()]
        self.terminated = np.zeros(rows, bool)
        self.steps = self.sampled = self.read = self.segments = self.chunks = 0
        self.waited = 0.0
        keys = row_keys(key, rows)
        limit = jnp.asarray(np.where(active, self._limit(0), 0), jnp.int32)

        def begin(part: slice) -> Conversations:
            groups = slice(part.start // group_size, part.stop // group_size)
            of_part = PromptBatch(prompts.tokens[groups], prompts.valid[groups])
            return begin_conversations(
                sampler, self.params, of_part, keys[part], prompt_keys(keys, group_size)[groups], limit[part]
            )

        self.rows = ConversationRows(begin, rows, decode_rows)

    def run(self) -> None:
        """Samples and reads until every conversation has ended."""
        while None in self.endings:
            self._take_replies()
            self._give_rows_away()
            seats = self.rows.seats
            if any(row in self.unread for row in seats.tolist()):
                self._read()
            if self.live[seats].any():
                self._sample()

    def result(self) -> Conversed:
        """The conversations; the state must not be used afterwards."""
        endings = [str(ending) for ending in self.endings]
        trajectory = to_trajectory(self.sampler, self.prompts, self.rows.records(), jnp.asarray(self.terminated))
        check_finite(trajectory.logprobs)
        steps = max(self.steps * len(self.rows.seats), 1)
        stats = ConversationStats(
            self.sampled, self.read, self.segments, self.chunks, self.sampled / steps, self.waited, self.rows.moved
        )
        return Conversed(trajectory, endings, stats)

    def _limit(self, begins: int) -> int:
        """Tokens after the prompt at which a turn is cut off that begins after `begins` of them."""
        most = self.sampler.config.max_new_tokens
        return min(begins + (self.conversation.turn_tokens or most), most)

    def _take_replies(self) -> None:
        wait = not self.unread and not self.live.any()
        began = time.perf_counter()
        replies = self.respondent.receive(wait)
        self.waited += time.perf_counter() - began
        for row, reply in replies:
            if not self._waits(row):
                raise ValueError(f"expected one reply to each turn that was sent; got another of conversation {row}")
            if reply.ending is not None:
                self.endings[row] = reply.ending
                self.terminated[row] = not reply.cut
            elif self.turn[row] >= self.conversation.turns:
                self.endings[row] = TURNS
            elif self.drawn[row] + len(reply.tokens) >= self.sampler.config.max_new_tokens:
                self.endings[row] = ROOM
            else:
                check_answer(row, reply.tokens, self.sampler.model.shape.vocab_size)
                self.unread[row] = [int(self.last[row]), *reply.tokens]
                self.read += len(reply.tokens)
                self.drawn[row] += len(reply.tokens)

    def _waits(self, row: int) -> bool:
        """Whether a turn of this conversation was sent and has no reply."""
        known = 0 <= row < len(self.endings)
        return known and self.endings[row] is None and not self.live[row] and row not in self.unread

    def _give_rows_away(self) -> None:
        """Parked conversations that have something to do take the rows of those that wait or have ended."""
        ready = [row for row in sorted(self.rows.parked) if row in self.unread or self.live[row]]
        idle = [seat for seat, row in enumerate(self.rows.seats.tolist()) if not (row in self.unread or self.live[row])]
        for seat, row in zip(idle, ready, strict=False):
            self.rows.exchange(seat, row)

    def _read(self) -> None:
        """Reads one chunk in every row of the cache that has something to read."""
        buffer = self.sampler.config.buffer
        seats = self.rows.seats.tolist()
        tokens = np.full((len(seats), buffer), self.sampler.config.pad_token_id, np.int32)
        lengths, limit = np.zeros((2, len(seats)), np.int32)
        for seat, row in enumerate(seats):
            if row not in self.unread:
                continue
            unread = self.unread[row]
            chunk, self.unread[row] = unread[:buffer], unread[buffer:]
            tokens[seat, : len(chunk)] = chunk
            lengths[seat] = len(chunk)
            if not self.unread[row]:
                del self.unread[row]
                self.begins[row] = self.drawn[row]
                self.turn[row] += 1
                self.live[row] = True
                limit[seat] = self._limit(int(self.begins[row]))
        self.rows.state = read_chunk(
            self.sampler, self.params, self.rows.state, *map(jnp.asarray, (tokens, lengths, limit))
        )
        self.chunks += 1

    def _sample(self) -> None:
        """Samples one segment in every row that samples, and sends the turns that ended."""
        seats = self.rows.seats
        live = self.live[seats]
        self.rows.state = sample_segment(self.sampler, self.params, self.rows.state, self.stop)
        state = self.rows.state
        drawn, done, terminated = jax.device_get((state.rows.drawn, state.rows.done, state.rows.terminated))
        new = (drawn - self.drawn[seats])[live]
        self.drawn[seats[live]] = drawn[live]
        self.segments += 1
        self.sampled += int(new.sum())
        self.steps += int(new.max())
        stopped = np.flatnonzero(live & done)
        self.live[seats] &= ~done
        if not len(stopped):
            return
        tokens, logprobs = jax.device_get((state.record.tokens, state.record.logprobs))
        check_finite(logprobs[stopped])  # before a respondent acts on tokens that mean nothing
        for seat in stopped.tolist():
            row, end = int(seats[seat]), int(drawn[seat])
            self.last[row] = tokens[seat, end - 1]
            if terminated[seat]:
                self.respondent.send(row, tokens[seat, self.begins[row] : end].tolist())
            else:
                self.endings[row] = LENGTH
