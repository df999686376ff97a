"""A model and the words of a small run, shared by the tests of the commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from smd_jax.testing import tiny_model_config, write_random_checkpoint

SORT = ["--dataset", "reasoning_gym:distractor_sort", "--dataset-parameters", "num_digits=3", "num_distractors=4"]
SMALL = ["--num-prompts", "2", "--num-generations", "4", "--max-completion-length", "5", "--budget", "12"]
SMALL += ["--buffer", "2", "--eviction", "h2o", "--dataset-size", "20", "--max-steps", "1"]
SMALL += ["--reward-timeout", "None"]  # no process for the reward, which takes seconds to start

Words = Callable[..., list[str]]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_random_checkpoint(directory, config=tiny_model_config(num_layers=1, max_positions=2048))
    return directory


@pytest.fixture
def train_words(model: Path, tmp_path: Path) -> Words:
    """The words of a small run in the folder `run`, and more."""

    def words(*more: str, algorithm: str = "grpo") -> list[str]:
        return [algorithm, "--model", str(model), *SORT, *SMALL, "--output-dir", str(tmp_path / "run"), *more]

    return words
