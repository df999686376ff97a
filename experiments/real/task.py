"""Sums of three numbers up to ten, step by step: a task that SmolLM2-135M-Instruct half knows, with one right answer.

    system   Add step by step, then give the answer.
    user     4 + 3 + 6 =
    model    I start with 4. Then I add 3: 4 + 3 = 7. Then I add 6: 7 + 6 = 13. The answer is 13.
    …        as many worked examples as `shots`
    user     2 + 9 + 0 =

The sums are reasoning-gym's `basic_arithmetic` with additions only. The reward is 1 if the last number of the text is
the answer and 0 otherwise; reasoning-gym's own verifier would reward short answers.

There are only 1,331 sums of three numbers from 0 to 10. The checksum of a sum decides its split, so no evaluated sum is
trained on.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from smd_jax.tasks.reasoning_gym import ReasoningGymTask
from smd_jax.tasks.task import Completion, Prompt, Row, completion_text

Split = Literal["evaluation", "validation", "train"]
SPLITS: tuple[Split, ...] = get_args(Split)
LOOKED_AT = 10_000  # rows of the dataset, which has every sum of three about seven times
# The prompts were chosen on these sums, so they are not evaluated.
TRIED = frozenset(
    """2 + 9 + 0, 1 + 5 + 1, 9 + 5 + 10, 3 + 5 + 10, 8 + 7 + 9, 3 + 5 + 8, 1 + 4 + 5, 8 + 0 + 6, 8 + 10 + 5, 9 + 6 + 8,
    10 + 9 + 8, 8 + 7 + 5, 1 + 0 + 2, 2 + 9 + 9, 3 + 0 + 4, 6 + 5 + 10, 8 + 3 + 2, 9 + 5 + 9, 2 + 5 + 3, 1 + 10 + 3,
    3 + 1 + 6, 2 + 1 + 6, 4 + 0 + 5, 9 + 3 + 4, 4 + 8 + 3, 9 + 6 + 4, 5 + 3 + 0, 1 + 0 + 6, 8 + 10 + 0, 9 + 0 + 2,
    1 + 3 + 6""".replace("\n   ", "").split(", ")
)
PARTS = 8  # of all sums: one for evaluation, one for validation, the rest for training

SYSTEM = "Add step by step, then give the answer."
EXAMPLES = {
    2: ((4, 3), (8, 6), (5, 9)),
    3: ((4, 3, 6), (8, 6, 5), (2, 9, 1)),
    4: ((4, 3, 6, 2), (8, 6, 5, 1), (2, 9, 1, 7)),
}

# A minus after a digit or a letter is a subtraction.
NUMBER = re.compile(r"(?:(?<!\w)-)?\d+(?:\.\d+)?")


@dataclass(frozen=True)
class DigitSums:
    """Rows of a split, as a task. Prompts are chat messages.

    Attributes:
      size: rows, all with different sums.
      terms: numbers of a sum.
      shots: worked examples before the question.
    """

    split: Split
    size: int
    terms: int = 3
    shots: int = 2

    def __post_init__(self) -> None:
        if self.terms not in EXAMPLES or not 0 <= self.shots <= len(EXAMPLES[self.terms]):
            most = {terms: len(examples) for terms, examples in EXAMPLES.items()}
            raise ValueError(
                f"expected terms and at most so many shots of {most}; got terms {self.terms} with {self.shots}"
            )

    @property
    def label(self) -> str:
        """Name in the results."""
        return f"digit-sums-{self.terms}"

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Row:
        expression = self.expressions[index]
        return {"prompt": self.messages(expression), "answer": sum(digits_of(expression))}

    @cached_property
    def expressions(self) -> list[str]:
        """As "2 + 9 + 0"."""
        fields = {"terms": self.terms, "digits": 1}
        parameters = [(f"{end}_{name}", value) for name, value in fields.items() for end in ("min", "max")]
        parameters += [("operators", ("+",)), ("allow_parentheses", False), ("allow_negation", False)]
        # Row i does not depend on the size of the dataset.
        every = ReasoningGymTask("basic_arithmetic", 0, LOOKED_AT, tuple(parameters))
        found: dict[str, None] = {}
        for index in range(len(every)):
            expression = every[index]["metadata"]["expression"]
            if split_of(expression) == self.split:
                found[expression] = None
            if len(found) == self.size:
                return list(found)
        raise ValueError(f"expected at most {len(found)} rows, the sums that are in {self.split}; got {self.size}")

    def messages(self, expression: str) -> list[dict[str, str]]:
        """The chat messages: examples, then the question."""
        said = [{"role": "system", "content": SYSTEM}]
        for digits in EXAMPLES[self.terms][: self.shots]:
            said.append({"role": "user", "content": f"{' + '.join(map(str, digits))} ="})
            said.append({"role": "assistant", "content": worked(digits)})
        return [*said, {"role": "user", "content": f"{expression} ="}]

    def reward(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], **columns: Sequence[Any]
    ) -> list[float]:
        """`exact` of each."""
        return [exact(completion_text(c), answer) for c, answer in zip(completions, columns["answer"], strict=True)]


def exact(text: str, answer: int) -> float:
    """1 if the last number of the text is the answer, else 0: "four and 3 is 7." is right for 7, "seven" is not."""
    numbers = NUMBER.findall(text)
    return float(bool(numbers) and float(numbers[-1]) == answer)


def split_of(expression: str) -> Split:
    """The split of a sum: an eighth each for evaluation and validation, without the tried sums."""
    if expression in TRIED:
        return "train"
    return SPLITS[min(zlib.crc32(expression.encode()) % PARTS, len(SPLITS) - 1)]


def digits_of(expression: str) -> list[int]:
    return [int(term) for term in expression.split(" + ")]


def worked(digits: Sequence[int]) -> str:
    """The worked answer of an example."""
    total = digits[0]
    steps = [f"I start with {total}."]
    for digit in digits[1:]:
        steps.append(f"Then I add {digit}: {total} + {digit} = {total + digit}.")
        total += digit
    return " ".join([*steps, f"The answer is {total}."])
