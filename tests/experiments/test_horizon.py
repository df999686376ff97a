"""The study of long responses: statistics of importance weights, the walk, its rows, and the pretrained model's."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

import horizon
import mismatch
import smd_jax as smd
from smd_jax.tasks.gsm8k import Gsm8kTask
from smd_jax.testing import random_params
from smd_jax.text.prompts import eos_token_id
from study.command import QUICK
from study.problems import WALK_ENDS, Walk, tokenizer
from study.samplers import sampler_of
from study.starts import examples_of
from study.weights import chi_square, effective_sample_size, response_weights, token_weights

pytestmark = pytest.mark.study


@pytest.mark.parametrize(
    ("weights", "ess", "chi2"),
    [
        ((1.0, 1.0, 1.0), 1.0, 0.0),
        # Mean 2, mean square 5: 4 / 5.
        ((1.0, 3.0), 0.8, 4.0),
        # Mean 1, mean square (1/4 + 9/4) / 2 = 5/4.
        ((0.5, 1.5), 0.8, 0.25),
        # A weight that is next to nothing: as good as one of two.
        ((1e-9, 2.0), 0.5, 1.0),
    ],
)
def test_effective_sample_size_and_chi_square(weights: tuple[float, ...], ess: float, chi2: float):
    logs = np.log(weights)
    assert effective_sample_size(logs) == pytest.approx(ess, rel=1e-6)
    assert effective_sample_size(logs + 2000.0) == pytest.approx(ess, rel=1e-6), "a common factor cancels"
    assert chi_square(logs) == pytest.approx(chi2, rel=1e-6, abs=1e-12)


def test_weights_by_hand():
    # Ratios of two responses: 2 · 1/2 · 4, and 1 · 3, which ends there.
    log_ratio = np.log(np.array([[2.0, 0.5, 4.0], [1.0, 3.0, 777.0]]))
    mask = np.array([[True, True, True], [True, True, False]])
    first, second, third = response_weights(log_ratio, mask, (1, 2, 3))
    # Weights (2, 1), (1, 3) and (4, 3): squares of the means 9/4, 4, 49/4 over means of the squares 5/2, 5, 25/2.
    assert [row["response_ess"] for row in (first, second, third)] == pytest.approx([0.9, 0.8, 0.98], rel=1e-5)
    assert [row["response_chi2"] for row in (first, second, third)] == pytest.approx([1.5, 4.0, 11.5], rel=1e-5)
    assert [row["alive"] for row in (first, second, third)] == [1.0, 1.0, 0.5]
    assert second["response_log_sd"] == pytest.approx(math.log(3) / math.sqrt(2), rel=1e-5)
    # Tokens up to the second: 2, 1/2, 1, 3.
    assert second["token_ess"] == pytest.approx((6.5 / 4) ** 2 / (14.25 / 4), rel=1e-5)
    tokens = token_weights(log_ratio, mask)
    assert tokens["outside"] == pytest.approx(2 / 5), "4 and 3; a ratio of 2 is a bound itself"
    assert tokens["mean_abs_dlogp"] == pytest.approx(math.log(2 * 2 * 4 * 3) / 5, rel=1e-5)
    assert tokens["max_abs_dlogp"] == pytest.approx(math.log(4), rel=1e-5)


def test_walks_of_all_lengths_share_a_start():
    assert Walk(16).start_problem == Walk(256).start_problem == Walk(512)
    assert Walk(600).start_problem == Walk(600)
    assert Walk(512).lesson(0) == Walk(512).lesson(101) == (Walk(32), 96) and Walk(512).lesson(100) == (Walk(512), 8)


def test_short_lessons_do_not_teach_to_end():
    """The start of long walks begins with short ones: who learnt to end there would never walk on."""
    short, long = (examples_of(Walk(512), step, 0, tokenizer()) for step in (0, 100))
    assert short.targets.sum(axis=1).tolist() == [32] * 96, "its steps, without an end"
    assert long.targets.sum(axis=1).tolist() == [513] * 8, "its steps and its end"
    assert (np.asarray(short.tokens)[:, -1] == eos_token_id(tokenizer())).all()


def test_a_walk_has_its_edges():
    for row in (Walk(40).rows("train")[i] for i in range(20)):
        graph, first = [WALK_ENDS[step] for step in row["prompt"][:-1]], row["prompt"][-1]
        assert len(set(graph)) == 12 and all(a != b for a, b in graph)
        assert sorted(a for a, _ in graph) == sorted(2 * "abcdef")
        walk = [WALK_ENDS[step] for step in row["answer"]]
        assert set(walk) <= set(graph) and [a for a, _ in walk] == [first, *(b for _, b in walk[:-1])]


def test_weight_rows(tmp_path: Path):
    problem = Walk(12)
    params = random_params(problem.model_config(), 0)
    with mock.patch.object(horizon, "start", return_value=params):
        rows = horizon.weight_rows(problem, sampler_of("h2o:8+2"), 3, QUICK.start, tmp_path, (4, 12), 4)
    assert [row["tokens"] for row in rows] == [4, 12]
    for row in rows:
        assert row["seed"] == 3 and row["policy"] == "h2o" and row["responses"] == 4
        assert row["shadow_max_abs_dlogp"] < 1e-4 < row["mean_abs_dlogp"]
        assert 0.25 <= row["response_ess"] <= 1 and 0 <= row["sparse"] <= 1


def test_table_of_rows():
    kinds = {"sparse": 0.5, "dense": 0.9, "sparse_greedy": 0.6, "dense_greedy": 1.0}
    base = {"task": "walk-16", "learning_rate": 1e-4, "pilot": False} | kinds
    rows = [
        base | {"arm": arm, "seed": seed, "sparse": 0.5 + gain + seed / 10}
        for arm, gain in (("untrained", 0.0), ("shadow", 0.125))
        for seed in (0, 1)
    ]
    rows.append(base | {"arm": "shadow", "seed": 100, "pilot": True, "sparse": 9.0})
    header, untrained, shadow = horizon.table(rows)
    assert header.split()[:4] == ["task", "arm", "rate", "n"]
    assert untrained.split()[4] == "0.550" and shadow.split()[:5] == ["walk-16", "shadow", "0.0001", "2", "0.125"]


def test_the_study_has_one_pilot_seed_that_it_does_not_report():
    grid = horizon.study(horizon.Args(tasks=("walk-16",), samplers=("h2o:12+4",), arms=("naive",)))
    jobs = [job for cell in grid.cells for job in grid.pilot_jobs(cell)]
    assert [(job.learning_rate, job.seed) for job in jobs] == [(rate, 100) for rate in horizon.RATES]
    assert 100 not in horizon.SEEDS and all(job.pilot for job in jobs)


# --- the pretrained model


def test_evicted_share_by_hand():
    # One row: a column of padding, a prompt of 2, a response of 2. The queries of columns 2 and 3 ask for the response
    # and would see 2 + 3 keys; the key of column 1 goes before the second of them.
    mask = smd.ShadowMask(jnp.array([0, 3, 99, 99, 99]).reshape(1, 1, 1, 5))
    trajectory = smd.Trajectory(
        tokens=jnp.zeros((1, 5), jnp.int32),
        valid=jnp.arange(5)[None] > 0,
        logprobs=jnp.zeros((1, 2)),
        terminated=jnp.array([False]),
        mask=mask,
    )
    assert mismatch.evicted_share(trajectory) == pytest.approx(1 / 5)


def test_solved_questions_in_front():
    first = mismatch.EXAMPLES
    task = Gsm8kTask([{"question": f"q{i}", "answer": f"a{i} #### {i}"} for i in range(first + 3)])
    rows = mismatch.prompts_of(task, first + 2, 1)
    for row in rows:
        assert [turn["content"].split("\n")[0] for turn in row["prompt"][:2]] == [f"q{first}", f"a{first} #### {first}"]
        assert [turn["role"] for turn in row["prompt"]] == ["user", "assistant", "user"]
    # The question that stands solved is never asked.
    asked = [row["prompt"][-1]["content"].split("\n")[0] for row in rows]
    assert asked == [f"q{i}" for i in range(first + 3) if i != first]


def test_a_kept_row_of_other_settings_is_refused():
    cells = mismatch.cells(mismatch.Args(Path("rows.jsonl"), policies=("h2o",)))
    assert len({cell.key for cell in cells}) == len(cells)
    kept = [asdict(cell) for cell in cells[:3]]
    assert [mismatch.is_kept(cell, kept) for cell in cells] == [True] * 3 + [False] * (len(cells) - 3)
    with pytest.raises(ValueError, match="expected a kept row of.*'buffer': 8.*got.*'buffer': 16"):
        mismatch.is_kept(replace(cells[1], buffer=8), kept)
    with pytest.raises(ValueError, match=r"expected policies from.*got \['h3o'\]"):
        mismatch.Args(Path("rows.jsonl"), policies=("h3o",))
