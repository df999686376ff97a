"""Rollouts: independent rows, end tokens, cache sizes, memory, errors and compilations."""

import inspect
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.devices.sharding import batch_sharding, constrain_rows, make_mesh
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.eviction.policies import H2O, RKV, Dense, KeyDiff, Knorm, Random, SnapKV, StreamingLLM
from smd_jax.eviction.wrappers import Protect, Pyramid
from smd_jax.message.masks import NEVER
from smd_jax.message.sampling import SamplingConfig
from smd_jax.message.trajectory import NonFiniteLogitsError, Trajectory, check_finite
from smd_jax.model.decoder import Decoder
from smd_jax.sampler.config import check_limits, plan
from smd_jax.sampler.engine import Engine
from smd_jax.sampler.fixed_batch import RolloutConfig, rollout, rollout_program
from smd_jax.sampler.prefill import prefill
from smd_jax.sampler.seats import begin
from smd_jax.sampler.static import Sampler
from smd_jax.testing import count_compilations, tiny_model_config
from smd_jax.text.prompts import PromptBatch
from tests.under_test import eviction_times, left_padded, make_params, to_prompts

SHAPE = tiny_model_config(num_layers=1, tie_embeddings=False)
MODEL = Decoder(SHAPE)
TWO_LAYERS = Decoder(replace(SHAPE, num_layers=2))
WIDTH, LENGTHS = 9, [9, 4, 7]
SIZES = RolloutConfig(max_new_tokens=24, budget=8, buffer=3)


@cache
def roll(policy: EvictionPolicy, sizes: RolloutConfig = SIZES, alone: bool = False) -> Trajectory:
    """Three prompts; or `alone`, the second one twice, without its padding. Pyramid's budgets differ between layers."""
    prompts = left_padded(LENGTHS, WIDTH, SHAPE.vocab_size)
    if alone:
        prompts = to_prompts(np.repeat(np.asarray(prompts.tokens)[1:2, 5:], 2, 0), np.ones((2, 4)))
    model = TWO_LAYERS if isinstance(policy, Pyramid) else MODEL
    return rollout(model, make_params(model.config), prompts, jax.random.key(5), policy=policy, config=sizes)


def visible(trajectory: Trajectory) -> np.ndarray:
    """`[batch, layers, kv_heads, queries, keys]`."""
    return np.asarray(trajectory.mask.to_boolean())


# Independent rows.


@pytest.mark.slow
@pytest.mark.parametrize("policy", [RKV(window=4, kernel=3), Random()], ids=["RKV", "Random"])
def test_a_row_does_not_depend_on_its_batch(policy: EvictionPolicy):
    """Row 1, padded among others and without padding among copies of itself: same tokens, same evictions."""
    together, alone = roll(policy), roll(policy, alone=True)
    np.testing.assert_array_equal(together.response[1], alone.response[1])
    np.testing.assert_allclose(together.logprobs[1], alone.logprobs[1], atol=2e-5)
    shifted = eviction_times(alone)[1]
    np.testing.assert_array_equal(eviction_times(together)[1, ..., 5:], np.where(shifted == NEVER, NEVER, shifted + 5))
    assert (np.asarray(alone.response[0]) != np.asarray(alone.response[1])).any(), (
        "each row must sample from its own key"
    )


# End tokens.


SMALL_VOCAB = tiny_model_config(vocab_size=16, num_layers=1, tie_embeddings=False)
# One of the end tokens is also the padding token, as in some checkpoints.
ENDING = replace(SIZES, max_new_tokens=40, eos_token_id=(3, 1), pad_token_id=1)


@pytest.fixture(scope="module")
def ended() -> Trajectory:
    prompts = left_padded([6, 2, 5, 6, 1, 4], 6, 16)
    return rollout(
        Decoder(SMALL_VOCAB), make_params(SMALL_VOCAB), prompts, jax.random.key(2), policy=Knorm(), config=ENDING
    )


def test_padding_follows_the_first_end_token(ended: Trajectory):
    """The end token itself belongs to the response."""
    tokens, logprobs, valid = (np.asarray(x) for x in (ended.response, ended.logprobs, ended.response_mask))
    for b in range(6):
        ends = np.flatnonzero(np.isin(tokens[b], (3, 1)))
        length = ends[0] + 1 if len(ends) else 40
        assert valid[b].tolist() == [True] * length + [False] * (40 - length)
        assert (tokens[b, length:] == 1).all() and (logprobs[b, length:] == 0).all()
        assert (logprobs[b, :length] < 0).all()
        assert bool(ended.terminated[b]) == bool(len(ends)) and int(ended.lengths()[b]) == length
        assert not eviction_times(ended)[b, :, :, 6 + length :].any()
    lasts = {int(tokens[b, valid[b].sum() - 1]) for b in np.flatnonzero(ended.terminated)}
    assert lasts == {1, 3}, "choose another key: rows should end with either"
    assert len(set(ended.lengths().tolist())) > 3, "choose another key: rows should end at different times"


def test_end_tokens_do_not_change_the_tokens_before_them(ended: Trajectory):
    prompts = PromptBatch(ended.tokens[:, :6], ended.valid[:, :6])
    endless = rollout(
        Decoder(SMALL_VOCAB),
        make_params(SMALL_VOCAB),
        prompts,
        jax.random.key(2),
        policy=Knorm(),
        config=replace(ENDING, eos_token_id=None),
    )
    assert endless.response_mask.all() and not endless.terminated.any()
    mask = np.asarray(ended.response_mask)
    np.testing.assert_array_equal(np.asarray(endless.response)[mask], np.asarray(ended.response)[mask])
    np.testing.assert_allclose(np.asarray(endless.logprobs)[mask], np.asarray(ended.logprobs)[mask], atol=1e-6)


@dataclass(frozen=True)
class Counting(Knorm):
    """Counts its calls while the program runs."""

    calls: ClassVar[list[int]] = []

    def score(self, view: Any) -> jax.Array:
        jax.debug.callback(lambda: self.calls.append(1))
        return super().score(view)


def test_decoding_stops_when_all_rows_have_ended():
    """With a buffer of one, each of three rows is compressed after the prompt and after every step."""
    Counting.calls.clear()
    prompts, params = left_padded([6, 2, 5], 6, 16), make_params(SMALL_VOCAB)
    sizes = replace(ENDING, budget=4, buffer=1)
    trajectory = rollout(Decoder(SMALL_VOCAB), params, prompts, jax.random.key(0), policy=Counting(), config=sizes)
    longest = int(trajectory.lengths().max())
    jax.effects_barrier()
    assert longest < 40, "choose another key: all rows should end"
    assert len(Counting.calls) == 3 * (1 + longest)


def test_non_finite_logits_are_refused():
    """Under jit nothing can be raised, so the caller must call `check_finite`."""
    params = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(jnp.nan), make_params(SMALL_VOCAB))
    prompts = left_padded([6, 2, 5, 6, 1, 4], 6, 16)
    run = partial(rollout, Decoder(SMALL_VOCAB), policy=Knorm(), config=ENDING)
    with pytest.raises(FloatingPointError, match="expected finite logits in the sampler; got NaN .* 6 of 6 rows"):
        run(params, prompts, jax.random.key(0))
    trajectory = jax.jit(run)(params, prompts, jax.random.key(0))
    with pytest.raises(NonFiniteLogitsError):
        check_finite(trajectory.logprobs)


# Sizes.


def dense() -> Trajectory:
    return roll(Dense())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "budget", "buffer"),
    [(H2O(), 40, 1), (Protect(KeyDiff(), sinks=2, recent=2), 32, 64)],
    ids=["H2O", "Protect"],
)
def test_budget_above_the_length_is_dense(policy: EvictionPolicy, budget: int, buffer: int):
    """The last token is never read, so 32 keys are all."""
    trajectory = roll(policy, replace(SIZES, budget=budget, buffer=buffer))
    np.testing.assert_array_equal(trajectory.tokens, dense().tokens)
    np.testing.assert_allclose(trajectory.logprobs, dense().logprobs, atol=2e-5)
    np.testing.assert_array_equal(eviction_times(trajectory), eviction_times(dense()))


@pytest.mark.parametrize(("budget", "buffer"), [(1, 1), (8, 5)])
def test_no_query_sees_more_than_the_cache_holds(budget: int, buffer: int):
    """Prompt queries are dense; every other query sees the budget and its own segment so far."""
    seen = visible(roll(Knorm(), replace(SIZES, budget=budget, buffer=buffer))).sum(-1)
    for b, length in enumerate(LENGTHS):
        for step in range(24 - 1):
            keys = length
            for segment in range(step // buffer + 1):
                keys = min(keys, budget) + (buffer if segment < step // buffer else step % buffer + 1)
            assert (seen[b, :, :, WIDTH + step] == keys).all()


def test_pyramid_gives_every_layer_its_own_budget():
    """Budgets 14 and 2: the fifth query fills the first layer's, the prompt the second layer's."""
    policy = Pyramid(Knorm(), beta=4.0)
    assert plan(policy, SIZES, 2, WIDTH) == ((14, 2), 3)
    seen = visible(roll(policy)).sum(-1)[0, :, :, WIDTH : WIDTH + 8]
    assert seen[0].tolist() == [[10, 11, 12, 13, 14, 15, 15, 16]] * 2
    assert seen[1].tolist() == [[3, 4, 5, 3, 4, 5, 3, 4]] * 2


def test_shapes_and_static_fields_of_the_trajectory():
    def abstract_rollout(sampling: SamplingConfig) -> Trajectory:
        prompts = left_padded(LENGTHS, WIDTH, SHAPE.vocab_size)
        sizes = replace(SIZES, sampling=sampling)
        with_names = partial(rollout, MODEL, policy=StreamingLLM(sinks=2), config=sizes)
        return jax.eval_shape(with_names, make_params(SHAPE), prompts, jax.random.key(0))

    warm = abstract_rollout(SamplingConfig(temperature=0.7))
    assert (warm.temperature, warm.replayable, warm.prompt_width) == (0.7, True, WIDTH)
    assert warm.tokens.shape == warm.valid.shape == (3, 33) and warm.logprobs.shape == (3, 24)
    assert warm.entropy is not None and warm.entropy.shape == (3, 24) and warm.drawable is None
    filtered = abstract_rollout(SamplingConfig(top_k=5))
    assert filtered.replayable and filtered.drawable is not None
    assert [leaf.shape for leaf in jax.tree.leaves(filtered.drawable)] == [(3, 24, 5)]
    assert not abstract_rollout(SamplingConfig(temperature=0.0)).replayable


# Memory.


WIDE = tiny_model_config(num_layers=1, head_dim=32)
BATCH = 4


def temporary_bytes(policy: EvictionPolicy, response: int) -> int:
    """Temporary memory of the compiled rollout."""
    prompts = left_padded([8] * BATCH, 8, WIDE.vocab_size)
    sizes = RolloutConfig(max_new_tokens=response, budget=16, buffer=8)
    lowered = rollout_program.lower(
        Decoder(WIDE), make_params(WIDE), prompts, jax.random.key(0), policy=policy, config=sizes
    )
    analysis: Any = lowered.compile().memory_analysis()
    return analysis.temp_size_in_bytes


@pytest.mark.slow
def test_memory_of_a_budget_does_not_depend_on_the_length():
    """960 more tokens cost a few integers each; a dense cache grows by their keys and values."""
    more = 1024 - 64
    entries = BATCH * WIDE.num_layers * WIDE.num_kv_heads * more
    keys_and_values = entries * 2 * WIDE.head_dim * 4
    grown = {policy: temporary_bytes(policy, 1024) - temporary_bytes(policy, 64) for policy in (H2O(), Dense())}
    print(f"bytes per layer, kv head, row and token: { {p: n / entries for p, n in grown.items()} }")
    assert grown[H2O()] <= 5 * 4 * entries
    assert grown[Dense()] >= keys_and_values


# Errors.


def test_sequences_longer_than_the_context_are_refused():
    short = Decoder(replace(SHAPE, max_positions=32))
    prompts = left_padded(LENGTHS, WIDTH, SHAPE.vocab_size)
    with pytest.raises(ValueError, match=r"context of 32 tokens; got 9 \+ 24"):
        rollout(short, make_params(SHAPE), prompts, jax.random.key(0), policy=Knorm(), config=SIZES)


def test_budgets_too_small_for_the_policy_are_refused():
    with pytest.raises(ValueError, match=r"at least 32 keys \(sinks \+ window that SnapKV.* got 8 in layer 0"):
        roll(SnapKV())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"min_new_tokens": -1}, "min_new_tokens >= 0.* got -1"),
        ({"min_new_tokens": 25}, "min_new_tokens <= max_new_tokens = 24; got 25"),
        *(({name: 0}, f"{name} >= 1, a whole number; got 0") for name in ("max_new_tokens", "budget", "buffer")),
    ],
)
def test_invalid_sizes_are_refused(change: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        replace(SIZES, **change)


def test_caches_of_a_batch_are_not_gathered():
    """Row i continues prompt i // group, whose cache is on the same device."""
    mesh, group = make_mesh(data=4), 2
    sampler = Sampler(MODEL, H2O(), SIZES, WIDTH)
    prompts = left_padded([3] * 8, WIDTH, SHAPE.vocab_size)
    prefilled = jax.eval_shape(
        partial(prefill, sampler), make_params(SHAPE), prompts, jax.random.split(jax.random.key(0), 8)
    )
    with jax.set_mesh(mesh):
        placed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch_sharding(mesh)), prefilled
        )
        rng = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8 * group))
        limit = jax.ShapeDtypeStruct((8 * group,), jnp.int32, sharding=batch_sharding(mesh))
        begun = jax.jit(lambda *state: constrain_rows(begin(*state))).lower(placed, rng, limit)
        hlo = str(begun.compile().as_text())
    assert "all-gather" not in hlo and "all-to-all" not in hlo


VALID_PROMPTS = left_padded([2, 3], WIDTH, SHAPE.vocab_size)


def with_token(row: int, column: int, token: int) -> PromptBatch:
    return VALID_PROMPTS.replace(tokens=VALID_PROMPTS.tokens.at[row, column].set(token))


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        (left_padded([5, 0, 3], WIDTH, 64), {}, "at least one token in every prompt; prompt 1 is all padding"),
        (left_padded([], WIDTH, 64), {}, "at least one prompt"),
        *(
            (PromptBatch(jnp.ones((1, 3), jnp.int32), jnp.array([valid])), {}, "padded only on the left.*got prompt 0")
            for valid in ([True, True, False], [True, False, True])
        ),
        (with_token(1, -2, -1), {}, f"vocabulary; got token -1 in prompt 1, column {WIDTH - 2}"),
        (with_token(1, -2, SHAPE.vocab_size), {}, f"vocabulary; got token {SHAPE.vocab_size} in prompt 1, column"),
        (with_token(0, 0, -100), {}, "got padding -100 in prompt 0, column 0"),
        (VALID_PROMPTS, {"group_size": 0}, "group_size >= 1, a whole number; got 0"),
        *(
            (VALID_PROMPTS, {"limits": limits}, "limits for 2 rows, each from 1 to max_new_tokens 24; got shape")
            for limits in (np.full(3, 5), np.full(2, 0), np.full(2, 25))
        ),
    ],
)
def test_invalid_inputs_are_refused(prompts: PromptBatch, options: dict[str, Any], message: str):
    params, key = make_params(SHAPE), jax.random.key(0)
    with pytest.raises(ValueError, match=message):
        rollout(MODEL, params, prompts, key, policy=Knorm(), config=SIZES, **options)
    with pytest.raises(ValueError, match=message):
        Engine(MODEL, Knorm(), SIZES, decode_rows=2).run(params, prompts, key, **options)


def test_fractional_limits_are_refused():
    with pytest.raises(ValueError, match="limits in whole tokens; got numbers of float64"):
        inspect.unwrap(check_limits)(np.array([2.5, 3.0]), 2, SIZES)  # without the type checks of tests


# Compilations.


def test_compiles_once():
    """For prompts and keys of one shape, and equal policies, sizes and models, which no other test has."""
    params = make_params(SHAPE)
    with count_compilations() as counts:
        for seed in range(2):
            prompts = left_padded(LENGTHS[seed:] + [3] * seed, WIDTH, SHAPE.vocab_size, seed)
            policy, sizes = Protect(Knorm(), sinks=1, recent=2), replace(SIZES, max_new_tokens=9)
            rollout(Decoder(replace(SHAPE)), params, prompts, jax.random.key(seed), policy=policy, config=sizes)
    assert counts["rollout_program"] == 1
    # The policy is part of the cache key.
    assert Protect(Knorm(), sinks=1, recent=2) != Protect(Knorm(), sinks=1, recent=3)
