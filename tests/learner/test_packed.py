"""Sequences that share a row are learnt from as if each had one; and how much padding is left."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from smd_jax.corrections.mismatch import TIS
from smd_jax.corrections.trust_region import OPSM
from smd_jax.eviction.policies import LearnedGate
from smd_jax.learner import packed
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.forward import replay
from smd_jax.learner.packed import make_packed_update, packed_segments, packed_trajectory
from smd_jax.learner.packs import ABSENT, Member, PackSizes, Sequences, first_fit, pack
from smd_jax.learner.state import init_state
from smd_jax.learner.update import make_update
from smd_jax.losses.distillation import DistillConfig
from smd_jax.losses.policy import LossConfig
from smd_jax.message.masks import Segments
from smd_jax.message.quantization import QuantConfig
from smd_jax.message.sampling import SamplingConfig
from tests import toy_loop
from tests.tiny_update import LENGTH, MODEL, PARAMS, RECORD, REFERENCE, ROWS, WIDTH, batch, trajectory
from tests.train import test_ppo

# --- who shares a row


def test_rows_are_filled_longest_first():
    sizes = PackSizes(rows=2, columns=10, responses=8)
    # By hand: 7 | 6 | 4 goes to the 6 | 3 to the 7 | 2 fits into neither: a third row.
    assert first_fit([4, 7, 2, 6, 3], [1, 1, 1, 1, 1], sizes) == [[1, 4], [3, 0], [2]]
    # The second row has no room for another response of 4.
    assert first_fit([5, 5], [5, 4], sizes) == [[0], [1]]
    with pytest.raises(ValueError, match="expected rows of at least 11 columns, 2 of them for responses, because seq"):
        first_fit([3, 11], [1, 2], sizes)


def sequences(prompts, responses, width: int, length: int) -> Sequences:
    """Of which all response tokens were sampled."""
    valid = np.arange(length)[None] < responses[:, None]
    return Sequences(prompts, valid, valid, width)


def test_every_token_has_one_place():
    rng = np.random.default_rng(0)
    prompts, responses = rng.integers(1, 9, 40), rng.integers(0, 13, 40)
    packs = pack(sequences(prompts, responses, 8, 12), PackSizes(3, 25, 16))
    there = packs.tokens != ABSENT
    assert there.sum() == (prompts + responses).sum() and (packs.responses != ABSENT).sum() == responses.sum()
    for name, places in (("tokens", packs.tokens[there]), ("responses", packs.responses[packs.responses != ABSENT])):
        assert len(np.unique(places)) == len(places), name
    # Places of the sequences' own tokens, by their definition.
    of_tokens = [i * 20 + c for i in range(40) for c in range(8 - prompts[i], 8 + responses[i])]
    assert np.sort(packs.tokens[there]).tolist() == of_tokens
    # A response token stands in its column, at its position.
    part, row, k = np.argwhere(packs.responses != ABSENT)[17]
    column, place = packs.columns[part, row, k], packs.responses[part, row, k]
    index, drawn = divmod(place, 12)
    assert packs.tokens[part, row, column] == index * 20 + 8 + drawn
    assert packs.positions[part, row, column] == prompts[index] + drawn
    assert packs.padding == pytest.approx(1 - there.mean())


def test_chains_get_as_many_columns_for_responses_as_they_need():
    """However many a row may have, which is all response tokens of a minibatch."""
    prompts, responses = np.array([3, 2, 4]), np.array([5, 1, 2])
    together = [[Member(0), Member(1, 2)], [Member(2)]]
    packs = pack(sequences(prompts, responses, 8, 12), PackSizes(2, 20, 10**15), together)
    assert (packs.responses != ABSENT).sum() == 8 and packs.responses.shape[-1] < 64


def test_lengths_like_those_of_gsm8k_leave_little_padding():
    """Quantiles of GSM8K's questions and solutions in tokens of SmolLM2; today's columns would be padded by more than
    half."""
    rng = np.random.default_rng(0)
    quantiles = [0, 0.05, 0.5, 0.95, 1]
    prompts = np.interp(rng.random(16), quantiles, [40, 63, 86, 131, 253]).astype(int).repeat(8)
    responses = np.minimum(np.interp(rng.random(128), quantiles, [20, 58, 113, 232, 454]).astype(int), 256)
    padded = 1 - (prompts + responses).sum() / (128 * (253 + 256))
    packs = pack(sequences(prompts, responses, 253, 256), PackSizes(4, 1024, 768))
    assert padded > 0.5 and packs.padding < 0.15


# --- the same step

ANCHOR = DistillConfig(direction="anchor", coef=0.5)
CONFIGS: dict[str, UpdateConfig] = {
    "grpo": UpdateConfig(),
    "many terms": UpdateConfig(loss=LossConfig(beta=0.1), entropy_coef=0.01, top_entropy_quantile=0.5, distill=ANCHOR),
    "tis, dense": UpdateConfig(visibility="dense", correction=TIS()),
}


def stepped(make, config: UpdateConfig, of=None):
    """Gradients, as RECORD keeps them, and metrics."""
    state = init_state(jax.tree.map(jnp.copy, PARAMS), RECORD, jax.random.key(0), REFERENCE)
    state, metrics = make(MODEL, RECORD, config)(state, of or batch())
    return jax.device_get(state.opt_state), {name: float(value) for name, value in metrics.items()}


@pytest.mark.parametrize(
    "name", ["grpo", *(pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS if name != "grpo")]
)
def test_the_step_is_the_same(name: str):
    config = CONFIGS[name]
    given = batch().replace(old_logprobs=None) if config.correction.traits.uses_mismatch else batch()
    expected, metrics = stepped(make_update, config, given)
    got, of_packed = stepped(make_packed_update, replace(config, microbatch_size=2, pack_columns=28), given)
    # Two microbatches of two rows, in which short responses have others behind them.
    assert of_packed.pop("update/padding") < 0.15
    assert metrics.keys() == of_packed.keys()
    for metric, value in metrics.items():
        # Rounding alone, as much as the CPU makes: squares of products over responses, and the worst log-probability.
        rounding = ("rollout_corr/chi2_seq", "sampling/sampling_logp_difference/max")
        most = 3e-6 if metric in rounding else 1e-6
        assert of_packed[metric] == pytest.approx(value, rel=1e-5, abs=most), metric
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("segments", [True, False])
def test_log_probabilities_are_those_of_the_sampler(segments: bool):
    """Under the mask that the sampler had, with attention over segments and over all keys."""
    one = trajectory()
    packs = packed.packs_of(one, UpdateConfig(microbatch_size=1, pack_columns=32))
    places = jax.tree.map(lambda x: jnp.asarray(x[0]), packs)
    together = packed_trajectory(one, places)
    assert together.mask.segments == (Segments(2, 2, WIDTH),)
    if not segments:
        together = together.replace(mask=together.mask.replace(segments=()))
    else:
        together.mask.with_segments(together.mask.segments)  # raises where the promise is not kept
    again = replay(MODEL, PARAMS, together).logprobs
    mask = together.response_mask
    np.testing.assert_allclose(again[mask], together.logprobs[mask], atol=1e-5)
    np.testing.assert_array_equal(together.response[mask], one.response.reshape(-1)[places.responses[mask]])
    assert int(mask.sum()) > LENGTH, "several sequences"


def test_segments_where_they_pay():
    assert packed_segments(Segments(100, 16, 64), 100, 1024) == Segments(16, 16, 100)
    assert packed_segments(Segments(20, 16, 64), 20, 1024) == Segments(16, 16, 80)
    assert packed_segments(Segments(100, 16, 64), 100, 200) is None


@pytest.mark.slow
@pytest.mark.parametrize("rows_per_prompt", [1, 2])
def test_a_run_is_the_same(rows_per_prompt: int):
    """Two rollouts of a loop, with minibatches and filters; also with completions that share their prompt."""
    rollout = replace(toy_loop.ROLLOUT, sampling=SamplingConfig(top_k=40))
    config = replace(toy_loop.CONFIG, rollout=rollout, minibatches=2, update_widths=1)
    update = UpdateConfig(microbatch_size=1, pack_columns=28, rows_per_prompt=rows_per_prompt)
    packing = replace(config, update=update)
    told = [toy_loop.run(toy_loop.own_loop(of), toy_loop.new_state(), 2)[1] for of in (config, packing)]
    for plain, of_packed in zip(*told, strict=True):
        assert of_packed.pop("update/padding") != plain.pop("update/padding")
        assert (of_packed.pop("update/shared", 0) > 0) == (rows_per_prompt > 1)
        assert plain.keys() == of_packed.keys()
        for metric, value in plain.items():
            assert of_packed[metric] == pytest.approx(value, rel=1e-4, abs=1e-5), metric


@pytest.mark.slow
def test_a_run_with_a_critic_is_the_same():
    """Whose values are of whole rows: packed microbatches count others."""
    config = replace(test_ppo.LOOP, update_widths=1)
    packing = replace(config, update=replace(config.update, microbatch_size=3, pack_columns=28))
    told = [toy_loop.run(test_ppo.new_loop(of), test_ppo.new_state(), 2)[1] for of in (config, packing)]
    for plain, of_packed in zip(*told, strict=True):
        for metric in ("loss", "grad_norm", "critic/values/mean", "reward"):
            assert of_packed[metric] == pytest.approx(plain[metric], rel=1e-3, abs=1e-5), metric


def test_rollouts_that_cannot_be_packed_are_refused_before_one_is_drawn():
    update = UpdateConfig(microbatch_size=1, pack_columns=28)
    for options in ({"min_new_tokens": 2}, {"quant": QuantConfig(bits=8, group=2)}):
        config = replace(toy_loop.CONFIG, rollout=replace(toy_loop.ROLLOUT, **options), update=update)
        with pytest.raises(ValueError, match="expected rollouts without quant and min_new_tokens with pack_columns"):
            toy_loop.own_loop(config)
    with pytest.raises(ValueError, match="expected pack_columns None with LearnedGate, .*; got 28"):
        toy_loop.own_loop(replace(toy_loop.CONFIG, policy=LearnedGate(), update=update))


def test_columns_that_do_not_fit():
    config = replace(toy_loop.CONFIG, update=UpdateConfig(microbatch_size=1, pack_columns=13))
    with pytest.raises(ValueError, match="expected pack_columns of at least 14, the longest sequence; got 13"):
        toy_loop.own_loop(config)


@pytest.mark.slow
def test_rows_that_do_not_count_and_rows_longer_than_the_context():
    """Sequences are not longer than it: positions begin anew in each."""
    assert MODEL.shape.max_positions == 32
    of = batch().replace(counted_rows=jnp.asarray([True, False] * (ROWS // 2)))
    expected, _ = stepped(make_update, CONFIGS["grpo"], of)
    got, _ = stepped(make_packed_update, replace(CONFIGS["grpo"], microbatch_size=1, pack_columns=80), of)
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-6)


# --- what cannot be packed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pack_columns": 24}, "expected pack_columns >= 2 with a microbatch_size"),
        ({"pack_columns": 1, "microbatch_size": 2}, "expected pack_columns >= 2"),
        (
            {"pack_columns": 24, "microbatch_size": 2, "loss": LossConfig(ratio_level="geometric")},
            "expected pack_columns None with ratios of whole responses",
        ),
        (
            {"pack_columns": 24, "microbatch_size": 2, "correction": OPSM()},
            "expected pack_columns None with .* a correction that judges them, .*; got 24 with .* and OPSM",
        ),
    ],
)
def test_choices_that_do_not_go_together(options, message):
    with pytest.raises(ValueError, match=message):
        UpdateConfig(**options)


def test_each_step_takes_its_own_configuration():
    packed = UpdateConfig(microbatch_size=2, pack_columns=24)
    with pytest.raises(ValueError, match="expected pack_columns None, or make_packed_update; got 24"):
        make_update(MODEL, optax.sgd(0.1), packed)
    with pytest.raises(ValueError, match="expected pack_columns, or make_update; got None"):
        make_packed_update(MODEL, optax.sgd(0.1), UpdateConfig())
