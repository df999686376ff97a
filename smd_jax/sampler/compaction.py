"""Text-level compaction: when a context is full, the policy summarises it and continues in a new context that begins
with the summary.

    context 1   prompt ─► turn ─► answer ─► turn ─► ask ─► summary         sampled: turns and the summary
    context 2   prompt + summary + answer ─► turn ─► …                     the summary is read, in a new cache

A context is a row of the trajectory. All contexts of a conversation begin with its prompt, so they are branches of one
tree (`smd_jax.message.tree`): an update with `pack_columns` and `rows_per_prompt` above 1 reads the shared beginning
once.

Two simpler layouts are wrong: with all contexts in one row, the second would see the first; with only the last context,
the sampled summary would not be trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key

from smd_jax.config import check_whole
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.routing import NOT_RECORDED
from smd_jax.sampler.conversation_loop import ABSENT, LENGTH, TURNS, ConversationStats, Conversed, Reply, Respondent
from smd_jax.sampler.keys import row_keys
from smd_jax.text.prompts import PromptBatch, pad_left
from smd_jax.typed_fields import check_types

COMPACTED = "compacted"  # the ending of a context that another one follows


@dataclass(frozen=True, kw_only=True)
class CompactionConfig:
    """When and how contexts are compacted; static.

    Attributes:
      contexts: maximum per conversation.
      after_tokens: tokens after the prompt from which a context is summarised, when a turn has ended.
      ask: tokens that the policy reads before it writes the summary; with a chat template those of
        `Dialogue.answer("Summarise …", last)`.
      heading: tokens between the prompt and the summary in the next context.
      end_token: the end of a turn that `ask` and the answers continue. A conversation whose turn or summary ends with
        another token is cut off instead of compacted. None: any.

    Raises:
      ValueError: fewer than two contexts, no `ask`.
    """

    contexts: int = 2
    after_tokens: int
    ask: tuple[int, ...]
    heading: tuple[int, ...] = ()
    end_token: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        check_whole("contexts", self.contexts, 2)
        check_whole("after_tokens", self.after_tokens, 1)
        if not self.ask:  # otherwise the summary would be part of the turn before it
            raise ValueError("expected at least one token in ask; got ()")


@dataclass
class CompactingRespondent:
    """Wraps a respondent: if the context is full, asks for a summary instead of passing on the answer.

    Attributes:
      inner: answers the turns.
      prompts: tokens of each conversation's own prompt. prompt_width: maximum tokens of a prompt.
      turns: maximum per conversation, without summaries; None: no limit. `converse` counts the turns of a context,
        summaries included, so its own limit must be higher.
      next_prompts: prompts of the next contexts, by conversation.
      summaries: int64 `[conversations]` written summaries, including those that did not fit or were cut off.
    """

    inner: Respondent
    config: CompactionConfig
    prompts: list[list[int]]
    prompt_width: int
    turns: int | None = None
    next_prompts: dict[int, list[int]] = field(default_factory=dict)
    summaries: Int[np.ndarray, " conversations"] = field(init=False)

    def __post_init__(self) -> None:
        self._context = 1
        self._lengths, self._turns, self.summaries = np.zeros((3, len(self.prompts)), np.int64)
        self._answers: dict[int, list[int]] = {}  # unread answers of conversations that write a summary
        self._last: dict[int, int] = {}  # of the newest turn
        self._summarised: list[tuple[int, Reply]] = []

    def begin_context(self, number: int) -> None:
        """Begins context `number`, from 1, of every conversation that continues."""
        self._context = number
        self._lengths[:] = 0
        self.next_prompts = {}

    def end_context(self, endings: Sequence[str]) -> None:
        """Ends the context, given how each conversation ended in it."""
        for row in self._answers:
            # A summary cut off by the length limit was never sent. With any other ending none was begun.
            self.summaries[row] += endings[row] == LENGTH
        self._answers = {}

    def send(self, row: int, tokens: list[int]) -> None:
        self._lengths[row] += len(tokens)
        self._last[row] = tokens[-1]
        if row not in self._answers:
            self._turns[row] += 1
            self.inner.send(row, tokens)
            return
        self.summaries[row] += 1
        prompt = [*self.prompts[row], *self.config.heading, *tokens, *self._answers.pop(row)]
        if len(prompt) > self.prompt_width:
            reply = Reply([], f"summary: expected a prompt of at most {self.prompt_width} tokens", cut=True)
        elif (wrong := self._wrong_end(row)) is not None:
            reply = wrong
        else:
            self.next_prompts[row] = prompt
            reply = Reply([], COMPACTED)
        self._summarised.append((row, reply))

    def receive(self, wait: bool) -> list[tuple[int, Reply]]:
        replies, self._summarised = self._summarised, []
        for row, reply in self.inner.receive(wait and not replies):
            if reply.ending is None and self._turns[row] == self.turns:
                reply = Reply([], TURNS, cut=True)
            full = self._lengths[row] + len(reply.tokens) > self.config.after_tokens
            if reply.ending is None and full and self._context < self.config.contexts:
                wrong = self._wrong_end(row)
                if wrong is None:
                    self._answers[row] = reply.tokens
                reply = Reply(list(self.config.ask)) if wrong is None else wrong
            self._lengths[row] += len(reply.tokens)
            replies.append((row, reply))
        return replies

    def _wrong_end(self, row: int) -> Reply | None:
        """Cuts off a conversation whose newest turn does not end with `end_token`."""
        end, last = self.config.end_token, self._last[row]
        if end is None or last == end:
            return None
        return Reply([], f"summary: expected a turn that ends with token {end}; got {last}", cut=True)


class Compacted(NamedTuple):
    """Conversations of several contexts.

    Attributes:
      trajectory: `[conversations * contexts, ...]`, the contexts of a conversation side by side. Rows without a context
        have no valid token. `terminated` is that of the conversation, in each of its rows.
      present: its rows that hold a context.
      endings: of the conversations.
      stats: of each context's batch of conversations.
    """

    trajectory: Trajectory
    present: Bool[np.ndarray, " rows"]
    endings: list[str]
    stats: list[ConversationStats]


def converse_compacting(
    sample: Callable[[PromptBatch, Any, Respondent, Bool[np.ndarray, " rows"]], Conversed],
    respondent: CompactingRespondent,
    key: Key[Array, ""] | Key[Array, " rows"],
    pad_token_id: int,
) -> Compacted:
    """Samples conversations whose contexts are compacted; conversations wait for each other between two contexts.

    Args:
      sample: `(prompts, keys, respondent, active) -> Conversed`, a call of `converse` with one prompt per conversation.
      key: consumed. pad_token_id: fills prompts of conversations that have ended.
    """
    count = len(respondent.prompts)
    keys = row_keys(key, count)
    prompts, active = dict(enumerate(respondent.prompts)), np.ones(count, bool)
    endings, terminated = [ABSENT] * count, np.zeros(count, bool)
    trajectories, stats, present = list[Trajectory](), list[ConversationStats](), list[np.ndarray]()
    for number in range(1, respondent.config.contexts + 1):
        present.append(active)
        if not active.any():
            nothing = jax.tree.map(jnp.zeros_like, trajectories[0])
            trajectories.append(_without_absent(nothing, jnp.asarray(active)))
            continue
        respondent.begin_context(number)
        rows = [prompts.get(row) or [pad_token_id] for row in range(count)]
        batch = pad_left(rows, respondent.prompt_width, pad_token_id)
        of_context = jax.vmap(lambda key, number=number: jax.random.fold_in(key, number))(keys)
        conversed = sample(batch, of_context, respondent, active)
        respondent.end_context(conversed.endings)
        trajectories.append(_without_absent(conversed.trajectory, jnp.asarray(active)))
        stats.append(conversed.stats)
        for row in np.flatnonzero(active).tolist():
            endings[row] = conversed.endings[row]
        terminated = np.where(active, np.asarray(conversed.trajectory.terminated), terminated)
        prompts = respondent.next_prompts
        active = np.array([row in prompts for row in range(count)])

    def side_by_side(*parts: Array) -> Array:
        return jnp.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:])

    trajectory = jax.tree.map(side_by_side, *trajectories)
    # A conversation that was cut off in its last context was cut off as a whole.
    trajectory = trajectory.replace(terminated=jnp.asarray(np.repeat(terminated, respondent.config.contexts)))
    return Compacted(trajectory, np.stack(present, axis=1).reshape(-1), endings, stats)


def _without_absent(trajectory: Trajectory, active: Bool[Array, " rows"]) -> Trajectory:
    """The trajectory without valid tokens in rows that are not active."""
    there = active[:, None, None, None]
    evicted_at = jnp.where(there, trajectory.mask.evicted_at, 0)
    # Rows without visible keys keep to any budget.
    mask = trajectory.mask.replace(evicted_at=evicted_at, segments=trajectory.mask.segments)
    routing = None if trajectory.routing is None else jnp.where(there, trajectory.routing, NOT_RECORDED)
    return trajectory.replace(valid=trajectory.valid & active[:, None], mask=mask, routing=routing)
