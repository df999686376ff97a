"""Prompts read in chunks, with evictions in between: the mask says so, the learner repeats it, memory is bounded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.eviction.base import EvictionPolicy
from smd_jax.eviction.policies import H2O, Dense, KeyDiff, Knorm, SnapKV
from smd_jax.learner.forward import replay
from smd_jax.masks import NEVER, Segments, ShadowMask
from smd_jax.model.decoder import Decoder
from smd_jax.quantization import QuantConfig
from smd_jax.sampler.fixed_batch import RolloutConfig, rollout
from smd_jax.sampler.prefill import prefill
from smd_jax.sampler.static import Sampler
from smd_jax.testing import tiny_model_config
from smd_jax.text.prompts import PromptBatch
from smd_jax.trajectory import Trajectory
from tests.under_test import POLICIES, eviction_times, left_padded, make_params, quick_rollout

SHAPE = tiny_model_config(vocab_size=64, num_layers=2, tie_embeddings=False, max_positions=16_384)
MODEL = Decoder(SHAPE)
WIDTH, LENGTHS = 37, [37, 4, 21]
SIZES = RolloutConfig(max_new_tokens=12, budget=8, buffer=4, prefill_chunk=8)

replay_jitted = jax.jit(replay, static_argnums=0)


def roll(policy: EvictionPolicy, sizes: RolloutConfig, prompts: PromptBatch | None = None) -> Trajectory:
    prompts = left_padded(LENGTHS, WIDTH, SHAPE.vocab_size) if prompts is None else prompts
    return quick_rollout(MODEL, make_params(SHAPE), prompts, jax.random.key(3), policy=policy, config=sizes)


def gap(trajectory: Trajectory, mask: Any = None) -> float:
    scores = replay_jitted(MODEL, make_params(SHAPE), trajectory, trajectory.mask if mask is None else mask)
    return float(jnp.abs(jnp.where(trajectory.response_mask, scores.logprobs - trajectory.logprobs, 0)).max())


@pytest.mark.parametrize(
    ("name", "chunk"), [("H2O", 3), ("SnapKV", 8), ("Pyramid of H2O", 4), ("Random", 8), ("H2O", 64), ("TOVA", 1)]
)
def test_identity(name: str, chunk: int):
    """Chunks that are shorter and longer than a segment, and than the prompt, divide it or do not."""
    policy = POLICIES[name]
    trajectory = roll(policy, replace(SIZES, prefill_chunk=chunk))
    assert gap(trajectory) <= 2e-5
    mask = trajectory.mask
    assert isinstance(mask, ShadowMask)
    mask.with_segments(mask.segments)  # raises otherwise
    in_prompt = (eviction_times(trajectory)[..., :WIDTH] < WIDTH) & (eviction_times(trajectory)[..., :WIDTH] > 0)
    assert in_prompt.any() == (chunk < WIDTH)
    if chunk < WIDTH:
        dense_prompt = jnp.where(mask.evicted_at < WIDTH, jnp.minimum(mask.evicted_at * WIDTH, WIDTH), mask.evicted_at)
        assert gap(trajectory, ShadowMask(dense_prompt)) > 1e-3, "the learner does not notice a dense prompt"


@pytest.mark.parametrize(("chunk", "length", "first"), [(8, 8, 5), (4, 4, 1), (2, 4, 1), (3, 4, WIDTH)])
def test_segments_of_the_prompt(chunk: int, length: int, first: int):
    """Where chunks and segments have common boundaries, the learner need not look at all of the prompt."""
    mask: Any = roll(Knorm(), replace(SIZES, prefill_chunk=chunk)).mask
    assert mask.segments == (Segments(first, length, 8),) * 2


def test_what_a_prompt_sees():
    """Of every query: what was kept at the chunk's beginning, at most the budget, and the chunk so far. Chunks are
    counted from the prompt's end: 37 columns in chunks of 8 begin with one of 5."""
    trajectory = roll(Knorm(), SIZES)
    assert isinstance(trajectory.mask, ShadowMask)
    seen = np.asarray(trajectory.mask.to_boolean()).sum(-1)
    for row, length in enumerate(LENGTHS):
        kept = inside = 0
        for column in range(WIDTH - length, WIDTH):
            if (WIDTH - column) % 8 == 0:
                kept, inside = min(kept + inside, 8), 0
            inside += 1
            assert (seen[row, :, :, column] == kept + inside).all()


def test_a_row_does_not_know_its_padding():
    """Row 2, with 16 columns of padding and without."""
    prompts = left_padded(LENGTHS, WIDTH, SHAPE.vocab_size)
    together = roll(H2O(), SIZES)
    keys = jax.random.fold_in(jax.random.key(3), 2)[None]
    alone = rollout(
        MODEL,
        make_params(SHAPE),
        PromptBatch(prompts.tokens[2:, 16:], prompts.valid[2:, 16:]),
        keys,
        policy=H2O(),
        config=SIZES,
    )
    np.testing.assert_array_equal(together.response[2], alone.response[0])
    shifted = eviction_times(alone)[0]
    np.testing.assert_array_equal(
        eviction_times(together)[2, ..., 16:], np.where(shifted == NEVER, NEVER, shifted + 16)
    )


@pytest.mark.parametrize("policy", [Dense(), KeyDiff()], ids=["Dense", "KeyDiff"])
def test_chunks_alone_change_nothing(policy: EvictionPolicy):
    """With room for everything, chunks give what a whole prompt gives."""
    sizes = replace(SIZES, budget=WIDTH + 12)
    chunks, whole = roll(policy, sizes), roll(policy, replace(sizes, prefill_chunk=None))
    np.testing.assert_array_equal(chunks.tokens, whole.tokens)
    np.testing.assert_allclose(chunks.logprobs, whole.logprobs, atol=2e-5)
    np.testing.assert_array_equal(eviction_times(chunks), eviction_times(whole))


def test_a_prompt_of_nine_thousand_tokens():
    """As long as GovReport's, through 48 slots."""
    sizes = RolloutConfig(max_new_tokens=24, budget=32, buffer=16, prefill_chunk=16)
    prompts = left_padded([9000, 40], 9000, SHAPE.vocab_size)
    trajectory = rollout(MODEL, make_params(SHAPE), prompts, jax.random.key(0), policy=SnapKV(8), config=sizes)
    assert gap(trajectory) <= 2e-5
    at = eviction_times(trajectory)[0]
    assert ((at < 9000).sum(-1) >= 9000 - 48).all()


def temporary_bytes(width: int) -> int:
    """Of reading two prompts."""
    sampler = Sampler(MODEL, H2O(), RolloutConfig(16, budget=64, buffer=16, prefill_chunk=64), width)
    params = jax.eval_shape(lambda: make_params(SHAPE))
    prompts = jax.eval_shape(lambda: left_padded([width, width], width, SHAPE.vocab_size))
    rng = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 2))
    sizes: Any = jax.jit(prefill, static_argnums=0).lower(sampler, params, prompts, rng).compile().memory_analysis()
    return sizes.temp_size_in_bytes


def test_memory_does_not_depend_on_the_length_of_the_prompt():
    """8,192 more columns cost a token, its validity, and an integer per layer and head, each a few times over; their
    keys and values would take 13 times as much."""
    more = 2 * 8192
    grown = temporary_bytes(9216) - temporary_bytes(1024)
    integers = 4 + SHAPE.num_layers * SHAPE.num_kv_heads * 4
    print(f"bytes per row and column: {grown / more}")
    assert grown <= 3 * integers * more
    assert 2 * SHAPE.num_layers * SHAPE.num_kv_heads * SHAPE.head_dim * 4 > 4 * grown / more


def test_bad_chunks():
    with pytest.raises(ValueError, match="prefill_chunk >= 1 columns, or None; got 0"):
        replace(SIZES, prefill_chunk=0)
    with pytest.raises(ValueError, match="prefill_chunk None with a quantised cache.* got 8"):
        replace(SIZES, quant=QuantConfig(8, group=4))
