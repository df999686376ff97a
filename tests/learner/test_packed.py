"""Packed rows: the update matches one sequence per row, with less padding."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.corrections.mismatch import TIS
from smd_jax.corrections.trust_region import OPSM
from smd_jax.eviction.policies import LearnedGate
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.objective import Prepared
from smd_jax.learner.packed import accumulate_packed, packed_segments, packed_trajectory, packs_of
from smd_jax.learner.packs import ABSENT, Member, PackSizes, Sequences, first_fit, pack
from smd_jax.learner.state import init_state
from smd_jax.losses.distillation import DistillConfig
from smd_jax.losses.policy import LossConfig
from smd_jax.message.masks import Segments
from smd_jax.message.quantization import QuantConfig
from smd_jax.message.sampling import SamplingConfig
from tests import toy_loop
from tests.tiny_update import (
    LENGTH,
    MODEL,
    PARAMS,
    RECORD,
    REFERENCE,
    ROWS,
    WIDTH,
    assert_equal_steps,
    batch,
    metrics_and_gradients,
    recording_update,
    trajectory,
)
from tests.train import test_ppo

# --- assigning sequences to rows


def test_rows_are_filled_longest_first():
    sizes = PackSizes(rows=2, columns=10, responses=8)
    # By hand: 7 | 6 | 4 goes to the 6 | 3 to the 7 | 2 fits into neither: a third row.
    assert first_fit([4, 7, 2, 6, 3], [1, 1, 1, 1, 1], sizes) == [[1, 4], [3, 0], [2]]
    # The second row has no room for another response of 4.
    assert first_fit([5, 5], [5, 4], sizes) == [[0], [1]]
    with pytest.raises(ValueError, match="expected rows of at least 11 columns, 2 of them for responses, because seq"):
        first_fit([3, 11], [1, 2], sizes)


def sequences(prompts, responses, width: int, length: int) -> Sequences:
    """All response tokens are sampled."""
    valid = np.arange(length)[None] < responses[:, None]
    return Sequences(prompts, valid, valid, width)


def test_response_columns_follow_the_longest_row():
    """The limit per row is 10**15."""
    prompts, responses = np.array([3, 2, 4]), np.array([5, 1, 2])
    members = [[Member(0), Member(1, 2)], [Member(2)]]
    packs = pack(sequences(prompts, responses, 8, 12), PackSizes(2, 20, 10**15), members)
    assert (packs.responses != ABSENT).sum() == 8 and packs.responses.shape[-1] < 64


def test_one_more_token_does_not_change_the_packed_width():
    one = jax.tree.map(lambda x: x[:1] if x.ndim else x, trajectory())
    config = UpdateConfig(microbatch_size=1, pack_columns=32, rows_per_prompt=2)

    def width(tokens: int) -> int:
        valid = one.valid.at[:, WIDTH:].set(np.arange(LENGTH) < tokens)
        return packs_of(one.replace(valid=valid), config).responses.shape[-1]

    assert width(9) == width(10) == 10


# --- the same update

ANCHOR = DistillConfig(direction="anchor", coef=0.5)
CONFIGS: dict[str, UpdateConfig] = {
    "grpo": UpdateConfig(),
    "many terms": UpdateConfig(loss=LossConfig(beta=0.1), entropy_coef=0.01, top_entropy_quantile=0.5, distill=ANCHOR),
    "tis, dense": UpdateConfig(visibility="dense", correction=TIS()),
}


@pytest.mark.parametrize(
    "name", ["grpo", *(pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS if name != "grpo")]
)
def test_update_matches_unpacked_rows(name: str):
    config = CONFIGS[name]
    data = batch().replace(old_logprobs=None) if config.correction.traits.uses_mismatch else batch()
    expected = metrics_and_gradients(config, data, reference=REFERENCE)
    packing = replace(config, microbatch_size=2, pack_columns=28)
    got = metrics_and_gradients(packing, data, reference=REFERENCE)
    # Two microbatches of two rows, shared by short responses.
    assert got[0]["update/padding"] < 0.15
    assert got[0].keys() - expected[0].keys() == {"update/padding"}
    assert_equal_steps(got, expected, 2.5e-6)


def test_empty_microbatches_are_not_computed():
    packs = packs_of(trajectory(), UpdateConfig(microbatch_size=2, pack_columns=28))
    assert (packs.tokens != ABSENT).any((1, 2)).tolist() == [True, True, False, False]
    prepared = Prepared(batch(), trajectory().response_mask, ())
    accumulate = jax.jit(partial(accumulate_packed, lambda x, part: (x, ({}, ()))))
    loss, gradient, *_ = accumulate(jnp.float32(3), prepared, packs)
    assert (loss, gradient) == (6, 2)


def test_segments_are_used_where_they_save_work():
    one = trajectory()
    places = jax.tree.map(lambda x: x[0], packs_of(one, UpdateConfig(microbatch_size=1, pack_columns=32)))
    mask: Any = packed_trajectory(one, places).mask
    assert mask.segments == (Segments(2, 2, WIDTH),)
    mask.with_segments(mask.segments)  # raises for segments that do not fit the evictions
    assert packed_segments(Segments(100, 16, 64), 100, 1024) == Segments(16, 16, 100)
    assert packed_segments(Segments(20, 16, 64), 20, 1024) == Segments(16, 16, 80)
    assert packed_segments(Segments(100, 16, 64), 100, 200) is None


@pytest.mark.slow
def test_packed_run_matches_unpacked_run():
    """Two rollouts, with minibatches, top-k and shared prompts."""
    rollout = replace(toy_loop.ROLLOUT, sampling=SamplingConfig(top_k=40))
    config = replace(toy_loop.CONFIG, rollout=rollout, minibatches=2, update_widths=1)
    update = UpdateConfig(microbatch_size=1, pack_columns=28, rows_per_prompt=2)
    packing = replace(config, update=update)
    runs = [toy_loop.run(toy_loop.own_loop(c), toy_loop.new_state(), 2)[1] for c in (config, packing)]
    for plain, packed in zip(*runs, strict=True):
        assert packed.pop("update/padding") != plain.pop("update/padding")
        assert packed.pop("update/shared") > 0
        assert plain.keys() == packed.keys()
        for metric, value in plain.items():
            assert packed[metric] == pytest.approx(value, rel=1e-4, abs=1e-5), metric


@pytest.mark.slow
def test_packed_run_with_a_critic_matches_unpacked_run():
    """The values come from unpacked rows, in other microbatches."""
    config = replace(test_ppo.LOOP, update_widths=1)
    packing = replace(config, update=replace(config.update, microbatch_size=3, pack_columns=28))
    runs = [toy_loop.run(test_ppo.new_loop(c), test_ppo.new_state(), 2)[1] for c in (config, packing)]
    for plain, packed in zip(*runs, strict=True):
        for metric in ("loss", "grad_norm", "critic/values/mean", "reward"):
            assert packed[metric] == pytest.approx(plain[metric], rel=1e-3, abs=1e-5), metric


def test_unpackable_rollouts_raise_before_sampling():
    update = UpdateConfig(microbatch_size=1, pack_columns=28)
    for options in ({"min_new_tokens": 2}, {"quant": QuantConfig(bits=8, group=2)}):
        config = replace(toy_loop.CONFIG, rollout=replace(toy_loop.ROLLOUT, **options), update=update)
        with pytest.raises(ValueError, match="expected rollouts without quant and min_new_tokens with pack_columns"):
            toy_loop.own_loop(config)
    with pytest.raises(ValueError, match="expected pack_columns None with LearnedGate, .*; got 28"):
        toy_loop.own_loop(replace(toy_loop.CONFIG, policy=LearnedGate(), update=update))


def test_too_few_pack_columns_raise():
    config = replace(toy_loop.CONFIG, update=UpdateConfig(microbatch_size=1, pack_columns=13))
    with pytest.raises(ValueError, match="expected pack_columns of at least 14, the longest sequence; got 13"):
        toy_loop.own_loop(config)


@pytest.mark.slow
def test_uncounted_rows_and_rows_longer_than_max_positions():
    """80 columns; positions restart in each sequence and stay below 32."""
    assert MODEL.shape.max_positions == 32
    data = batch().replace(counted_rows=jnp.asarray([True, False] * (ROWS // 2)))
    got = metrics_and_gradients(UpdateConfig(microbatch_size=1, pack_columns=80), data)
    assert_equal_steps(got, metrics_and_gradients(data=data), 2.5e-6)


# --- invalid options


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
def test_incompatible_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        UpdateConfig(**options)


def test_program_without_packs_raises():
    update = recording_update(UpdateConfig(microbatch_size=2, pack_columns=28))
    with pytest.raises(ValueError, match="expected packs with pack_columns, and none without; got 28"):
        update.lower(init_state(PARAMS, RECORD, jax.random.key(3)), batch())
