"""A tiny model and the arguments of a small run, shared by the tests of the commands."""

from collections.abc import Callable
from pathlib import Path

import pytest

from smd_jax.testing import tiny_model_config, write_random_checkpoint

SORT_ARGV = ["--dataset", "reasoning_gym:distractor_sort", "--dataset-parameters", "num_digits=3", "num_distractors=4"]
SMALL_RUN = ["--num-prompts", "2", "--num-generations", "4", "--max-completion-length", "5", "--budget", "12"]
SMALL_RUN += ["--buffer", "2", "--eviction", "h2o", "--dataset-size", "20", "--max-steps", "1"]
SMALL_RUN += ["--reward-timeout", "None"]  # a reward process takes seconds to start

MakeArgv = Callable[..., list[str]]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_random_checkpoint(directory, config=tiny_model_config(num_layers=1, max_positions=2048))
    return directory


@pytest.fixture
def train_argv(model: Path, tmp_path: Path) -> MakeArgv:
    """Makes the arguments of a small run in the folder `run`, followed by `flags`."""

    def make_argv(*flags: str, algorithm: str = "grpo") -> list[str]:
        return [algorithm, "--model", str(model), *SORT_ARGV, *SMALL_RUN, "--output-dir", str(tmp_path / "run"), *flags]

    return make_argv
