"""Runs: evaluations, objectives, settings at a resume, damaged checkpoints, warnings."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from smd_jax.devices import processes
from smd_jax.runs import checkpoint
from smd_jax.runs.run import train
from smd_jax.runs.run_config import Objective, RunConfig
from smd_jax.runs.run_folder import check_progress
from smd_jax.runs.run_log import ROLLOUTS, best_rollout, better, symptoms
from smd_jax.runs.settings import machine, split_settings
from tests.bitwise import assert_bitwise_equal
from tests.plain_loop import CONFIG, PlainLoop, new_state
from tests.plain_runs import CURVE, DENSE, DiedError, Evaluations, dies_at, never, rows, saved, start

# --- evaluations


class LastRollouts(PlainLoop):
    """Records the rollouts that no other follows."""

    recorded: list[int] = []

    def step(self, state: Any, follows: Callable[[], bool] = lambda: True) -> Any:
        if not follows():
            self.recorded.append(int(state.step))
        return super().step(state, follows)


def test_start_interval_and_end_are_evaluated(tmp_path, monkeypatch):
    """A step knows before its update whether it is the last, whose completions and masks are kept."""
    monkeypatch.setattr(LastRollouts, "recorded", [])
    evaluate = Evaluations(CURVE)
    start(tmp_path, 7, LastRollouts(), evaluate_every=2, evaluate=evaluate)
    assert evaluate.asked == [0, 2, 4, 6, 7] and LastRollouts.recorded == [6]
    assert not any(DENSE in row for row in rows(tmp_path))
    assert rows(tmp_path, "evaluations.jsonl") == [{"step": n, DENSE: CURVE[n]} for n in evaluate.asked]


@pytest.mark.parametrize(
    ("options", "message"), [({"evaluate": never}, "0 with evaluate"), ({"evaluate_every": 2}, "2 without evaluate")]
)
def test_evaluate_and_evaluate_every_need_each_other(tmp_path, options, message):
    with pytest.raises(ValueError, match=f"expected both evaluate and .* or neither; got .*{message}$"):
        start(tmp_path / "run", 1, PlainLoop(begins=never), **options)
    assert not (tmp_path / "run").exists()


def test_processes_must_agree_on_evaluate_and_watch(tmp_path, monkeypatch):
    """Both are collective: without one process the others would hang."""
    other = {"evaluate": False, "watch": True, "watch_every": 2}

    def gather_json(value: Any) -> list[Any]:
        return [value, value | other if isinstance(value, dict) else value]

    loop = PlainLoop(begins=never)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "gather_json", gather_json)
    with pytest.raises(processes.OtherProcessError) as caught:
        start(tmp_path / "run", 2, loop, evaluate_every=1, evaluate=Evaluations(CURVE))
    assert str(caught.value).splitlines()[1:] == [
        "  process 1: evaluate: expected true, got false",
        "  process 1: watch: expected false, got true",
        "  process 1: watch_every: expected 1, got 2",
    ]


class DyingEvaluations(Evaluations):
    """Raises `DiedError` in the first evaluation after `last` rollouts."""

    def __init__(self, curve: dict[int, float], last: int) -> None:
        super().__init__(curve)
        self.last = last

    def __call__(self, state: Any) -> dict[str, float]:
        metrics = super().__call__(state)
        if int(state.step) == self.last:
            self.last = -1
            raise DiedError
        return metrics


def test_without_a_checkpoint_the_start_is_evaluated_again(tmp_path):
    """Settings are not compared then, so the model may differ."""
    with pytest.raises(DiedError):
        start(tmp_path, 4, PlainLoop(begins=dies_at(1)), evaluate_every=2, evaluate=Evaluations(CURVE))
    other = {step: value + 1 for step, value in CURVE.items()}
    start(tmp_path, 4, resume=True, evaluate_every=2, evaluate=Evaluations(other))
    assert rows(tmp_path, "evaluations.jsonl") == [{"step": step, DENSE: other[step]} for step in (0, 2, 4)]


@pytest.mark.parametrize("last", [4, 9])
def test_an_interrupted_evaluation_is_repeated_and_no_rollout_is_lost(tmp_path, last):
    options: dict[str, Any] = {"evaluate_every": 2, "checkpoint_every": 4}
    whole = start(tmp_path / "whole", 9, evaluate=Evaluations(CURVE), **options)
    evaluate = DyingEvaluations(CURVE, last)
    parts = tmp_path / "parts"
    with pytest.raises(DiedError):
        start(parts, 9, evaluate=evaluate, **options)
    assert saved(parts)[-1] == last == len(rows(parts)), "saved before the evaluation"
    rollouts = list[int]()
    state = start(parts, 9, PlainLoop(begins=rollouts.append), resume=True, evaluate=evaluate, **options)
    assert_bitwise_equal(state, whole)
    assert rollouts == list(range(last, 9)) and evaluate.asked.count(last) == 2
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert rows(parts, name) == rows(tmp_path / "whole", name)
    # Existing evaluations are not repeated.
    start(parts, 10, resume=True, evaluate=Evaluations({10: 0.3}), **options)
    assert [row[DENSE] for row in rows(parts, "evaluations.jsonl")][-2:] == [CURVE[9], 0.3]


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
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        shutil.copytree(tmp_path, tmp_path / "copy")
        (tmp_path / "copy" / name).write_text('{"step": 0}\n\n{"step": 2}\n')
        with pytest.raises(ValueError, match=rf"{name}, line 2: expected a JSON object"):
            check_progress(tmp_path / "copy", True, RunConfig(steps=12))
        shutil.rmtree(tmp_path / "copy")


def test_a_resumed_run_does_not_evaluate_its_start_again(tmp_path):
    whole = Evaluations(CURVE)
    start(tmp_path / "whole", 9, evaluate_every=2, evaluate=whole)

    evaluate = Evaluations(CURVE)
    options: dict[str, Any] = {"evaluate_every": 2, "evaluate": evaluate, "checkpoint_every": 4, "resume": True}
    for number in (5, 7):
        with pytest.raises(DiedError):
            start(tmp_path / "parts", 9, PlainLoop(begins=dies_at(number)), **options)
    start(tmp_path / "parts", 9, **options)
    # Stopped after 5 and after 7 rollouts; saved after 4.
    assert evaluate.asked == [0, 2, 4, 6, 6, 8, 9]
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert rows(tmp_path / "parts", name) == rows(tmp_path / "whole", name)


# --- the objective


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 0}, "expected steps >= 1, a whole number .*; got 0"),
        ({"checkpoint_every": -1}, "expected checkpoint_every >= 0.*; got -1"),
        ({"evaluate_every": -2}, "expected evaluate_every >= 0.*; got -2"),
        ({"keep": 0}, "expected keep >= 1.*; got 0"),
    ],
)
def test_invalid_run_configs_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(**{"steps": 1, **wrong})


def test_the_best_rollout_by_hand():
    values = [float("nan"), 0.5, 0.4, 0.61, float("nan"), 0.6]
    for maximize, expected in ((True, [0, 2, 2, 4, 4, 4]), (False, [0, 2, 3, 3, 3, 3])):
        objective, best, seen = Objective("x", maximize), None, []
        for done, value in enumerate(values, start=1):
            best = better(better(best, objective, done, {"x": value}), objective, done, {"another": 9.0})
            seen.append(0 if best is None else best.done)
        assert seen == expected
        assert better(None, objective, 0, {"x": 0.5}) is None, "the start has no checkpoint"


def test_the_best_checkpoint_is_kept_with_the_newest(tmp_path):
    options: dict[str, Any] = {
        "evaluate_every": 2,
        "evaluate": Evaluations(CURVE),
        "objective": Objective(DENSE),
        "checkpoint_every": 1,
        "keep": 2,
    }
    start(tmp_path / "run", 7, **options)
    assert saved(tmp_path / "run") == [2, 6, 7]
    # A resumed run reads the best from the rows; a better evaluation replaces it.
    start(tmp_path / "run", 8, resume=True, **options)
    assert saved(tmp_path / "run") == [2, 7, 8]
    start(tmp_path / "run", 9, resume=True, **options)
    assert saved(tmp_path / "run") == [8, 9]
    best = checkpoint.restore(tmp_path / "run" / "checkpoints", new_state(), config=CONFIG, step=8).state
    assert_bitwise_equal(best, start(tmp_path / "eight", 8))
    # The best is saved even if no checkpoint is due.
    options |= {"checkpoint_every": 0, "keep": 1}
    start(tmp_path / "once", 7, **options)
    assert saved(tmp_path / "once") == [2, 7]
    # The start, which has no checkpoint, does not count.
    options["evaluate"] = Evaluations({0: 0.9, 2: 0.5, 4: 0.3, 6: 0.4})
    start(tmp_path / "worse", 6, **options)
    assert saved(tmp_path / "worse") == [2, 6]


def test_an_objective_added_at_a_resume(tmp_path):
    """The best is chosen among the checkpoints that still exist."""
    start(tmp_path, 4, evaluate_every=2, evaluate=Evaluations({0: 0.1, 2: 0.9, 4: 0.2}), keep=1, checkpoint_every=1)
    assert saved(tmp_path) == [4]
    later = Evaluations({6: 0.5, 8: 0.3})
    start(tmp_path, 8, resume=True, evaluate_every=2, evaluate=later, objective=Objective(DENSE), keep=1)
    assert saved(tmp_path) == [6, 8]
    best = best_rollout(tmp_path, Objective(DENSE))
    assert best is not None and best.done == 6, "rollout 2 was better, but its checkpoint was deleted"


def test_an_unknown_objective_is_refused(tmp_path):
    """Checked after the first rollout with an optimizer step: rollouts without signal have fewer metrics."""
    with pytest.raises(ValueError, match="expected evaluations .* for the objective 'eval/dense/reward'; got none"):
        start(tmp_path / "a", 2, PlainLoop(begins=never), objective=Objective(DENSE))

    def metrics(number: int) -> dict[str, float]:
        return {"reward": 0.0} | ({} if number < 2 else {"grad_norm": 1.0, "entropy": float(number)})

    options: dict[str, Any] = {
        "loop": PlainLoop(metrics=metrics),
        "evaluate_every": 9,
        "evaluate": lambda state: {DENSE: 1.0},
    }
    assert int(start(tmp_path / "entropy", 4, objective=Objective("entropy"), **options).step) == 4
    for number, name in enumerate(("eval/dens/reward", "rewards")):
        run = tmp_path / str(number)
        with pytest.raises(ValueError, match=f"metric among .*: entropy, eval/dense/reward.*; got '{name}'"):
            start(run, 4, objective=Objective(name), **options)
        assert len(rows(run)) == 3 and saved(run) == [3], "finished rollouts are kept"


def test_an_objective_added_at_a_resume_waits_for_its_evaluation(tmp_path):
    options: dict[str, Any] = {"loop": PlainLoop(metrics=lambda number: {"grad_norm": 1.0}), "resume": True}
    start(tmp_path, 1, **options)
    options |= {"evaluate_every": 4, "evaluate": Evaluations(CURVE)}
    start(tmp_path, 6, objective=Objective(DENSE), **options)
    assert rows(tmp_path, "evaluations.jsonl") == [{"step": step, DENSE: CURVE[step]} for step in (4, 6)]
    with pytest.raises(ValueError, match="metric among .*; got 'eval/dens/reward'"):
        start(tmp_path, 9, objective=Objective("eval/dens/reward"), **options)
    assert len(rows(tmp_path)) == 9, "the rollout after the evaluation at 8"


# --- settings at a resume


def test_a_resume_prints_changed_settings_and_its_first_rollout(tmp_path, capsys, monkeypatch):
    with pytest.raises(DiedError):
        start(tmp_path, 9, PlainLoop(begins=dies_at(7)), checkpoint_every=4, metadata={"memory": "80GiB"})
    capsys.readouterr()
    monkeypatch.setattr("smd_jax.runs.run.machine", lambda mesh: machine(mesh) | {"jaxlib": "0.1"})
    options: dict[str, Any] = {"resume": True, "checkpoint_every": 4, "metadata": {"memory": "40GiB"}}
    start(tmp_path, 9, **options)
    first, jaxlib, memory = [x for x in capsys.readouterr().out.splitlines() if x.startswith("resume")][::-1]
    assert first == "resumes after 4 of 9 rollouts; 3 later ones are repeated"
    assert memory == 'resumed with another setting, memory: was "80GiB", is now "40GiB"'
    assert jaxlib.startswith("resumed with another setting, machine.jaxlib: was ") and jaxlib.endswith('now "0.1"')
    start(tmp_path, 10, **options)
    output = capsys.readouterr().out
    assert "resumed with" not in output and "not compared" not in output


def test_a_resume_without_a_config_prints_that_it_is_not_compared(tmp_path, capsys):
    train(PlainLoop(), new_state(), RunConfig(steps=1), tmp_path, resume=True)
    assert "not compared" not in capsys.readouterr().out, "nothing is resumed"
    train(PlainLoop(), new_state(), RunConfig(steps=2), tmp_path, resume=True)
    assert capsys.readouterr().out.count("not compared with the earlier run: model, task, optimizer") == 1


def test_a_resume_without_a_config_compares_the_config_of_the_loop(tmp_path, capsys):
    def resume(steps: int, **changed: Any) -> Any:
        loop = replace(PlainLoop(), config=replace(CONFIG, **changed))
        return train(loop, new_state(), RunConfig(steps=steps), tmp_path, resume=True)

    resume(1)
    checkpoint.check_config(tmp_path / "checkpoints", split_settings(CONFIG)[0])
    resume(2, decode_rows=2)
    assert "resumed with another setting, decode_rows: was null, is now 2" in capsys.readouterr().out
    with pytest.raises(checkpoint.OtherConfigError, match="seed: expected 0, got 1"):
        resume(3, seed=1)


# --- the step of the state


@pytest.mark.parametrize("resume", [False, True])
def test_a_new_run_needs_a_state_at_step_0(tmp_path, resume):
    first = start(tmp_path / "first", 3)
    with pytest.raises(ValueError, match=r"expected a state at step 0.*; got one at step 3\. Begin with init_state"):
        start(tmp_path / "second", 5, PlainLoop(begins=never), first, resume=resume)
    assert not (tmp_path / "second").exists()
    again = first.replace(step=jnp.zeros((), jnp.int32))  # as the message says
    assert int(start(tmp_path / "second", 5, state=again).step) == len(rows(tmp_path / "second")) == 5
    # With a checkpoint, the given state is ignored.
    assert int(start(tmp_path / "second", 6, state=first, resume=True).step) == 6


def test_a_resume_with_other_steps_per_rollout_is_refused(tmp_path):
    start(tmp_path, 4, checkpoint_every=1, config={"mine": 1})
    loop = PlainLoop(config=replace(CONFIG, prompts_per_step=2, minibatches=2), begins=never)
    with pytest.raises(ValueError, match="with 2 optimizer steps .*; got 4 steps after 4 rollouts"):
        start(tmp_path, 6, loop, resume=True, config={"mine": 1})
    assert saved(tmp_path) == [2, 3, 4] and len(rows(tmp_path)) == 4


# --- damaged checkpoints


def truncate_files(checkpoint_folder: Path):
    for file in checkpoint_folder.rglob("*"):
        if file.is_file() and file.name != "checksums.json":
            file.write_bytes(file.read_bytes()[:-1])


def test_a_damaged_checkpoint_falls_back_to_the_last_good_one(tmp_path, capsys):
    whole = start(tmp_path / "whole", 9)
    run = tmp_path / "run"
    start(run, 6, checkpoint_every=2)
    truncate_files(run / "checkpoints" / "6")
    with pytest.raises(checkpoint.OtherConfigError):
        start(run, 9, resume=True, config=replace(CONFIG, seed=1))
    assert saved(run) == [2, 4, 6], "a refused resume changes nothing"
    capsys.readouterr()
    state = start(run, 9, resume=True)
    output = capsys.readouterr().out
    assert f"warning: checkpoint 6 in {run / 'checkpoints'} cannot be read" in output
    assert "the run continues from step 4" in output
    assert_bitwise_equal(state, whole)
    assert rows(run) == rows(tmp_path / "whole") and saved(run) == [2, 4, 9]


# --- runs without signal


def test_a_run_without_signal_warns_once(tmp_path, capsys):
    metrics = {"reward": 0.0, "frac_reward_zero_std": 1.0, "grad_norm": 0.0, "completions/clipped_ratio": 0.5}
    start(tmp_path, 12, PlainLoop(metrics=lambda number: dict(metrics)))
    (warning,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert warning.startswith("warning: in each of the last 5 rollouts nothing could be learned")


GOOD = {"frac_reward_zero_std": 0.25, "grad_norm": 1.0, "reward_std": 0.3, "completions/clipped_ratio": 0.89}
FLAT = GOOD | {"frac_reward_zero_std": 1.0}
CRITIC = {"critic/values/mean": 0.0, "reward_std": 0.2}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (GOOD | {"rollout/entropy": 0.011}, []),
        (FLAT, ["nothing could be learned"]),
        (GOOD | {"grad_norm": 0.0}, ["nothing could be learned"]),
        (FLAT | {"completions/clipped_ratio": 0.9}, ["nothing could be learned", "nine of ten completions"]),
        (GOOD | {"rollout/entropy": 0.009}, ["the entropy"]),
        # Groups of one have no spread.
        (FLAT | CRITIC, []),
        (FLAT | CRITIC | {"reward_std": 0.0}, ["nothing could be learned"]),
    ],
)
def test_symptoms_by_hand(row, expected):
    warned = set[str]()
    assert symptoms([row] * (ROLLOUTS - 1), warned) == []
    assert symptoms([{}] + [row] * (ROLLOUTS - 1), warned) == []
    found = symptoms([row] * ROLLOUTS, warned)
    assert len(found) == len(expected) and all(words in line for words, line in zip(expected, found, strict=True))
    assert symptoms([row] * ROLLOUTS, warned) == []
