"""Chunked prefill: evictions between chunks are recorded and replayed, and memory is bounded."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.eviction.base import EvictionPolicy
from smd_jax.eviction.policies import H2O, Dense, KeyDiff, Knorm, SnapKV
from smd_jax.message.masks import NEVER, Segments, ShadowMask, dense_mask, positions
from smd_jax.message.quantization import QuantConfig
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.decoder import Decoder
from smd_jax.model.teacher_forced import apply_model
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
MODELS = {1: MODEL, 2: Decoder(replace(SHAPE, num_layers=2))}
KEY = jax.random.key(0)
WIDTH, LENGTHS = 37, [37, 4, 21]
SIZES = RolloutConfig(max_new_tokens=12, budget=8, buffer=4, prefill_chunk=8)
SHORT_CHUNKS = RolloutConfig(max_new_tokens=16, budget=64, buffer=16, prefill_chunk=64)


@cache
def roll(policy: EvictionPolicy, sizes: RolloutConfig, layers: int = 1) -> Trajectory:
    model = MODELS[layers]
    prompts = left_padded(LENGTHS, WIDTH, SHAPE.vocab_size)
    return rollout(model, make_params(model.config), prompts, jax.random.key(3), policy=policy, config=sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chunk"), [("H2O", 3), ("SnapKV", 8), ("Pyramid of H2O", 4), ("H2O", 64), ("TOVA", 1)]
)
def test_identity(name: str, chunk: int):
    """Chunks shorter and longer than a segment and the prompt, with and without a remainder."""
    layers = 2 if name.startswith("Pyramid") else 1  # budgets that differ between layers
    trajectory, model = roll(POLICIES[name], replace(SIZES, prefill_chunk=chunk), layers), MODELS[layers]
    assert gap(model, trajectory).max() <= 2e-5
    mask = trajectory.mask
    mask.with_segments(mask.segments)  # raises unless the mask fits its segments
    in_prompt = (eviction_times(trajectory)[..., :WIDTH] < WIDTH) & (eviction_times(trajectory)[..., :WIDTH] > 0)
    assert in_prompt.any() == (chunk < WIDTH)
    if chunk < WIDTH:
        dense_prompt = jnp.where(mask.evicted_at < WIDTH, jnp.minimum(mask.evicted_at * WIDTH, WIDTH), mask.evicted_at)
        difference = gap(model, trajectory, ShadowMask(dense_prompt)).max()
        assert difference > 1e-3, "the learner does not notice a dense prompt"


@pytest.mark.parametrize(
    ("width", "response", "buffer", "chunk", "expected"),
    [
        (101, 12, 4, 8, Segments(5, 8, 8)),  # boundaries of both at 5, 13, …, 101, 109
        (101, 12, 4, 4, Segments(1, 4, 8)),
        (101, 12, 4, 2, Segments(1, 4, 8)),  # every second chunk ends where a segment does
        (101, 12, 4, 3, Segments(101, 4, 8)),  # no common boundaries
        (37, 12, 4, 8, Segments(37, 4, 8)),  # a dense view of a short prompt is cheaper
        (101, 900, 4, 64, Segments(101, 4, 8)),  # every query of a long response would read 64 more keys
    ],
)
def test_segments_of_the_prompt(width: int, response: int, buffer: int, chunk: int, expected: Segments):
    """With common boundaries of chunks and segments the learner reads the prompt in segments, unless a dense prompt is
    cheaper. Attention scores before and after the first segment are counted by hand."""
    sizes = RolloutConfig(max_new_tokens=response, budget=8, buffer=buffer, prefill_chunk=chunk)
    assert segments_of(Knorm(), sizes, 2, width) == (expected,) * 2


def test_prompt_queries_see_kept_keys_and_their_chunk_so_far():
    """Chunks are aligned to the prompt's end: 37 columns in chunks of 8 begin with one of 5."""
    trajectory = roll(POLICIES["SnapKV"], SIZES)
    seen = np.asarray(trajectory.mask.to_boolean()).sum(-1)
    for row, length in enumerate(LENGTHS):
        kept = inside = 0
        for column in range(WIDTH - length, WIDTH):
            if (WIDTH - column) % 8 == 0:
                kept, inside = min(kept + inside, 8), 0
            inside += 1
            assert (seen[row, :, :, column] == kept + inside).all()


def test_a_row_does_not_depend_on_its_padding():
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
def test_chunks_without_evictions_equal_a_whole_prompt(policy: EvictionPolicy):
    sizes = replace(SIZES, budget=WIDTH + 12)
    chunks, whole = roll(policy, sizes), roll(KeyDiff(), replace(sizes, prefill_chunk=None))
    np.testing.assert_array_equal(chunks.tokens, whole.tokens)
    np.testing.assert_allclose(chunks.logprobs, whole.logprobs, atol=2e-5)
    np.testing.assert_array_equal(eviction_times(chunks), eviction_times(whole))


def test_a_long_prompt():
    """1,500 tokens in 48 slots; the learner reads the prompt in segments too."""
    sizes = RolloutConfig(max_new_tokens=24, budget=32, buffer=16, prefill_chunk=16)
    prompts = left_padded([1500, 40], 1500, SHAPE.vocab_size)
    trajectory = rollout(MODEL, make_params(SHAPE), prompts, jax.random.key(0), policy=SnapKV(8), config=sizes)
    assert gap(MODEL, trajectory).max() <= 2e-5
    assert trajectory.mask.segments[0].first < 48
    assert ((eviction_times(trajectory)[0] < 1500).sum(-1) >= 1500 - 48).all()


def temporary_bytes(width: int, rows: int = 2, sizes: RolloutConfig = SHORT_CHUNKS) -> int:
    """Temporary memory of a prefill of this width."""
    sampler = Sampler(MODEL, H2O(), sizes, width)
    params = jax.eval_shape(lambda: make_params(SHAPE))
    prompts = jax.eval_shape(lambda: left_padded([width] * rows, width, SHAPE.vocab_size))
    rng = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
    found: Any = jax.jit(prefill, static_argnums=0).lower(sampler, params, prompts, rng).compile().memory_analysis()
    return found.temp_size_in_bytes


def test_memory_does_not_depend_on_the_length_of_the_prompt():
    """8,192 more columns cost a few integers each; their keys and values would take 13 times as much."""
    columns = 2 * 8192
    grown = temporary_bytes(9216) - temporary_bytes(1024)
    integers = 4 + SHAPE.num_layers * SHAPE.num_kv_heads * 4
    print(f"bytes per row and column: {grown / columns}")
    assert grown <= 3 * integers * columns
    assert 2 * SHAPE.num_layers * SHAPE.num_kv_heads * SHAPE.head_dim * 4 > 4 * grown / columns


def test_chunks_of_many_rows_need_less_memory_than_whole_prompts():
    """Scores of a chunk exist for a few rows at a time; those of all 32 rows would take 16 times as much."""
    sizes = RolloutConfig(max_new_tokens=16, budget=128, buffer=16, prefill_chunk=128)
    chunks, whole = (temporary_bytes(512, 32, each) for each in (sizes, replace(sizes, prefill_chunk=None)))
    scores = 32 * SHAPE.num_heads * 128 * 256 * 4
    print(f"temporary bytes: chunks {chunks}, whole {whole}, scores of a chunk in all rows {scores}")
    assert chunks < whole and chunks < scores


def test_chunks_are_not_longer_than_the_prompt():
    """Otherwise eight columns in a chunk of 512 would have 504 columns of padding."""
    sizes = RolloutConfig(max_new_tokens=16, budget=8, buffer=4, prefill_chunk=8)
    assert temporary_bytes(8, sizes=replace(sizes, prefill_chunk=512)) == temporary_bytes(8, sizes=sizes)


def test_short_prompts_are_read_in_few_columns():
    """The engine batches prompts of up to one chunk by their width, longer ones by their number of chunks."""
    queue = PromptQueue(np.array([3, 200, 30, 64, 65, 10]), 200, chunk=64)
    read = []
    while queue:
        read.append(queue.next(4))
    assert read == [([0, 5], 16), ([1], 200), ([2], 32), ([3], 64), ([4], 200)]


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Dense(), H2O(), SnapKV(4)], ids=["Dense", "H2O", "SnapKV"])
def test_short_prompts_have_the_same_cache_in_fewer_columns(policy: EvictionPolicy):
    """In 8 columns, less than a chunk of 32, and in all 37."""
    sampler = Sampler(MODEL, policy, replace(SIZES, budget=6, prefill_chunk=32), WIDTH)
    wide = left_padded([8, 3], WIDTH, SHAPE.vocab_size)
    narrow = PromptBatch(wide.tokens[:, -8:], wide.valid[:, -8:])
    read = jax.jit(prefill, static_argnums=0)
    one, other = (read(sampler, make_params(SHAPE), each, row_keys(KEY, 2)) for each in (wide, narrow))
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for x, y in zip(
        jax.tree.leaves((one.hidden, one.start, one.records)),
        jax.tree.leaves((other.hidden, other.start, other.records)),
        strict=True,
    ):
        np.testing.assert_allclose(x, y, atol=2e-5)
    for x, y in zip(one.cache, other.cache, strict=True):
        np.testing.assert_array_equal(x.columns, y.columns)
        valid = np.asarray(x.valid)[..., None]
        np.testing.assert_allclose(np.where(valid, x.keys, 0), np.where(valid, y.keys, 0), atol=2e-5)
        np.testing.assert_allclose(np.where(valid, x.values, 0), np.where(valid, y.values, 0), atol=2e-5)


def test_invalid_chunks_are_refused():
    with pytest.raises(ValueError, match=r"prefill_chunk >= 1, a whole number \(columns, or None\); got 0"):
        replace(SIZES, prefill_chunk=0)
    with pytest.raises(ValueError, match="prefill_chunk None with a quantised cache.* got 8"):
        replace(SIZES, quant=QuantConfig(bits=8, group=4))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda hidden, given, new: (hidden, given), "state from attend for each of 2 layers; got layer 0's unchanged"),
        (lambda hidden, given, new: (hidden, new[:1]), "each of 2 layers; got 1 states"),
        (lambda hidden, given, new: (hidden[:, -1:], new), r"hidden_size\] \(3, 37, 32\); got \(3, 1, 32\)"),
        (lambda hidden, given, new: None, "of Broken to return an array .* got NoneType"),
        (lambda hidden, given, new: (hidden, new, new), "of Broken to return an array .* got 3 objects"),
    ],
)
def test_wrong_results_of_a_models_hidden_are_refused(broken: Any, message: str):
    class Broken(Decoder):
        def hidden(self, params: Any, tokens: Any, positions: Any, attend: Any, layers: Any) -> Any:
            hidden, new = super().hidden(params, tokens, positions, attend, layers)
            return broken(hidden, layers, new)

    model = Broken(MODELS[2].config)
    params, prompts = make_params(model.config), left_padded(LENGTHS, WIDTH, SHAPE.vocab_size)
    with pytest.raises((TypeError, ValueError), match=f"expected hidden .*{message}"):
        rollout(model, params, prompts, KEY, policy=Dense(), config=replace(SIZES, prefill_chunk=None))
    with pytest.raises((TypeError, ValueError), match=f"expected hidden .*{message}"):
        apply_model(model, params, prompts.tokens, positions(prompts.valid), dense_mask(prompts.valid))
