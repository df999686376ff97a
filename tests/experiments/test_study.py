"""Code that the studies share: problems, the grid with its pilot, finished runs, intervals."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import room
from learned_eviction import GATE_SPEED, GATES
from lib import grid, runs
from lib.arms import Arm, arms_of
from lib.command import QUICK, StudyArgs, grid_of, narrowed
from lib.files import RESULTS, read_rows, write_rows
from lib.grid import Cell, Grid, best_rate, searched_rate
from lib.intervals import estimate
from lib.lookup import Lookup
from lib.problems import PROBLEMS, WALK_EDGES, WALK_ENDS, CopySums, Sorting, Walk, problem_of, tokenizer
from lib.runs import DECODINGS, Job
from lib.samplers import sampler_of
from lib.starts import StartLevel, examples_of
from smd_jax.message.gate import EVICTION_GATE
from smd_jax.model.decoder import Decoder
from smd_jax.text.prompts import eos_token_id
from smd_jax.train.evaluation import Decode
from tests.paths import ROOT

pytestmark = pytest.mark.study

CELL = Cell(Sorting(4), sampler_of("tova-heads:4+1"), arms_of(("untrained", "naive", "shadow")), (0,))
# From a start after one step.
SIZES = replace(QUICK, start=StartLevel(0.0, rows=16, every=1))
CLOCKS = {"cpu_seconds", "date"}


class LocalPool:
    """Runs jobs in this process, which keeps its compiled programs."""

    def __init__(self, workers: int) -> None:
        pass

    def __enter__(self) -> "LocalPool":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def imap_unordered(self, call: Any, work: list[Any]) -> Any:
        return map(call, work)


def make_grid(folder: Path, **options: Any) -> Grid:
    settings = {"cells": (CELL,), "rates": (1e-4, 1e-3), "pilot_seeds": (100,), "clean": False} | options
    return Grid("experiments/study.py", sizes=SIZES, runs=folder / "study", results=folder / "rows.json", **settings)


def run_here(study: Grid) -> list[dict[str, Any]]:
    with mock.patch.object(grid, "one_core_each", LocalPool), mock.patch.object(grid, "cache_programs", lambda: None):
        return study.run()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has the runs and rows of a quick study."""
    path = tmp_path_factory.mktemp("study")
    run_here(make_grid(path))
    return path


def test_rows_of_a_study(folder: Path):
    rows = read_rows(folder / "rows.json")
    reported = {row["arm"]: row for row in rows if not row["pilot"]}
    assert set(reported) == {"untrained", "naive", "shadow"} and len(rows) == 7
    for row in rows:
        assert row["task"] == "sorting-4" and row["policy"] == "tova-heads" and row["budget"] == 4
        assert row["commit"] and row["cpu"]
        assert row["command"].startswith("python experiments/study.py --tasks sorting-4")
    for kind in DECODINGS:
        assert len({row[f"{kind}_before"] for row in reported.values()}) == 1, "arms of a seed share their start"
        assert reported["untrained"][kind] == reported["untrained"][f"{kind}_before"]
    assert reported["shadow"]["mismatch_kl"] <= 1e-6 < reported["naive"]["mismatch_kl"]
    assert [point["step"] for point in reported["shadow"]["curve"]] == [0, 1, 2]
    assert reported["shadow"]["curve"][-1]["sparse"] == reported["shadow"]["sparse"]
    for arm in ("naive", "shadow"):
        means = {
            row["learning_rate"]: row["sparse_greedy"] + row["dense_greedy"]
            for row in rows
            if row["pilot"] and row["arm"] == arm
        }
        assert reported[arm]["learning_rate"] == best_rate(means)


def test_finished_runs_are_not_repeated(folder: Path):
    with mock.patch.object(runs, "execute", side_effect=AssertionError("expected no run")):
        run_here(make_grid(folder))
    lost = next((folder / "study").rglob("shadow/lr-*/seed-0/run.json"))
    before = json.loads(lost.read_text())["row"]
    lost.unlink()
    run_here(make_grid(folder))
    after = json.loads(lost.read_text())["row"]
    assert {name: value for name, value in after.items() if name not in CLOCKS} == {
        name: value for name, value in before.items() if name not in CLOCKS
    }, "equal jobs make equal rows"


def test_a_study_resumes_from_its_rows_on_another_machine(folder: Path, tmp_path: Path):
    rows = read_rows(folder / "rows.json")
    write_rows(tmp_path / "rows.json", rows)
    with mock.patch.object(runs, "execute", side_effect=AssertionError("expected no run")):
        assert run_here(make_grid(tmp_path)) == run_here(make_grid(folder))
    write_rows(tmp_path / "others" / "rows.json", [row | {"settings": "0" * 16} for row in rows])
    repeated = mock.patch.object(runs, "execute", side_effect=InterruptedError)  # rows of other settings do not count
    with repeated, pytest.raises(InterruptedError):
        run_here(make_grid(tmp_path / "others"))


def test_rows_of_pilots_beyond_the_first_rates_count_on_another_machine(folder: Path, tmp_path: Path):
    """Otherwise their arms would have no rate on another machine, and their reported seeds would never run."""
    pilots = [row for row in read_rows(folder / "rows.json") if row["pilot"]]
    better = [row | dict.fromkeys(DECODINGS, row["learning_rate"]) for row in pilots]
    write_rows(tmp_path / "rows.json", better)
    study = make_grid(tmp_path, first_rates=(1e-4,), minutes=0.0)
    run_here(study)
    for arm in CELL.arms[1:]:
        assert set(study.chosen_rates(CELL, arm)) == {1e-3}


def test_runs_of_other_settings_are_refused(folder: Path):
    job = Job(CELL.problem, CELL.sampler, CELL.arms[1], 1e-4, 100, True, replace(SIZES, rollouts=3))
    with pytest.raises(ValueError, match="a run of the present settings.*got.*rollouts=2"):
        runs.kept_row(job, folder / "study")


def test_committed_rows_have_the_present_settings():
    """Otherwise the study of room and time would run all of them again."""
    for row in read_rows(RESULTS / "room"):
        sampler = sampler_of(f"{row['policy']}:{row['budget']}+{row['buffer']}")
        arm, rate, seed = arms_of((row["arm"],))[0], row["learning_rate"], row["seed"]
        job = Job(problem_of(row["task"]), sampler, arm, rate, seed, row["pilot"], room.SIZES)
        assert job.identity["settings"] == row["settings"], f"the settings of {arm.name} have another text"


def test_default_options_are_not_in_the_settings():
    job = CELL.job(CELL.arms[2], 1e-4, 0, QUICK)
    assert "teacher" not in job.settings and "visibility='shadow'" in job.settings


def test_without_a_criterion_every_rate_is_reported(tmp_path: Path):
    study = make_grid(tmp_path, criteria=())
    assert not list(study.pilot_jobs(CELL))
    jobs = [(job.arm.name, job.learning_rate, job.pilot) for job in study.reported_jobs(CELL)]
    assert jobs == [("untrained", 1e-4, False)] + [
        (arm, rate, False) for arm in ("naive", "shadow") for rate in (1e-4, 1e-3)
    ]


def test_pilots_of_another_study_count(folder: Path, tmp_path: Path):
    """The reported rows of the other study do not."""
    study = make_grid(tmp_path, pilots_from=folder / "rows.json", minutes=0.0)
    run_here(study)
    pilots = [row for row in read_rows(folder / "rows.json") if row["pilot"]]
    assert study.collect() == pilots and pilots
    chosen = {arm: study.chosen_rates(CELL, arm) for arm in CELL.arms}
    assert chosen == {arm: make_grid(folder).chosen_rates(CELL, arm) for arm in CELL.arms}


def test_no_job_begins_after_the_time_limit(tmp_path: Path):
    with mock.patch.object(runs, "execute", side_effect=AssertionError("expected no run")):
        assert not run_here(make_grid(tmp_path, cells=(replace(CELL, arms=CELL.arms[1:]),), minutes=0.0))


def test_an_arm_waits_for_its_pilot(tmp_path: Path):
    study = make_grid(tmp_path)
    assert [job.arm.name for job in study.reported_jobs(CELL)] == ["untrained"]
    assert len(list(study.pilot_jobs(CELL))) == 4, "an untrained arm has no rate to choose"


def test_rows_of_other_seeds_are_kept(folder: Path, tmp_path: Path):
    rows = read_rows(folder / "rows.json")
    others = [row | {"seed": 7} for row in rows if not row["pilot"]]
    write_rows(folder / "rows.json", others)
    make_grid(folder).collect()
    assert len(read_rows(folder / "rows.json")) == len(others) + len(rows)


def test_pilot_seeds_are_not_reported(tmp_path: Path):
    with pytest.raises(ValueError, match=r"expected seeds other than those of the pilot, \(100,\); got \[100\]"):
        make_grid(tmp_path, cells=(replace(CELL, seeds=(0, 100)),))


def test_the_best_rate_is_the_lower_of_two_equal_ones():
    assert best_rate({1e-3: 0.5, 1e-4: 0.5}) == 1e-4
    assert best_rate({1e-4: 0.4, 1e-3: 0.5}) == 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arms": ("smd",)}, r"expected arms of \['naive', 'shadow', 'untrained'\]; got \['smd'\]"),
        ({"tasks": ("sorting-6",)}, r"expected tasks of \['sorting-4', 'sorting-5'\]; got \['sorting-6'\]"),
        ({"samplers": ("h2o:5+1",)}, r"expected samplers of \['h2o:4\+1', 'tova-heads:4\+1'\]; got \['h2o:5\+1'\]"),
        ({"tasks": ("sorting-4",), "samplers": ("h2o:4+1",)}, r"a cell of \['sorting-4 under tova-heads:4\+1', 's"),
    ],
)
def test_unknown_arms_tasks_and_samplers_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        narrowed(StudyArgs(**options), [CELL, replace(CELL, problem=Sorting(5), sampler=sampler_of("h2o:4+1"))])


def test_a_part_of_a_study_leaves_the_committed_rows_alone():
    whole = grid_of(StudyArgs(), "map", [CELL], (1e-4,), QUICK)
    part = grid_of(StudyArgs(seeds=(7,)), "map", [CELL], (1e-4,), QUICK)
    assert whole.results == ROOT / "experiments" / "results" / "map.json"
    assert part.results == ROOT / "runs" / "map" / "map.json" and part.cells[0].seeds == (7,)


@pytest.mark.parametrize("arm", arms_of(("anchor-then-shadow", "quantised-cache")), ids=lambda arm: arm.name)
def test_exact_arms_run(arm: Arm, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Phases share prompts, curve and parameters. The run raises at a mismatch of sampler and learner."""
    # One program instead of four.
    monkeypatch.setattr(runs, "decodings", lambda policy: tuple(Decode(name, policy) for name in DECODINGS))
    row = runs.execute(Job(CELL.problem, CELL.sampler, arm, 1e-3, 0, False, replace(SIZES, last=2)), folder / "arms")
    assert [point["step"] for point in row["curve"]] == [0, 1, 2] and row["mismatch_kl"] <= 1e-6
    assert row["sparse"] == pytest.approx(np.mean([point["sparse"] for point in row["curve"][-2:]]), rel=1e-5)


# --- rates


def run_pilot(folder: Path, rewards: dict[float, tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Returns the rates that a pilot with these sparse and dense rewards runs, and those that it chooses."""
    study = make_grid(folder, rates=tuple(rewards), first_rates=(1e-4, 3e-4, 1e-3), criteria=(("sparse",), ("dense",)))
    ran: list[float] = []
    while missing := [job for job in study.pilot_jobs(CELL) if runs.kept_row(job, study.runs) is None]:
        for job in missing:
            sparse, dense = rewards[job.learning_rate]
            runs.keep(job, study.runs, job.identity | {"sparse": sparse, "dense": dense})
        ran += [job.learning_rate for job in missing if job.arm.name == "shadow"]
    return ran, study.chosen_rates(CELL, CELL.arms[-1])


@pytest.mark.parametrize(
    ("best", "tried"),
    [(3, [2, 3, 4]), (1, [0, 1, 2, 3, 4]), (0, [0, 1, 2, 3, 4]), (5, [2, 3, 4, 5, 6]), (6, [2, 3, 4, 5, 6])],
)
def test_a_search_widens_until_the_best_rate_is_inside_or_none_is_left(best: int, tried: list[int]):
    asked: set[float] = set()

    def reward(rate: float) -> float:
        asked.add(rate)
        return -abs(rate - best)

    assert searched_rate(reward, range(7), [2, 3, 4]) == best
    assert sorted(asked) == tried


def test_a_pilot_widens_until_no_best_rate_is_at_the_edge(tmp_path: Path):
    inside = {3e-5: (9.0, 9.0), 1e-4: (0.1, 0.2), 3e-4: (0.3, 0.3), 1e-3: (0.2, 0.1), 3e-3: (9.0, 9.0)}
    assert run_pilot(tmp_path / "inside", inside) == ([1e-4, 3e-4, 1e-3], [3e-4, 3e-4])
    edge = {1e-5: (0.0, 0.1), 3e-5: (0.0, 0.4), 1e-4: (0.1, 0.3), 3e-4: (0.3, 0.2), 1e-3: (0.4, 0.1), 3e-3: (0.5, 0.0)}
    ran, rates = run_pilot(tmp_path / "edge", edge)
    assert ran == [1e-4, 3e-4, 1e-3, 3e-5, 3e-3, 1e-5] and rates == [3e-3, 3e-5]


# --- intervals


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
def test_interval(values: tuple[float, ...], middle: float, half: float):
    interval = estimate(values)
    assert (interval.mean, interval.half) == pytest.approx((middle, half), rel=1e-5)
    assert interval.established == (abs(middle) > half)


def test_two_seeds_establish_nothing():
    """Two equal differences have an interval of width 0."""
    assert estimate([0.5, 0.5]).half == 0 and not estimate([0.5, 0.5]).established
    assert estimate([0.5, 0.5, 0.51]).established


def test_one_value_has_no_interval():
    assert math.isnan(estimate([0.5]).half) and not estimate([0.5]).established
    with pytest.raises(ValueError, match="got none"):
        estimate([])


# --- problems


@pytest.mark.parametrize("kind", [kind for kind in PROBLEMS.values() if kind is not Lookup])  # see test_agents.py
def test_a_right_answer_has_reward_1_and_fits(kind: Any):
    problem = kind(9)
    rows = problem.rows("train")
    for index in (0, 1, 77):
        row = rows[index]
        ids = tokenizer().encode(row["prompt"] + row["answer"], add_special_tokens=False)
        assert len(ids) == problem.prompt_width + problem.response_width - 1  # the end of sequence comes on top
        assert problem.grade(row["prompt"], row["answer"], row["answer"]) == 1.0
        assert problem.grade(row["prompt"], row["answer"] + "5", row["answer"]) == 1.0
        assert problem.grade(row["prompt"], "", row["answer"]) == 0.0
        wrong = "=" + row["answer"][1:]
        assert 0.7 < problem.grade(row["prompt"], wrong, row["answer"]) < 1.0
    assert problem_of(problem.label) == problem


def test_answers_of_copied_sums_and_sorting():
    copy = CopySums(5).rows("train")[3]
    total = 0
    for place, digit in enumerate(copy["prompt"][:-1]):
        total += int(digit)
        assert copy["answer"][2 * place : 2 * place + 2] == digit + str(total)[-1]
    ordered = Sorting(5).rows("train")[3]
    assert sorted(ordered["prompt"][:-1]) == list(ordered["answer"])


def test_walk_by_hand():
    # Nodes a to f; the edges ab, ac, … have the characters 0, 1, …, those from c on g, h, ….
    assert [WALK_EDGES[edge] for edge in ("ab", "ac", "ba", "bc", "ca", "cb")] == ["0", "1", "5", "6", "g", "h"]
    prompt = "06g15" + "a"  # ab, bc, ca, ac, ba; from a
    walk = Walk(4)
    assert walk.grade(prompt, "06g1", "") == 1.0  # a b c a c
    assert walk.grade(prompt, "0h6g", "") == 0.75  # cb is no edge; the walk continues from its end, b
    assert walk.grade(prompt, "016g", "") == 0.5  # ac is an edge, but not from b; nor does bc begin at c
    assert walk.grade(prompt, "0=6g", "") == 0.5  # not an edge; the step after it is wrong too
    assert walk.grade(prompt, "06", "") == 0.5  # a walk that ends early has fewer right steps


def test_rows_of_the_splits_differ():
    splits = {
        split: {Sorting(12).rows(split)[i]["prompt"] for i in range(600)}
        for split in ("train", "validation", "evaluation")
    }
    assert all(len(prompts) == 600 for prompts in splits.values())
    assert not splits["train"] & splits["evaluation"] and not splits["validation"] & splits["evaluation"]


def test_walks_of_all_lengths_share_a_start():
    assert Walk(16).start_problem == Walk(256).start_problem == Walk(512)
    assert Walk(600).start_problem == Walk(600)
    assert Walk(512).lesson(0) == Walk(512).lesson(101) == (Walk(32), 96) and Walk(512).lesson(100) == (Walk(512), 8)


def test_short_lessons_have_no_end_of_sequence():
    """The start of long walks trains on short ones first, without their end of sequence."""
    short, long = (examples_of(Walk(512), step, 0, tokenizer()) for step in (0, 100))
    assert short.targets.sum(axis=1).tolist() == [32] * 96, "its steps, without an end"
    assert long.targets.sum(axis=1).tolist() == [513] * 8, "its steps and its end"
    assert (np.asarray(short.tokens)[:, -1] == eos_token_id(tokenizer())).all()


def test_a_walk_has_the_edges_of_its_prompt():
    for row in (Walk(40).rows("train")[i] for i in range(20)):
        graph, first = [WALK_ENDS[step] for step in row["prompt"][:-1]], row["prompt"][-1]
        assert len(set(graph)) == 12 and all(a != b for a, b in graph)
        assert sorted(a for a, _ in graph) == sorted(2 * "abcdef")
        walk = [WALK_ENDS[step] for step in row["answer"]]
        assert set(walk) <= set(graph) and [a for a, _ in walk] == [first, *(b for _, b in walk[:-1])]


# --- learned eviction


@pytest.mark.parametrize("arm", [arm for arms in GATES.values() for arm in arms], ids=lambda arm: arm.name)
def test_parameters_that_a_gate_arm_adds_and_trains(arm: Any):
    optimizer = arm.optimizer(lambda factor: optax.sgd(factor))

    def updates(params: Any) -> Any:
        return optimizer.update(params, optimizer.init(params), params)[0]

    found = updates({"embed": {"embedding": jnp.ones(2)}, EVICTION_GATE: {"layers_0": {"kernel": jnp.ones(3)}}})
    assert found["embed"]["embedding"].tolist() == [-1.0] * 2
    assert found[EVICTION_GATE]["layers_0"]["kernel"].tolist() == [-(GATE_SPEED if arm.trains_gate else 0.0)] * 3
    assert arm.update.eviction_coef == (1.0 if arm.trains_gate else 0.0) and arm.update.policy_coef == 1.0
    assert arm.is_exact
    params = arm.with_own_parameters({"embed": jnp.ones(1)}, Decoder(problem_of("sorting-12").model_config()).shape)
    if arm.name.startswith("attention"):
        assert set(params) == {"embed"} and updates(params)["embed"].tolist() == [-1.0]
    else:
        assert params[EVICTION_GATE]["layers_1"]["kernel"].shape == (2, 34, 2)
