"""Procedural tasks of reasoning-gym, graded by their own verifiers.

The package is an extra and costs about a second to import, so nothing here imports it before a task is made.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from smd_jax.config import check_whole
from smd_jax.tasks.evaluated_answers import readable_answer
from smd_jax.tasks.task import Completion, Prompt, Row, column_of, completion_text, missing_extra, question_of
from smd_jax.text.near_names import did_you_mean

# What verifiers raise at answers that are not of the form they expect: that of prime_factorization at "?".
_UNREADABLE = (ValueError, LookupError, AttributeError, TypeError)


@runtime_checkable
class ScoredDataset(Protocol):
    """What we use of reasoning_gym's `ProceduralDataset`, which cannot be named without importing the extra."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Any]: ...

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float: ...


@dataclass(frozen=True)
class ReasoningGymTask:
    """A procedural dataset of reasoning_gym with its own verifier; rows have "prompt", "answer" and "metadata".

    Attributes:
      name: a dataset of reasoning_gym, or our own "distractor_sort".
      seed, size: the rows. Most datasets of reasoning_gym make row i from `seed + i`: seeds closer together than `size`
        share rows, so take the seed of an evaluation far away from that of training.
      parameters: fields of the dataset's configuration as (name, value) pairs, so that the task stays hashable.
    """

    name: str
    seed: int
    size: int
    parameters: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        check_whole("seed", self.seed, 0, "Python's generator takes -1 for 1")
        if len(self) < 1:  # makes the dataset, so that a wrong name or parameter fails here
            raise ValueError(f"expected a dataset of at least one row; got size {self.size}")

    @functools.cached_property
    def dataset(self) -> ScoredDataset:
        return _create_dataset(self.name, self.seed, self.size, dict(self.parameters))

    def __getstate__(self) -> dict[str, Any]:
        # Made again where it is needed: some datasets hold what cannot be pickled, and others much.
        return {name: value for name, value in vars(self).items() if name != "dataset"}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Row:
        # Iterating over a task ends at this error; a procedural dataset can make rows beyond its size.
        if not 0 <= index < len(self):
            raise IndexError(f"expected a row from 0 to {len(self) - 1}; got {index}")
        item = self.dataset[index]
        return {"prompt": item["question"], "answer": item["answer"], "metadata": item["metadata"]}

    def reward(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], **columns: Sequence[Any]
    ) -> list[float]:
        """The dataset's own score of every completion, white space at its ends removed; 0.0 where its verifier raises
        because it cannot read the answer. What would be run is put before none, see `evaluated_answers`."""
        questions = map(question_of, prompts)
        texts = map(completion_text, completions)
        rows = zip(texts, questions, column_of(columns, "answer"), column_of(columns, "metadata"), strict=True)
        return [self._score(*row) for row in rows]

    def _score(self, completion: str, question: str, answer: Any, metadata: Any) -> float:
        # The fields that the dataset gave the row with: verifiers look at more than the answer.
        entry = {"question": question, "answer": answer, "metadata": metadata}
        answer = readable_answer(self.name, completion.strip())
        try:
            return float(self.dataset.score_answer(answer=answer, entry=entry))
        except _UNREADABLE:
            return 0.0


def _create_dataset(name: str, seed: int, size: int, parameters: dict[str, Any]) -> ScoredDataset:
    """Imports reasoning_gym here because it is an extra, and costs about a second."""
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
