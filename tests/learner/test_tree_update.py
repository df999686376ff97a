"""Updates of trees: loss, gradients and metrics match separate rows."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.packed import packs_of
from smd_jax.learner.state import TrainBatch
from smd_jax.learner.update import make_update
from smd_jax.losses.policy import LossConfig
from smd_jax.losses.weighting import SequenceMean
from smd_jax.message.masks import NEVER
from smd_jax.message.tree import Branch, Node, Tree, to_trajectory
from smd_jax.model.decoder import Decoder
from smd_jax.model.teacher_forced import apply_model
from smd_jax.testing import tiny_model_config
from tests.message.test_tree import random_tree
from tests.tiny_update import RECORD, assert_equal_steps, metrics_and_gradients, spread_params

CONFIG = tiny_model_config(vocab_size=32, max_positions=64, num_layers=2)
MODEL = Decoder(CONFIG)
PARAMS = spread_params(0, CONFIG)
REFERENCE = jax.tree.map(lambda x: np.float32(1.1) * np.asarray(x), PARAMS)
LEAVES, PROMPT, RESPONSE, COLUMNS = 8, 12, 20, 48


def random_branches(seed: int) -> list[Branch]:
    """The branches of several random trees, `LEAVES` in all."""
    rng = np.random.default_rng(seed)
    found: list[Branch] = []
    while len(found) < LEAVES:
        found += random_tree(7, int(rng.integers(2**16))).branches()
    return [branch for branch in found[:LEAVES]]


def random_batch(seed: int) -> TrainBatch:
    """Ratios are clipped on either side; advantages have both signs."""
    rng = np.random.default_rng(seed)
    rows = to_trajectory(random_branches(seed), prompt_width=PROMPT, response_width=RESPONSE, temperature=0.9)
    tokens = jnp.take_along_axis(jax.nn.log_softmax(logits(rows)), rows.response[..., None], -1)[..., 0]
    old = tokens + jnp.asarray(0.3 * rng.normal(size=tokens.shape), jnp.float32)
    return TrainBatch(rows.replace(logprobs=tokens), jnp.asarray(rng.normal(size=LEAVES), jnp.float32), old)


@jax.jit
def logits(rows):
    return apply_model(MODEL, PARAMS, rows.tokens, rows.positions, rows.mask)[:, PROMPT - 1 : -1] / rows.temperature


def run_update(config: UpdateConfig, batch: TrainBatch):
    return metrics_and_gradients(config, batch, reference=REFERENCE, model=MODEL, params=PARAMS)


def run_tree_update(config: UpdateConfig, batch: TrainBatch):
    return run_update(replace(config, microbatch_size=1, pack_columns=COLUMNS, rows_per_prompt=2), batch)


MANY_TERMS = UpdateConfig(
    loss=LossConfig(weighting=SequenceMean(), beta=0.1), entropy_coef=0.01, top_entropy_quantile=0.5
)


@pytest.mark.slow
def test_random_trees_match_separate_rows():
    for seed in range(3):
        batch = random_batch(seed)
        found = run_tree_update(MANY_TERMS, batch)
        assert found[0]["update/shared"] > 0.1
        assert_equal_steps(found, run_update(MANY_TERMS, batch), 3e-6)


def test_logits_of_shared_tokens_are_computed_once():
    """By hand: two branches share two sampled tokens and add one each."""
    nodes = (Node([1, 2]), Node([3, 4], 0, [True, True]), Node([5], 1, [True]), Node([6], 1, [True]))
    rows = to_trajectory(Tree(nodes).branches())
    packs = packs_of(rows, UpdateConfig(microbatch_size=1, pack_columns=6, rows_per_prompt=2))
    assert packs.columns[0, 0].tolist() == [2, 3, 4, 2, 3, 5] and packs.sources[0, 0].tolist() == [1, 2, 3, 1, 2, 3]
    assert packs.distinct is not None and packs.same is not None
    assert packs.columns[0, 0][packs.distinct[0, 0]].tolist() == [2, 3, 4, 5]
    assert packs.distinct[0, 0][packs.same[0, 0]].tolist() == [0, 1, 2, 0, 1, 5]


def batch_with_evictions(seed: int, early: float, late: float) -> TrainBatch:
    """A share `early` of the keys is evicted at the same time in all branches, a share `late` at different times."""
    rng = np.random.default_rng(seed)
    common = np.arange(64) + rng.integers(1, 4, (2, 2, 64))
    common = np.where(rng.random((2, 2, 64)) < early, common, NEVER)
    branches = []
    for branch in random_branches(seed):
        length = len(branch.tokens)
        evictions = rng.integers(np.arange(length) + 1, length + 1)
        evictions = np.where(rng.random((2, 2, length)) < late, evictions, NEVER)
        branches.append(replace(branch, evicted_at=np.minimum(common[..., :length], evictions)))
    rows = to_trajectory(branches, layers=2, kv_heads=2, prompt_width=PROMPT, response_width=RESPONSE)
    return TrainBatch(rows, jnp.asarray(rng.normal(size=LEAVES), jnp.float32), None)


@pytest.mark.parametrize(("early", "late"), [(0.2, 0.0), (0.1, 0.01)])
def test_trees_with_evictions_match_separate_rows(early: float, late: float):
    """Keys that one branch evicts and the next one sees are in the row twice."""
    batch = batch_with_evictions(3, early, late)
    found = run_tree_update(UpdateConfig(), batch)
    assert 0 < found[0]["update/shared"] < 0.5
    assert_equal_steps(found, run_update(UpdateConfig(), batch), 3e-6)


def test_windows_shorter_than_the_row_raise():
    model = Decoder(replace(CONFIG, sliding_windows=(16, None)))
    config = UpdateConfig(microbatch_size=1, pack_columns=COLUMNS, rows_per_prompt=2)
    with pytest.raises(ValueError, match="at least pack_columns 48 .* come back in the next; got .* a window of 16"):
        make_update(model, RECORD, config)
