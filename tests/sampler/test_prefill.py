"""Prompts read in chunks, with evictions in between: the mask says so, the learner repeats it, memory is bounded."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.eviction.base import EvictionPolicy
from smd_jax.eviction.policies import H2O, Dense, KeyDiff, Knorm, SnapKV
from smd_jax.message.masks import NEVER, Segments, ShadowMask
from smd_jax.message.quantization import QuantConfig
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.decoder import Decoder
from smd_jax.sampler.engine import PromptQueue
from smd_jax.sampler.fixed_batch import RolloutConfig, rollout
from smd_jax.sampler.keys import row_keys
from smd_jax.sampler.prefill import prefill
from smd_jax.sampler.records import segments_of
from smd_jax.sampler.static import Sampler
from smd_jax.testing import tiny_model_config
from smd_jax.text.prompts import PromptBatch
from tests.under_test import POLICIES, eviction_times, gap, left_padded, make_params

SHAPE = tiny_model_config(vocab_size=64, num_layers=1, tie_embeddings=False, max_positions=16_384)
MODEL = Decoder(SHAPE)
OF_LAYERS = {1: MODEL, 2: Decoder(replace(SHAPE, num_layers=2))}
KEY = jax.random.key(0)
WIDTH, LENGTHS = 37, [37, 4, 21]
SIZES = RolloutConfig(max_new_tokens=12, budget=8, buffer=4, prefill_chunk=8)
SHORT_CHUNKS = RolloutConfig(16, budget=64, buffer=16, prefill_chunk=64)


@cache
def roll(policy: EvictionPolicy, sizes: RolloutConfig, layers: int = 1) -> Trajectory:
    model = OF_LAYERS[layers]
    prompts = left_padded(LENGTHS, WIDTH, SHAPE.vocab_size)
    return rollout(model, make_params(model.config), prompts, jax.random.key(3), policy=policy, config=sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chunk"), [("H2O", 3), ("SnapKV", 8), ("Pyramid of H2O", 4), ("H2O", 64), ("TOVA", 1)]
)
def test_identity(name: str, chunk: int):
    """Chunks that are shorter and longer than a segment, and than the prompt, divide it or do not."""
    layers = 2 if name.startswith("Pyramid") else 1  # budgets that differ between layers
    trajectory, model = roll(POLICIES[name], replace(SIZES, prefill_chunk=chunk), layers), OF_LAYERS[layers]
    assert gap(model, trajectory).max() <= 2e-5
    mask = trajectory.mask
    mask.with_segments(mask.segments)  # raises otherwise
    in_prompt = (eviction_times(trajectory)[..., :WIDTH] < WIDTH) & (eviction_times(trajectory)[..., :WIDTH] > 0)
    assert in_prompt.any() == (chunk < WIDTH)
    if chunk < WIDTH:
        dense_prompt = jnp.where(mask.evicted_at < WIDTH, jnp.minimum(mask.evicted_at * WIDTH, WIDTH), mask.evicted_at)
        missed = gap(model, trajectory, ShadowMask(dense_prompt)).max()
        assert missed > 1e-3, "the learner does not notice a dense prompt"


@pytest.mark.parametrize(
    ("width", "response", "buffer", "chunk", "expected"),
    [
        (101, 12, 4, 8, Segments(5, 8, 8)),  # boundaries of both at 5, 13, …, 101, 109
        (101, 12, 4, 4, Segments(1, 4, 8)),
        (101, 12, 4, 2, Segments(1, 4, 8)),  # every second chunk ends where a segment does
        (101, 12, 4, 3, Segments(101, 4, 8)),  # no common boundaries
        (37, 12, 4, 8, Segments(37, 4, 8)),  # a short prompt, which is cheaper seen densely
        (101, 900, 4, 64, Segments(101, 4, 8)),  # a long response, in which every query would look at 64 keys more
    ],
)
def test_segments_of_the_prompt(width: int, response: int, buffer: int, chunk: int, expected: Segments):
    """Where chunks and segments have common boundaries, the learner need not look at all of the prompt; it does where
    that is cheaper. Counted by hand: scores of the queries before the first segment and of those after it."""
    sizes = RolloutConfig(response, budget=8, buffer=buffer, prefill_chunk=chunk)
    assert segments_of(Knorm(), sizes, 2, width) == (expected,) * 2


def test_what_a_prompt_sees():
    """Of every query: what was kept at the chunk's beginning, at most the budget, and the chunk so far. Chunks are
    counted from the prompt's end: 37 columns in chunks of 8 begin with one of 5."""
    trajectory = roll(POLICIES["SnapKV"], SIZES)
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
    prompts, sizes = left_padded(LENGTHS, WIDTH, SHAPE.vocab_size), replace(SIZES, prefill_chunk=3)
    together = roll(H2O(), sizes)
    keys = jax.random.fold_in(jax.random.key(3), 2)[None]
    alone = rollout(
        MODEL,
        make_params(SHAPE),
        PromptBatch(prompts.tokens[2:, 16:], prompts.valid[2:, 16:]),
        keys,
        policy=H2O(),
        config=sizes,
    )
    np.testing.assert_array_equal(together.response[2], alone.response[0])
    shifted = eviction_times(alone)[0]
    np.testing.assert_array_equal(
        eviction_times(together)[2, ..., 16:], np.where(shifted == NEVER, NEVER, shifted + 16)
    )


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Dense(), KeyDiff()], ids=["Dense", "KeyDiff"])
def test_chunks_alone_change_nothing(policy: EvictionPolicy):
    """With room for everything, chunks give what a whole prompt gives, whatever the policy."""
    sizes = replace(SIZES, budget=WIDTH + 12)
    chunks, whole = roll(policy, sizes), roll(KeyDiff(), replace(sizes, prefill_chunk=None))
    np.testing.assert_array_equal(chunks.tokens, whole.tokens)
    np.testing.assert_allclose(chunks.logprobs, whole.logprobs, atol=2e-5)
    np.testing.assert_array_equal(eviction_times(chunks), eviction_times(whole))


def test_a_long_prompt():
    """Through 48 slots; long enough that the learner sees it in segments, too."""
    sizes = RolloutConfig(max_new_tokens=24, budget=32, buffer=16, prefill_chunk=16)
    prompts = left_padded([1500, 40], 1500, SHAPE.vocab_size)
    trajectory = rollout(MODEL, make_params(SHAPE), prompts, jax.random.key(0), policy=SnapKV(8), config=sizes)
    assert gap(MODEL, trajectory).max() <= 2e-5
    assert trajectory.mask.segments[0].first < 48
    assert ((eviction_times(trajectory)[0] < 1500).sum(-1) >= 1500 - 48).all()


def temporary_bytes(width: int, rows: int = 2, sizes: RolloutConfig = SHORT_CHUNKS) -> int:
    """Of reading prompts of this width."""
    sampler = Sampler(MODEL, H2O(), sizes, width)
    params = jax.eval_shape(lambda: make_params(SHAPE))
    prompts = jax.eval_shape(lambda: left_padded([width] * rows, width, SHAPE.vocab_size))
    rng = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
    found: Any = jax.jit(prefill, static_argnums=0).lower(sampler, params, prompts, rng).compile().memory_analysis()
    return found.temp_size_in_bytes


def test_memory_does_not_depend_on_the_length_of_the_prompt():
    """8,192 more columns cost a token, its validity, and an integer per layer and head, each a few times over; their
    keys and values would take 13 times as much."""
    more = 2 * 8192
    grown = temporary_bytes(9216) - temporary_bytes(1024)
    integers = 4 + SHAPE.num_layers * SHAPE.num_kv_heads * 4
    print(f"bytes per row and column: {grown / more}")
    assert grown <= 3 * integers * more
    assert 2 * SHAPE.num_layers * SHAPE.num_kv_heads * SHAPE.head_dim * 4 > 4 * grown / more


def test_chunks_of_many_rows_need_less_memory_than_whole_prompts():
    """Scores of a chunk exist for a few rows at a time; those of all 32 rows would take 16 times as much."""
    sizes = RolloutConfig(16, budget=128, buffer=16, prefill_chunk=128)
    chunks, whole = (temporary_bytes(512, 32, each) for each in (sizes, replace(sizes, prefill_chunk=None)))
    scores = 32 * SHAPE.num_heads * 128 * 256 * 4
    print(f"temporary bytes: chunks {chunks}, whole {whole}, scores of a chunk in all rows {scores}")
    assert chunks < whole and chunks < scores


def test_a_chunk_is_not_longer_than_the_prompt():
    """Eight columns, in chunks of 512: the cache had 512 slots beside its budget, and 504 columns of padding."""
    sizes = RolloutConfig(16, budget=8, buffer=4, prefill_chunk=8)
    assert temporary_bytes(8, sizes=replace(sizes, prefill_chunk=512)) == temporary_bytes(8, sizes=sizes)


def test_short_prompts_are_read_in_few_columns():
    """By the engine, which may choose: prompts of up to one chunk by their width, others by their number of chunks."""
    queue = PromptQueue(np.array([3, 200, 30, 64, 65, 10]), 200, chunk=64)
    read = []
    while queue:
        read.append(queue.next(4))
    assert read == [([0, 5], 16), ([1], 200), ([2], 32), ([3], 64), ([4], 200)]


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Dense(), H2O(), SnapKV(4)], ids=["Dense", "H2O", "SnapKV"])
def test_prompts_in_fewer_columns_than_a_chunk(policy: EvictionPolicy):
    """A batch of short prompts has the same cache in eight columns as in all 37, which hold one chunk of 32 of them."""
    sampler = Sampler(MODEL, policy, replace(SIZES, budget=6, prefill_chunk=32), WIDTH)
    given = left_padded([8, 3], WIDTH, SHAPE.vocab_size)
    narrow = PromptBatch(given.tokens[:, -8:], given.valid[:, -8:])
    read = jax.jit(prefill, static_argnums=0)
    one, other = (read(sampler, make_params(SHAPE), each, row_keys(KEY, 2)) for each in (given, narrow))
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for x, y in zip(
        jax.tree.leaves((one.hidden, one.start, one.records)),
        jax.tree.leaves((other.hidden, other.start, other.records)),
        strict=True,
    ):
        np.testing.assert_allclose(x, y, atol=2e-5)
    for x, y in zip(one.cache, other.cache, strict=True):
        np.testing.assert_array_equal(x.columns, y.columns)
        held = np.asarray(x.valid)[..., None]
        np.testing.assert_allclose(np.where(held, x.keys, 0), np.where(held, y.keys, 0), atol=2e-5)
        np.testing.assert_allclose(np.where(held, x.values, 0), np.where(held, y.values, 0), atol=2e-5)


def test_bad_chunks():
    with pytest.raises(ValueError, match=r"prefill_chunk >= 1, a whole number \(columns, or None\); got 0"):
        replace(SIZES, prefill_chunk=0)
    with pytest.raises(ValueError, match="prefill_chunk None with a quantised cache.* got 8"):
        replace(SIZES, quant=QuantConfig(bits=8, group=4))
