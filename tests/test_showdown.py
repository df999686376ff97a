"""The study of all methods, in its quick form: rows, tables, the choice of a rate, commands that make a row again."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import multiprocessing.dummy
import os
import shlex
import subprocess
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib.image
import numpy as np
import pytest
import tyro

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "experiments" / "showdown" / "main.py"
FIELDS = {"arm", "seed", "command", "sparse", "dense", "sparse_before", "dense_before", "mismatch_kl"}
FIELDS |= {"learning_rate", "steps", "seconds", "sparse_first", "dense_first", "mismatch_kl/max"}
FIELDS |= {"rollout_corr/chi2_token", "rollout_corr/eff_sample_size/end", "rollout_corr/rollout_rs_masked_fraction"}
CLOCKS = {"seconds", "cpu_seconds", "date"}


def run(arguments: list[str], folder: Path) -> None:
    """The script as a command."""
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], cwd=folder, capture_output=True, text=True)
    assert not done.returncode, done.stderr


def run_here(script: Any, arguments: list[str]) -> str:
    """Standard output of the script. Its one worker is a thread of this process, which has imported everything, and
    finds again what was compiled for earlier runs."""
    threads = types.SimpleNamespace(get_context=lambda method: multiprocessing.dummy)
    with mock.patch.object(script, "multiprocessing", threads), contextlib.redirect_stdout(io.StringIO()) as output:
        script.main(tyro.cli(script.Args, args=[*arguments, "--workers", "1"]))
    return output.getvalue()


def rows_of(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())


def numbers(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in CLOCKS}


@pytest.fixture(scope="module")
def script() -> Any:
    """The script as a module; what it does to the environment is for its own processes alone."""
    with mock.patch.dict(os.environ), mock.patch.object(sys, "path", [str(ROOT / "experiments"), *sys.path]):
        return importlib.import_module("showdown.main")


@pytest.fixture(scope="module")
def study(script: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all of a quick study."""
    folder = tmp_path_factory.mktemp("showdown") / "all"
    run_here(script, ["--quick", "--runs", str(folder)])
    return folder


def test_rows(study: Path):
    rows, grid = rows_of(study / "showdown.json"), rows_of(study / "showdown_grid.json")
    assert [(row["arm"], row["seed"]) for row in rows] == [("naive", 0), ("shadow", 0)]
    assert [(row["arm"], row["seed"]) for row in grid] == [("naive", 100)] * 2 + [("shadow", 100)] * 2
    for row in rows + grid:
        assert row.keys() >= FIELDS
        assert (row["mismatch_kl/max"] <= 1e-6) == (row["arm"] == "shadow")
    for row in rows:
        best = max((r for r in grid if r["arm"] == row["arm"]), key=lambda r: r["sparse"] + r["dense"])
        assert best["chosen"] and row["learning_rate"] == best["learning_rate"]
    assert sum(row["chosen"] for row in grid) == 2


def test_arms_of_a_seed_begin_at_one_policy(study: Path):
    naive, shadow = rows_of(study / "showdown.json")
    for kind in ("sparse_before", "dense_before"):
        assert naive[kind] == shadow[kind]
    assert naive["sparse"] != shadow["sparse"] or naive["dense"] != shadow["dense"]


def test_tables_curves_and_picture(study: Path):
    text = (study / "showdown.md").read_text()
    assert text.count("\n| naive |") == 4 and text.count("\n| shadow |") == 5
    for curve, row in zip(rows_of(study / "showdown_curves.json"), rows_of(study / "showdown.json"), strict=True):
        assert curve["arm"] == row["arm"] and curve["eval/step"] == [0, 1, 2, 4]
        assert curve["eval/sparse"][-1] == pytest.approx(row["sparse"], rel=1e-3)
        assert curve["step"] == [1, 2, 3, 4] and len(curve["grad_norm"]) == 4
    assert matplotlib.image.imread(study / "showdown.png").shape[1] > 1000


def test_the_command_of_a_row_makes_it_again(study: Path, tmp_path: Path):
    """In processes of its own, from what the command line says."""
    row = rows_of(study / "showdown.json")[1]
    program, path, *arguments = shlex.split(row["command"])
    assert (program, ROOT / path) == ("python", SCRIPT)
    run(arguments, tmp_path)
    (again,) = rows_of(tmp_path / "runs" / "showdown-again" / "showdown.json")
    assert numbers(again) == numbers(row)
    assert not rows_of(tmp_path / "runs" / "showdown-again" / "showdown_grid.json")


def test_what_is_finished_is_not_run_again(script: Any, study: Path):
    rows = rows_of(study / "showdown.json")
    lost = study / "naive" / f"lr-{rows[0]['learning_rate']}" / "seed-0" / "run.json"
    kept = {path: path.stat().st_mtime_ns for path in study.rglob("run.json") if path != lost}
    assert len(kept) == 5
    lost.unlink()
    output = run_here(script, ["--quick", "--runs", str(study)])
    assert output.count("(kept)") == 5
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    again = rows_of(study / "showdown.json")
    assert list(map(numbers, again)) == list(map(numbers, rows))
    assert again[1] == rows[1]


def test_other_settings_are_refused(script: Any, study: Path):
    (naive,) = (arm for arm in script.ARMS if arm.name == "naive")
    job = script.Job(naive, 1e-4, 100, script.Sizes(), study)
    with pytest.raises(ValueError, match="a run of the present settings.*got.*rollouts=4"):
        script.finished(job)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"arms": ("smd",)}, r"got \['smd'\]"), ({"seeds": (0, 100)}, "seeds other than those of the pilot")],
)
def test_bad_arguments(script: Any, arguments: dict[str, Any], message: str):
    with pytest.raises(SystemExit, match=message):
        script.make_plan(script.Args(**arguments))


def test_the_whole_study(script: Any):
    plan = script.make_plan(script.Args())
    assert len(plan.arms) == len({arm.name for arm in plan.arms}) == 12
    assert len(plan.rates) >= 3 and len(plan.seeds) >= 3 and not set(plan.seeds) & set(plan.pilot_seeds)
    assert plan.results == ROOT / "experiments" / "results"
    assert len({repr(arm.update) + repr(arm.sampler) for arm in plan.arms}) == 12
    assert script.make_plan(script.Args(seeds=(7,))).results == plan.runs


def test_choice_of_the_rate(script: Any):
    def pilot(*rows: tuple[float, float, float]) -> list[Any]:
        names = ("learning_rate", "sparse", "dense")
        return [script.report.Run(dict(zip(names, row, strict=True)), {}) for row in rows]

    assert script.best_rate(pilot((1e-3, 0.9, 0.1), (1e-4, 0.5, 0.6), (1e-3, 0.2, 0.6), (1e-4, 0.4, 0.5))) == 1e-4
    assert script.best_rate(pilot((1e-3, 0.5, 0.5), (1e-4, 0.5, 0.5))) == 1e-4, "the lower one of two equals"


@pytest.mark.parametrize(
    ("values", "middle", "half"),
    [
        # Two values: s = 1 / √2, s / √2 = 1 / 2, and t with one degree of freedom is 12.706.
        ((0.0, 1.0), 0.5, 12.7062 / 2),
        # Five: squared deviations 4 + 1 + 0 + 1 + 4 = 10, s² = 10 / 4, s / √5 = √0.5, and t with four is 2.776.
        ((1.0, 2.0, 3.0, 4.0, 5.0), 3.0, 2.77645 * 0.5**0.5),
        ((0.25, 0.25, 0.25), 0.25, 0.0),
    ],
)
def test_interval(script: Any, values: tuple[float, ...], middle: float, half: float):
    low, high = script.report.interval(values)
    assert (low, high) == pytest.approx((middle - half, middle + half), rel=1e-5)


def test_one_value_has_no_interval(script: Any):
    with pytest.raises(ValueError, match="expected two values or more; got 1"):
        script.report.interval([0.5])
    assert script.report.mean_cells([0.5]) == ("0.500", "-") and script.report.mean_cells([]) == ("-", "-")


def test_committed_rows_give_the_committed_tables(script: Any, tmp_path: Path):
    pilot, reported = script.report.read(ROOT / "experiments" / "results")
    script.report.write_tables(tmp_path, pilot, reported)
    text = (tmp_path / "showdown.md").read_text()
    assert text == (ROOT / "experiments" / "results" / "showdown.md").read_text()
    # 0.124 ± 0.186, computed apart from this code from the differences of the five seeds: no lead is established.
    anchor = [row for row in script.report.lead_table(reported, "tis").rows if row[0] == "shadow-anchor"]
    assert anchor[0][1:3] == ("+0.124", "-0.062 … +0.310")


def test_rows_are_read_as_they_were_written(script: Any, study: Path, tmp_path: Path):
    script.report.write(tmp_path, *script.report.read(study))
    for name in ("showdown.json", "showdown_grid.json", "showdown_curves.json", "showdown.md"):
        assert (tmp_path / name).read_text() == (study / name).read_text(), name


def history(rewards: list[float], metric: str, values: list[float]) -> list[dict[str, Any]]:
    """One evaluation before, and one after each rollout."""
    names = [name for name in importlib.import_module("showdown.report").MEASURED]
    rows: list[dict[str, Any]] = [{"step": 0, "eval/sparse": rewards[0], "eval/dense": 0.7}]
    for step, (reward, value) in enumerate(zip(rewards[1:], values, strict=True), start=1):
        rows.append({"step": step, "reward": reward, "eval/sparse": reward, "eval/dense": 0.7})
        rows[-1] |= dict.fromkeys(names, 1.0) | {metric: value}
    return rows


def test_a_fall_is_named_with_its_metrics(script: Any):
    rows = history([0.5, 0.5, 0.1, 0.2], "entropy", [2.0, 0.25, 0.5])
    row = {"arm": "shadow", "learning_rate": 1e-3, "seed": 0}
    run = script.report.Run(row, script.report.thin_curve(rows))
    (cells,) = script.report.falls(run, "pilot")
    assert cells[:5] == ("shadow", 1e-3, "0 pilot", "sparse", "0.500 → 0.200")
    assert cells[5:8] == ("1 to 2", "0.500 → 0.100", "2 → 0.25")
    upright = script.report.Run(row, script.report.thin_curve(history([0.5, 0.1, 0.48], "entropy", [1.0, 1.0])))
    assert script.report.falls(upright, "") == []


def test_falls_of_reported_runs_come_first(script: Any):
    thin = script.report.thin_curve(history([0.5, 0.1], "entropy", [1.0]))
    pilot, reported = (
        [script.report.Run({"arm": arm, "learning_rate": 1e-3, "seed": seed}, thin) for arm in ("naive", "shadow")]
        for seed in (100, 0)
    )
    rows = script.report.fall_table(pilot, reported).rows
    order = [("naive", "0"), ("shadow", "0"), ("naive", "100 pilot"), ("shadow", "100 pilot")]
    assert [(row[0], row[2]) for row in rows] == order


def ended(script: Any, arm: str, seed: int, sparse: tuple[float, float], dense: tuple[float, float]) -> Any:
    """A run with its rewards before and after, at a rate of 1e-3."""
    row = {"arm": arm, "seed": seed, "learning_rate": 1e-3, "sparse_before": sparse[0], "sparse": sparse[1]}
    return script.report.Run(row | {"dense_before": dense[0], "dense": dense[1]}, {})


def test_differences_are_paired_by_seed(script: Any):
    # The seeds are far apart and not in the same order. Of two values the interval is mean ± 12.706 · |difference| / 2.
    runs = [
        ended(script, "naive", 0, (0.25, 0.5), (0.5, 0.25)),
        ended(script, "naive", 1, (0.5, 1.0), (0.75, 0.75)),
        ended(script, "shadow", 1, (0.5, 0.875), (0.75, 1.0)),
        ended(script, "shadow", 0, (0.25, 0.625), (0.5, 0.75)),
    ]
    naive, shadow = script.report.gain_table(runs).rows
    assert naive == ("naive", "+0.375", "-1.213 … +1.963", "-0.125", "-1.713 … +1.463")  # 0.25, 0.5; -0.25, 0
    assert shadow == ("shadow", "+0.375", "+0.375 … +0.375", "+0.250", "+0.250 … +0.250")
    table = script.report.lead_table(runs, "naive")
    (row,) = table.rows
    assert row == ("shadow", "+0.000", "-1.588 … +1.588", "+0.375", "-1.213 … +1.963")  # -0.125, 0.125; 0.25, 0.5
    assert len(table.columns) == len(row)


def test_differences_of_one_seed_have_no_interval(script: Any):
    naive = ended(script, "naive", 0, (0.25, 0.5), (0.5, 0.25))
    shadow = ended(script, "shadow", 0, (0.25, 0.625), (0.5, 0.75))
    (alone,) = script.report.gain_table([shadow]).rows
    assert alone == ("shadow", "+0.375", "-", "+0.250", "-")
    (row,) = script.report.lead_table([naive, shadow], "naive").rows
    assert row == ("shadow", "+0.125", "-", "+0.500", "-")


@pytest.mark.parametrize(("chosen", "edge"), [(1e-4, " edge"), (3e-4, ""), (1e-3, " edge")])
def test_a_rate_at_an_edge_of_the_grid_is_marked(script: Any, chosen: float, edge: str):
    names, rates = ("arm", "seed", "learning_rate", "sparse", "dense"), (1e-4, 3e-4, 1e-3)
    rows = [dict(zip(names, ("shadow", 100, rate, 0.5, 0.25), strict=True)) for rate in rates]
    pilot = [script.report.Run(row, {}) for row in rows]
    reported = [script.report.Run({"arm": "shadow", "learning_rate": chosen}, {})]
    table = script.report.pilot_table(pilot, reported)
    cell = "0.375 (0.500, 0.250)"
    expected = tuple(f"→ {cell}{edge}" if rate == chosen else cell for rate in rates)
    assert table.rows == [("shadow", *expected)] and "edge: " in table.title


def test_summary(script: Any):
    rows = history([0.5, 0.4, 0.6, 0.7], "mismatch_kl", [1.0, 2.0, float("inf")])
    row = script.report.summary(rows)
    assert (row["sparse_before"], row["sparse_first"], row["sparse"], row["dense"]) == (0.5, 0.4, 0.7, 0.7)
    assert (row["grad_norm"], row["grad_norm/end"], row["grad_norm/max"]) == (1.0, 1.0, 1.0)
    assert row["mismatch_kl"] is None, "JSON has no infinity"


def test_task(script: Any):
    task, held_out = script.RunningSums("train"), script.RunningSums("evaluation", 5)
    assert len(held_out) == 5 and len(task) > 40_000
    for index in (0, 7):
        row = task[index]
        terms, total, sums = row["prompt"], 0, ""
        for digit in terms[:-1]:
            total += int(digit)
            sums += str(total)[-1]
        assert terms[-1] == "=" and len(terms) == 13 and row["answer"] == sums
    answers = ["012345678901"] * 4
    texts = ["012345678901", "01234567890", "1123456789019", ""]
    assert task.reward([""] * 4, texts, answer=answers) == pytest.approx([1.0, 11 / 12, 11 / 12, 0.0])


def test_no_row_is_in_both_splits(script: Any):
    splits = [{script.RunningSums(name)[i]["prompt"] for i in range(512)} for name in ("train", "evaluation")]
    digits = importlib.import_module("showdown.task").digits
    both = np.concatenate([digits("train"), digits("evaluation")])
    assert len(np.unique(both, axis=0)) == len(both) and len(digits("evaluation")) == 512
    assert not splits[0] & splits[1]


def test_one_token_per_character(script: Any):
    tokenizer = script.tokenizer()
    assert tokenizer.decode(tokenizer.encode("0918=", add_special_tokens=False), skip_special_tokens=True) == "0918="
    assert len(tokenizer.encode("0918=", add_special_tokens=False)) == 5 and len(tokenizer) == 13
