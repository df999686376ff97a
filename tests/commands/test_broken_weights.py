"""Weights with which a model has no distribution end a command with one box."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from smd_jax.commands.evaluate import main as smd_eval
from smd_jax.testing import tiny_model_config, write_random_checkpoint
from tests.command_errors import error_of

NAME = "model.layers.0.mlp.up_proj.weight"
DATA = ["reasoning_gym:chain_sum", "--max-completion-length", "4", "--reward-timeout", "None"]


def checkpoint(folder: Path, name: str, value: float) -> Path:
    """A random model in which one number, or all of a tensor, is another."""
    write_random_checkpoint(folder, config=tiny_model_config(num_layers=1, max_positions=512))
    tensors = load_file(folder / "model.safetensors")
    if np.isnan(value):
        tensors[name][0, 0] = value
    else:
        tensors[name] = np.full_like(tensors[name], value)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (NAME, np.nan, "expected finite weights; got NaN or infinity in layers_0/mlp/up_proj/kernel"),
        ("model.norm.weight", 3e38, "expected finite logits in the sampler; got NaN or infinity in"),
    ],
)
def test_a_command_says_so(name: str, value: float, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Those that are no numbers when they are read, others at the first rollout."""
    model = str(checkpoint(tmp_path / "model", name, value))
    train = ["grpo", "--model", model, "--dataset", *DATA, "--num-prompts", "1", "--num-generations", "2"]
    train += ["--budget", "8", "--buffer", "2", "--eviction", "h2o", "--distill", "none", "--max-steps", "1"]
    assert said in error_of([*train, "--output-dir", str(tmp_path / "run")], capsys)
    assert said in error_of(["--model", model, "--dataset", *DATA, "--eval-rows", "2"], capsys, smd_eval)
