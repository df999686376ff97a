"""Small tasks with models that learn them in seconds to minutes on one core; nothing to download.

    sorting  "5 3 8 1 … =" -> "1 3 5 8 …"      every step looks at all operands again
    copy     "3 8 2 … =" -> "3 3 8 1 2 3 …"    each operand, then the sum so far modulo 10: half of the steps look back
    walk     a walk along the edges of a graph in the prompt: any length, the same difficulty at every step

A letter or digit is a token. Each split has its own random stream.
"""

from __future__ import annotations

import functools
import math
import string
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, ClassVar, Literal

import numpy as np
import optax
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import smd_jax as smd
from smd_jax.tasks.task import Row
from smd_jax.text.prompts import eos_token_id, pad_token_id

Split = Literal["train", "validation", "evaluation"]
SPLITS: tuple[Split, ...] = ("train", "validation", "evaluation")
TRAINING_ROWS = 50_000
CHARACTERS = "=" + string.digits + string.ascii_lowercase


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    vocabulary = {character: index for index, character in enumerate(["<pad>", "<end>", *CHARACTERS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="<end>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


@dataclass(frozen=True)
class Problem:
    """A task of one length. Equal problems make equal rows.

    Attributes:
      length: of an instance, in the unit of the subclass.
    """

    length: int

    name: ClassVar[str]
    hidden_size: ClassVar[int] = 64
    start_every: ClassVar[int] = 20  # supervised steps between two evaluations of the start

    @property
    def start_problem(self) -> Problem:
        """The problem whose supervised start this one shares."""
        return self

    def lesson(self, step: int) -> tuple[Problem, int]:
        """Problem and number of rows of a supervised step of the start."""
        return self, 128

    def schedule(self) -> optax.Schedule:
        """Learning rate of the supervised start, by its step."""
        return optax.linear_schedule(0.0, 1e-3, 30)

    @property
    def prompt_width(self) -> int:
        """Tokens of every prompt: here the digits and "="."""
        return self.length + 1

    @property
    def response_width(self) -> int:
        """Tokens of an answer, its end of sequence included."""
        return self.length + 1

    @abstractmethod
    def draw(self, random: np.random.Generator) -> Row:
        """A row with "prompt" and "answer"."""

    def grade(self, prompt: str, completion: str, answer: str) -> float:
        """The share of right steps: here of the answer's characters in their place; later ones are ignored."""
        return sum(a == b for a, b in zip(completion, answer, strict=False)) / len(answer)

    @property
    def label(self) -> str:
        """Name in the studies: "sorting-12"."""
        return f"{self.name}-{self.length}"

    def rollout(self, budget: int = 1, buffer: int = 1) -> smd.RolloutConfig:
        """Rollout config; the default budget is for a full cache."""
        return smd.RolloutConfig(
            max_new_tokens=self.response_width,
            budget=budget,
            buffer=buffer,
            eos_token_id=eos_token_id(tokenizer()),
            pad_token_id=pad_token_id(tokenizer()),
        )

    def rows(self, split: Split, size: int = TRAINING_ROWS) -> Rows:
        return Rows(self, split, size)

    def model_config(self) -> smd.ModelConfig:
        """A Qwen3-style decoder with two layers: 75,000 parameters at a width of 64."""
        return smd.ModelConfig(
            vocab_size=len(tokenizer()),
            hidden_size=self.hidden_size,
            intermediate_size=2 * self.hidden_size,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=self.hidden_size // 4,
            max_positions=self.prompt_width + self.response_width,
            qk_norm=True,
            tie_embeddings=True,
        )


@dataclass(frozen=True)
class Rows:
    """Rows of a problem as a task. Row i of a split is the same in every process and for every size."""

    problem: Problem
    split: Split
    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Row:
        return self.problem.draw(np.random.default_rng((SPLITS.index(self.split), index)))

    def reward(self, prompts: Sequence[str], completions: Sequence[str], **columns: Sequence[Any]) -> list[float]:
        """`Problem.grade` of each."""
        triples = zip(prompts, completions, columns["answer"], strict=True)
        return [self.problem.grade(prompt, completion, answer) for prompt, completion, answer in triples]


@dataclass(frozen=True)
class Sorting(Problem):
    """`length` digits, in order."""

    name: ClassVar[str] = "sorting"

    def draw(self, random: np.random.Generator) -> Row:
        digits = random.integers(0, 10, self.length)
        return {"prompt": text_of(digits) + "=", "answer": text_of(np.sort(digits))}


@dataclass(frozen=True)
class CopySums(Problem):
    """`length` digits; each is repeated, and then comes the sum so far, modulo 10."""

    name: ClassVar[str] = "copy"

    @property
    def response_width(self) -> int:
        return 2 * self.length + 1

    def draw(self, random: np.random.Generator) -> Row:
        digits = random.integers(0, 10, self.length)
        both = np.stack([digits, np.cumsum(digits) % 10], axis=1).reshape(-1)
        return {"prompt": text_of(digits) + "=", "answer": text_of(both)}


@dataclass(frozen=True)
class Walk(Problem):
    """A walk of `length` edges along a graph of six nodes with `DEGREE` edges from each.

    The prompt has the graph, one token per edge, and the first node. A step is right if it is an edge of the graph and
    begins where the previous token ends. A mistake costs only one step (two if it is not an edge), so every step is
    equally hard. The edge is sampled, so a policy has one bit of entropy per step. A policy that knows the rule but has
    lost the graph is right in two steps of five.

    An edge is one token instead of two nodes: attention then finds it in one step, and a model of two layers learns
    walks of 512 steps within minutes. With two tokens it was still at chance after 600 supervised steps.
    """

    name: ClassVar[str] = "walk"
    DEGREE: ClassVar[int] = 2
    LONGEST: ClassVar[int] = 512

    @property
    def start_problem(self) -> Walk:
        """Walks of all lengths share one start."""
        return Walk(max(self.length, self.LONGEST))

    def lesson(self, step: int) -> tuple[Walk, int]:
        """Short walks; from step 100 on, every fourth step long ones with about as many tokens."""
        return (self, max(4096 // self.length, 1)) if step >= 100 and step % 4 == 0 else (Walk(32), 96)

    def schedule(self) -> optax.Schedule:
        """Decays: at a constant 1e-2 the reward stays at 94 %."""
        return optax.warmup_exponential_decay_schedule(
            0.0, 1e-2, 30, transition_steps=200, decay_rate=1 / math.e, end_value=1e-3
        )

    @property
    def prompt_width(self) -> int:
        return len(WALK_NODES) * self.DEGREE + 1

    def draw(self, random: np.random.Generator) -> Row:
        count = len(WALK_NODES)
        # Row i has the nodes that follow node i: some of the others, in any order.
        others = np.argsort(random.random((count, count - 1)), axis=1)[:, : self.DEGREE]
        follow = others + (others >= np.arange(count)[:, None])
        edges = [WALK_EDGES[WALK_NODES[a] + WALK_NODES[b]] for a in range(count) for b in follow[a]]
        here = random.integers(count)
        first, walk = WALK_NODES[here], ""
        for turn in random.integers(self.DEGREE, size=self.length):
            there = follow[here, turn]
            walk += WALK_EDGES[WALK_NODES[here] + WALK_NODES[there]]
            here = there
        return {"prompt": "".join(edges[i] for i in random.permutation(len(edges))) + first, "answer": walk}

    def grade(self, prompt: str, completion: str, answer: str) -> float:
        graph, here = prompt[:-1], prompt[-1]
        right = 0
        for step in completion[: self.length]:
            start, end = WALK_ENDS.get(step, (None, None))
            right += step in graph and start == here
            here = end
        return right / self.length


# A character for every edge from one node to another.
WALK_NODES = string.ascii_lowercase[:6]
WALK_EDGES = {
    a + b: c for (a, b), c in zip(permutations(WALK_NODES, 2), CHARACTERS[1:11] + CHARACTERS[17:], strict=True)
}
WALK_ENDS = {character: tuple(edge) for edge, character in WALK_EDGES.items()}


def text_of(digits: np.ndarray) -> str:
    return "".join(map(str, digits))


PROBLEMS: dict[str, type[Problem]] = {kind.name: kind for kind in (Sorting, CopySums, Walk)}


def problem_of(label: str) -> Problem:
    """ "sorting-12" -> Sorting(12).

    Raises:
      ValueError: for an unknown label.
    """
    name, dash, length = label.rpartition("-")
    if name not in PROBLEMS or not dash or not length.isdecimal() or int(length) < 1:
        raise ValueError(f"expected a problem as NAME-LENGTH with a name of {sorted(PROBLEMS)}; got {label!r}")
    return PROBLEMS[name](int(length))
