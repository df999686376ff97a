"""Guards that stop a run: sampler–learner mismatch and non-finite updates."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors
import safetensors.numpy

from smd_jax.corrections.base import Naive
from smd_jax.devices.sharding import make_mesh, shard_batch, shard_tree
from smd_jax.eviction.policies import H2O
from smd_jax.learner.forward import make_replay
from smd_jax.learner.mismatch_guard import MismatchGuard, default_bound, find_wrong_head, first_difference
from smd_jax.learner.state import init_state
from smd_jax.learner.step import skip_step, take_step
from smd_jax.message.masks import NEVER
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.decoder import Decoder
from smd_jax.model.protocol import ModelShape
from smd_jax.monitor.metrics_log import read_metrics
from smd_jax.runs import checkpoint
from smd_jax.runs.run import train
from smd_jax.runs.run_config import Objective, RunConfig
from smd_jax.runs.settings import split_settings
from smd_jax.sampler.fixed_batch import RolloutConfig, rollout
from smd_jax.testing import random_params, tiny_model_config
from smd_jax.text.prompts import PromptBatch
from smd_jax.train.grpo import GRPOLoop
from smd_jax.train.optimizers import OptimizerConfig, make_optimizer
from smd_jax.train.samples import RefusedRolloutError, Samples
from tests.bitwise import assert_bitwise_equal
from tests.toy_loop import CONFIG, new_loop, new_state, share_programs

# --- non-finite gradients


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_gradients_change_only_the_step(bad):
    optimizer = optax.adamw(0.1, weight_decay=0.5)
    state = init_state({"w": jnp.ones(3), "b": jnp.ones(2)}, optimizer, jax.random.key(0))
    state, metrics = take_step(state, optimizer, {"w": jnp.ones(3), "b": jnp.ones(2)})
    assert metrics["update/skipped"] == 0
    after, metrics = take_step(state, optimizer, {"w": jnp.array([1.0, bad, 1.0]), "b": jnp.ones(2)})
    assert metrics["update/skipped"] == 1
    assert_bitwise_equal(after, state.replace(step=state.step + 1))
    # A non-finite loss with finite gradients.
    after, metrics = take_step(state, optimizer, {"w": jnp.ones(3), "b": jnp.ones(2)}, is_finite=jnp.isfinite(bad))
    assert metrics["update/skipped"] == 1
    assert_bitwise_equal(after.params, state.params)


def test_a_step_without_learning_signal_ignores_momentum_and_is_not_skipped():
    optimizer = optax.adamw(0.1, weight_decay=0.5)
    state = init_state({"w": jnp.ones(3)}, optimizer, jax.random.key(0))
    state, _ = take_step(state, optimizer, {"w": jnp.ones(3)})
    after, metrics = take_step(state, optimizer, {"w": jnp.zeros(3)}, learns=jnp.bool_(False))
    assert metrics["update/skipped"] == 0 and metrics["grad_norm"] == 0
    assert_bitwise_equal(after, state.replace(step=state.step + 1))


@pytest.mark.parametrize(
    "optimizer",
    [
        make_optimizer(OptimizerConfig(learning_rate=1.0, lr_scheduler_type="linear", max_grad_norm=None), 4),
        make_optimizer(OptimizerConfig(learning_rate=1.0, lr_scheduler_type="linear"), 4),
        optax.adam(optax.linear_schedule(1.0, 0.0, 4), eps=1e-8),
    ],
)
def test_schedules_count_skipped_steps(optimizer: optax.GradientTransformation):
    """The last of four steps has a quarter of the rate, although the first three change no parameter."""
    state = init_state({"w": jnp.zeros(1)}, optimizer, jax.random.key(0))
    moments = state.opt_state
    state, _ = take_step(state, optimizer, {"w": jnp.ones(1)}, learns=jnp.bool_(False))
    state, metrics = take_step(state, optimizer, {"w": jnp.full(1, jnp.nan)})
    assert metrics.get("learning_rate", 0.75) == 0.75
    state = skip_step(state)
    for name in ("mu", "nu"):
        assert_bitwise_equal(optax.tree.get(state.opt_state, name), optax.tree.get(moments, name))
    state, metrics = take_step(state, optimizer, {"w": jnp.full(1, 0.5)})
    assert metrics.get("learning_rate", 0.25) == 0.25
    np.testing.assert_allclose(state.params["w"], [-0.25], rtol=1e-5)


@pytest.mark.parametrize("state", [jnp.zeros(2), {"count": jnp.int32(0)}])
def test_skipped_steps_do_not_advance_stateful_schedules(state: Any):
    class Schedule(optax.schedules.StatefulSchedule):
        def init(self) -> Any:
            return state

        def update(self, state: Any, **_: Any) -> Any:
            return jax.tree.map(lambda x: x + 1, state)

        def __call__(self, state: Any, **_: Any) -> jax.Array:
            return jnp.float32(0.5)

    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=Schedule())
    every_other = optax.MultiSteps(optax.sgd(optax.linear_schedule(1.0, 0.0, 4)), 2).gradient_transformation()
    for each in (optimizer, every_other):
        before = init_state({"w": jnp.zeros(1)}, each, jax.random.key(0))
        after = skip_step(before)
        states = [x.hyperparams_states if each is optimizer else x for x in (before.opt_state, after.opt_state)]
        assert_bitwise_equal(*states)
    after, _ = take_step(init_state({"w": jnp.zeros(1)}, optimizer, jax.random.key(0)), optimizer, {"w": jnp.ones(1)})
    assert after.params["w"].tolist() == [-0.5]


def test_gradients_whose_norm_overflows_are_skipped():
    optimizer = optax.sgd(1.0)
    state = init_state({"w": jnp.ones(2)}, optimizer, jax.random.key(0))
    after, metrics = take_step(state, optimizer, {"w": jnp.full(2, 1e30)})
    assert metrics["update/skipped"] == 1 and after.params["w"].tolist() == [1.0, 1.0]


# --- the bound on the mismatch


def shape_of(dtype: Any, layers: int) -> ModelShape:
    return ModelShape(layers, 2, 2, 8, 16, 32, 64, dtype=dtype)


def test_bounds_by_dtype_and_depth():
    # Ten times what was measured: 3.5e-5 and 3.8e-5 nats over 30 layers in float32, 0.28 in bfloat16.
    assert default_bound(shape_of("float32", 30)) == pytest.approx(1.1e-3)
    assert default_bound(shape_of("float32", 3)) == pytest.approx(5.6e-4)
    assert default_bound(shape_of("bfloat16", 30)) == pytest.approx(2.0)
    assert default_bound(shape_of("bfloat16", 2)) < default_bound(shape_of("bfloat16", 3))
    assert MismatchGuard(0.25).bound_for(shape_of("float32", 3)) == 0.25
    for bound in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"expected a bound > 0 nats, or None; got {bound}"):
            MismatchGuard(bound)


def test_bounds_by_device(monkeypatch):
    """Accelerators multiply float32 in lower precision, except in a Decoder (tests/model/test_model.py)."""
    for backend in ("cpu", "gpu", "tpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        assert default_bound(Decoder(tiny_model_config(num_layers=3)).shape) == pytest.approx(5.6e-4)
        assert default_bound(Decoder(tiny_model_config(num_layers=3, dtype="bfloat16")).shape) == pytest.approx(0.65)
    assert default_bound(shape_of("float32", 3)) == default_bound(shape_of("bfloat16", 3))
    with jax.default_matmul_precision("highest"):
        assert default_bound(shape_of("float32", 3)) == pytest.approx(5.6e-4)


# --- the first difference of sampler and learner

MODEL = Decoder(tiny_model_config(max_positions=32, num_layers=2))


@pytest.fixture(scope="module")
def sampled() -> tuple[Any, Trajectory]:
    params = random_params(MODEL.config)
    tokens = jax.random.randint(jax.random.key(0), (4, 8), 0, 256)
    prompts = PromptBatch(tokens=tokens, valid=jnp.arange(8)[None] >= jnp.array([[0], [1], [2], [3]]))
    config = RolloutConfig(max_new_tokens=16, budget=6, buffer=2)
    return params, rollout(MODEL, params, prompts, jax.random.key(1), policy=H2O(), config=config)


REPLAY = make_replay(MODEL, "shadow")


def with_mask(trajectory: Trajectory, change: Callable[[np.ndarray], None]) -> Trajectory:
    evicted_at = np.array(trajectory.mask.evicted_at)
    change(evicted_at)
    return trajectory.replace(mask=trajectory.mask.replace(evicted_at=jnp.asarray(evicted_at), segments=()))


def never_evict(evicted_at: np.ndarray, layer: int, head: int) -> None:
    times = evicted_at[:, layer, head]
    times[times > 0] = NEVER


def evict_late(evicted_at: np.ndarray, layer: int, head: int) -> None:
    times = evicted_at[1:, layer, head]
    times[(times > 0) & (times < NEVER)] += 1


@pytest.mark.parametrize(
    ("axes", "layer", "head"), [({}, 0, 1), ({}, 1, 0), ({"fsdp": 2, "tensor": 2, "sequence": 2}, 1, 1)]
)
def test_the_first_difference_and_the_wrong_head_are_found(sampled, axes, layer, head):
    """The mask evicts one query late in one head of all rows but the first. Also with sharded weights and columns."""
    params, trajectory = sampled
    wrong = with_mask(trajectory, lambda x: evict_late(x, layer, head))
    delta = np.where(trajectory.response_mask, REPLAY(params, wrong) - trajectory.logprobs, 0.0)
    first = int(np.argmax((np.abs(delta) > 1e-4).any(axis=0)))
    row = int(np.argmax(np.abs(delta[:, first])))
    mesh = make_mesh(**axes)
    with jax.set_mesh(mesh):
        split, right, wrong = shard_tree(params, mesh), shard_batch(trajectory, mesh), shard_batch(wrong, mesh)
        assert first_difference(right, REPLAY(split, right), 1e-4) is None
        found = first_difference(wrong, REPLAY(split, wrong), 1e-4)
        assert found is not None
        diagnosis = find_wrong_head(MODEL, split, wrong, found)
    # Row r begins with r columns of padding; prompts have 8 columns.
    assert found == (row, first, 8 + first - row, pytest.approx(delta[row, first], abs=1e-5))
    assert str(found) == f"first at row {row}, position {8 + first - row} ({found.nats:+.3g} nats)"
    match = re.fullmatch(
        rf"likeliest layer {layer}, KV head {head}: (.*) nats are left where it evicts a query earlier", diagnosis
    )
    assert match is not None and float(match[1]) < 1e-5, diagnosis


def test_changed_parameters_do_not_blame_a_head(sampled):
    params, trajectory = sampled
    moved = jax.tree.map(lambda x: x * 1.5, params)
    found = first_difference(trajectory, REPLAY(moved, trajectory), 1e-4)
    assert found is not None
    assert find_wrong_head(MODEL, moved, trajectory, found).startswith(
        "no mask of a single head explains it: other par"
    )


# --- guards in a run

COMPARED = split_settings(CONFIG)[0]


class Tampered(GRPOLoop):
    """Changes its samples before the update."""

    tamper: Callable[[int, Samples], Samples]

    def collect(self, state: Any, index: int) -> Samples:
        return self.tamper(index, super().collect(state, index))


def tampered(tamper: Callable[[int, Samples], Samples], **options: Any) -> GRPOLoop:
    base = new_loop(options.pop("config", CONFIG))
    loop = Tampered(base.model, base.task, base.tokenizer, base.optimizer, base.config, base.mesh, **options)
    object.__setattr__(loop, "tamper", tamper)
    share_programs(loop)
    return loop


def infinite_rewards(first: int, last: int) -> Callable[[int, Samples], Samples]:
    def tamper(index: int, samples: Samples) -> Samples:
        return samples._replace(rewards=samples.rewards + (np.inf if first <= index <= last else 0))

    return tamper


@pytest.mark.slow
def test_non_finite_updates_are_skipped_and_reported(tmp_path, capsys):
    state = train(tampered(infinite_rewards(1, 2)), new_state(), RunConfig(steps=4, checkpoint_every=1), tmp_path)
    reported = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
    assert [line.split(":")[1] for line in reported] == [" rollout 1", " rollout 2"]
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["update/skipped"] for row in rows] == [0, 1, 1, 0]
    before, after = (
        checkpoint.restore(tmp_path / "checkpoints", new_state(), config=COMPARED, step=step).state for step in (2, 3)
    )
    assert_bitwise_equal(before.params, after.params)
    assert_bitwise_equal(before.opt_state, after.opt_state)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(state.params))


def test_too_many_skipped_updates_stop_the_run_and_save_the_rollout(tmp_path):
    loop = tampered(infinite_rewards(1, 9), max_skipped=2)
    with pytest.raises(
        RefusedRolloutError, match="rollout 2: expected a finite loss .*; got loss nan .* 2 rollouts"
    ) as e:
        train(loop, new_state(), RunConfig(steps=9, checkpoint_every=1), tmp_path)
    assert e.value.file == tmp_path / "refused_2.safetensors" and str(e.value.file) in str(e.value)
    arrays = safetensors.numpy.load_file(str(e.value.file))
    assert arrays["tokens"].shape == (8, 14) and np.isinf(arrays["rewards"]).all()
    with safetensors.safe_open(e.value.file, "np") as file:
        metadata = file.metadata()
    assert len(json.loads(metadata["completions"])) == 8 and "got loss nan" in metadata["why"]
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    # With finite rewards the run resumes.
    state = train(tampered(infinite_rewards(9, 9)), new_state(), RunConfig(steps=4), tmp_path, resume=True)
    assert int(state.step) == 4


def without_evictions(index: int, samples: Samples) -> Samples:
    """From rollout 1 on, the mask of the second head lacks its evictions."""
    if index == 0:
        return samples
    return samples._replace(trajectory=with_mask(samples.trajectory, lambda x: never_evict(x, 0, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("steps", [{}, {"minibatches": 2}, {"num_iterations": 2}])
def test_a_sampler_learner_mismatch_stops_the_run(tmp_path, steps):
    loop = tampered(without_evictions, config=replace(CONFIG, **steps))
    state, metrics = loop.step(new_state())
    assert loop.max_difference == pytest.approx(5.2e-4)
    assert metrics["sampling/sampling_logp_difference/max"] < 5.2e-4
    before = jax.tree.map(np.array, state.params)
    captured = []
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RefusedRolloutError) as caught:
        # A refused step raises, so its parameters are captured here.
        patch.setattr(
            Tampered,
            "_refusal",
            lambda self, params, *rest: (captured.append(params), GRPOLoop._refusal(self, params, *rest))[1],
        )
        loop.step(state)
    assert_bitwise_equal(jax.tree.map(np.array, captured[0]), before)
    message = str(caught.value)
    assert re.match(
        r"rollout 1: expected sampler and learner within 0.00052 nats at every token; got \d\.\d+, first", message
    )
    assert re.search(r"first at row \d, position \d+ \(", message)


def with_nan_logprob(index: int, samples: Samples) -> Samples:
    logprobs = samples.trajectory.logprobs.at[2, 0].set(jnp.nan)
    return samples._replace(trajectory=samples.trajectory.replace(logprobs=logprobs))


def test_a_nan_logprob_is_refused_with_several_steps_per_rollout():
    """There is no single step to skip."""
    loop = tampered(with_nan_logprob, config=replace(CONFIG, minibatches=2))
    state = new_state()
    with pytest.raises(
        RefusedRolloutError, match=r"got nan, first at row 2, position \d+ \(\+?nan nats\); no mask explains a NaN$"
    ):
        loop.step(state)


def test_a_missing_objective_metric_does_not_hide_the_refusal(tmp_path):
    loop = tampered(lambda index, samples: without_evictions(1, samples), config=replace(CONFIG, minibatches=2))
    with pytest.raises(RefusedRolloutError, match="expected sampler and learner within"):
        train(loop, new_state(), RunConfig(steps=2, objective=Objective("entropy")), tmp_path)
    assert (tmp_path / "refused_0.safetensors").is_file()
    assert "entropy" not in read_metrics(tmp_path / "metrics.jsonl")[0]


def test_no_bound_for_a_dense_learner_or_without_a_guard():
    assert tampered(without_evictions).max_difference is not None
    assert tampered(without_evictions, guard=None).max_difference is None
    naive = replace(CONFIG, update=replace(CONFIG.update, visibility="dense", correction=Naive()))
    assert new_loop(naive).max_difference is None


@pytest.mark.slow
def test_a_refused_rollout_is_saved_with_the_state(tmp_path: Path):
    with pytest.raises(RefusedRolloutError) as caught:
        train(tampered(without_evictions), new_state(), RunConfig(steps=3), tmp_path)
    # The state is saved even without checkpoint_every: rollout 0 took its step, rollout 1 was skipped.
    assert caught.value.__notes__ == [f"saved after 2 of 3 rollouts in {tmp_path}; resume continues the run"]
    restored = checkpoint.restore(tmp_path / "checkpoints", new_state(), config=COMPARED).state
    one = train(new_loop(), new_state(), RunConfig(steps=1), tmp_path / "one")
    assert_bitwise_equal(restored, one.replace(step=one.step + 1))
    arrays = safetensors.numpy.load_file(tmp_path / "refused_1.safetensors")
    assert arrays["evicted_at"].shape == (8, 1, 2, 14) and (arrays["evicted_at"][:, 0, 1] == NEVER).any()
    assert "The rollout is in" in str(caught.value)
