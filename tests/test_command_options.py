"""Options of the commands, one by one: what each changes, and what is refused before weights are read."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from smd_jax.commands.command_line import parse
from smd_jax.commands.train import loggers
from smd_jax.testing import tiny_model_config, write_random_checkpoint
from tests.command_errors import error_of

SUMS = ["--dataset", "reasoning_gym:chain_sum", "--dataset-size", "20"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_random_checkpoint(directory, config=tiny_model_config(num_layers=1, max_positions=2048))
    return directory


# --- loggers


@pytest.mark.parametrize(
    ("name", "package", "extra"), [("wandb", "wandb", "wandb"), ("tensorboard", "tensorboardX", "train")]
)
def test_a_logger_without_its_package_is_refused_before_weights_are_read(
    name: str,
    package: str,
    extra: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setitem(sys.modules, package, None)
    # Not even the model is looked for.
    words = ["grpo", "--model", "no/such/model", *SUMS, "--output-dir", str(tmp_path / "run"), "--report-to", name]
    said = error_of(words, capsys)
    assert f"{package}, which is not installed: pip install -e '.[{extra}]'" in said
    assert not (tmp_path / "run").exists()


def test_weights_and_biases_gets_the_options_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    began: list[dict[str, Any]] = []
    fake = types.ModuleType("wandb")
    fake.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    vars(fake).update(init=lambda **options: began.append(options), Settings=lambda **options: options)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    words = ["grpo", "--model", "somewhere", *SUMS, "--output-dir", str(tmp_path / "mine"), "--report-to", "wandb"]
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    for variable, more, project in (
        (None, [], "smd_jax"),
        ("of the variable", [], "of the variable"),
        ("of the variable", ["--wandb-project", "of the flag"], "of the flag"),
    ):
        if variable is not None:
            monkeypatch.setenv("WANDB_PROJECT", variable)
        loggers(*parse([*words, *more]))
        assert (began[-1]["project"], began[-1]["name"], began[-1]["mode"]) == (project, "mine", "online")
    config = began[-1]["config"]
    assert (config["algorithm"], config["learning_rate"], config["budget"]) == ("grpo", None, 512)
    assert config["output_dir"] == str(tmp_path / "mine")
