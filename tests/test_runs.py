"""What surrounds the steps of a run: signals, the disk, evaluations, early stop, the best checkpoint, settings."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest

from breaking.disks import files_end_at
from smd_jax.config import ModelConfig
from smd_jax.learner.config import UpdateConfig
from smd_jax.losses.distillation import DistillConfig
from smd_jax.model.weights import save_checkpoint
from smd_jax.monitor.metrics_log import MACHINE_METRICS, read_metrics
from smd_jax.testing import random_params, tiny_model_config
from smd_jax.train import checkpoint, disk
from smd_jax.train.grpo import GRPOConfig
from smd_jax.train.machine import machine
from smd_jax.train.objective import Objective, Standing
from smd_jax.train.run import RunConfig, check_directory, check_room, train
from smd_jax.train.settings import rounding_only, split_settings, taken_out
from smd_jax.train.stop import RunStoppedError, StopSignals
from tests.bitwise import assert_bitwise_equal
from tests.plain_loop import CONFIG, PlainLoop, new_state

GRPO = GRPOConfig(2, 4, 9, CONFIG.policy, CONFIG.rollout)
DENSE = "eval/dense/reward"


def start(directory: Path, steps: int, loop: PlainLoop | None = None, state: Any = None, **options: Any):
    """`train` on the plain loop; `options` are RunConfig's and train's."""
    names = ("checkpoint_every", "evaluate_every", "keep", "objective")
    run = RunConfig(steps, **{name: options.pop(name) for name in names if name in options})
    state = new_state() if state is None else state
    return train(loop or PlainLoop(), state, run, directory, **{"config": CONFIG, **options})


def never(number: int) -> None:
    pytest.fail(f"rollout {number} begins")


def rows(directory: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """But for what depends on the machine."""
    found = read_metrics(directory / name)
    return [{name: value for name, value in row.items() if name not in MACHINE_METRICS} for row in found]


def saved(directory: Path, name: str = "checkpoints") -> list[int]:
    return checkpoint.all_steps(directory / name)


# --- signals


@contextmanager
def run_in_a_process(directory: Path, steps: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.plain_loop", str(directory), str(steps)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    """Reads its output up to a line that has `text`."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return
    pytest.fail(f"expected {text!r}; got {''.join(seen)}")


def end_rollout(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_ctrl_c_saves_the_rollout_under_way_and_the_run_goes_on(tmp_path):
    parts = tmp_path / "parts"
    with run_in_a_process(parts, 5) as process:
        wait_for(process, "rollout 0")
        end_rollout(process)
        wait_for(process, "rollout 1")
        process.send_signal(signal.SIGINT)
        # Said while the rollout goes on, which ends only when it is told to.
        wait_for(process, "SIGINT: stops when this rollout is finished and saved; once more ends at once")
        end_rollout(process)
        wait_for(process, f"SIGINT stopped the run after 2 of 5 rollouts; saved in {parts}")
        assert process.wait() == 130
    assert saved(parts) == [2] and [row["step"] for row in rows(parts)] == [0, 1]
    state = start(parts, 5, resume=True)
    assert_bitwise_equal(state, start(tmp_path / "whole", 5))
    assert rows(parts) == rows(tmp_path / "whole")


def test_the_second_signal_ends_at_once(tmp_path):
    with run_in_a_process(tmp_path, 5) as process:
        wait_for(process, "rollout 0")
        process.send_signal(signal.SIGTERM)
        wait_for(process, "SIGTERM: stops")
        process.send_signal(signal.SIGINT)
        wait_for(process, "ended without saving")
        # In the middle of a rollout that nobody ends; and the code is that of the second signal.
        assert process.wait() == 130
    assert saved(tmp_path) == [] and rows(tmp_path) == []


def test_a_signal_before_the_first_rollout_has_nothing_to_save(tmp_path):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)

    heard = threading.Event()

    def evaluate(state: Any) -> dict[str, float]:
        signal.raise_signal(signal.SIGTERM)
        heard.wait()  # for the thread that listens
        return {DENSE: 0.5}

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RunStoppedError, match="after 0 of 5.*nothing to") as e:
        patch.setattr("smd_jax.train.stop._say", lambda line: heard.set())
        start(tmp_path, 5, evaluate_every=2, evaluate=evaluate)
    assert (e.value.exit_code, e.value.done) == (143, 0)
    assert saved(tmp_path) == [] and rows(tmp_path, "evaluations.jsonl") == [{"step": 0, DENSE: 0.5}]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_beside_the_main_thread_there_are_no_signals_to_hear(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    handlers = list[Any]()
    loop = PlainLoop(begins=lambda number: handlers.append(signal.getsignal(signal.SIGINT)))
    thread = threading.Thread(target=start, args=(tmp_path, 2, loop))
    thread.start()
    thread.join()
    assert saved(tmp_path) == [2] and handlers == [before, before]


# --- evaluations


class Evaluations:
    """Gives a run the values of a list, and remembers after how many rollouts it was asked."""

    def __init__(self, values: dict[int, float]):
        self.values = values
        self.asked = list[int]()

    def __call__(self, state: Any) -> dict[str, float]:
        self.asked.append(int(state.step))
        return {DENSE: self.values[int(state.step)]}


class DiedError(BaseException):
    """What ends a run between two rollouts as a process ends that is killed: nothing is saved then."""


def dies_at(last: int) -> Callable[[int], None]:
    def begins(number: int) -> None:
        if number == last:
            raise DiedError

    return begins


CURVE = {0: 0.4, 2: 0.6, 4: 0.5, 6: 0.6, 7: 0.1, 8: 0.7, 9: 0.2}


def test_start_interval_and_end_are_evaluated(tmp_path):
    evaluate = Evaluations(CURVE)
    start(tmp_path, 7, evaluate_every=2, evaluate=evaluate)
    assert evaluate.asked == [0, 2, 4, 6, 7]
    assert [row.get(DENSE) for row in rows(tmp_path)] == [None, 0.6, None, 0.5, None, 0.6, 0.1]
    assert rows(tmp_path, "evaluations.jsonl") == [{"step": n, DENSE: CURVE[n]} for n in evaluate.asked]


class DyingEvaluations(Evaluations):
    """Ends as a killed process does in the evaluation after `last` rollouts, the first time."""

    def __init__(self, curve: dict[int, float], last: int) -> None:
        super().__init__(curve)
        self.last = last

    def __call__(self, state: Any) -> dict[str, float]:
        found = super().__call__(state)
        if int(state.step) == self.last:
            self.last = -1
            raise DiedError
        return found


@pytest.mark.parametrize("last", [4, 9])
def test_a_run_that_dies_in_an_evaluation_makes_it_again_and_loses_no_rollout(tmp_path, last):
    options: dict[str, Any] = {"evaluate_every": 2, "checkpoint_every": 4, "objective": Objective(DENSE)}
    whole = start(tmp_path / "whole", 9, evaluate=Evaluations(CURVE), **options)
    evaluate = DyingEvaluations(CURVE, last)
    parts = tmp_path / "parts"
    with pytest.raises(DiedError):
        start(parts, 9, evaluate=evaluate, **options)
    assert saved(parts)[-1] == last and len(rows(parts)) == last - 1, "saved before, and the row comes behind"
    taken = list[int]()
    state = start(parts, 9, PlainLoop(begins=taken.append), resume=True, evaluate=evaluate, **options)
    assert_bitwise_equal(state, whole)
    assert taken == list(range(last, 9)) and evaluate.asked.count(last) == 2
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert rows(parts, name) == rows(tmp_path / "whole", name)
    assert saved(parts, "best") == saved(tmp_path / "whole", "best")
    # Once more, to more rollouts: what is there is not made again.
    start(parts, 10, resume=True, evaluate=Evaluations({10: 0.3}), **options)
    assert [row[DENSE] for row in rows(parts, "evaluations.jsonl")][-2:] == [CURVE[9], 0.3]


class Told(StopSignals):
    """Hears no signals, and has received one when a test says so."""

    def __enter__(self) -> Told:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def test_who_is_told_to_stop_evaluates_when_the_run_goes_on(tmp_path, monkeypatch):
    stops = [Told()]
    monkeypatch.setattr("smd_jax.train.run.StopSignals", lambda: stops[-1])

    def told(number: int) -> None:
        stops[-1].received = signal.SIGTERM if number == 3 else None

    def metrics(number: int) -> dict[str, float]:
        return {"reward": float("nan") if number == 3 else float(number)}

    options: dict[str, Any] = {"evaluate_every": 2, "evaluate": Evaluations(CURVE)}
    start(tmp_path / "whole", 6, PlainLoop(metrics=metrics), **options)
    parts = tmp_path / "parts"
    evaluate = Evaluations(CURVE)
    with pytest.raises(RunStoppedError, match="after 4 of 6 rollouts; saved"):
        start(parts, 6, PlainLoop(begins=told, metrics=metrics), **options | {"evaluate": evaluate})
    assert evaluate.asked == [0, 2] and saved(parts) == [4]
    stops.append(Told())
    start(parts, 6, PlainLoop(metrics=metrics), resume=True, **options | {"evaluate": evaluate})
    assert evaluate.asked == [0, 2, 4, 6]
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        np.testing.assert_equal(rows(parts, name), rows(tmp_path / "whole", name))


def test_a_resume_says_where_it_goes_on(tmp_path, capsys):
    with pytest.raises(DiedError):
        start(tmp_path, 9, PlainLoop(begins=dies_at(7)), checkpoint_every=4)
    start(tmp_path, 9, resume=True, checkpoint_every=4)
    assert "goes on after 4 of 9 rollouts; 3 behind them are taken again" in capsys.readouterr().out


def test_a_resume_that_would_lose_rollouts_is_refused(tmp_path):
    start(tmp_path, 9, checkpoint_every=4)
    before = rows(tmp_path)
    with pytest.raises(ValueError, match=r"steps of at least 9, the rollouts that are finished in .*; got 8"):
        start(tmp_path, 8, PlainLoop(begins=never), resume=True)
    shutil.move(tmp_path / "checkpoints", tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match=r"metrics.jsonl has 9 rollouts and one is saved every 4; found none"):
        start(tmp_path, 12, PlainLoop(begins=never), resume=True, checkpoint_every=4)
    assert rows(tmp_path) == before
    shutil.move(tmp_path / "elsewhere", tmp_path / "checkpoints")
    start(tmp_path, 12, resume=True, checkpoint_every=4)
    assert rows(tmp_path)[:9] == before


def test_a_resumed_run_does_not_evaluate_its_start_again(tmp_path):
    whole = Evaluations(CURVE)
    start(tmp_path / "whole", 9, evaluate_every=2, evaluate=whole)

    evaluate = Evaluations(CURVE)
    options: dict[str, Any] = {"evaluate_every": 2, "evaluate": evaluate, "checkpoint_every": 4, "resume": True}
    for number in (1, 7):
        with pytest.raises(DiedError):
            start(tmp_path / "parts", 9, PlainLoop(begins=dies_at(number)), **options)
    start(tmp_path / "parts", 9, **options)
    # Stopped after 1 and after 7 rollouts; saved after 4.
    assert evaluate.asked == [0, 2, 4, 6, 6, 8, 9]
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert rows(tmp_path / "parts", name) == rows(tmp_path / "whole", name)


# --- the objective


@pytest.mark.parametrize(
    ("objective", "ends"),
    [
        (Objective(DENSE), 7),
        (Objective(DENSE, patience=2), 6),
        (Objective(DENSE, patience=3), 7),
        (Objective(DENSE, patience=1), 4),
        (Objective(DENSE, patience=1, maximize=False), 2),
        (Objective(DENSE, patience=1, min_gain=0.3), 2),
        (Objective("reward", patience=1), 7),  # of every rollout, and it always rises
        (Objective("reward", patience=3, maximize=False), 4),
    ],
)
def test_patience(tmp_path, capsys, objective, ends):
    options: dict[str, Any] = {"evaluate_every": 2, "evaluate": Evaluations(CURVE), "objective": objective}
    state = start(tmp_path, 7, **options)
    assert int(state.step) == ends and saved(tmp_path) == [ends]
    assert ("stopped early" in capsys.readouterr().out) == (ends < 7)
    # A resume stands where the run stood.
    again = start(tmp_path, 7, PlainLoop(begins=never), resume=True, **options)
    assert_bitwise_equal(again, state)


def test_standing_by_hand():
    objective = Objective("x", patience=2, min_gain=0.1)
    standing = Standing()
    seen = []
    for done, value in enumerate([0.5, 0.55, 0.58, 0.61, float("nan"), 0.6], start=1):
        standing = standing.after(objective, done, {"x": value}).after(objective, done, {"another": 9.0})
        seen.append(standing)
    assert [(s.best, s.best_at) for s in seen] == [(0.5, 1), (0.55, 2), (0.58, 3), (0.61, 4), (0.61, 4), (0.61, 4)]
    assert [(s.reference, s.without_gain) for s in seen] == [
        (0.5, 0),
        (0.5, 1),
        (0.5, 2),
        (0.61, 0),
        (0.61, 1),
        (0.61, 2),
    ]
    assert [s.has_ended(objective) for s in seen] == [False, False, True, False, False, True]


def test_the_best_checkpoint_stays_beside_the_newest(tmp_path):
    options: dict[str, Any] = {
        "evaluate_every": 2,
        "evaluate": Evaluations(CURVE),
        "objective": Objective(DENSE),
        "checkpoint_every": 1,
        "keep": 2,
    }
    start(tmp_path, 7, **options)
    assert saved(tmp_path) == [6, 7] and saved(tmp_path, "best") == [2]
    best = checkpoint.restore(tmp_path / "best", new_state(), config=CONFIG).state
    assert_bitwise_equal(best, start(tmp_path / "two", 2))
    start(tmp_path, 9, resume=True, **options)
    assert saved(tmp_path) == [8, 9] and saved(tmp_path, "best") == [8]


def test_a_best_checkpoint_of_rollouts_that_are_taken_again(tmp_path):
    options: dict[str, Any] = {"evaluate_every": 2, "objective": Objective(DENSE)}
    start(tmp_path, 9, evaluate=Evaluations(CURVE), **options)
    assert saved(tmp_path, "best") == [8]
    checkpoint.discard_after(tmp_path / "checkpoints", 0)  # as if the run had died before its first one
    start(tmp_path, 7, resume=True, evaluate=Evaluations(CURVE), **options)
    assert saved(tmp_path, "best") == [2]


def test_a_best_checkpoint_of_another_configuration_or_start(tmp_path):
    """Of a run that was killed before its first checkpoint."""
    options: dict[str, Any] = {"evaluate_every": 1, "objective": Objective(DENSE)}
    curve = {0: 0.1, 1: 0.5, 2: 0.2}
    with pytest.raises(DiedError):
        start(tmp_path, 2, PlainLoop(begins=dies_at(1)), evaluate=Evaluations(curve), **options)
    assert saved(tmp_path, "best") == [1] and saved(tmp_path) == []
    with pytest.raises(checkpoint.OtherConfigError, match="seed: expected 0, got 1"):
        other = replace(CONFIG, seed=1)
        start(tmp_path, 2, resume=True, config=other, evaluate=Evaluations(curve), **options)
    with pytest.raises(FileExistsError):
        (tmp_path / "metrics.jsonl").rename(tmp_path / "rows")
        (tmp_path / "evaluations.jsonl").rename(tmp_path / "evaluated")
        check_directory(tmp_path, resume=False)
    state = new_state().replace(params={"w": new_state().params["w"] + 1})
    start(tmp_path, 2, state=state, resume=True, evaluate=Evaluations(curve), **options)
    best = checkpoint.restore(tmp_path / "best", new_state(), config=CONFIG)
    assert best.step == 1 and best.state.params["w"].tolist() == state.params["w"].tolist()


def test_an_objective_that_is_no_metric(tmp_path):
    with pytest.raises(ValueError, match="expected evaluations .* for the objective 'eval/dense/reward'; got none"):
        start(tmp_path / "a", 2, PlainLoop(begins=never), objective=Objective(DENSE))
    typo = Objective("eval/dens/reward")
    with pytest.raises(ValueError, match="metric among .*: eval/dense/reward; got 'eval/dens/reward'"):
        start(
            tmp_path / "b",
            2,
            PlainLoop(begins=never),
            objective=typo,
            evaluate_every=1,
            evaluate=lambda s: {DENSE: 1.0},
        )
    with pytest.raises(ValueError, match="metric among .*reward; got 'rewards'"):
        start(tmp_path / "c", 2, objective=Objective("rewards"))
    assert [row["step"] for row in rows(tmp_path / "c")] == [0], "what was measured stays"
    assert saved(tmp_path / "c") == [1], "and what was learnt"


def test_an_objective_that_the_first_rollouts_do_not_have(tmp_path):
    """Rollouts without signal take no optimizer step; from the first one on that does, the metric must be there."""

    def metrics(number: int) -> dict[str, float]:
        return {"reward": 0.0} | ({} if number < 2 else {"grad_norm": 1.0, "entropy": float(number)})

    loop = PlainLoop(metrics=metrics)
    state = start(tmp_path / "entropy", 4, loop, objective=Objective("entropy"))
    assert int(state.step) == 4 and saved(tmp_path / "entropy", "best") == [4]
    with pytest.raises(ValueError, match="got 'kl'"):
        start(tmp_path / "kl", 4, loop, objective=Objective("kl"))
    assert saved(tmp_path / "kl") == [3]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 0}, "expected steps >= 1, a whole number .*; got 0"),
        ({"steps": -1}, "expected steps >= 1.*; got -1"),
        ({"checkpoint_every": -1}, "expected checkpoint_every >= 0.*; got -1"),
        ({"evaluate_every": -2}, "expected evaluate_every >= 0.*; got -2"),
        ({"keep": 0}, "expected keep >= 1.*; got 0"),
    ],
)
def test_wrong_numbers_of_a_run(wrong, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(**{"steps": 1, **wrong})


@pytest.mark.parametrize(("field", "value"), [("patience", 0), ("min_gain", -0.1), ("min_gain", float("nan"))])
def test_wrong_numbers_of_an_objective(field, value):
    with pytest.raises(ValueError, match=f"expected .*{field}.*; got {value}"):
        replace(Objective("x"), **{field: value})


# --- what a resume compares


def test_noted_settings_may_differ(tmp_path, capsys):
    start(tmp_path, 1, noted={"memory": "80GiB", "decode_rows": None})
    capsys.readouterr()
    start(tmp_path, 2, noted={"memory": "40GiB", "decode_rows": 8}, resume=True)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("resumed with")]
    assert lines == [
        'resumed with another setting, memory: was "80GiB", is now "40GiB"',
        "resumed with another setting, decode_rows: was null, is now 8",
    ]
    start(tmp_path, 3, noted={"memory": "40GiB", "decode_rows": 8}, resume=True)
    assert "resumed" not in capsys.readouterr().out
    assert checkpoint.restore(tmp_path / "checkpoints", new_state(), config=CONFIG).noted == {
        "memory": "40GiB",
        "decode_rows": 8,
    }


def test_a_checkpoint_without_notes_is_resumed(tmp_path):
    start(tmp_path, 1)
    meta = next((tmp_path / "checkpoints" / "1" / "meta").rglob("metadata"))
    content = json.loads(meta.read_text())
    assert content.pop("noted") is None
    meta.write_text(json.dumps(content))
    (tmp_path / "checkpoints" / "1" / "checksums.json").unlink()
    assert int(start(tmp_path, 2, resume=True, noted={"memory": 1}).step) == 2


def test_settings_that_plan_memory_are_noted():
    compared, noted = split_settings(GRPO)
    rows_of_cache = {"decode_rows": None, "prefill_rows": 8}
    of_update = {"update.microbatch_size": None, "update.pack_columns": None, "update.rows_per_prompt": 1}
    assert noted == {**rows_of_cache, **of_update, "update_widths": 4}
    assert not {"decode_rows", "prefill_rows", "update_widths"} & compared.keys()
    assert "microbatch_size" not in cast(dict[str, Any], compared["update"]) and compared["prompts_per_step"] == 2
    planned = replace(GRPO, decode_rows=4, update_widths=1, update=replace(GRPO.update, microbatch_size=2))
    assert split_settings(planned)[0] == compared
    for other in (replace(GRPO, seed=1), replace(GRPO, rollout=replace(GRPO.rollout, budget=5))):
        assert split_settings(other)[0] != compared


def test_without_a_config_that_of_the_loop_is_compared(tmp_path, capsys):
    def go(steps: int, **changed: Any) -> Any:
        loop = replace(PlainLoop(), config=replace(CONFIG, **changed))
        return train(loop, new_state(), RunConfig(steps), tmp_path, resume=True)

    go(1)
    assert checkpoint.saved_config(tmp_path / "checkpoints") == split_settings(CONFIG)[0]
    go(2, decode_rows=2)
    assert "resumed with another setting, decode_rows: was null, is now 2" in capsys.readouterr().out
    with pytest.raises(checkpoint.OtherConfigError, match="seed: expected 0, got 1"):
        go(3, seed=1)


def test_what_chooses_the_rows_of_a_teacher_is_compared():
    def distilled(fraction: float, position_fraction: float) -> GRPOConfig:
        distill = DistillConfig(fraction=fraction, position_fraction=position_fraction)
        return replace(GRPO, update=UpdateConfig(distill=distill))

    free = {"decode_rows", "prefill_rows", "update.pack_columns", "update.rows_per_prompt"}
    assert set(rounding_only(distilled(1.0, 1.0))) == {*free, "update.microbatch_size", "update_widths"}
    assert set(rounding_only(distilled(0.5, 1.0))) == {*free, "update_widths"}
    assert set(rounding_only(distilled(1.0, 0.5))) == {*free, "update.microbatch_size"}


def test_taking_out_what_is_not_there():
    assert taken_out({"a": {"b": 1, "c": 2}}, ["a.b"]) == ({"a": {"c": 2}}, {"a.b": 1})
    with pytest.raises(ValueError, match="expected a setting 'a.d'; got"):
        taken_out({"a": {"b": 1}}, ["a.d"])


# --- a checkpoint that is damaged


def cut_off(checkpoint_folder: Path):
    for file in checkpoint_folder.rglob("*"):
        if file.is_file() and file.name != "checksums.json":
            file.write_bytes(file.read_bytes()[:-1])


def test_a_damaged_checkpoint_falls_back_to_the_last_good_one(tmp_path, capsys):
    whole = start(tmp_path / "whole", 9)
    run = tmp_path / "run"
    start(run, 6, checkpoint_every=2)
    cut_off(run / "checkpoints" / "6")
    with pytest.raises(checkpoint.OtherConfigError):
        start(run, 9, resume=True, config=replace(CONFIG, seed=1))
    assert saved(run) == [2, 4, 6], "a run that is refused is left as it was"
    capsys.readouterr()
    state = start(run, 9, resume=True)
    said = capsys.readouterr().out
    assert f"warning: checkpoint 6 in {run / 'checkpoints'} cannot be read" in said
    assert "the run goes on from step 4" in said
    assert_bitwise_equal(state, whole)
    assert rows(run) == rows(tmp_path / "whole") and saved(run) == [2, 4, 9]


def test_what_a_run_stands_on_is_compared(tmp_path, capsys, monkeypatch):
    start(tmp_path, 1)
    start(tmp_path, 2, resume=True)
    assert "resumed" not in capsys.readouterr().out
    monkeypatch.setattr("smd_jax.train.run.machine", lambda mesh: machine(mesh) | {"jaxlib": "0.1"})
    start(tmp_path, 3, resume=True)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("resumed")]
    assert line.startswith("resumed elsewhere, which may change rounding, jaxlib: was ") and line.endswith('now "0.1"')


# --- the disk

Usage = namedtuple("Usage", "total used free")


def test_a_disk_without_room_is_refused_before_the_first_rollout(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(2**30, 0, 3000))
    state = new_state(size=250)  # 1,000 bytes, the step and the key
    assert disk.stored_bytes(state) == 1000 + 4 + 8
    with pytest.raises(
        OSError, match=r"expected 3.95 KiB free on the disk of .*run, for 4 checkpoints of 1012 B; got 2"
    ):
        start(tmp_path / "run", 9, PlainLoop(begins=never), state, checkpoint_every=1)
    assert not (tmp_path / "run").exists()
    start(tmp_path / "run", 9, state=state, checkpoint_every=1, keep=1)


@pytest.mark.parametrize(
    ("options", "checkpoints"),
    [
        ({"steps": 9}, 1),
        ({"steps": 9, "checkpoint_every": 4}, 3),
        ({"steps": 9, "checkpoint_every": 1}, 4),
        ({"steps": 9, "checkpoint_every": 1, "keep": 5}, 6),
        ({"steps": 9, "objective": Objective("reward")}, 3),
        ({"steps": 9, "objective": Objective("reward", keep_best=False)}, 1),
    ],
)
def test_room_for_all_that_is_there_at_once(tmp_path, monkeypatch, options, checkpoints):
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(2**30, 0, checkpoints * 100))
    check_room(tmp_path, 100, RunConfig(**options))
    with pytest.raises(OSError, match="free on the disk"):
        check_room(tmp_path, 101, RunConfig(**options))


def test_what_is_there_needs_no_more_room(tmp_path, monkeypatch):
    start(tmp_path, 5, checkpoint_every=1)
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(2**30, 0, 100))
    check_room(tmp_path, 100, RunConfig(9, checkpoint_every=1))
    with pytest.raises(OSError, match="for one checkpoint; got 100 B"):
        check_room(tmp_path, 101, RunConfig(9, checkpoint_every=1))
    check_room(tmp_path, 101, RunConfig(5))  # that run is over


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_disk_that_fills_up_leaves_the_last_good_checkpoint(tmp_path, caplog):
    state = new_state(size=100_000)
    whole = start(tmp_path / "whole", 4, state=state)
    run = tmp_path / "run"
    start(run, 2, state=state)
    with files_end_at(100_000), pytest.raises(OSError) as caught:
        start(run, 4, state=state, resume=True)
    message = str(caught.value)
    assert message.startswith(f"checkpoint 4 in {run / 'checkpoints'} could not be written (")
    assert message.endswith(" free on the disk): File too large. Checkpoints [2] are as they were")
    assert not caplog.records, "nobody else says it, with a traceback"
    assert saved(run) == [2] and [path.name for path in (run / "checkpoints").iterdir()] == ["2"]
    assert_bitwise_equal(start(run, 4, state=state, resume=True), whole)
    assert rows(run) == rows(tmp_path / "whole")


def test_a_metrics_file_that_cannot_grow(tmp_path):
    loop = PlainLoop(metrics=lambda number: {"reward": 0.1} | {f"metric {i}": 1 / 3 for i in range(100)})
    with (
        files_end_at(5000),
        pytest.raises(OSError, match=r"metrics.jsonl could not be written \(.* free on the disk\): .*too large"),
    ):
        start(tmp_path, 4, loop)
    assert len(rows(tmp_path)) == 1  # the second one was cut off


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError, match=r"expected a directory, or nothing, at .*run; got the file .*file"):
        check_directory(tmp_path / "file" / "run", resume=False)
    # Where nobody makes files, root neither.
    with pytest.raises(PermissionError, match="expected a directory that can be written at /proc/runs; got "):
        check_directory("/proc/runs", resume=False)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_where_an_export_will_be_refused(tmp_path, monkeypatch):
    disk.check_export(tmp_path / "model", 100)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="it also holds notes.txt"):
        disk.check_export(tmp_path / "model", 100)
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(2**30, 0, 100))
    with pytest.raises(OSError, match="expected 101 B free on the disk of .*for the exported model; got 100 B"):
        disk.check_export(tmp_path / "other", 101)
    with pytest.raises(PermissionError, match="can be written"):
        disk.check_export("/proc/model", 1)


@pytest.fixture(scope="module")
def trained() -> tuple[ModelConfig, dict[str, Any]]:
    config = tiny_model_config(num_layers=1)
    return config, random_params(config)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_exported_files_have_the_mode_of_the_umask(tmp_path, trained, umask, mode):
    before = os.umask(umask)
    try:
        save_checkpoint(tmp_path / "model", trained[1], trained[0])
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()} == {mode}


def test_an_export_to_a_disk_that_is_full_leaves_what_was_there(tmp_path, trained):
    config, params = trained
    save_checkpoint(tmp_path / "model", params, config)
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    with files_end_at(2000), pytest.raises(OSError, match="model.safetensors could not be written: .*too large"):
        save_checkpoint(tmp_path / "model", params, config, dtype="float32")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before


# --- runs without signal


def test_a_run_without_signal_is_warned_of_once(tmp_path, capsys):
    rows_of = {"reward": 0.0, "frac_reward_zero_std": 1.0, "grad_norm": 0.0, "completions/clipped_ratio": 0.5}
    start(tmp_path, 12, PlainLoop(metrics=lambda number: rows_of))
    warned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert len(warned) == 1
    assert warned[0].startswith("warning: in each of the last 5 rollouts (mean reward 0) nothing could be learnt")


def test_stored_bytes_of_shapes():
    state = new_state(size=10)
    assert disk.stored_bytes(jax.eval_shape(lambda: state)) == disk.stored_bytes(state) == 40 + 4 + 8
    assert disk.stored_bytes({"a": np.zeros((2, 3), np.int64)}) == 48
