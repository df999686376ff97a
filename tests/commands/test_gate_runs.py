"""Eviction gates in smd-train, smd-export and smd-eval; their file, sinks and learning rate."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from smd_jax.commands.evaluate import main as smd_eval
from smd_jax.commands.evaluate import with_trained
from smd_jax.commands.export import main as export
from smd_jax.commands.train import main
from smd_jax.eviction.policies import LearnedGate
from smd_jax.learner.evictions import recorded_draws, replay_evictions
from smd_jax.message.gate import EVICTION_GATE, KEPT, LinearGate
from smd_jax.model.decoder import Decoder
from smd_jax.model.gate_format import GATE_FILE, load_gate, save_gate
from smd_jax.model.weights import load_checkpoint
from smd_jax.sampler.fixed_batch import RolloutConfig, rollout
from smd_jax.testing import random_params, tiny_model_config, write_random_checkpoint
from smd_jax.train.optimizers import OptimizerConfig, make_optimizer
from tests.command_errors import error_of
from tests.message.test_eviction_draws import with_gate
from tests.under_test import left_padded

CONFIG = tiny_model_config(num_layers=1, max_positions=2048)
TASK = ["reasoning_gym:distractor_sort"]
PARAMETERS = ["num_digits=3", "num_distractors=4"]
TRAIN = ["--dataset", *TASK, "--dataset-parameters", *PARAMETERS, "--dataset-size", "20", "--reward-timeout", "None"]
TRAIN += ["--num-prompts", "2", "--num-generations", "4", "--max-completion-length", "6", "--budget", "6"]
TRAIN += ["--buffer", "2", "--eviction", "gate", "--sinks", "1"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gate")
    write_random_checkpoint(folder / "start", config=CONFIG)
    paths = ["--model", str(folder / "start"), "--output-dir", str(folder / "run")]
    main(["grpo", *paths, *TRAIN, "--max-steps", "2", "--learning-rate", "1e-3", "--reward", f"{__name__}:odd_sum"])
    return folder


def odd_sum(completion_ids: Any, **columns: Any) -> list[float]:
    """1.0 for about half of random completions."""
    return [float(sum(ids) % 2) for ids in completion_ids]


@pytest.mark.slow
def test_a_run_writes_a_model_and_a_gate(trained: Path):
    gate = load_file(trained / "run" / "gate" / GATE_FILE)
    assert {name: x.shape for name, x in gate.items()} == {"layers_0.kernel": (2, 2 * CONFIG.head_dim + 2, 2)}
    # Two first steps of Adam, each as long as the learning rate, which is 30 times the model's.
    change = np.abs(gate["layers_0.kernel"]).max()
    assert 0.02 < change < 0.07, change
    model = load_checkpoint(trained / "run" / "model")[1]
    assert EVICTION_GATE not in model
    start = load_checkpoint(trained / "start")[1]
    assert (
        0
        < np.abs(model["layers_0"]["mlp"]["up_proj"]["kernel"] - start["layers_0"]["mlp"]["up_proj"]["kernel"]).max()
        < 0.003
    )


@pytest.mark.slow
def test_the_gate_of_a_checkpoint_is_exported(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    export([str(trained / "run"), "--out", str(tmp_path / "gate"), "--format", "gate"])
    once, again = (load_gate(place, CONFIG) for place in (trained / "run" / "gate", tmp_path / "gate"))
    assert once[1] == again[1] == LinearGate(sinks=1)
    jax.tree.map(np.testing.assert_array_equal, once[0], again[0])
    (trained / "start" / "tokenizer.json").rename(tmp_path / "tokenizer.json")  # a gate needs no tokenizer
    export([str(trained / "run"), "--out", str(tmp_path / "gate"), "--format", "gate"])  # overwrites the first
    (tmp_path / "tokenizer.json").rename(trained / "start" / "tokenizer.json")
    message = error_of([str(trained / "run"), "--out", str(tmp_path / "gate")], capsys, export)
    assert f"it also holds {GATE_FILE}" in message and load_gate(tmp_path / "gate", CONFIG)[1] == once[1]
    export([str(trained / "run"), "--out", str(tmp_path / "model")])
    model, other = (load_checkpoint(place)[1] for place in (trained / "run" / "model", tmp_path / "model"))
    jax.tree.map(np.testing.assert_array_equal, model, other)


@pytest.mark.slow
def test_a_model_is_evaluated_with_its_gate(trained: Path, capsys: pytest.CaptureFixture[str]):
    argv = ["--model", str(trained / "run" / "model"), "--dataset", *TASK, "--dataset-parameters", *PARAMETERS]
    argv += ["--eval-rows", "4", "--max-completion-length", "6", "--reward-timeout", "None", "--json"]
    smd_eval([*argv, "--eval-decode", "dense", "gate:6+2", "--gate", str(trained / "run" / "gate")])
    assert '"decode": "gate-6-2"' in capsys.readouterr().out
    assert with_trained(LearnedGate(greedy=True), LinearGate(2)) == LearnedGate(LinearGate(2), greedy=True)
    assert "expected --gate, a directory with a trained gate" in error_of(
        [*argv, "--eval-decode", "gate:6+2"], capsys, smd_eval
    )


def test_a_subclass_of_linear_gate_cannot_be_saved(tmp_path: Path):
    @dataclasses.dataclass(frozen=True)
    class Other(LinearGate):
        """A subclass, which may compute other logits."""

    with pytest.raises(ValueError, match="expected a LinearGate, the gate that a file can hold; got .*Other"):
        save_gate(tmp_path, with_gate(CONFIG), Other())


def test_gate_file_round_trip_and_errors(tmp_path: Path):
    params = with_gate(CONFIG)
    save_gate(tmp_path, params, LinearGate(3))
    loaded, gate = load_gate(tmp_path, CONFIG)
    assert gate == LinearGate(3)
    jax.tree.map(np.testing.assert_array_equal, loaded, params[EVICTION_GATE])
    with pytest.raises(ValueError, match=r"a gate for 2 layers .* missing layers_1.kernel"):
        load_gate(tmp_path, dataclasses.replace(CONFIG, num_layers=2))
    save_file({"x": np.zeros(1)}, tmp_path / GATE_FILE)
    with pytest.raises(ValueError, match="expected the gate LinearGate with a number of sinks in .* got {}"):
        load_gate(tmp_path, CONFIG)
    (tmp_path / GATE_FILE).write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="in the format of safetensors"):
        load_gate(tmp_path, CONFIG)
    with pytest.raises(FileNotFoundError, match=GATE_FILE):
        load_gate(tmp_path / "elsewhere", CONFIG)
    with pytest.raises(ValueError, match="expected parameters with 'eviction_gate'"):
        save_gate(tmp_path, random_params(CONFIG), LinearGate())


@pytest.mark.slow
def test_sinks_are_never_evicted_and_the_replay_leaves_them_out():
    config = tiny_model_config(num_layers=2)
    model, params = Decoder(config), with_gate(config)
    prompts = left_padded([9, 4, 7], 9, config.vocab_size)
    trajectory = rollout(
        model,
        params,
        prompts,
        jax.random.key(0),
        policy=LearnedGate(LinearGate(sinks=2)),
        config=RolloutConfig(max_new_tokens=16, budget=4, buffer=2),
    )
    mask, draws = recorded_draws(trajectory)
    start = np.asarray(trajectory.valid).argmax(axis=1)
    columns = np.arange(trajectory.tokens.shape[1])
    sinks = (columns >= start[:, None]) & (columns < start[:, None] + 2)
    order = np.moveaxis(np.asarray(draws.order), 0, 2)  # layers, heads, rows, columns
    assert (order[:, :, sinks] == -1).all() and (order >= 0).any(axis=(2, 3)).all()
    assert (np.asarray(draws.logprobs) < -0.1).any()
    again = replay_evictions(model, params, trajectory)
    np.testing.assert_allclose(again, draws.logprobs, atol=3e-5)
    # Sinks have no weight in a draw: a gate without sinks gives the other keys lower log-probabilities.
    without = dataclasses.replace(draws, gate=LinearGate())
    other = replay_evictions(model, params, dataclasses.replace(trajectory, evictions=without))
    assert (np.asarray(other) <= np.asarray(again) + 1e-5).all() and (np.asarray(other) < np.asarray(again) - 0.1).any()


def test_the_logit_of_a_sink_has_no_gradient():
    gate, positions, logits = LinearGate(sinks=2), jnp.arange(5)[None, None], jnp.ones((1, 2, 1, 5))
    kept = gate.keep_sinks(logits, positions)
    assert (kept[..., :2] == KEPT).all() and (kept[..., 2:] == 1).all()
    assert not jax.grad(lambda logits: gate.keep_sinks(logits, positions)[..., :2].sum())(logits).any()
    with pytest.raises(ValueError, match="expected sinks >= 0"):
        LinearGate(-1)


def test_gate_speed_multiplies_the_update_of_the_gate():
    params = {"w": {"kernel": jnp.ones((2, 2))}, EVICTION_GATE: {"layers_0": {"kernel": jnp.ones((1, 4, 2))}}}
    grads = jax.tree.map(jnp.ones_like, params)
    for speed, expected in ((None, 1.0), (30.0, 30.0)):
        config = OptimizerConfig(learning_rate=1e-3, max_grad_norm=None, gate_speed=speed)
        optimizer = make_optimizer(config, 10)
        updates: Any = optimizer.update(grads, optimizer.init(params), params)[0]
        ratio = updates[EVICTION_GATE]["layers_0"]["kernel"].mean() / updates["w"]["kernel"].mean()
        assert ratio == pytest.approx(expected, rel=1e-5)
        assert updates["w"]["kernel"].mean() == pytest.approx(-1e-3, rel=1e-3)
