"""A run on disk: what it writes, and that a run which stops anywhere and resumes is the run that did not stop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.learner.state import TrainState
from smd_jax.monitor.completions import CompletionsLog
from smd_jax.monitor.metrics_log import MACHINE_METRICS, TIME_METRICS, read_metrics
from smd_jax.monitor.saved_masks import load_masks
from smd_jax.runs import checkpoint
from smd_jax.runs.run import train
from smd_jax.runs.run_config import RunConfig
from smd_jax.runs.run_folder import check_directory
from smd_jax.train.grpo import GRPOConfig, GRPOLoop
from smd_jax.train.samples import Samples
from tests.bitwise import assert_bitwise_equal
from tests.toy_loop import CONFIG, DISTILLED, new_loop, new_state, share_programs

TWICE = dataclasses.replace(CONFIG, minibatches=2)


class StoppedError(BaseException):
    """What ends a run between two rollouts as a process ends that is killed: nothing is saved then."""


class StoppingLoop(GRPOLoop):
    """Dies in place of the rollout `stop`."""

    stop: int = 0

    def step(
        self, state: TrainState, follows: Callable[[], bool] = lambda: True
    ) -> tuple[TrainState, dict[str, float]]:
        if int(state.step) // self.config.minibatches == self.stop:
            raise StoppedError
        return super().step(state, follows)


def stopping_loop(stop: int, config: GRPOConfig = CONFIG) -> GRPOLoop:
    whole = new_loop(config)
    loop = StoppingLoop(whole.model, whole.task, whole.tokenizer, whole.optimizer, whole.config, whole.mesh)
    object.__setattr__(loop, "stop", stop)
    share_programs(loop)
    return loop


def start(directory: Path, steps: int, config: GRPOConfig = CONFIG, loop: GRPOLoop | None = None, **options: Any):
    """`train` on the toy; `options` are RunConfig's and train's."""
    kept = {name: options.pop(name) for name in ("checkpoint_every", "evaluate_every") if name in options}
    loop = new_loop(config) if loop is None else loop
    options = {"config": config, **options}
    return train(loop, options.pop("state", new_state()), RunConfig(steps=steps, **kept), directory, **options)


def rows(directory: Path) -> list[dict[str, float]]:
    """What metrics.jsonl holds, but for times and memory."""
    found = read_metrics(directory / "metrics.jsonl")
    return [{name: value for name, value in row.items() if name not in MACHINE_METRICS} for row in found]


def steps(directory: Path) -> list[float]:
    return [row["step"] for row in rows(directory)]


def saved(directory: Path) -> list[int]:
    return checkpoint.all_steps(directory / "checkpoints")


def whole_run(directory: Path, config: GRPOConfig = CONFIG) -> tuple[TrainState, list[dict[str, float]]]:
    state = start(directory, 6, config)
    return state, rows(directory)


def assert_same_run(directory: Path, state: TrainState, whole: tuple[TrainState, list[dict[str, float]]]):
    assert rows(directory) == whole[1]
    assert_bitwise_equal(state, whole[0])


# --- what it writes


@pytest.mark.slow
def test_rows_and_checkpoints(tmp_path, capsys):
    state = start(tmp_path, 5, checkpoint_every=2, label="toy")
    assert steps(tmp_path) == [0, 1, 2, 3, 4]
    assert all({"reward", "loss", "grad_norm", "entropy"} <= row.keys() for row in rows(tmp_path))
    assert saved(tmp_path)[-1] == 5 and int(state.step) == 5
    restored = checkpoint.restore(tmp_path / "checkpoints", new_state(), config=CONFIG)
    assert restored.data_position == {"rollouts": 5, "seed": 0}
    assert_bitwise_equal(restored.state, state)
    assert "toy 5/5 reward" in capsys.readouterr().out


class Recorder:
    """A logger that remembers, or raises."""

    def __init__(self, broken: bool = False) -> None:
        self.rows: list[dict[str, float]] = []
        self.broken = broken

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.broken:
            raise OSError("no such host")
        self.rows.append({"step": step, **metrics})

    def close(self) -> None:
        self.rows.append({})


def test_loggers_get_every_row_and_none_stops_the_run(tmp_path, capsys):
    sound = Recorder()
    state = start(tmp_path, 3, loggers=[Recorder(broken=True), sound])
    *written, closed = sound.rows
    # Loggers count finished rollouts; rows are numbered from 0.
    assert [row | {"step": row["step"] - 1} for row in written] == read_metrics(tmp_path / "metrics.jsonl")
    assert closed == {}
    assert all({"memory/host_bytes"} <= row.keys() for row in written)
    assert "Recorder failed and gets no more metrics of this run" in capsys.readouterr().err
    assert_bitwise_equal(state, start(tmp_path / "again", 3))


def test_loggers_get_the_evaluation_before_training(tmp_path):
    logger = Recorder()
    start(tmp_path, 2, evaluate_every=1, evaluate=lambda state: {"eval/dense": float(state.step)}, loggers=[logger])
    assert [(row["step"], row["eval/dense"]) for row in logger.rows[:-1]] == [(0, 0.0), (1, 1.0), (2, 2.0)]


def test_completions_and_masks_of_a_run(tmp_path):
    seen = []

    def watch(step: int, samples: Samples) -> None:
        seen.append((step, samples))
        log(step, samples)

    whole = new_loop()
    log = CompletionsLog(tmp_path, whole.tokenizer, table_rows=0, masks=3)
    loop = dataclasses.replace(whole, watch=watch, watch_every=2)
    share_programs(loop)
    start(tmp_path, 4, loop=loop)
    assert [step for step, _ in seen] == [0, 2, 3], "every second, and the last"
    of_run = [row["reward"] for row in rows(tmp_path)]
    for step, samples in seen:
        assert samples.rewards.mean() == pytest.approx(of_run[step])
        groups = samples.advantages.reshape(-1, CONFIG.group_size)
        np.testing.assert_allclose(groups.mean(1), 0, atol=1e-6)
    assert sorted(path.name for path in (tmp_path / "completions").glob("*.parquet")) == [
        *("completions_00000.parquet", "completions_00002.parquet", "completions_00003.parquet"),
    ]
    trajectory = seen[2][1].trajectory
    for row, mask in enumerate(load_masks(tmp_path / "completions" / "masks_00003.npz")):
        # Against the explicit mask of the same rollout, without its padding.
        keep = np.flatnonzero(trajectory.valid[row])
        expected = np.asarray(trajectory.mask.to_boolean())[row][..., keep[0] : keep[-1] + 1, keep[0] : keep[-1] + 1]
        causal = np.tril(np.ones(expected.shape[-2:], bool))
        for query in range(len(keep)):
            np.testing.assert_array_equal(mask.forgotten(query), causal[query] & ~expected[:, :, query])


def test_times_are_parts_of_a_step(tmp_path):
    start(tmp_path, 2)
    for row in read_metrics(tmp_path / "metrics.jsonl"):
        assert TIME_METRICS.keys() - {"time/environment"} <= row.keys()
        assert 0 < row["time/rollout"] + row["time/grading"] + row["time/update"] <= row["step_time"] + 1e-3
        assert row["rollout/tokens"] == 8 * row["completions/mean_length"]
        assert row["rollout/tokens_per_second"] == pytest.approx(row["rollout/tokens"] / row["time/rollout"])


# --- it resumes


@pytest.mark.slow
@pytest.mark.parametrize("config", [DISTILLED, TWICE], ids=["distilled", "two minibatches"])
def test_six_rollouts_equal_three_and_three(tmp_path, config):
    whole = whole_run(tmp_path / "whole", config)
    assert len({row["entropy"] for row in whole[1]}) == 6
    start(tmp_path / "parts", 3, config)
    assert steps(tmp_path / "parts") == [0, 1, 2]
    other = jax.tree.map(jnp.zeros_like, new_state(seed=9).params)
    state = start(tmp_path / "parts", 6, config, resume=True, state=new_state(seed=9).replace(params=other))
    assert_same_run(tmp_path / "parts", state, whole)
    assert saved(tmp_path / "parts")[-1] == 6


def test_rows_after_the_last_checkpoint_are_written_again(tmp_path):
    whole = whole_run(tmp_path / "whole")
    parts = tmp_path / "parts"
    with pytest.raises(StoppedError):
        start(parts, 6, loop=stopping_loop(5), checkpoint_every=2)
    assert steps(parts) == [0, 1, 2, 3, 4] and saved(parts)[-1] == 4
    with open(parts / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 5, "rew')  # the machine went down in the middle of a line
    assert_same_run(parts, start(parts, 6, checkpoint_every=2, resume=True), whole)


def test_a_finished_run_stays_as_it_is(tmp_path):
    finished = start(tmp_path, 2)
    before = rows(tmp_path)
    state = start(tmp_path, 2, loop=stopping_loop(2), resume=True)
    assert rows(tmp_path) == before and saved(tmp_path) == [2]
    assert_bitwise_equal(state, finished)


# --- what it refuses


def test_a_new_run_in_a_used_directory(tmp_path):
    start(tmp_path / "run", 1)
    (tmp_path / "rows").mkdir()
    (tmp_path / "run" / "metrics.jsonl").rename(tmp_path / "rows" / "metrics.jsonl")
    for used in ("run", "rows"):  # only checkpoints here, only metrics there
        with pytest.raises(FileExistsError, match=rf"{used}; got one\. Continue it with resume=True"):
            start(tmp_path / used, 1)
        check_directory(tmp_path / used, resume=True)


def test_what_is_no_earlier_run(tmp_path):
    check_directory(tmp_path / "absent", resume=False)
    (tmp_path / "metrics.jsonl").touch()  # a run that ended before its first row
    (tmp_path / "notes.txt").write_text("mine")
    check_directory(tmp_path, resume=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "notes.txt"]
