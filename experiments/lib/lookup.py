"""A task of several turns with a tool: look up the values of some letters, one after another, and say them all.

    prompt   c a f d =                          letters whose values are asked for
    turn 1   c                                  ─► answer  3 q z w …    the value, and noise
    turn 2   3 a                                ─► answer  8 x q y …    the policy repeats what it knows, and asks on
    …
    turn 5   3 8 2 0                            graded: the share of right values

The dialogue is longer than the budget. A policy that repeats what it knows needs the newest turn, the newest
answer and the prompt alone. Only the last turn has a reward.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

import smd_jax as smd
from lib.problems import PROBLEMS, Problem, Rows, text_of, tokenizer
from smd_jax.environments.dialogue import Dialogue
from smd_jax.environments.processes import EnvironmentsHere
from smd_jax.environments.respondent import EnvironmentRespondent
from smd_jax.model.protocol import LanguageModel
from smd_jax.sampler.conversation_loop import ConversationConfig, converse
from smd_jax.tasks.task import Row
from smd_jax.text.prompts import Tokenizer, eos_token_id, pad_token_id
from smd_jax.train.conversations import EnvironmentConfig
from smd_jax.train.evaluation import Decode, EvaluationConfig, Evaluator
from smd_jax.train.supervised import Examples

LETTERS = string.ascii_lowercase[:8]
NOISE = string.ascii_lowercase[16:]
NOISE_LENGTH = 8  # letters behind each value


@dataclass(frozen=True)
class Lookup(Problem):
    """`length` letters to look up."""

    name: ClassVar[str] = "lookup"

    @property
    def turn_tokens(self) -> int:
        """Tokens of a turn at most: all values, a letter and the end."""
        return self.length + 2

    @property
    def response_width(self) -> int:
        return (self.length + 1) * self.turn_tokens + self.length * (1 + NOISE_LENGTH)

    def draw(self, random: np.random.Generator) -> Row:
        values = text_of(random.integers(0, 10, len(LETTERS)))
        letters = "".join(random.choice([*LETTERS], self.length, replace=False))
        noise = ["".join(random.choice([*NOISE], NOISE_LENGTH)) for _ in range(self.length)]
        answer = "".join(values[LETTERS.index(letter)] for letter in letters)
        return {"prompt": f"{letters}=", "answer": answer, "values": values, "noise": noise}

    @property
    def conversation(self) -> ConversationConfig:
        return ConversationConfig(turns=self.length + 1, turn_tokens=self.turn_tokens)

    def environment(self) -> EnvironmentConfig:
        """Runs in this process: it is fast and cannot fail."""
        return EnvironmentConfig(environments=EnvironmentsHere(Shelf), conversation=self.conversation)


class Shelf:
    """Knows the values of a row's letters."""

    def reset(self, row: Row) -> str:
        self._row, self._turn = row, 0
        return row["prompt"]

    def step(self, text: str) -> tuple[str, float, bool]:
        answer, turn = self._row["answer"], self._turn
        self._turn += 1
        if turn == len(answer):
            return "", sum(a == b for a, b in zip(text, answer, strict=False)) / len(answer), True
        asked = text[-1:]
        value = self._row["values"][LETTERS.index(asked)] if asked and asked in LETTERS else "="
        return value + self._row["noise"][turn], 0.0, False


def examples_of_lookup(problem: Lookup, rows: Sequence[Row], tokens: Tokenizer) -> Examples:
    """Conversations of a policy that makes no mistake, right-padded; its turns are the targets."""
    width = problem.prompt_width + problem.response_width
    ids = np.full((len(rows), width), pad_token_id(tokens), np.int32)
    valid, targets = np.zeros((2, len(rows), width), bool)
    for row, drawn in enumerate(rows):
        text, target = encoded(drawn, tokens)
        ids[row, : len(text)], targets[row, : len(text)], valid[row, : len(text)] = text, target, True
    return Examples(*map(jax.numpy.asarray, (ids, valid, targets)))


def encoded(row: Row, tokens: Tokenizer) -> tuple[list[int], list[bool]]:
    """The tokens of a conversation without a mistake, and which of them the policy writes."""
    letters, answer, end = row["prompt"][:-1], row["answer"], eos_token_id(tokens)
    ids = tokens.encode(row["prompt"], add_special_tokens=False)
    targets = [False] * len(ids)
    for turn, letter in enumerate((*letters, "")):
        said = [*tokens.encode(answer[:turn] + letter, add_special_tokens=False), end]
        ids, targets = ids + said, targets + [True] * len(said)
        if letter:
            heard = tokens.encode(answer[turn] + row["noise"][turn], add_special_tokens=False)
            ids, targets = ids + heard, targets + [False] * len(heard)
    return ids, targets


class Decoded(NamedTuple):
    """The mean reward of one way of decoding."""

    name: str
    reward: float


@dataclass(frozen=True)
class LookupEvaluator:
    """Evaluates conversations under several ways of decoding; in place of an Evaluator."""

    model: LanguageModel
    problem: Lookup
    rows: Rows
    rollout: smd.RolloutConfig
    decodes: tuple[Decode, ...]

    def run(self, params: Any) -> list[Decoded]:
        return [Decoded(decode.name, self._reward(params, decode)) for decode in self.decodes]

    def _reward(self, params: Any, decode: Decode) -> float:
        rows = [self.rows[index] for index in range(len(self.rows))]
        tokens, width = tokenizer(), self.problem.prompt_width
        respondent = EnvironmentRespondent(
            EnvironmentsHere(Shelf), Dialogue(tokens), tokens, rows, group_size=1, prompt_width=width
        )
        converse(
            self.model,
            params,
            respondent.prompts,
            jax.random.key(7, impl="threefry2x32"),
            respondent,
            policy=decode.policy,
            config=decode.rollout(self.rollout),
            conversation=self.problem.conversation,
        )
        return float(np.mean([conversation.reward for conversation in respondent.conversations]))


def evaluator_of(
    model: LanguageModel, problem: Problem, rows: Rows, rollout: smd.RolloutConfig, decodes: tuple[Decode, ...]
) -> Evaluator | LookupEvaluator:
    """Evaluates a problem under several ways of decoding."""
    if isinstance(problem, Lookup):
        return LookupEvaluator(model, problem, rows, rollout, decodes)
    width = problem.prompt_width
    config = EvaluationConfig(decodes=decodes, rollout=rollout, prompt_width=width, rows=len(rows), seed=7)
    return Evaluator(model, rows, tokenizer(), config)


PROBLEMS[Lookup.name] = Lookup
