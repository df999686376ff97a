"""`Trajectory.from_records`: every form of record, rollouts of a NumPy sampler, and invalid records."""

import dataclasses
import tracemalloc
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.certify.record import arrays_of
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.packed import packed_trajectory, packs_of
from smd_jax.learner.state import TrainBatch
from smd_jax.message.foreign import Compression, evicted_by_row, unpad
from smd_jax.message.masks import NEVER, Segments, ShadowMask
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.decoder import Decoder
from smd_jax.monitor.completions import extract_mask
from smd_jax.testing import byte_tokenizer
from tests import numpy_decoder
from tests.tiny_update import ADVANTAGES, MODEL, PARAMS, TEMPERATURE, metrics_and_gradients
from tests.under_test import eviction_times, replay_jitted

CONFIG = MODEL.config
LAYERS, HEADS, VOCAB = CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.vocab_size

# ---------------------------------------------------------------- by hand

# One layer, two KV heads. The first head is the example of foreign.py; the second evicts nothing.
ALL = [0, 1, 2, 3, 4, 5]
KEPT = [(5, [[[0, 1, 3, 4], ALL]]), (7, [[[1, 3, 6, 7], [*ALL, 6, 7]]])]
DROPPED = [(5, [[[2, 5], []]]), (7, [[[0, 4], []]])]
EVICTED_AT = np.array([[[8, 99, 6, 99, 8, 6, 99, 99, 99], [99] * 9]])
PICTURE = """
    1 . . . . . . . .
    1 1 . . . . . . .
    1 1 1 . . . . . .
    1 1 1 1 . . . . .
    1 1 1 1 1 . . . .
    1 1 1 1 1 1 . . .
    1 1 . 1 1 . 1 . .
    1 1 . 1 1 . 1 1 .
    . 1 . 1 . . 1 1 1
"""
HEAD = np.array([[cell == "1" for cell in line.split()] for line in PICTURE.strip().splitlines()])
RECORDS = {"kept": KEPT, "dropped": DROPPED, "evicted_at": EVICTED_AT}

PROMPT, RESPONSE, LOGPROBS = [5, 6, 7, 8], [9, 10, 11, 12, 2], [-0.5, -1.0, 0.0, -2.0, -0.25]


def row_trajectory(**changes: Any) -> Trajectory:
    """Trajectory of the row above, with some arguments changed."""
    arguments = {"prompts": [PROMPT], "responses": [RESPONSE], "logprobs": [LOGPROBS], "terminated": [True]}
    arguments |= {"layers": 1, "kv_heads": 2} | ({} if changes.keys() & RECORDS.keys() else {"kept": [KEPT]})
    return Trajectory.from_records(**(arguments | changes))


@pytest.mark.parametrize("name", RECORDS)
def test_every_form_of_record_gives_the_same_mask(name: str):
    """The row has padding on both sides."""
    trajectory = row_trajectory(
        **{name: [RECORDS[name]]}, prompt_width=6, response_width=7, pad_token_id=3, temperature=0.5
    )
    assert trajectory.tokens.tolist() == [[3, 3, *PROMPT, *RESPONSE, 3, 3]]
    assert trajectory.valid.tolist() == [[False] * 2 + [True] * 9 + [False] * 2]
    assert trajectory.logprobs.tolist() == [[*LOGPROBS, 0.0, 0.0]]
    assert trajectory.terminated.tolist() == [True] and trajectory.temperature == 0.5 and trajectory.prompt_width == 6
    expected = np.zeros((13, 13), bool)
    expected[2:11, 2:11] = HEAD
    np.testing.assert_array_equal(trajectory.mask.to_boolean()[0, 0, 0], expected)
    # No key outlives the row's end, column 11; padding was never cached.
    assert eviction_times(trajectory)[0, 0, 1].tolist() == [0, 0] + [11] * 9 + [0, 0]
    assert eviction_times(row_trajectory(**{name: [RECORDS[name]]}))[0, 0, 1].tolist() == [NEVER] * 9


def test_rows_of_unequal_length():
    """Row 0 is compressed after its prompt and in its response, row 1 never."""
    prompts, responses = [[1], [1, 2, 3]], [[4, 5, 6], [7, 8]]
    kept = [[(0, [[[]]]), (2, [[[1, 2]]])], []]
    logprobs = [[-1.0] * 3, [-1.0] * 2]
    same = {"terminated": [False, True], "layers": 1, "kv_heads": 1}
    trajectory = Trajectory.from_records(prompts, responses, logprobs, kept=kept, **same)
    assert trajectory.tokens.tolist() == [[0, 0, 1, 4, 5, 6], [1, 2, 3, 7, 8, 0]]
    # Position 0 of row 0 is column 2: its key is evicted before the query of column 3.
    assert eviction_times(trajectory)[:, 0, 0].tolist() == [[0, 0, 3] + [NEVER] * 3, [5] * 5 + [0]]


def test_two_compressions_may_follow_one_query():
    """One per layer, as hooks report them: `dropped` is empty for the other layer."""
    dropped = [(5, [[[1], []], [[], []]]), (5, [[[], []], [[], [0, 5]]])]
    found = eviction_times(row_trajectory(dropped=[dropped], layers=2))[0]
    expected = np.full((2, 2, 9), NEVER)
    expected[0, 0, 1] = expected[1, 1, 0] = expected[1, 1, 5] = 6
    np.testing.assert_array_equal(found, expected)


def test_axes_of_size_one_broadcast():
    """They stay 1 if every row has them; replays, packed rows, records and saved masks broadcast them."""
    one = EVICTED_AT[:, :1]
    shared = row_trajectory(evicted_at=[one], layers=3)
    np.testing.assert_array_equal(eviction_times(shared), eviction_times(row_trajectory())[:, :, :1])
    two = {"prompts": [PROMPT] * 2, "responses": [RESPONSE] * 2, "logprobs": [LOGPROBS] * 2, "terminated": [True] * 2}
    assert eviction_times(row_trajectory(**two, evicted_at=[one, EVICTED_AT], layers=3)).shape == (2, 1, 2, 9)
    every = shared.replace(mask=ShadowMask(jnp.broadcast_to(shared.mask.evicted_at, (1, LAYERS, HEADS, 9))))
    config, tokenizer = UpdateConfig(microbatch_size=1, pack_columns=12), byte_tokenizer(chat=False)
    masks, logprobs = list[list[np.ndarray]](), list[jax.Array]()
    for each in (shared, every):
        packed = packed_trajectory(each, jax.tree.map(lambda x: x[0], packs_of(each, config)))
        saved = extract_mask(each, 0, tokenizer, 0, 0.0).evicted_at
        masks.append([eviction_times(packed)[0], arrays_of(each)["evicted_at"][0], saved])
        logprobs.append(replay_jitted(MODEL, PARAMS, each).logprobs)
    for got, expected in zip(*masks, strict=True):
        np.testing.assert_array_equal(np.broadcast_to(got, expected.shape), expected)
    np.testing.assert_allclose(logprobs[0], logprobs[1], atol=1e-6)


def test_kept_and_dropped_keys_of_random_evictions_agree():
    """One compression after every query; some drop no key."""
    rng = np.random.default_rng(0)
    tokens, sides = 24, (2, 3)
    expected = np.full((*sides, tokens), NEVER)
    kept, dropped = [], []
    for query in range(tokens):
        drops = (expected[..., : query + 1] == NEVER) & (rng.random((*sides, query + 1)) < 0.1)
        expected[..., : query + 1][drops] = query + 1
        keeps = expected[..., : query + 1] == NEVER
        for record, selected in ((kept, keeps), (dropped, drops)):
            record.append((query, [[rng.permutation(np.flatnonzero(head)) for head in layer] for layer in selected]))
    for of_kept, of_dropped in (([kept], None), (None, [dropped])):
        (found,) = evicted_by_row(np.array([tokens]), *sides, kept=of_kept, dropped=of_dropped)
        np.testing.assert_array_equal(found, expected)


def test_dropped_keys_are_read_without_a_pass_over_the_row():
    """Otherwise the time is quadratic in the length if an engine evicts at every step."""
    tokens = 50_000
    dropped = [[(tokens - 2, [[[5], [6]]]), (tokens - 1, [[[7], []]])]]
    tracemalloc.start()
    try:
        (found,) = evicted_by_row(np.array([tokens]), 1, 2, dropped=dropped)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.argwhere(found != NEVER)[:, 2].tolist() == [5, 7, 6] and peak < 1.25 * found.nbytes


def test_tool_tokens_have_no_loss():
    """Their log-probabilities are ignored, and they have no set of drawable tokens."""
    flags, logprobs = [True, False, False, True, True], [-0.5, float("nan"), 7.0, -2.0, -0.25]
    support = [([9, 3, 6, 12, 2], [0, 2, 3, 3, 4, 5])]
    trajectory = row_trajectory(logprobs=[logprobs], sampled=[flags], support=support, response_width=7)
    assert trajectory.response_mask.tolist() == [[*flags, False, False]]
    assert trajectory.logprobs.tolist() == [[-0.5, 0, 0, -2.0, -0.25, 0, 0]]
    none = [-1, -1]
    assert trajectory.drawable is not None and trajectory.drawable.sets is not None
    assert trajectory.drawable.sets.tolist() == [[[9, 3], none, none, [12, -1], [2, -1], none, none]]


def test_unpad_removes_padding():
    rows = unpad(np.array([[7, 7, 1, 2], [3, 4, 5, 6]]), np.array([[0, 0, 1, 1], [1, 1, 1, 1]]))
    assert [row.tolist() for row in rows] == [[1, 2], [3, 4, 5, 6]]
    with pytest.raises(ValueError, match=r"one shape \[batch, width\]; got \(2, 3\) and \(2, 2\)"):
        unpad(np.zeros((2, 3)), np.zeros((2, 2)))
    with pytest.raises(ValueError, match="ones and zeros"):
        unpad(np.zeros((1, 2)), np.array([[0.5, 1]]))


# ---------------------------------------------------------------- invalid records


def keys(first: list[int], second: Sequence[int] = (0, 1, 2, 3, 4, 5)) -> list[list[list[int]]]:
    return [[first, list(second)]]


def changed(array: np.ndarray, where: tuple[int, ...], value: Any) -> np.ndarray:
    array = array.copy()
    array[where] = value
    return array


INVALID_RECORDS: dict[str, tuple[dict[str, Any], str]] = {
    "an evicted key comes back": (
        {"kept": [[KEPT[0], (7, keys([1, 2, 6, 7]))]]},
        "evicted key never comes back; got key 2, which was dropped after query 5 "
        r"\(row 0, compression 1 after query 7, layer 0, kv head 0\)",
    ),
    "a key is dropped twice": (
        {"dropped": [[DROPPED[0], (7, keys([5], []))]]},
        r"dropped keys that were in the cache, .* got key 5, .* \(row 0, compression 1 .*kv head 0\)",
    ),
    "a key is dropped before it exists": (
        {"dropped": [[(5, keys([2], [6]))]]},
        r"dropped keys from 0 to 5, .*; got 6 \(row 0, compression 0 after query 5, layer 0, kv head 1\)",
    ),
    "a key is kept twice": (
        {"kept": [[(5, keys([0, 1, 2, 3, 4, 5, 5]))]]},
        r"every kept key once; got key 5 2 times \(row 0, compression 0 after query 5, layer 0, kv head 0\)",
    ),
    "after the row": ({"kept": [[(9, keys([0]))]]}, r"queries 0 to 8; got one after query 9 \(row 0, compression 0\)"),
    "out of order": ({"kept": [KEPT[::-1]]}, r"queries 7 to 8; got one after query 5 \(row 0, compression 1\)"),
    "another number of layers": ({"layers": 3}, r"keys of 3 layers; got 1 \(row 0, compression 0\)"),
    "fractional keys": (
        {"kept": [[(5, [[np.array([0.5]), ALL]])]]},
        r"whole numbers in a list; got .*float64 \(row 0, comp",
    ),
    "NaN": ({"logprobs": [[-1, -1, float("nan"), -1, -1]]}, r"finite .*; got nan \(row 0, response token 2\)"),
    "a positive log-probability": ({"logprobs": [[-1, 0.7, -1, -1, -1]]}, r"at most 0 .* got 0.7 .*token 1\)"),
    "too few log-probabilities": ({"logprobs": [[-1.0] * 4]}, r"each of the 5 response tokens of row 0; got .*\(4,\)"),
    "a token outside": ({"vocab_size": 12}, r"ids from 0 to 11, the vocabulary; got 12 \(response of row 0, token 3\)"),
    "a pad token outside": ({"vocab_size": 13, "pad_token_id": 13}, r"got 13 \(pad_token_id"),
    "fractional tokens": (
        {"prompts": [np.full(4, 0.5)]},
        r"whole numbers in a list; got .*float64 \(prompt of row 0\)",
    ),
    "no prompt": ({"prompts": [[]]}, "at least one token in every prompt; got none in row 0"),
    "unequal numbers of rows": ({"prompts": [PROMPT] * 2}, "prompts, responses and rows of .*; got 2, 1 and 1"),
    "two records": ({"kept": [KEPT], "evicted_at": [EVICTED_AT]}, "exactly one of .*; got kept and evicted_at"),
    "no record": ({"kept": None}, "exactly one of kept, dropped, evicted_at; got none"),
    "a greedy sampler": ({"temperature": 0.0}, "temperature > 0, .*; got 0.0"),
    "terminated for two rows": ({"terminated": [True, False]}, "a boolean for each of 1 rows in terminated"),
    "prompts too wide": ({"prompt_width": 3}, "prompt_width of at least 4, the tokens of row 0; got 3"),
    "a row longer than longest": ({"longest": 8}, "longest of at least 9, the tokens of row 0; got 8"),
    "sampled for two rows": ({"sampled": [[True] * 5] * 2}, "expected sampled of 1 rows; got 2"),
    "sampled of another length": (
        {"sampled": [[True] * 4]},
        r"a boolean for each of the 5 response tokens of row 0 in sampled; got .* shape \(4,\) and bool",
    ),
    "sampled as numbers": ({"sampled": [np.ones(5, int)]}, r"in sampled; got an array of shape \(5,\) and int64"),
    "a sampled token without a set": (
        {"sampled": [[True, True, False, True, True]], "support": [([9, 12, 2], [0, 1, 1, 1, 2, 3])]},
        "expected 6 rising offsets from 0 to 3 in the sampling support of row 0",
    ),
    "evicted_at of another shape": (
        {"evicted_at": [EVICTED_AT[..., 1:]]},
        r"row 0 to be \(1, 2, 9\) .*; got \(1, 2, 8\)",
    ),
    "fractional evicted_at": ({"evicted_at": [EVICTED_AT / 2]}, r"whole numbers in evicted_at; got float64 \(row 0\)"),
    "a key that its own query doesn't see": (
        {"evicted_at": [changed(EVICTED_AT, (0, 1, 4), 4)]},
        r"evicted_at of at least 5, .*; got 4 \(row 0, layer 0, kv head 1, key 4\)",
    ),
}


@pytest.mark.parametrize("case", INVALID_RECORDS)
def test_invalid_records_are_refused(case: str):
    changes, message = INVALID_RECORDS[case]
    with pytest.raises(ValueError, match=message):
        row_trajectory(**changes)


def test_errors_name_the_row():
    """Row 1 of two, in each form of the record."""
    two = {"prompts": [PROMPT] * 2, "responses": [RESPONSE] * 2, "terminated": [True] * 2}
    bad = {"kept": KEPT[::-1], "dropped": DROPPED * 2, "evicted_at": EVICTED_AT * 0}
    for name, record in bad.items():
        with pytest.raises(ValueError, match="row 1"):
            row_trajectory(**two, logprobs=[LOGPROBS] * 2, **{name: [RECORDS[name], record]})
    with pytest.raises(ValueError, match="row 1, response token 0"):
        row_trajectory(**two, logprobs=[LOGPROBS, [1.0] * 5], kept=[KEPT, KEPT])


def test_rounding_may_make_log_probabilities_positive():
    """x - logsumexp(x) of a certain token, in float32."""
    assert row_trajectory(logprobs=[[2e-6, -1, -1, -1, -1]]).logprobs[0, 0] == np.float32(2e-6)


# ---------------------------------------------------------------- end to end, from a NumPy sampler

BUDGET, INTERVAL, LENGTH = 5, 2, 10


def numpy_rollout(prompt: list[int], rng: np.random.Generator) -> tuple[list[int], list[float], list[Compression]]:
    """Samples in float64, keeping BUDGET random keys after the prompt and every INTERVAL tokens. Returns response,
    log-probabilities and kept keys."""
    tokens = list(prompt)
    logprobs, kept = [], []
    total = len(prompt) + LENGTH
    alive = np.zeros((LAYERS, HEADS, total), bool)
    seen = np.zeros((LAYERS, HEADS, total, total), bool)
    for query in range(total - 1):
        alive[:, :, query] = True
        seen[:, :, query] = alive
        step = query - len(prompt) + 1
        if step < 0:  # the prompt is still being read
            continue
        size = query + 1
        logits = numpy_decoder.logits(PARAMS, CONFIG, np.array(tokens), np.arange(size), seen[:, :, :size, :size])
        weights = numpy_decoder.softmax(logits[-1] / TEMPERATURE)
        if step % INTERVAL == 0:
            for layer, head in np.ndindex(LAYERS, HEADS):
                alive[layer, head, rng.permutation(np.flatnonzero(alive[layer, head]))[BUDGET:]] = False
            kept.append((query, [[np.flatnonzero(head).tolist() for head in layer] for layer in alive]))
        tokens.append(int(rng.choice(VOCAB, p=weights)))
        logprobs.append(np.log(weights[tokens[-1]]))
    return tokens[len(prompt) :], logprobs, kept


@cache
def foreign_trajectory() -> Trajectory:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (8, 5, 3, 8, 2, 6, 7, 1)]
    responses, logprobs, kept = zip(*(numpy_rollout(prompt, rng) for prompt in prompts), strict=True)
    return Trajectory.from_records(
        prompts,
        responses,
        logprobs,
        terminated=[False] * len(prompts),
        layers=LAYERS,
        kv_heads=HEADS,
        kept=kept,
        temperature=TEMPERATURE,
        vocab_size=VOCAB,
    )


def test_learner_replays_and_trains_on_another_sampler():
    trajectory = foreign_trajectory()
    segmented = trajectory.replace(mask=trajectory.mask.with_segments((Segments(8, INTERVAL, BUDGET),)))
    for each in (trajectory, segmented):
        difference = np.asarray(replay_jitted(MODEL, PARAMS, each).logprobs - trajectory.logprobs)
        assert np.abs(difference).max() <= 2e-5
    dense = replay_jitted(MODEL, PARAMS, trajectory.replace(mask=trajectory.dense_mask())).logprobs
    assert np.abs(np.asarray(dense - trajectory.logprobs)).max() > 1e-2
    metrics, gradients = metrics_and_gradients(UpdateConfig(), TrainBatch(segmented, ADVANTAGES, segmented.logprobs))
    assert metrics["sampling/sampling_logp_difference/max"] <= 2e-5
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(gradients)) > 0


def test_a_batch_may_be_wider_than_the_context():
    """Every row fits, but prompts and responses are padded separately."""
    model = Decoder(dataclasses.replace(CONFIG, max_positions=16))
    rng = np.random.default_rng(0)
    prompts, responses = ([rng.integers(0, VOCAB, n).tolist() for n in lengths] for lengths in ((3, 12), (12, 3)))

    def of_rows(rows: list[int], longest: int | None) -> Trajectory:
        return Trajectory.from_records(
            [prompts[row] for row in rows],
            [responses[row] for row in rows],
            [[-1.0] * len(responses[row]) for row in rows],
            terminated=[True] * len(rows),
            layers=1,
            kv_heads=1,
            kept=[[] for _ in rows],
            longest=longest,
        )

    with pytest.raises(ValueError, match=r"at most 16 tokens \(the model's context\); got 24"):
        replay_jitted(model, PARAMS, of_rows([0, 1], None))
    together = of_rows([0, 1], 15)
    assert together.positions.max() == 14
    found = replay_jitted(model, PARAMS, together).logprobs
    for row, response in enumerate(responses):
        alone = replay_jitted(model, PARAMS, of_rows([row], None)).logprobs[0]
        np.testing.assert_allclose(found[row, : len(response)], alone, atol=1e-5)
    packs = packs_of(together, UpdateConfig(microbatch_size=1, pack_columns=30))
    packed = packed_trajectory(together, jax.tree.map(lambda x: x[0], packs))
    assert packed.packing is not None and packed.packing.longest == 15
