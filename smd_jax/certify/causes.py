"""Known causes of a mismatch between sampler and learner, each as the conditions that the sampler would have had.

`smd_jax.certify.verdict` replays a record under each of them. The cause whose replay gives the recorded
log-probabilities is the cause of the mismatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from smd_jax.message.masks import NEVER
from smd_jax.message.trajectory import Trajectory

# Columns in front of the prompts that a cause may fill with tokens that the record does not have.
SPARE = 48


@dataclass(frozen=True)
class Conditions:
    """What a forward pass needs to predict the response tokens of a record.

    Attributes:
      tokens, positions: int32 `[rows, T]`; prompts are padded on the left.
      evicted_at: int32 `[rows, layers or 1, kv_heads or 1, T]`; 0 for padding, `NEVER` for keys that stay.
      start: `[rows]` column of each row's first token.
      first: column of the first response token.
      routing: `[rows, T, layers with experts, experts of a token]`, -1 for tokens that choose themselves; None: all do.
    """

    tokens: np.ndarray
    positions: np.ndarray
    evicted_at: np.ndarray
    start: np.ndarray
    first: int
    routing: np.ndarray | None = None

    @classmethod
    def of(cls, record: Trajectory) -> Conditions:
        """The conditions that the record states."""
        valid = _widened(np.asarray(record.valid), False)
        start, columns = valid.argmax(axis=1), np.arange(valid.shape[1])
        end = (start + valid.sum(axis=1))[:, None, None, None]
        evicted_at = _widened(np.asarray(record.mask.evicted_at, np.int64), -SPARE, axis=3) + SPARE
        evicted_at = np.where(evicted_at < end, evicted_at, NEVER)  # after the last token there is no query
        return cls(
            tokens=_widened(np.asarray(record.tokens), 0),
            positions=np.maximum(columns - start[:, None], 0).astype(np.int32),
            evicted_at=np.where(valid[:, None, None], evicted_at, 0).astype(np.int32),
            start=start,
            first=SPARE + record.prompt_width,
            routing=None if record.routing is None else _widened(np.asarray(record.routing), -1),
        )

    @property
    def evicted(self) -> np.ndarray:
        """Which keys were evicted."""
        return (self.evicted_at > 0) & (self.evicted_at < NEVER)

    def with_prefix(self, prefixes: Sequence[Sequence[int] | np.ndarray], *, counted: bool) -> Conditions:
        """The conditions of rows that had these tokens, which no query loses, in front. `counted`: whether the
        positions of the row's own tokens follow them."""
        tokens, positions, evicted_at = self.tokens.copy(), self.positions.copy(), self.evicted_at.copy()
        for row, prefix in enumerate(prefixes):
            count, start = len(prefix), self.start[row]
            before = slice(start - count, start)
            tokens[row, before], positions[row, before], evicted_at[row, ..., before] = prefix, range(count), NEVER
            positions[row, start:] += count if counted else 0
        return replace(self, tokens=tokens, positions=positions, evicted_at=evicted_at)

    def without(self, begins: np.ndarray, count: int) -> Conditions:
        """The conditions of rows whose prompts lacked `count` tokens, from the column `begins` of each row on."""
        columns, end = np.arange(self.tokens.shape[1]), begins + count
        # The tokens before them move to the right, and the response stays where it is.
        source = np.where(columns < end[:, None], np.maximum(columns - count, 0), columns)
        positions = columns - (self.start + count)[:, None]
        at = np.take_along_axis(self.evicted_at.astype(np.int64), source[:, None, None], axis=3)
        at = np.minimum(at + count, np.maximum(at, end[:, None, None, None]))
        routing = self.routing
        return replace(
            self,
            tokens=np.take_along_axis(self.tokens, source, axis=1),
            positions=np.maximum(positions, 0).astype(np.int32),
            evicted_at=np.where(positions[:, None, None] < 0, 0, at).astype(np.int32),
            routing=None if routing is None else np.take_along_axis(routing, source[..., None, None], axis=1),
        )


def _widened(array: np.ndarray, fill: int, axis: int = 1) -> np.ndarray:
    """The array with SPARE more columns on the left."""
    width = [(SPARE if at == axis else 0, 0) for at in range(array.ndim)]
    return np.pad(array, width, constant_values=fill)


@dataclass(frozen=True)
class PromptFacts:
    """Facts of the tokenizer.

    Attributes:
      bos: id of its BOS token; None without one.
      system: ids that its chat template puts before the user's first message; empty if none.
      generation: ids that it puts before the answer; empty if none.
    """

    bos: int | None = None
    system: tuple[int, ...] = ()
    generation: tuple[int, ...] = ()


def prompt_facts(tokenizer: Any) -> PromptFacts:
    """The facts of a transformers tokenizer."""
    if not tokenizer.chat_template:
        return PromptFacts(tokenizer.bos_token_id)
    plain, asked = (_render(tokenizer, add_generation_prompt=asked) for asked in (False, True))
    # Turns begin with the same special token, as `<|im_start|>` or `<start_of_turn>`.
    special = plain[0] in tokenizer.all_special_ids
    begins = [index for index, token in enumerate(plain) if token == plain[0]]
    system = plain[: begins[-1]] if special else []
    return PromptFacts(tokenizer.bos_token_id, tuple(system), tuple(asked[len(plain) :]))


def _render(tokenizer: Any, add_generation_prompt: bool) -> list[int]:
    messages = [{"role": "user", "content": "x"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    return tokenizer(text, add_special_tokens=False).input_ids


# What the sampler did instead of what the record states, and its conditions.
Cases = Iterator[tuple[str, Conditions]]


class Cause(NamedTuple):
    """A cause that is tested by a forward pass of its own.

    Attributes:
      name: for reports and exit messages.
      mend: what to do about it.
      cases: how it may have happened, given the stated conditions.
    """

    name: str
    mend: str
    cases: Callable[[Conditions, PromptFacts], Cases]


def _mask_ignored(at: Conditions, facts: PromptFacts) -> Cases:
    if at.evicted.any():
        yield "nothing was evicted", replace(at, evicted_at=np.where(at.evicted, NEVER, at.evicted_at))


def _mask_off_by_one(at: Conditions, facts: PromptFacts) -> Cases:
    if at.evicted.any():
        keys = np.arange(at.evicted_at.shape[-1])
        for by, said in ((1, "one query later"), (-1, "one query earlier")):
            moved = np.where(at.evicted, np.maximum(at.evicted_at + by * at.evicted, keys + 1), at.evicted_at)
            yield f"keys were evicted {said} than recorded", replace(at, evicted_at=moved.astype(np.int32))


def _positions_shifted(at: Conditions, facts: PromptFacts) -> Cases:
    response = np.arange(at.tokens.shape[1]) >= at.first
    for by in (1, -1):
        shifted = np.maximum(at.positions + by * response, 0).astype(np.int32)
        yield f"positions of the response were shifted by {by:+d}", replace(at, positions=shifted)


def _positions_of_slots(at: Conditions, facts: PromptFacts) -> Cases:
    if at.evicted.any():
        queries = np.arange(at.tokens.shape[1])[:, None]
        visible = (queries >= queries.T) & (queries < at.evicted_at[:, 0, 0, None])
        positions = np.maximum(visible.sum(axis=-1) - 1, 0).astype(np.int32)
        yield "positions counted the keys left in the cache", replace(at, positions=positions)


def _padding_attended(at: Conditions, facts: PromptFacts) -> Cases:
    pads = [tokens[at.start.min() : start] for tokens, start in zip(at.tokens, at.start, strict=True)]
    if any(map(len, pads)):
        said = "the padding left of short prompts was attended to"
        yield said, at.with_prefix(pads, counted=False)
        yield f"{said} and counted", at.with_prefix(pads, counted=True)


def _bos(at: Conditions, facts: PromptFacts) -> Cases:
    if facts.bos is not None:
        bos = (facts.bos,)
        yield "the prompts began with one more BOS token", at.with_prefix([bos] * len(at.start), counted=True)
        if _has(at, at.start, bos).all() and (at.first - at.start > 1).all():
            yield "the prompts had no BOS token", at.without(at.start, 1)


def _template(at: Conditions, facts: PromptFacts) -> Cases:
    shortest = (at.first - at.start).min()
    if count := len(facts.system):
        has = _has(at, at.start, facts.system)
        if has.all() and shortest > count:
            yield "the prompts had no system message", at.without(at.start, count)
        elif not has.any() and count <= SPARE:
            moved = at.with_prefix([facts.system] * len(at.start), counted=True)
            yield "the prompts had the template's system message", moved
    begins = np.full_like(at.start, at.first - len(facts.generation))
    if facts.generation and shortest > len(facts.generation) and _has(at, begins, facts.generation).all():
        yield "the prompts had no generation prompt", at.without(begins, len(facts.generation))


def _has(at: Conditions, begins: np.ndarray, ids: tuple[int, ...]) -> np.ndarray:
    """Whether each row has these ids from its column on."""
    columns = np.minimum(begins[:, None] + np.arange(len(ids)), at.tokens.shape[1] - 1)
    return (np.take_along_axis(at.tokens, columns, axis=1) == np.array(ids)).all(axis=1)


def _swapped(at: Conditions, facts: PromptFacts) -> Cases:
    for axis, name in ((1, "layer"), (2, "KV head")):
        count = at.evicted_at.shape[axis]
        if count > 1:
            flipped = np.flip(at.evicted_at, axis)
            yield f"the masks of the {name}s came in reverse order", replace(at, evicted_at=flipped)
        if count > 2:
            for by in (1, -1):
                rolled = np.roll(at.evicted_at, by, axis)
                yield f"the masks were shifted by {by:+d} {name}", replace(at, evicted_at=rolled)


def _routing_ignored(at: Conditions, facts: PromptFacts) -> Cases:
    if at.routing is not None:
        yield "tokens went to the experts that the learner's router chooses", replace(at, routing=None)


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
