"""Records of TensorRT-LLM and Memento against NumPy caches and our own rollouts."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smd_jax.eviction.base import EvictionPolicy
from smd_jax.eviction.policies import TriAttention
from smd_jax.eviction.wrappers import OnTokens
from smd_jax.message.engine_records import EvictionMode, MementoBlocks, Round, memento_evictions, tensorrt_llm_evictions
from smd_jax.message.masks import NEVER
from smd_jax.message.spans import TokenSpans
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.decoder import Decoder
from smd_jax.model.query_centers import measure_query_centers
from smd_jax.sampler.fixed_batch import RolloutConfig, rollout
from smd_jax.testing import tiny_model_config
from smd_jax.text.prompts import PromptBatch
from tests.under_test import eviction_times, gap, left_padded, make_params, records_of

LAYERS, HEADS = 2, 2
CONFIG = tiny_model_config(vocab_size=8, num_layers=LAYERS, num_kv_heads=HEADS, tie_embeddings=False)
MODEL, PARAMS = Decoder(CONFIG), make_params(CONFIG)
MODES: tuple[EvictionMode, ...] = ("union", "per_head", "per_layer_perhead")


# ---------------------------------------------------------------- TensorRT-LLM


class Pool:
    """Key pools of one request: each slot holds the position of its token."""

    def __init__(self, prompt: int, tokens: int) -> None:
        self.prompt = prompt
        self.slots = np.full((LAYERS, HEADS, tokens), -1)
        self.slots[:, :, :prompt] = np.arange(prompt)
        self.length = prompt
        self.visible = np.zeros((LAYERS, HEADS, tokens, tokens), bool)
        for query in range(prompt):
            self.visible[:, :, query, : query + 1] = True

    def forward(self, query: int) -> None:
        """Writes the query's key, then attends to every key in the pools."""
        self.slots[:, :, self.length] = query
        self.length += 1
        for layer, head in np.ndindex(LAYERS, HEADS):
            self.visible[layer, head, query, self.slots[layer, head, : self.length]] = True

    def compact(self, kept: np.ndarray, cached: int) -> None:
        """Moves the kept keys `[layers, kv_heads, keep]` and the keys in flight to the slots after the prompt."""
        for layer, head in np.ndindex(LAYERS, HEADS):
            pool = self.slots[layer, head]
            for target, source in enumerate([*kept[layer, head], *range(cached, self.length)], self.prompt):
                pool[target] = pool[source]
        self.length = self.prompt + kept.shape[-1] + self.length - cached


def emulate(
    mode: EvictionMode, prompt: int, tokens: int, keep: int, beta: int, overlap: bool, seed: int
) -> tuple[list[Round], np.ndarray]:
    """A request with random kept sets: its rounds, and the keys that its queries saw."""
    rng, pool, rounds, evicted = np.random.default_rng(seed), Pool(prompt, tokens), [], 0
    queries = iter(range(prompt, tokens - 1))  # the last token is never read
    for step, query in enumerate(queries, 1):
        if pool.length + evicted <= query:
            pool.forward(query)
        cached = query + 1 - evicted
        if step % beta or cached <= prompt + keep:
            continue
        in_flight = int(overlap and query + 1 < tokens - 1)
        if in_flight:
            pool.forward(query + 1)
        selections = {"union": 1, "per_head": HEADS, "per_layer_perhead": LAYERS * HEADS}[mode]
        kept = np.stack([np.sort(rng.choice(np.arange(prompt, cached), keep, False)) for _ in range(selections)])
        shape = {"union": (1, 1, keep), "per_head": (1, HEADS, keep), "per_layer_perhead": (LAYERS, HEADS, keep)}[mode]
        pool.compact(np.broadcast_to(kept.reshape(shape), (LAYERS, HEADS, keep)), cached)
        evicted += cached - prompt - keep
        rounds.append(Round(cached, kept[0] if mode == "union" else kept, int(overlap)))
    return rounds, pool.visible


@settings(deadline=None)
@given(
    mode=st.sampled_from(MODES),
    prompt=st.integers(1, 5),
    response=st.integers(2, 20),
    keep=st.integers(1, 6),
    beta=st.integers(1, 5),
    overlap=st.booleans(),
    seed=st.integers(0, 9),
)
def test_random_rounds_give_the_emulated_visibility(
    mode: EvictionMode, prompt: int, response: int, keep: int, beta: int, overlap: bool, seed: int
):
    tokens = prompt + response
    rounds, visible = emulate(mode, prompt, tokens, keep, beta, overlap, seed)
    rows = [[1] * prompt], [[2] * response]
    (evicted_at,) = tensorrt_llm_evictions(*rows, [rounds], mode=mode, layers=LAYERS, kv_heads=HEADS)
    query = np.arange(tokens)
    assert evicted_at.shape[:2] == {"union": (1, 1), "per_head": (1, HEADS)}.get(mode, (LAYERS, HEADS))
    seen = (query <= query[:, None]) & (query[:, None] < evicted_at[:, :, None])
    np.testing.assert_array_equal(np.broadcast_to(seen, visible.shape)[:, :, :-1], visible[:, :, :-1])


def row_evicted_at(rounds: Any, mode: Any = "union", full_layers: Any = ()) -> np.ndarray:
    """For a prompt of two tokens and a response of eight."""
    sizes = {"layers": LAYERS, "kv_heads": HEADS, "full_layers": full_layers}
    return tensorrt_llm_evictions([[1] * 2], [[2] * 8], rounds, mode=mode, **sizes)[0]


def test_rounds_of_the_module_docstring():
    for late in (0, 1):
        rounds = [Round(6, [3, 4], late), Round(6, [2, 5], late)]
        expected = [NEVER, NEVER, 6 + late, NEVER, 8 + late, 6 + late, 8 + late, NEVER, NEVER, NEVER]
        assert row_evicted_at([rounds]).tolist() == [[expected]]
        assert row_evicted_at([rounds], full_layers=[1]).tolist() == [[expected], [[NEVER] * 10]]
    assert row_evicted_at([[Round(6, [])]]).tolist() == [[[NEVER] * 2 + [6] * 4 + [NEVER] * 4]]


@pytest.mark.parametrize(
    ("rounds", "options", "message"),
    [
        ([], {}, "expected rounds of 1 prompts and 1 responses; got 0"),
        ([[Round(11, [3, 4])]], {}, r"expected cached from 2, .* to 10, .*; got 11 \(row 0, round 0\)"),
        ([[Round(6, [3, 4]), Round(3, [2])]], {}, r"expected cached from 4, .* to 8, .*; got 3 \(row 0, round 1\)"),
        ([[Round(6, [1, 4])]], {}, "rising kept ordinals from 2, after the prompt, to 5, .*; got .*1 4"),
        ([[Round(6, [3, 4]), Round(5, [3, 5])]], {}, r"to 4, the end of the cache; got \[\[3 5\]\] \(row 0, round 1\)"),
        ([[Round(6, [3, 3])]], {}, "rising kept ordinals .*; got .*3 3"),
        ([[Round(6, [3, 4])]], {"mode": "per_head"}, r"expected whole numbers \[2, keep\] in kept; got \(2,\) int64"),
        ([[Round(6, [[3, 4]] * 3)]], {}, r"expected whole numbers \[keep\] in kept; got \(3, 2\) int64"),
        ([[Round(6, np.array([2.5]))]], {}, r"expected whole numbers \[keep\] in kept; got \(1,\) float64"),
        ([[Round(6, [3], -1)]], {}, "expected in_flight >= 0; got -1"),
        ([[Round(6, [3])]], {"full_layers": [2]}, r"expected full_layers from 0 to 1; got \(2,\)"),
    ],
)
def test_invalid_rounds_are_refused(rounds: Any, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        row_evicted_at(rounds, **options)


PROMPT, KEEP, BETA = 7, 6, 4


def sampled(policy: EvictionPolicy, sizes: RolloutConfig, prompts: PromptBatch) -> Trajectory:
    return rollout(MODEL, PARAMS, prompts, jax.random.key(1), policy=policy, config=sizes)


def rounds_of(evicted_at: np.ndarray) -> list[Round]:
    """The rounds of one row `[layers, kv_heads, T]` whose cache was compacted every BETA tokens."""
    alive = np.tile(np.arange(PROMPT), (LAYERS * HEADS, 1))
    rounds, flat, read = [], evicted_at.reshape(LAYERS * HEADS, -1), PROMPT
    for end in range(PROMPT + BETA, flat.shape[1], BETA):
        alive = np.concatenate([alive, np.tile(np.arange(read, end), (len(alive), 1))], axis=1)
        stays = np.take_along_axis(flat, alive, axis=1) > end
        read = end
        if stays.all():
            continue
        cached = alive.shape[1]
        rounds.append(Round(cached, np.stack([np.flatnonzero(row)[PROMPT:] for row in stays])))
        alive = alive[stays].reshape(len(alive), -1)
    return rounds


def test_a_rollout_of_the_engine_is_replayed_exactly():
    """TriAttention pins the prompt; every BETA tokens it keeps KEEP later keys per layer and head."""
    prompts = left_padded([PROMPT] * 3, PROMPT, CONFIG.vocab_size)
    centers = measure_query_centers(MODEL, PARAMS, prompts.tokens, prompts.valid)
    sizes = RolloutConfig(max_new_tokens=41, budget=PROMPT + KEEP, buffer=BETA)
    ours = sampled(TriAttention(centers, sinks=PROMPT), sizes, prompts)
    rounds = [rounds_of(row) for row in eviction_times(ours)]
    assert all(len(of_row) == 9 and np.asarray(of_row[0].kept).shape == (4, KEEP) for of_row in rounds)
    late = [[replace(one, in_flight=1) for one in of_row] for of_row in rounds]
    record = records_of(ours)
    del record["evicted_at"]
    tokens = record["prompts"], record["responses"]
    theirs, wrong = (
        Trajectory.from_records(
            **record,
            evicted_at=tensorrt_llm_evictions(*tokens, x, mode="per_layer_perhead", layers=LAYERS, kv_heads=HEADS),
        )
        for x in (rounds, late)
    )
    np.testing.assert_array_equal(eviction_times(theirs), eviction_times(ours))
    assert gap(MODEL, theirs).max() <= 2e-5 and gap(MODEL, wrong).max() > 1e-3


# ---------------------------------------------------------------- Memento

BLOCKS = MementoBlocks(block_start=3, block_end=4, summary_start=5, summary_end=6, mask_delimiters=False)


def visible_by_hand(prompt: int, response: list[int], blocks: MementoBlocks) -> np.ndarray:
    """Visibility `[tokens, tokens]`; evicted keys are deleted from a list."""
    total, cache = prompt + len(response), list(range(prompt))
    visible = np.zeros((total, total), bool)
    visible[:prompt, :prompt] = np.tril(np.ones((prompt, prompt), bool))
    stack: list[int] = []
    ends: dict[int, int] = {}  # start: end of closed blocks without a summary
    summarising: tuple[int, int] | None = None
    summarised: list[tuple[int, int]] = []
    defer = blocks.keep_last_block_for_answer and blocks.keep_last_n_blocks == 0

    def delete_oldest() -> None:
        if 0 <= blocks.keep_last_n_blocks < len(summarised):
            start, end = summarised.pop(0)
            first, last = (start, end) if blocks.mask_delimiters else (start + 1, end - 1)
            cache[:] = [key for key in cache if not first <= key <= last]

    for position, token in enumerate(response, prompt):
        if token == 3:
            if defer:
                delete_oldest()
            stack.append(position)
        if token == 4 and stack:
            ends[stack.pop()] = position
        if token == 5 and ends:
            newest = max(ends)
            summarising = (newest, ends.pop(newest))
        if token == 6 and summarising:
            summarised.append(summarising)
            summarising = None
            if not defer:
                delete_oldest()
        cache.append(position)
        visible[position, cache] = True
    return visible


@settings(deadline=None)
@given(
    prompt=st.integers(1, 3),
    response=st.lists(st.integers(2, 7), min_size=1, max_size=40),
    delimiters=st.booleans(),
    keep=st.integers(-1, 2),
    for_answer=st.booleans(),
)
def test_visibility_of_random_blocks(prompt: int, response: list[int], delimiters: bool, keep: int, for_answer: bool):
    """Includes nested and unfinished blocks."""
    blocks = replace(BLOCKS, mask_delimiters=delimiters, keep_last_n_blocks=keep, keep_last_block_for_answer=for_answer)
    (evicted_at,) = memento_evictions([[2] * prompt], [response], blocks)
    query = np.arange(prompt + len(response))
    visible = (query <= query[:, None]) & (query[:, None] < evicted_at[0, 0])
    np.testing.assert_array_equal(visible, visible_by_hand(prompt, response, blocks))


def nests(response: list[int]) -> bool:
    """Whether a block begins inside another, or ends before the previous one has its summary."""
    opened, waiting = False, False
    for token in response:
        if (token == 3 and opened) or (token == 4 and opened and waiting):
            return True
        opened = (opened or token == 3) and token != 4
        waiting = (waiting or (token == 4 and not opened)) and token != 6
    return False


def test_a_rollout_of_memento_is_replayed_exactly():
    """Our policy evicts the same blocks if they do not nest. Evictions one query later would differ."""
    prompts = PromptBatch(jnp.tile(jnp.array([[1, 2, 7]]), (48, 1)), jnp.ones((48, 3), bool))
    policy = OnTokens(TokenSpans(open=3, close=4, summary=(5, 6)))
    ours = sampled(policy, RolloutConfig(max_new_tokens=30, budget=8, buffer=8), prompts)
    rows = [row for row, tokens in enumerate(np.asarray(ours.response).tolist()) if not nests(tokens)]
    record = records_of(jax.tree.map(lambda x: x[np.array(rows)], ours))
    del record["evicted_at"]
    theirs, late = (
        Trajectory.from_records(
            **record, evicted_at=memento_evictions(record["prompts"], record["responses"], BLOCKS, in_flight=in_flight)
        )
        for in_flight in (0, 1)
    )
    expected = eviction_times(ours)[rows]
    times = np.broadcast_to(eviction_times(theirs), expected.shape)  # all layers and heads share them
    np.testing.assert_array_equal(times, expected)
    assert (times < NEVER).sum() > 5, "choose another key"
    assert gap(MODEL, theirs).max() <= 2e-5 and gap(MODEL, late).max() > 1e-3


def test_invalid_blocks_are_refused():
    with pytest.raises(ValueError, match="expected four different token ids"):
        replace(BLOCKS, block_end=3)
    with pytest.raises(ValueError, match="expected keep_last_n_blocks >= -1; got -2"):
        replace(BLOCKS, keep_last_n_blocks=-2)
    with pytest.raises(ValueError, match=r"expected blocks in the response only; got .* 3 .* \(row 0, token 1\)"):
        memento_evictions([[2, 3]], [[4]], BLOCKS)
    with pytest.raises(ValueError, match="expected as many prompts as responses; got 1 and 2"):
        memento_evictions([[1]], [[2], [3]], BLOCKS)
    with pytest.raises(ValueError, match="expected in_flight >= 0; got -1"):
        memento_evictions([[1]], [[2]], BLOCKS, in_flight=-1)
