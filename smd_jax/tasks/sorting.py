"""Sorts digits among letters: a reasoning-gym dataset that needs memory, for models of any size.

    question  "k3xq7ab0cd1efg3hi2jk9m8p="      24 symbols of one character, no natural language
    answer    "01233789"                       the digits, ascending

Digits may be anywhere in the question, and each must be in the cache when the answer needs it. A policy that keeps the
digits solves the task with a third of the cache; a policy that keeps recent keys does not.

Importing this module registers the dataset with reasoning_gym as "distractor_sort".
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from random import Random
from typing import Any

from reasoning_gym import register_dataset
from reasoning_gym.dataset import ProceduralDataset

from smd_jax.config import check_whole

DATASET_NAME = "distractor_sort"


@dataclass(kw_only=True)  # not frozen: reasoning_gym's ReseedingDataset assigns a new seed
class DistractorSortConfig:
    """Size of a question, and scoring of an answer.

    Attributes:
      num_digits: digits to sort, drawn from 0 to 9 with repetition.
      num_distractors: letters to ignore, drawn from `letters` with repetition.
      letters: the alphabet of the distractors, without digits.
      partial_credit: score the share of right positions instead of 1 for the exact answer and 0 for all others.
      seed, size: the dataset's seed (None draws one) and its number of rows.
    """

    num_digits: int = 8
    num_distractors: int = 16
    letters: str = string.ascii_lowercase
    partial_credit: bool = False
    seed: int | None = None
    size: int = 500

    def validate(self) -> None:
        """Raises ValueError for a dataset that cannot be made; reasoning_gym calls this."""
        check_whole("num_digits", self.num_digits, 1)
        check_whole("num_distractors", self.num_distractors, 0)
        check_whole("size", self.size, 1)
        if not self.letters or set(self.letters) & set(string.digits + "="):
            raise ValueError(f"expected letters: at least one character, no digits, no '='; got {self.letters!r}")


class DistractorSortDataset(ProceduralDataset):
    """Row `index` depends on (seed, index) and the configuration only."""

    def __init__(self, config: DistractorSortConfig) -> None:
        super().__init__(config=config, seed=config.seed, size=config.size)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        # A string as the seed: with reasoning_gym's usual `seed + idx`, datasets of neighbouring seeds share rows.
        rng = Random(f"{self.seed}/{idx}")
        digits = rng.choices(string.digits, k=self.config.num_digits)
        symbols = digits + rng.choices(self.config.letters, k=self.config.num_distractors)
        rng.shuffle(symbols)
        return {
            "question": "".join(symbols) + "=",
            "answer": "".join(sorted(digits)),
            "metadata": {"source_dataset": DATASET_NAME, "source_index": idx},
        }

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        """1 for the exact answer; otherwise 0, or with `partial_credit` the share of right positions.

        The share is of the longer of the two, so that text after the answer does not pay.
        """
        if not self.config.partial_credit or not answer:
            return float(answer == entry["answer"])
        right = sum(a == b for a, b in zip(answer, entry["answer"], strict=False))
        return right / max(len(answer), len(entry["answer"]))


register_dataset(DATASET_NAME, DistractorSortDataset, DistractorSortConfig)
