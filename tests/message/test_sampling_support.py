"""Sampling support of other engines in compressed rows: exact, and checked."""

from __future__ import annotations

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import smd_jax as smd
from smd_jax.certify.record import arrays_of
from smd_jax.message.drawable_tokens import DrawableTokens
from smd_jax.testing import random_params, tiny_model_config
from tests.under_test import left_padded

CONFIG = tiny_model_config(vocab_size=100, max_positions=64)
MODEL = smd.Decoder(CONFIG)


def test_by_hand():
    support = [([3, 5, 7, 1, 2], [0, 2, 5]), ([9], [0, 1])]
    drawable = DrawableTokens.from_csr(support, [[5, 1], [9]])
    assert drawable.sets is not None and drawable.sets.tolist() == [
        [[3, 5, -1], [7, 1, 2]],
        [[9, -1, -1], [-1, -1, -1]],
    ]


@pytest.mark.slow
@settings(deadline=None)  # the first call compiles
@given(st.lists(st.sets(st.integers(0, 99), min_size=1), min_size=1, max_size=6), st.booleans())
def test_sets_come_back(sets, as_bits):
    ids = [token for one in sets for token in sorted(one)]
    offsets = np.cumsum([0, *map(len, sets)])
    response = [min(one) for one in sets]
    drawable = DrawableTokens.from_csr([(ids, offsets)], [response], vocab_size=100 if as_bits else None)
    boolean = np.asarray(drawable.to_boolean(100, jnp.arange(len(sets))))[0]
    assert [set(np.flatnonzero(row).tolist()) for row in boolean] == sets


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling", [smd.SamplingConfig(top_k=5), smd.SamplingConfig(temperature=0.8, top_p=0.9)], ids=str
)
def test_a_foreign_record_with_support_is_exact(sampling):
    """A rollout of ours, reported as vLLM reports it. Without its support the learner is another policy."""
    params = jax.tree.map(lambda x: 2 * x, random_params(CONFIG))
    prompts = left_padded([6, 4, 2], 6, CONFIG.vocab_size)
    sizes = smd.RolloutConfig(max_new_tokens=20, budget=10, buffer=4, sampling=sampling)
    ours = smd.rollout(MODEL, params, prompts, jax.random.key(1), policy=smd.eviction.TOVA(), config=sizes)
    arrays = arrays_of(ours)
    offsets = arrays["support_offsets"]
    ends = np.cumsum(np.asarray(ours.lengths()))
    support, rows = [], []
    for row, end in enumerate(ends):
        start = end - int(ours.lengths()[row])
        support.append(
            (arrays["support_ids"][offsets[start] : offsets[end]], offsets[start : end + 1] - offsets[start])
        )
        prompt, length = arrays["prompt_lengths"][row], arrays["lengths"][row]
        rows.append((arrays["tokens"][row], arrays["logprobs"][row], arrays["evicted_at"][row], prompt, length))
    record = {
        "prompts": [tokens[:p] for tokens, _, _, p, _ in rows],
        "responses": [tokens[p:n] for tokens, _, _, p, n in rows],
        "logprobs": [logprobs[p:n] for _, logprobs, _, p, n in rows],
        "evicted_at": [evicted_at[:, :, :n] for _, _, evicted_at, _, n in rows],
        "terminated": [False] * 3,
        "temperature": sampling.temperature,
        "vocab_size": CONFIG.vocab_size,
        "layers": CONFIG.num_layers,
        "kv_heads": CONFIG.num_kv_heads,
    }
    for sets, bound in ((support, True), (None, False)):
        foreign = smd.Trajectory.from_records(**record, support=sets)
        off = abs(smd.replay(MODEL, params, foreign).logprobs - foreign.logprobs)[np.asarray(foreign.response_mask)]
        assert (float(off.max()) < 2e-5) == bound


@pytest.mark.parametrize(
    ("support", "said"),
    [
        ([], "sampling support of 1 rows; got 0"),
        ([([1, 2], [0, 1])], "expected 3 rising offsets from 0 to 2 in the sampling support of row 0"),
        ([([1, 2], [0, 2, 2])], "rising offsets"),
        ([([1, 101], [0, 1, 2])], "expected ids from 0 to 99 in the sampling support of row 0; got 101"),
        (
            [([1, 4], [0, 1, 2])],
            r"sampled token 2 in its sampling support of row 0; it is missing \(response token 1\)",
        ),
        ([(np.array([1.5, 2.0]), [0, 1, 2])], "expected whole numbers"),
    ],
)
def test_bad_support_is_refused(support, said):
    with pytest.raises(ValueError, match=said):
        DrawableTokens.from_csr(support, [[1, 2]], vocab_size=100)


def test_bits_are_packed_token_by_token():
    """The booleans of all tokens at once would take 4 MB; the bits take 0.5 MB."""
    vocab, tokens, most = 20_000, 200, 700
    support = [(np.tile(np.arange(most), 4), most * np.arange(5))]

    def packed() -> DrawableTokens:
        return DrawableTokens.from_csr(support, [[0] * 4], response_width=tokens, vocab_size=vocab)

    packed()  # the first call also fills caches
    tracemalloc.start()
    try:
        drawable = packed()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert drawable.sets is not None and drawable.sets.shape == (1, tokens, vocab // 8) and peak < 2e6


def test_a_width_below_the_longest_response_is_refused():
    for vocab_size in (None, 100):
        with pytest.raises(ValueError, match="response_width of at least 2, the tokens of row 0; got 1"):
            DrawableTokens.from_csr([([1, 2], [0, 1, 2])], [[1, 2]], response_width=1, vocab_size=vocab_size)
