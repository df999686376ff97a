"""The study of gradients: products without the noise's share, rewards of tokens, coefficients of the arms."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradients
import smd_jax as smd
from smd_jax.learner.objective import make_objective
from smd_jax.learner.prepare import prepare
from smd_jax.learner.state import TrainBatch
from smd_jax.testing import random_params
from study import small_steps
from study.arms import arms_of
from study.coefficients import GROUP, NAMES, REFERENCES, _at_drawn, _logprobs, library_weights
from study.files import fingerprint, write_rows
from study.gradient_runs import MIXES, ROWS, GradientSizes, Rollouts, keep, kept, mixing, rows_of
from study.moments import Compared, Moments, jackknife, quality
from study.problems import Problem, RunningSums, Walk, tokenizer
from study.samplers import sampler_of
from study.token_rewards import leave_one_out_to_go, relative_to_go, to_go, token_rewards

pytestmark = pytest.mark.study


def moments_of(rollouts: list[list[list[float]]]) -> Moments:
    """Of vectors `[rollouts][names][size]`, a block each."""
    moments = Moments.empty(len(rollouts), len(rollouts[0]), len(rollouts[0][0]))
    for block, vectors in enumerate(rollouts):
        moments.add(block, np.array(vectors, np.float32))
    return moments


# --- products of means


def test_products_by_hand():
    # a: (1, 0), (3, 0), (2, 3); b: (1, 1), (0, 1), (2, 1). Pairs of different rollouts:
    # a·a: 3, 2, 6, each twice: 22 / 6. b·b: 1, 3, 1: 10 / 6.
    # a_i·b_j: (1,2) 0, (1,3) 2, (2,1) 3, (2,3) 6, (3,1) 5, (3,2) 3: 19 / 6.
    products = moments_of([[[1, 0], [1, 1]], [[3, 0], [0, 1]], [[2, 3], [2, 1]]]).products()
    np.testing.assert_allclose(products.of_means(), np.array([[22, 19], [19, 10]]) / 6)
    # Within a rollout: a·a 1 + 9 + 13, a·b 1 + 0 + 7, b·b 2 + 1 + 5.
    np.testing.assert_allclose(products.of_rollouts(), np.array([[23, 8], [8, 8]]) / 3)
    found = quality(products, 0, 1)
    assert found.signal == pytest.approx(22 / 6) and found.noise == pytest.approx(23 / 3 - 22 / 6)
    assert found.cosine == pytest.approx(19 / math.sqrt(220))
    assert found.alignment == pytest.approx((19 / 6) / math.sqrt(23 / 3 * 10 / 6))
    assert found.snr == pytest.approx((22 / 6) / 4)


def test_products_do_not_depend_on_the_blocks():
    vectors = np.random.default_rng(0).standard_normal((6, 2, 3)).astype(np.float32)
    several, one = Moments.empty(3, 2, 3), Moments.empty(1, 2, 3)
    for index, of_rollout in enumerate(vectors):
        several.add(index % 3, of_rollout)
        one.add(0, of_rollout)
    np.testing.assert_allclose(several.products().of_means(), one.products().of_means(), rtol=1e-12)


def test_noise_that_two_gradients_share_is_no_cosine():
    # True means at a right angle, of squared length 4, and one noise of variance 100 in both.
    random = np.random.default_rng(1)
    moments = Moments.empty(200, 2, 100)
    means = np.zeros((2, 100))
    means[0, 0] = means[1, 1] = 2.0
    for index in range(4_000):
        moments.add(index % 200, means + random.standard_normal(100))
    found = quality(moments.products(), 0, 1)
    assert found.signal == pytest.approx(4.0, abs=0.2) and found.noise == pytest.approx(100, rel=0.01)
    assert abs(found.cosine) < 0.05
    # The plain cosine of means over a block's 20 rollouts: the noise's share of the product is 100 / 20, the true
    # means' is 0, and the squared lengths are 4 + 100 / 20.
    plain = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in moments.sums]
    assert np.mean(plain) == pytest.approx(5 / 9, abs=0.05)


def test_weighted_sums():
    products = moments_of([[[1, 0], [1, 1]], [[3, 0], [0, 1]], [[2, 3], [2, 1]]]).products()
    # a + 2 b: (3, 2), (3, 2), (6, 5). Pairs: 13, 28, 28, each twice.
    mixed = products.mixed(np.array([[1.0, 2.0]]))
    np.testing.assert_allclose(mixed.of_means(), [[138 / 6]])
    table = mixing()
    assert table.shape == (len(ROWS), len(NAMES)) and table[ROWS.index("tis"), NAMES.index("tis")] == 1
    assert set(MIXES["shadow-anchor"]) == {"shadow", "anchor"}
    assert table[ROWS.index("shadow-anchor"), NAMES.index("anchor")] == 0.1


def test_jackknife_of_a_mean_is_its_t_interval():
    # Of blocks with one number each, 1 … 5: half the interval of the mean is t(4) √(2.5 / 5) = 2.776 · 0.7071.
    products = moments_of([[[float(value)]] for value in range(1, 6)]).products()
    half = jackknife(5, lambda block: np.array([np.sqrt(products.without(block).within[:, 0, 0]).mean()]))
    assert half[0] == pytest.approx(2.77645 * 0.5**0.5, rel=1e-5)


def test_one_rollout_has_no_pair():
    with pytest.raises(ValueError, match="expected two rollouts or more.*got 1"):
        moments_of([[[1.0]]]).products().of_means()


# --- rewards of tokens


@pytest.mark.parametrize("problem", [RunningSums(6), Walk(6)])
def test_rewards_of_tokens_add_up(problem: Problem):
    random = np.random.default_rng(3)
    task = problem.rows("train")
    texts, rows = [], []
    for index in range(20):
        row = task[index]
        text = list(row["answer"])[: int(random.integers(2, 7))]  # some end early
        for place in random.integers(0, len(text), 2):
            text[place] = str(random.choice(list(row["prompt"])))
        texts.append("".join(text))
        rows.append(row)
    encoded = [[*tokenizer().encode(text, add_special_tokens=False), tokenizer().eos_token_id] for text in texts]
    response = np.array([ids + [0] * (problem.response_width - len(ids)) for ids in encoded])
    mask = np.array([[place < len(ids) for place in range(problem.response_width)] for ids in encoded])
    found = token_rewards(problem, rows, response, mask).sum(1)
    grades = [problem.grade(row["prompt"], text, row["answer"]) for row, text in zip(rows, texts, strict=True)]
    np.testing.assert_allclose(found, grades, atol=1e-6)
    assert min(grades) > 0 and len(set(grades)) > 3


def test_to_go_by_hand():
    rewards = jnp.array([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    np.testing.assert_allclose(to_go(rewards), [[2, 1, 1], [1, 1, 0]])
    # Less the other one of the group, place by place.
    np.testing.assert_allclose(leave_one_out_to_go(rewards, 2), [[1, 0, 1], [-1, 0, -1]])
    # Less the mean, over the deviation of the batch's 2 and 1, √0.5.
    scale = math.sqrt(0.5) + 1e-4
    np.testing.assert_allclose(relative_to_go(rewards, 2), np.array([[0.5, 0, 0.5], [-0.5, 0, -0.5]]) / scale)


# --- coefficients


@pytest.mark.parametrize("name", ["tis", "shadow"])
def test_coefficients_give_the_librarys_gradient(name: str):
    problem = RunningSums(3)
    roll = Rollouts(problem, sampler_of("tova:3+1"))
    params = random_params(problem.model_config(), 0)
    rolled = roll(params, roll.rows(range(2)), jax.random.key(1))
    trajectory = rolled.trajectory
    advantages = jnp.linspace(-1.5, 2.0, 2 * GROUP)  # an untrained policy earns too little for those of its rewards
    config = arms_of((name,))[0].update
    mask = trajectory.mask if name == "shadow" else trajectory.dense_mask()

    @jax.jit
    def both(params: Any) -> tuple[Any, Any]:
        batch = TrainBatch(trajectory, advantages, None)
        objective = make_objective(roll.model, config, smd.init_state(params, optax.sgd(1.0), jax.random.key(0)))
        theirs = jax.grad(lambda params: objective(params, prepare(roll.model, config, params, batch))[0])(params)
        logp, back = jax.vjp(lambda params: _logprobs(roll.model, trajectory, mask, params), params)
        weights = library_weights(roll.model, name, params, trajectory, advantages, logp)
        return theirs, back(_at_drawn(trajectory, weights, logp))[0]

    theirs, ours = both(params)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(theirs)) > 1e-3
    # The loss goes down where we go up.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, -b, atol=1e-6), theirs, ours)


# --- rows and steps


def test_references_by_hand():
    # Means (2, 1) and (1, 2), products within 1 + 9 + 13 and 4 + 8; the references' pair has a product of 0.
    arms = moments_of([[[1, 0]], [[3, 0]], [[2, 3]]])
    references = moments_of([[[2, 0]], [[0, 4]], [[1, 2]]])
    found = Compared.of(arms, references).quality(0, 0)
    towards = 2 * 1 + 1 * 2
    target = (2 * 0 + 2 * 2 + 2 * 8) / 6
    assert found.signal == pytest.approx(22 / 6)
    assert found.cosine == pytest.approx(towards / math.sqrt(22 / 6 * target))
    left_out = Compared.of(arms, references).without(2).quality(0, 0)
    # Means (2, 0) and (1, 2); the pair of arms has 3, that of references 0.
    assert left_out.signal == pytest.approx(3) and math.isnan(left_out.cosine)


def test_rows_of_a_cell():
    random = np.random.default_rng(0)
    arms, references = (Moments.empty(4, len(names), 30) for names in (NAMES, REFERENCES))
    for index in range(16):
        arms.add(index % 4, 1 + 0.1 * random.standard_normal((len(NAMES), 30)))
        references.add(index % 4, 2 + 0.1 * random.standard_normal((len(REFERENCES), 30)))
    rows = rows_of(Compared.of(arms, references))
    assert [row["arm"] for row in rows] == [*ROWS, *REFERENCES]
    for row in rows:
        assert row["cosine_sparse"] == pytest.approx(1.0, abs=0.01) and row["snr_half"] > 0
        json.dumps(row, allow_nan=False)
    for row in rows[: len(ROWS)]:
        assert row["noise_of_block_mean"] == pytest.approx(row["noise"] / 4, rel=0.8)
    assert rows[-1]["signal"] == pytest.approx(4 * 30, rel=0.01), "of the references' own rollouts"


def test_directions_and_quotients():
    params = {"q_proj": {"kernel": np.zeros((2, 2))}, "rest": np.zeros(3)}
    np.testing.assert_array_equal(small_steps.of_leaves(params, ("q_proj",)), [True] * 4 + [False] * 3)
    with pytest.raises(ValueError, match="expected modules of"):
        small_steps.of_leaves(params, ("k_proj",))
    # 2 ± 0.3 by 4 ± 0.8: 0.5, and √(0.3² + (0.5 · 0.8)²) / 4.
    assert small_steps.quotient(2.0, 0.3, 4.0, 0.8) == pytest.approx((0.5, 0.125))


def test_what_was_measured_otherwise_is_refused(tmp_path: Path):
    keep(tmp_path / "rows.json", "these", [{"arm": "tis"}])
    assert kept(tmp_path / "rows.json", "these") == [{"arm": "tis"}] and kept(tmp_path / "none.json", "these") is None
    with pytest.raises(ValueError, match="the present settings those; got these"):
        kept(tmp_path / "rows.json", "those")


def test_a_study_goes_on_from_its_results_on_another_machine(tmp_path: Path):
    args = gradients.Args(runs=tmp_path, results=tmp_path / "rows.json", quick=True)
    study = gradients.make_study(args)
    job = study.jobs[0]
    place = {name: job.identity[name] for name in ("task", "policy", "budget", "buffer", "seed")}
    rows = [place | {"settings": fingerprint(part.settings)} for part in (job, *study.steps_of(job))]
    with mock.patch.object(gradients, "measured", side_effect=InterruptedError):
        for there in (rows[:-1], [row | {"settings": "other"} for row in rows]):
            write_rows(study.results, there)
            with pytest.raises(InterruptedError):
                study.cell(job)
        write_rows(study.results, rows)
        study.cell(job)
    study.collect()
    assert len(gradients.read_rows(study.results)) == len(rows) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tasks": ("sums-5",)},
            r"expected tasks of \['sorting-12', 'sorting-16', 'sorting-8', 'sums-12', 'walk-16', .*; got \['sums-5'\]",
        ),
        ({"samplers": ("tova:9+2",)}, r"expected samplers of \['h2o:11\+2'.*got \['tova:9\+2'\]"),
        ({"tasks": ("sums-12",), "samplers": ("tova:11+2",)}, "expected a cell of"),
    ],
)
def test_what_the_study_does_not_have(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        gradients.make_study(gradients.Args(**options))


def test_a_part_leaves_the_committed_rows_alone():
    whole, part = (gradients.make_study(gradients.Args(seeds=seeds)) for seeds in (None, (7,)))
    assert whole.results == gradients.RESULTS / "gradients.json" != part.results
    assert [job.seed for job in part.jobs] == [7] * len(gradients.CELLS)
    assert len(whole.steps_of(whole.jobs[0])) == 2 and not whole.steps_of(whole.jobs[-1])
    job = replace(whole.jobs[0], sizes=GradientSizes(rollouts=32))
    assert job.settings != whole.jobs[0].settings
    with pytest.raises(ValueError, match="16 blocks of at least two; got 40"):
        GradientSizes(rollouts=40)


def test_the_model_is_that_of_the_studies():
    assert Rollouts(RunningSums(3), sampler_of("tova:4+1")).model == smd.Decoder(RunningSums(3).model_config())
