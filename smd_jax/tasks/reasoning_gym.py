"""Procedural tasks of reasoning-gym, graded by their own verifiers.

The package is an extra and takes a second to import, so it is imported when a task is made.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smd_jax.config import check_whole
from smd_jax.tasks.reward_functions import ANSWER
from smd_jax.tasks.task import Completion, Prompt, Row, completion_text, missing_extra, question_of
from smd_jax.text.near_names import did_you_mean

# Verifiers raise these for answers of an unexpected form, as prime_factorization for "?" and coin_flip for "1e999".
_UNREADABLE = (ValueError, LookupError, AttributeError, TypeError, ArithmeticError)

# `tests/house/test_security.py` compares both lists with the sources of the installed package.
# Verifiers that call `eval` on answers written as Python lists.
LITERALS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
# Verifiers that call sympy's `parse_expr`, which calls `eval`.
EXPRESSIONS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
# Characters of an expression: no quotes, brackets or colons.
_CHARACTERS = re.compile(r"[\w\s+\-*/^().,!=]*")
_FUNCTIONS = {
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "sec", "csc", "cot"),
    *("exp", "log", "ln", "sqrt", "Abs", "abs", "factorial", "Rational", "erf"),
}
_CALLS = re.compile(r"([^\W\d]\w*)\s*\(")
# A call of something that is no name; an attribute; a name with two underscores.
_OTHER_CODE = re.compile(r"\)\s*\(|\.\s*[^\W\d]|__")


@dataclass(frozen=True)
class ReasoningGymTask:
    """A procedural dataset of reasoning_gym with its own verifier; rows have "prompt", "answer" and "metadata".

    Attributes:
      name: a dataset of reasoning_gym, or our own "distractor_sort".
      seed, size: of the rows. Most datasets of reasoning_gym make row i from `seed + i`, so seeds closer together than
        `size` share rows: keep the seed of an evaluation away from that of training.
      parameters: fields of the dataset's configuration as (name, value) pairs, which are hashable.
    """

    name: str
    seed: int
    size: int
    parameters: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        check_whole("seed", self.seed, 0, "Python's generator takes -1 for 1")
        if len(self) < 1:  # makes the dataset, for errors of its name and parameters
            raise ValueError(f"expected a dataset of at least one row; got size {self.size}")

    @functools.cached_property
    def dataset(self) -> Any:
        return _create_dataset(self.name, self.seed, self.size, dict(self.parameters))

    def __getstate__(self) -> dict[str, Any]:
        # Another process creates the dataset again: some cannot be pickled, and others are large.
        return {name: value for name, value in vars(self).items() if name != "dataset"}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Row:
        # Ends an iteration over the task; a procedural dataset could make rows beyond its size.
        if not 0 <= index < len(self):
            raise IndexError(f"expected a row from 0 to {len(self) - 1}; got {index}")
        item = self.dataset[index]
        return {"prompt": item["question"], "answer": item["answer"], "metadata": item["metadata"]}

    def reward(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        answer: Sequence[Any],
        metadata: Sequence[Any],
        **columns: Sequence[Any],
    ) -> list[float]:
        """The dataset's own score of every completion's answer; 0.0 where its verifier raises.

        The answer is the last `<answer>…</answer>`, as reasoning-gym extracts it; without one, the text after thinking.
        Answers that the verifier would execute are replaced, see `readable_answer`.
        """
        rows = zip(map(completion_text, completions), map(question_of, prompts), answer, metadata, strict=True)
        return [self._score(*row) for row in rows]

    def _score(self, completion: str, question: str, answer: Any, metadata: Any) -> float:
        # Verifiers read more fields than the answer.
        entry = {"question": question, "answer": answer, "metadata": metadata}
        tagged = ANSWER.findall(completion)
        text = (tagged[-1] if tagged else completion.rpartition("</think>")[2]).strip()
        # The reference itself is safe, and may be no literal: a bare word in "string_insertion".
        given = text if text == answer else readable_answer(self.name, text)
        try:
            return float(self.dataset.score_answer(answer=given, entry=entry))
        except _UNREADABLE:
            return 0.0


def _create_dataset(name: str, seed: int, size: int, parameters: dict[str, Any]) -> Any:
    """Imports reasoning_gym and makes a dataset of it."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ModuleNotFoundError as error:
        raise missing_extra("reasoning_gym") from error
    import smd_jax.tasks.sorting  # noqa: F401  registers "distractor_sort"

    if name not in DATASETS:
        near = did_you_mean(name, DATASETS)
        raise ValueError(f"expected the name of one of reasoning_gym's {len(DATASETS)} datasets; got {name!r}{near}")
    names = [field.name for field in dataclasses.fields(DATASETS[name][1]) if field.name not in ("seed", "size")]
    unknown = sorted(set(parameters) - set(names))
    if unknown:
        raise ValueError(f"expected parameters of {name!r}, among {names}; got {unknown}")
    try:
        return create_dataset(name, seed=seed, size=size, **parameters)
    except (AssertionError, TypeError) as error:
        raise ValueError(f"expected parameters that {name!r} takes, of {names}; got {parameters} ({error})") from error


def readable_answer(dataset: str, answer: str) -> str:
    """The answer, or "?" if the verifier of this dataset might run code in it, such as `__import__("os").system(...)`.

    An answer to such a verifier must be a literal or arithmetic. No verifier can read "?", which gets the reward of an
    unreadable answer.
    """
    if dataset in LITERALS and not _runs_nothing(answer):
        return "?"
    if dataset in EXPRESSIONS and not _is_arithmetic(answer):
        return "?"
    if dataset == "complex_arithmetic" and "nan" in answer.replace(" ", "").lower():
        return "?"  # the verifier would accept NaN as a distance of 0
    return answer


def _runs_nothing(text: str) -> bool:
    try:
        ast.literal_eval(text.strip())
    except (SyntaxError, RecursionError, MemoryError):
        return True  # `eval` raises, too
    except (ValueError, TypeError):  # Python that is no literal
        return False
    return True


def _is_arithmetic(text: str) -> bool:
    if not _CHARACTERS.fullmatch(text) or _OTHER_CODE.search(text):
        return False
    return all(name in _FUNCTIONS for name in _CALLS.findall(text))
