"""Conditions under which a sampler may have sampled a record's tokens, and known causes.

A cause of a mismatch implies other conditions in the sampler than the record states. `smd_jax.certify.verdict` replays
a record under each cause's conditions. The cause whose replay gives the recorded log-probabilities is the right one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from smd_jax.certify.record import Record
from smd_jax.message.masks import NEVER
from smd_jax.pytrees import PyTreeNode
from smd_jax.text.chat_template import render_messages

# Fewest columns that are added at the right, for tokens that a cause puts before the prompt.
SPARE = 48


class Conditions(PyTreeNode):
    """Inputs of a forward pass that predicts the response tokens of a record.

    Attributes:
      tokens, positions: int32 `[rows, T]`.
      evicted_at: int32 `[rows, layers or 1, kv_heads or 1, T]`.
      first: int32 `[rows]` column of the first response token.
      routing: int32 `[rows, T, layers with experts, experts of a token]`, -1 where the learner's router chooses; None:
        it chooses for all tokens.
    """

    tokens: np.ndarray
    positions: np.ndarray
    evicted_at: np.ndarray
    first: np.ndarray
    routing: np.ndarray | None = None

    @classmethod
    def of(cls, record: Record, system: int = 0) -> Conditions:
        """The conditions that the record states. `system`: tokens of a system message that a cause may add."""
        # A cause may also put padding before the prompts, up to the longest of them.
        spare = max(SPARE, int(np.ptp(record.prompt_lengths)), system)
        routing = record.routing
        if routing is not None:
            routing = np.pad(routing, [(0, 0), (0, spare), (0, 0), (0, 0)], constant_values=-1)
        return cls(
            _widened(record.tokens, spare),
            _widened(record.positions, spare),
            _widened(record.evicted_at, spare),
            record.prompt_lengths,
            routing,
        )

    def with_prefix(self, prefixes: list[np.ndarray], positions: np.ndarray, begin: int = 0) -> Conditions:
        """The conditions of rows with these tokens from column `begin` on, at most as many as spare columns; their keys
        are never evicted. `positions`: of the row's own tokens."""
        counts = np.array([len(prefix) for prefix in prefixes])
        found = self._moved(np.full_like(counts, begin), counts, positions)
        for row, (prefix, end) in enumerate(zip(prefixes, begin + counts, strict=True)):
            found.tokens[row, begin:end], found.positions[row, begin:end] = prefix, np.arange(begin, end)
            found.evicted_at[row, :, :, begin:end] = NEVER
        return found

    def without_columns(self, starts: np.ndarray | int, ends: np.ndarray | int) -> Conditions:
        """The conditions of rows without the columns `starts` to `ends` of the prompt."""
        starts = np.broadcast_to(starts, len(self.tokens))
        cuts, columns = ends - starts, np.arange(self.tokens.shape[1])
        return self._moved(starts, -cuts, columns - np.where(columns < starts[:, None], 0, cuts[:, None]))

    def _moved(self, starts: np.ndarray, by: np.ndarray, positions: np.ndarray) -> Conditions:
        """Moves the columns from `starts` on to the right, or with negative numbers over the columns at their left."""
        width = self.tokens.shape[1]
        columns = np.arange(width) - np.where(np.arange(width) < starts[:, None], 0, by[:, None])
        inside = (columns >= 0) & (columns < width)
        at = np.where(inside, columns, 0)
        tokens, positions = (np.where(inside, np.take_along_axis(x, at, 1), 0) for x in (self.tokens, positions))
        later = (self.evicted_at >= np.maximum(starts - by, 1)[:, None, None, None]) & (self.evicted_at < NEVER)
        evicted_at = np.take_along_axis(self.evicted_at + later * by[:, None, None, None], at[:, None, None], 3)
        evicted_at = np.where(inside[:, None, None], evicted_at, 0).astype(np.int32)
        routing = self.routing
        if routing is not None:
            routing = np.where(inside[..., None, None], np.take_along_axis(routing, at[..., None, None], 1), -1)
        first = (self.first + by).astype(np.int32)
        return Conditions(tokens.astype(np.int32), positions.astype(np.int32), evicted_at, first, routing)


def _widened(array: np.ndarray, spare: int) -> np.ndarray:
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, spare)]).astype(np.int32)


# --- known causes


class Case(NamedTuple):
    """One way in which a cause may have happened: what the sampler did instead of what the record states."""

    detail: str
    conditions: Conditions


@dataclass(frozen=True)
class PromptFacts:
    """Facts about the tokenizer.

    Attributes:
      bos: id of its BOS token; None without one.
      system: ids that its chat template puts before the user's first message, without BOS; empty if none.
      generation: ids that it puts before the answer; empty if none.
    """

    bos: int | None = None
    system: tuple[int, ...] = ()
    generation: tuple[int, ...] = ()


def prompt_facts(tokenizer: Any) -> PromptFacts:
    """The facts of a transformers tokenizer. A chat template that fails or exceeds its limits adds none."""
    without_template = PromptFacts(tokenizer.bos_token_id)
    if not tokenizer.chat_template:
        return without_template
    messages = [{"role": "user", "content": "x"}]
    try:
        texts = [render_messages(messages, tokenizer, {}, add_generation_prompt=asked) for asked in (False, True)]
    except ValueError:  # a TemplateError, or several templates without a default
        return without_template
    plain, asked = (tokenizer(text, add_special_tokens=False).input_ids for text in texts)
    # Turns begin with the same special token, such as `<|im_start|>`; a system message is before the last of them.
    special = set(tokenizer.all_special_ids)
    has_bos = plain[:1] == [tokenizer.bos_token_id] and special.issuperset(plain[1:2])  # not where BOS begins a turn
    first = int(has_bos)
    begins = [index for index, token in enumerate(plain) if [token] == plain[first : first + 1] and token in special]
    system = tuple(plain[first : begins[-1]]) if len(begins) > 1 else ()
    # Some templates end a text without a generation prompt with EOS.
    shared = len(os.path.commonprefix([plain, asked]))
    return replace(without_template, system=system, generation=tuple(asked[shared:]))


@dataclass(frozen=True)
class Cause:
    """A cause that is tested by a separate forward pass; `find` gets the conditions that the record states."""

    name: str  # in reports and exit messages
    fix: str
    find: Callable[[Record, PromptFacts, Conditions], Iterator[Case]]

    def cases(self, record: Record, facts: PromptFacts) -> Iterator[Case]:
        """The ways in which the cause may have happened. All have one shape, so that one program is compiled."""
        return self.find(record, facts, Conditions.of(record, len(facts.system)))


def _mask_ignored(record: Record, facts: PromptFacts, at: Conditions) -> Iterator[Case]:
    if record.has_evictions:
        dense = np.where(at.evicted_at > 0, NEVER, 0).astype(np.int32)
        yield Case("nothing was evicted", replace(at, evicted_at=dense))


def _mask_off_by_one(record: Record, facts: PromptFacts, at: Conditions) -> Iterator[Case]:
    evicted = (at.evicted_at > 0) & (at.evicted_at < NEVER)
    if evicted.any():
        keys = np.arange(at.evicted_at.shape[-1])
        for by, said in ((1, "one query later"), (-1, "one query earlier")):
            moved = np.maximum(at.evicted_at + by * evicted, np.where(evicted, keys + 1, 0))
            yield Case(f"keys were evicted {said} than recorded", replace(at, evicted_at=moved.astype(np.int32)))


def _positions_shifted(record: Record, facts: PromptFacts, at: Conditions) -> Iterator[Case]:
    columns = np.arange(at.tokens.shape[1])
    response = columns >= at.first[:, None]
    for by in (1, -1):
        shifted = np.maximum(at.positions + by * response, 0).astype(np.int32)
        yield Case(f"positions of the response were shifted by {by:+d}", replace(at, positions=shifted))
    if (record.positions != np.arange(record.tokens.shape[1])).any():
        plain = np.broadcast_to(columns, at.tokens.shape).astype(np.int32)
        yield Case("positions were 0, 1, 2, … in every row", replace(at, positions=plain))


def _positions_of_slots(record: Record, facts: PromptFacts, at: Conditions) -> Iterator[Case]:
    if not record.has_evictions:
        return
    queries = np.arange(at.tokens.shape[1])
    # Keys up to a query, less those that were evicted by then; empty columns have 0.
    kept = [
        np.cumsum(evicted_at > 0) - np.searchsorted(np.sort(evicted_at[evicted_at > 0]), queries, side="right")
        for evicted_at in at.evicted_at[:, 0, 0]
    ]
    positions = np.maximum(np.stack(kept) - 1, 0).astype(np.int32)
    yield Case("positions counted the keys left in the cache", replace(at, positions=positions))


def _padding_attended(record: Record, facts: PromptFacts, at: Conditions) -> Iterator[Case]:
    counts = record.prompt_lengths.max() - record.prompt_lengths
    if not counts.any():
        return
    pads = [np.full(count, record.pad_token_id) for count in counts]
    yield Case("the padding left of short prompts was attended to", at.with_prefix(pads, at.positions))
    later = at.positions + counts[:, None]
    yield Case("the padding left of short prompts was attended to and counted", at.with_prefix(pads, later))


def _bos(record: Record, facts: PromptFacts, at: Conditions) -> Iterator[Case]:
    if facts.bos is None:
        return
    longer = at.with_prefix([np.array([facts.bos])] * len(at.tokens), at.positions + 1)
    yield Case("the prompts began with one more BOS token", longer)
    if (record.tokens[:, 0] == facts.bos).all() and (record.prompt_lengths > 1).all():
        yield Case("the prompts had no BOS token", at.without_columns(0, 1))


def _template(record: Record, facts: PromptFacts, at: Conditions) -> Iterator[Case]:
    rows = len(record.lengths)
    system = np.array(facts.system, np.int32)
    count = len(system)
    if count:
        begin = int(system[0] != facts.bos and (record.tokens[:, 0] == facts.bos).all())  # after a BOS token
        has = [np.array_equal(record.tokens[row, begin : begin + count], system) for row in range(rows)]
        if all(has) and (record.prompt_lengths > begin + count).all():
            yield Case("the prompts had no system message", at.without_columns(begin, begin + count))
        elif not any(has):
            later = at.positions + count * (np.arange(at.tokens.shape[1]) >= begin)
            moved = at.with_prefix([system] * rows, later.astype(np.int32), begin)
            yield Case("the prompts had the template's system message", moved)
    generation = np.array(facts.generation, np.int32)
    count = len(generation)
    ends = record.prompt_lengths
    if not count or (ends <= count).any():
        return
    if all(np.array_equal(record.tokens[row, ends[row] - count : ends[row]], generation) for row in range(rows)):
        yield Case("the prompts had no generation prompt", at.without_columns(ends - count, ends))


def _swapped(record: Record, facts: PromptFacts, at: Conditions) -> Iterator[Case]:
    heads = at.evicted_at.shape[2]
    for axis, name in ((1, "layer"), (2, "KV head")):
        count = at.evicted_at.shape[axis]
        if count > 1:
            flipped = np.flip(at.evicted_at, axis)
            yield Case(f"the masks of the {name}s came in reverse order", replace(at, evicted_at=flipped))
        for by in (1, -1) if count > 2 else ():  # of two, a shift is the reverse order
            rolled = np.roll(at.evicted_at, by, axis)
            yield Case(f"the masks were shifted by {by:+d} {name}", replace(at, evicted_at=rolled))
    for ways in range(2, heads):
        if heads % ways == 0:
            # Tensor-parallel devices hold neighbouring heads; merged head by head, the devices alternate.
            order = np.arange(heads).reshape(ways, -1).T.ravel()
            said = f"the masks of the KV heads came interleaved, as {ways} tensor-parallel devices hold them"
            yield Case(said, replace(at, evicted_at=at.evicted_at[:, :, order]))


def _routing_ignored(record: Record, facts: PromptFacts, at: Conditions) -> Iterator[Case]:
    if record.routing is not None:
        yield Case("tokens went to the experts that the learner's router chooses", replace(at, routing=None))


SAME_TOKENS = "encode prompts once, and pass token ids to both sides"

CAUSES = (
    Cause("mask ignored", "apply the recorded evictions on both sides, or record none", _mask_ignored),
    Cause("mask off by one", "an evicted key is last seen by query evicted_at - 1", _mask_off_by_one),
    Cause("positions shifted", "give every token the same position in sampler and learner", _positions_shifted),
    Cause("positions of cache slots", "cache keys at their original positions", _positions_of_slots),
    Cause("padding attended", "mask the padding, or pass the row's own prompt only", _padding_attended),
    Cause("BOS token", SAME_TOKENS, _bos),
    Cause("chat template", SAME_TOKENS, _template),
    Cause("expert routing", "record the experts that the sampler chose, and replay them", _routing_ignored),
    Cause("layers or heads swapped", "record evicted_at in the model's order of layers and heads", _swapped),
)
