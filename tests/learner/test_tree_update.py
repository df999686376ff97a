"""The update of trees: what separate dense rows would give, in loss, gradients and metrics."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.packed import make_packed_update, packed_trajectory, packs_of
from smd_jax.learner.packs import ABSENT
from smd_jax.learner.state import TrainBatch, init_state
from smd_jax.learner.update import make_update
from smd_jax.losses.policy import LossConfig
from smd_jax.losses.weighting import SequenceMean
from smd_jax.message.masks import NEVER, ShadowMask
from smd_jax.message.tree import Branch, Node, Tree, pack, to_trajectory
from smd_jax.model.decoder import Decoder
from smd_jax.model.teacher_forced import apply_model
from smd_jax.testing import tiny_model_config
from tests.message.test_tree import random_tree
from tests.tiny_update import RECORD, spread_params

CONFIG = tiny_model_config(vocab_size=32, max_positions=64, num_layers=2)
MODEL = Decoder(CONFIG)
PARAMS = spread_params(0, CONFIG)
LEAVES, PROMPT, RESPONSE, COLUMNS = 8, 12, 20, 48


def random_branches(seed: int) -> list[Branch]:
    """The branches of several random trees, `LEAVES` in all."""
    rng = np.random.default_rng(seed)
    found: list[Branch] = []
    while len(found) < LEAVES:
        found += random_tree(7, int(rng.integers(2**16))).branches()
    return [branch for branch in found[:LEAVES]]


def random_batch(seed: int) -> TrainBatch:
    """Ratios on both sides of the clipping, advantages of both signs."""
    rng = np.random.default_rng(seed)
    rows = to_trajectory(random_branches(seed), prompt_width=PROMPT, response_width=RESPONSE, temperature=0.9)
    tokens = jnp.take_along_axis(jax.nn.log_softmax(logits(rows)), rows.response[..., None], -1)[..., 0]
    old = tokens + jnp.asarray(0.3 * rng.normal(size=tokens.shape), jnp.float32)
    return TrainBatch(rows.replace(logprobs=tokens), jnp.asarray(rng.normal(size=LEAVES), jnp.float32), old)


@jax.jit
def logits(rows):
    return apply_model(MODEL, PARAMS, rows.tokens, rows.positions, rows.mask)[:, PROMPT - 1 : -1] / rows.temperature


@functools.cache
def update_of(config: UpdateConfig):
    """Compiled once for all batches of a shape."""
    if config.pack_columns is None:
        return make_update(MODEL, RECORD, config)
    return make_packed_update(MODEL, RECORD, config, share_beginnings=True)


def stepped(config: UpdateConfig, batch: TrainBatch):
    """Gradients, as RECORD keeps them, and metrics."""
    params, reference = (
        jax.tree.map(lambda x, s=scale: jax.device_put(np.float32(s * np.asarray(x))), PARAMS) for scale in (1, 1.1)
    )
    state = init_state(params, RECORD, jax.random.key(0), reference)
    state, metrics = update_of(config)(state, batch)
    return jax.device_get(state.opt_state), {name: float(value) for name, value in metrics.items()}


def of_trees(config: UpdateConfig, batch: TrainBatch):
    return stepped(replace(config, microbatch_size=1, pack_columns=COLUMNS), batch)


def assert_equal_steps(got, expected, most: float):
    """Relative to the largest gradient and to 1."""
    (grads, metrics), (of_rows, metrics_of_rows) = got, expected
    assert metrics["update/shared"] > 0.1 and metrics["loss"] != 0
    scale = max(abs(x).max() for x in jax.tree.leaves(of_rows))
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(of_rows), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(y / scale, x / scale, atol=most, err_msg=jax.tree_util.keystr(path))
    for name, value in metrics_of_rows.items():
        assert metrics[name] == pytest.approx(value, rel=10 * most, abs=10 * most), name


MANY_TERMS = UpdateConfig(
    loss=LossConfig(weighting=SequenceMean(), beta=0.1), entropy_coef=0.01, top_entropy_quantile=0.5
)


@pytest.mark.slow
def test_random_trees_are_separate_rows():
    for seed in range(3):
        batch = random_batch(seed)
        assert_equal_steps(of_trees(MANY_TERMS, batch), stepped(MANY_TERMS, batch), 1e-5)


def test_shared_tokens_have_their_logits_once():
    """By hand: two branches share two sampled tokens and have one of their own each."""
    nodes = (Node([1, 2]), Node([3, 4], 0, [True, True]), Node([5], 1, [True]), Node([6], 1, [True]))
    rows = to_trajectory(Tree(nodes).branches())
    packs = packs_of(rows, UpdateConfig(microbatch_size=1, pack_columns=6), share_beginnings=True)
    assert packs.columns[0, 0].tolist() == [2, 3, 4, 2, 3, 5] and packs.sources[0, 0].tolist() == [1, 2, 3, 1, 2, 3]
    assert packs.distinct is not None and packs.same is not None
    assert packs.columns[0, 0][packs.distinct[0, 0]].tolist() == [2, 3, 4, 5]
    assert packs.distinct[0, 0][packs.same[0, 0]].tolist() == [0, 1, 2, 0, 1, 5]


def with_evictions(seed: int, early: float, late: float) -> TrainBatch:
    """Branches of which some keys went early, at the same times in all of them, and others late.

    Args:
      early, late: shares of the keys.
    """
    rng = np.random.default_rng(seed)
    common = np.arange(64) + rng.integers(1, 4, (2, 2, 64))
    common = np.where(rng.random((2, 2, 64)) < early, common, NEVER)
    branches = []
    for branch in random_branches(seed):
        length = len(branch.tokens)
        goes = rng.integers(np.arange(length) + 1, length + 1)
        goes = np.where(rng.random((2, 2, length)) < late, goes, NEVER)
        branches.append(replace(branch, evicted_at=np.minimum(common[..., :length], goes)))
    rows = to_trajectory(branches, layers=2, kv_heads=2, prompt_width=PROMPT, response_width=RESPONSE)
    return TrainBatch(rows, jnp.asarray(rng.normal(size=LEAVES), jnp.float32), None)


@pytest.mark.parametrize(("early", "late", "most"), [(0.0, 0.0, 999), (0.2, 0.0, 150), (0.1, 0.01, 150)])
def test_a_row_shows_every_sequence_what_it_saw(early: float, late: float, most: int):
    """Under recorded evictions: query by query, against the mask of separate rows."""
    shared = 0
    for seed in range(3):
        rows = with_evictions(seed, early, late).trajectory
        tokens_of, valid = np.asarray(rows.tokens), np.asarray(rows.valid)
        seen = np.asarray(rows.mask.to_boolean())
        packs = packs_of(rows, UpdateConfig(microbatch_size=2, pack_columns=COLUMNS), share_beginnings=True)
        shared += int(valid.sum()) - (packs.tokens != ABSENT).sum()
        found = set()
        for part in range(len(packs.tokens)):
            places = jax.tree.map(lambda x, part=part: x[part], packs)
            visible = np.asarray(packed_mask(rows, places))
            for row, answer in np.argwhere(places.responses != ABSENT):
                index, drawn = divmod(int(places.responses[row, answer]), RESPONSE)
                column, source = places.columns[row, answer], places.sources[row, answer]
                path = path_to(places, row, source)
                tokens = np.flatnonzero(valid[index])[: len(path)]
                found.add((index, drawn))
                assert places.positions[row, column] == len(path)
                np.testing.assert_array_equal(tokens_of[index, tokens], tokens_of.reshape(-1)[places.tokens[row, path]])
                # What the query that predicts the token sees, and nothing of other branches.
                sees = visible[row, :, :, source]
                np.testing.assert_array_equal(sees[..., path], seen[index][:, :, tokens[-1], tokens])
                assert sees.sum() == seen[index][:, :, tokens[-1]].sum()
        assert found == {(int(i), int(r)) for i, r in np.argwhere(np.asarray(rows.response_mask))}
    assert 20 < shared < most


@jax.jit
def packed_mask(rows, places):
    mask = packed_trajectory(rows, places).mask
    return mask.to_boolean()


def path_to(places, row: int, column: int) -> list[int]:
    """Columns from a tree's first token to this one: at each position the last column whose subtree has it."""
    return [
        max(c for c in range(column + 1) if places.positions[row, c] == p and places.ends[row, c] > column)
        for p in range(places.positions[row, column] + 1)
    ]


def test_evicted_keys_that_come_back_are_in_the_row_twice():
    batch = with_evictions(3, 0.1, 0.01)
    grads, metrics = of_trees(UpdateConfig(), batch)
    of_rows, of_rows_metrics = stepped(UpdateConfig(), batch)
    assert 0 < metrics["update/shared"] < 0.5
    for x, y in zip(jax.tree.leaves(of_rows), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-6)
    assert metrics["loss"] == pytest.approx(of_rows_metrics["loss"], rel=1e-5, abs=1e-6)


@functools.partial(jax.jit, static_argnums=0)
def logprobs_of(impl, tokens, positions, evicted_at):
    """Log-probabilities of every column's successors, `[columns, vocabulary]`."""
    mask = ShadowMask(evicted_at[None, None, None])
    return jax.nn.log_softmax(apply_model(Decoder(CONFIG, impl=impl), PARAMS, tokens[None], positions[None], mask)[0])


def logprobs_alone(tokens: np.ndarray, width: int) -> jax.Array:
    """Those of one sequence in a row of its own."""
    padded, places = np.pad(tokens, (0, width - len(tokens))).astype(np.int32), np.arange(width, dtype=np.int32)
    return logprobs_of("xla", padded, places, np.where(places < len(tokens), NEVER, 0).astype(np.int32))[: len(tokens)]


def test_compacted_contexts_are_one_tree():
    """A context is summarised, and the summary is read again behind the task: two branches, and no single sequence."""
    rng = np.random.default_rng(3)
    task, turn, summary, rest = (rng.integers(1, 32, n) for n in (6, 9, 4, 5))
    first, second = np.concatenate([task, turn, summary]), np.concatenate([task, summary, rest])
    row = pack([Tree((Node(task), Node(first[6:], 0), Node(second[6:], 0)))], 30)
    assert np.count_nonzero(row.evicted_at) == 28
    alone = [logprobs_alone(ids, 30) for ids in (first, second)]
    columns = np.arange(19), np.concatenate([np.arange(6), np.arange(19, 28)])
    for impl in ("xla", "interval"):
        together = logprobs_of(impl, row.tokens, row.positions, row.evicted_at)
        for found, expected in zip(columns, alone, strict=True):
            np.testing.assert_allclose(together[found], expected, atol=1e-5)
    # One sequence that goes on behind the summary is another policy.
    wrong = logprobs_alone(np.concatenate([first, rest]), 30)
    assert abs(wrong[18:-1] - alone[1][9:-1]).max() > 0.1


def test_windows_that_would_hide_a_beginning():
    model = Decoder(replace(CONFIG, sliding_windows=(16, None)))
    config = UpdateConfig(microbatch_size=1, pack_columns=COLUMNS, rows_per_prompt=2)
    with pytest.raises(ValueError, match="at least pack_columns 48 .* come back in the next; got .* a window of 16"):
        make_packed_update(model, RECORD, config)
