"""Small tasks with the models that learn them: seconds to minutes a run on one core, and nothing to download.

    sums     "3 8 2 … =" -> "3 1 3 …"          running sums modulo 10: the operands are needed once, in order
    sorting  "5 3 8 1 … =" -> "1 3 5 8 …"      every step looks at all operands again
    copy     "3 8 2 … =" -> "3 3 8 1 2 3 …"    each operand copied, then the sum so far: half of the steps look back
    walk     "ab=ac=bd=…=a" -> "b d …"         a walk along edges that stand in the prompt: any length, the same
                                               difficulty at every step

A letter or digit is a token. Rows of the splits come from random streams of their own.
"""

from __future__ import annotations

import functools
import string
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import smd_jax as smd
from smd_jax.tasks.task import Row

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
      length: of an instance; what it counts, the class says.
    """

    length: int

    name: ClassVar[str]
    learning_rate: ClassVar[float] = 1e-3  # of the supervised start
    hidden_size: ClassVar[int] = 64
    start_every: ClassVar[int] = 20  # supervised steps between two looks at the start's reward

    @property
    def start_problem(self) -> Problem:
        """Whose supervised start this one shares, with all its parameters."""
        return self

    def lesson(self, step: int) -> tuple[Problem, int]:
        """What a supervised step of the start learns from: rows of which problem, and how many."""
        return self, 128

    @property
    @abstractmethod
    def prompt_width(self) -> int:
        """Tokens of every prompt."""

    @property
    @abstractmethod
    def response_width(self) -> int:
        """Tokens of an answer, its end of sequence included."""

    @abstractmethod
    def draw(self, random: np.random.Generator) -> Row:
        """A row with "prompt" and "answer"."""

    @abstractmethod
    def grade(self, prompt: str, completion: str, answer: str) -> float:
        """From 0 to 1: the share of the steps that are right."""

    @property
    def label(self) -> str:
        """As a study names it: "sums-12"."""
        return f"{self.name}-{self.length}"

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
    """Some rows of a problem, as a task. Row i of a split is the same in every process, whatever the size."""

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


def share_in_place(completion: str, answer: str) -> float:
    """The share of the answer's characters that stand at their place; what follows the last one is ignored."""
    return sum(a == b for a, b in zip(completion, answer, strict=False)) / len(answer)


@dataclass(frozen=True)
class RunningSums(Problem):
    """`length` digits, and their sums so far, modulo 10."""

    name: ClassVar[str] = "sums"

    @property
    def prompt_width(self) -> int:
        return self.length + 1

    @property
    def response_width(self) -> int:
        return self.length + 1

    def draw(self, random: np.random.Generator) -> Row:
        digits = random.integers(0, 10, self.length)
        return {"prompt": text_of(digits) + "=", "answer": text_of(np.cumsum(digits) % 10)}

    def grade(self, prompt: str, completion: str, answer: str) -> float:
        return share_in_place(completion, answer)


@dataclass(frozen=True)
class Sorting(Problem):
    """`length` digits, in order."""

    name: ClassVar[str] = "sorting"

    @property
    def prompt_width(self) -> int:
        return self.length + 1

    @property
    def response_width(self) -> int:
        return self.length + 1

    def draw(self, random: np.random.Generator) -> Row:
        digits = random.integers(0, 10, self.length)
        return {"prompt": text_of(digits) + "=", "answer": text_of(np.sort(digits))}

    def grade(self, prompt: str, completion: str, answer: str) -> float:
        return share_in_place(completion, answer)


@dataclass(frozen=True)
class CopySums(Problem):
    """`length` digits; each is repeated, and then comes the sum so far, modulo 10."""

    name: ClassVar[str] = "copy"

    @property
    def prompt_width(self) -> int:
        return self.length + 1

    @property
    def response_width(self) -> int:
        return 2 * self.length + 1

    def draw(self, random: np.random.Generator) -> Row:
        digits = random.integers(0, 10, self.length)
        both = np.stack([digits, np.cumsum(digits) % 10], axis=1).reshape(-1)
        return {"prompt": text_of(digits) + "=", "answer": text_of(both)}

    def grade(self, prompt: str, completion: str, answer: str) -> float:
        return share_in_place(completion, answer)


@dataclass(frozen=True)
class Walk(Problem):
    """A graph of `NODES` letters with `DEGREE` edges from each stands in the prompt, "ab=ac=bd=…=a"; the response is a
    walk of `length` steps along its edges, any of them, from the letter that ends the prompt.

    A step is right if it follows an edge from the letter before it, right or not: a mistake costs one step and not the
    rest, so that a step is as hard at the end of a walk as at its beginning. What is needed is the edges of one letter,
    from the prompt or from an earlier visit. Which edge is taken is drawn: a policy has a bit of entropy a
    step.
    """

    name: ClassVar[str] = "walk"
    learning_rate: ClassVar[float] = 3e-3
    start_every: ClassVar[int] = 100
    NODES: ClassVar[int] = 6
    DEGREE: ClassVar[int] = 2
    LONGEST: ClassVar[int] = 512

    @property
    def start_problem(self) -> Walk:
        """One start for walks of all lengths: they differ in nothing else."""
        return Walk(max(self.length, self.LONGEST))

    def lesson(self, step: int) -> tuple[Walk, int]:
        """Short walks and long ones in turn, about as many tokens of either."""
        return (Walk(32), 64) if step % 2 == 0 else (self, max(4096 // self.length, 1))

    @property
    def prompt_width(self) -> int:
        return 3 * self.NODES * self.DEGREE + 1

    @property
    def response_width(self) -> int:
        return self.length + 1

    def draw(self, random: np.random.Generator) -> Row:
        letters = [string.ascii_lowercase[i] for i in random.permutation(26)[: self.NODES]]
        # Row i has the letters that follow letter i: some of the others, in any order.
        others = np.argsort(random.random((self.NODES, self.NODES - 1)), axis=1)[:, : self.DEGREE]
        follow = others + (others >= np.arange(self.NODES)[:, None])
        listed = [letters[a] + letters[b] for a in range(self.NODES) for b in follow[a]]
        here = random.integers(self.NODES)
        first = letters[here]
        walk = ""
        for turn in random.integers(self.DEGREE, size=self.length):
            here = follow[here, turn]
            walk += letters[here]
        return {"prompt": "=".join([*(listed[i] for i in random.permutation(len(listed))), first]), "answer": walk}

    def grade(self, prompt: str, completion: str, answer: str) -> float:
        *edges, first = prompt.split("=")
        steps = (first + completion)[: self.length + 1]
        return sum(steps[i : i + 2] in edges for i in range(len(steps) - 1)) / self.length


def text_of(digits: np.ndarray) -> str:
    return "".join(map(str, digits))


PROBLEMS: dict[str, type[Problem]] = {kind.name: kind for kind in (RunningSums, Sorting, CopySums, Walk)}


def problem_of(label: str) -> Problem:
    """ "sums-12" -> RunningSums(12).

    Raises:
      ValueError: for a label of none; says which there are.
    """
    name, dash, length = label.rpartition("-")
    if name not in PROBLEMS or not dash or not length.isdecimal() or int(length) < 1:
        raise ValueError(f"expected a problem as NAME-LENGTH with a name of {sorted(PROBLEMS)}; got {label!r}")
    return PROBLEMS[name](int(length))
