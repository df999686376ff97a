"""What surrounds the steps of a run: evaluations, early stop, the best checkpoint, settings, what a resume needs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from smd_jax.runs import checkpoint
from smd_jax.runs.machine import machine
from smd_jax.runs.objective import Best, Objective
from smd_jax.runs.resume_settings import split_fields, split_settings
from smd_jax.runs.run import train
from smd_jax.runs.run_config import RunConfig
from smd_jax.runs.run_folder import check_directory
from smd_jax.train.grpo import GRPOConfig
from tests.bitwise import assert_bitwise_equal
from tests.plain_loop import CONFIG, PlainLoop, new_state
from tests.plain_runs import CURVE, DENSE, DiedError, Evaluations, dies_at, never, rows, saved, start

GRPO = GRPOConfig(prompts_per_step=2, group_size=4, prompt_width=9, policy=CONFIG.policy, rollout=CONFIG.rollout)


# --- evaluations


def test_start_interval_and_end_are_evaluated(tmp_path):
    evaluate = Evaluations(CURVE)
    start(tmp_path, 7, evaluate_every=2, evaluate=evaluate)
    assert evaluate.asked == [0, 2, 4, 6, 7]
    assert [row.get(DENSE) for row in rows(tmp_path)] == [None, 0.6, None, 0.5, None, 0.6, 0.1]
    assert rows(tmp_path, "evaluations.jsonl") == [{"step": n, DENSE: CURVE[n]} for n in evaluate.asked]
    start(tmp_path / "without an interval", 1, evaluate=never)
    assert saved(tmp_path / "without an interval") == [1]


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


def test_a_resume_says_where_it_goes_on(tmp_path, capsys):
    with pytest.raises(DiedError):
        start(tmp_path, 9, PlainLoop(begins=dies_at(7)), checkpoint_every=4)
    start(tmp_path, 9, resume=True, checkpoint_every=4)
    assert "resumes after 4 of 9 rollouts; 3 later ones are repeated" in capsys.readouterr().out


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


class Followed(PlainLoop):
    """Keeps the numbers of the rollouts that may be the last, as a loop asks once the rollout is there."""

    last_ones: list[int] = []

    def step(self, state: Any, follows: Callable[[], bool] = lambda: True) -> Any:
        if not follows():
            self.last_ones.append(int(state.step))
        return super().step(state, follows)


def test_the_last_rollout_is_known_before_its_update(tmp_path, monkeypatch):
    """Its completions and masks are kept."""
    found: list[int] = []
    monkeypatch.setattr(Followed, "last_ones", found)
    start(tmp_path, 7, Followed(), evaluate_every=2, evaluate=Evaluations(CURVE))
    assert found == [6]


def test_the_best_of_an_objective_by_hand():
    values = [float("nan"), 0.5, 0.4, 0.61, float("nan"), 0.6]
    for maximize, expected in ((True, [0, 2, 2, 4, 4, 4]), (False, [0, 2, 3, 3, 3, 3])):
        objective, best, seen = Objective("x", maximize), Best(), []
        for done, value in enumerate(values, start=1):
            best = best.after(objective, done, {"x": value}).after(objective, done, {"another": 9.0})
            seen.append(best.at)
        assert seen == expected


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
        return train(loop, new_state(), RunConfig(steps=steps), tmp_path, resume=True)

    go(1)
    assert checkpoint.saved_config(tmp_path / "checkpoints") == split_settings(CONFIG)[0]
    go(2, decode_rows=2)
    assert "resumed with another setting, decode_rows: was null, is now 2" in capsys.readouterr().out
    with pytest.raises(checkpoint.OtherConfigError, match="seed: expected 0, got 1"):
        go(3, seed=1)


def test_taking_out_what_is_not_there():
    assert split_fields({"a": {"b": 1, "c": 2}}, ["a.b"]) == ({"a": {"c": 2}}, {"a.b": 1})
    with pytest.raises(ValueError, match="expected a setting 'a.d'; got"):
        split_fields({"a": {"b": 1}}, ["a.d"])


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
    assert "the run continues from step 4" in said
    assert_bitwise_equal(state, whole)
    assert rows(run) == rows(tmp_path / "whole") and saved(run) == [2, 4, 9]


def test_what_a_run_stands_on_is_compared(tmp_path, capsys, monkeypatch):
    start(tmp_path, 1)
    start(tmp_path, 2, resume=True)
    assert "resumed" not in capsys.readouterr().out
    monkeypatch.setattr("smd_jax.runs.run.machine", lambda mesh: machine(mesh) | {"jaxlib": "0.1"})
    start(tmp_path, 3, resume=True)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("resumed")]
    assert line.startswith("resumed elsewhere, which may change rounding or rows, jaxlib: was ") and line.endswith(
        'now "0.1"'
    )


# --- runs without signal


def test_a_run_without_signal_is_warned_of_once(tmp_path, capsys):
    rows_of = {"reward": 0.0, "frac_reward_zero_std": 1.0, "grad_norm": 0.0, "completions/clipped_ratio": 0.5}
    start(tmp_path, 12, PlainLoop(metrics=lambda number: rows_of))
    warned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert len(warned) == 1
    assert warned[0].startswith("warning: in each of the last 5 rollouts nothing could be learned")
