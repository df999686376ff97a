"""A trajectory with padding and evictions, and a train step on it, for tests of updates."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from smd_jax.config import ModelConfig
from smd_jax.eviction.policies import H2O
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.state import TrainBatch, init_state
from smd_jax.learner.update import make_update
from smd_jax.message.sampling import SamplingConfig
from smd_jax.model.decoder import Decoder
from smd_jax.model.protocol import LanguageModel
from smd_jax.model.teacher_forced import apply_model
from smd_jax.sampler.fixed_batch import RolloutConfig, rollout
from smd_jax.testing import random_params, tiny_model_config
from smd_jax.text.prompts import PromptBatch

ROWS, WIDTH, LENGTH = 8, 8, 10
TEMPERATURE = 0.9
# One layer compiles in half the time; tests/sampler/test_identity.py tests the masks of several layers.
MODEL = Decoder(tiny_model_config(vocab_size=32, max_positions=32, num_layers=1))

# An optimizer that changes nothing and keeps the exact gradients as its state. NumPy's zeros compile no programs.
RECORD = optax.GradientTransformation(
    init=lambda params: jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), params),
    update=lambda updates, state, params=None: (jax.tree.map(jnp.zeros_like, updates), updates),
)


def spread_params(seed: int, config: ModelConfig = MODEL.config):
    """Parameters with unequal logits, so that results depend on the mask."""

    @jax.jit
    def spread(params):
        leaves, structure = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        return structure.unflatten([x + 0.2 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)])

    return spread(random_params(config))


PARAMS, REFERENCE = spread_params(0), spread_params(1)


@functools.cache
def trajectory() -> Any:
    """Eight rows of unequal prompts and responses, under a budget of half their length."""
    rng = np.random.default_rng(0)
    valid = jnp.asarray(np.arange(WIDTH)[None] >= np.array([0, 3, 5, 0, 6, 2, 1, 7])[:, None])
    prompts = PromptBatch(jnp.where(valid, jnp.asarray(rng.integers(0, 32, (ROWS, WIDTH)), jnp.int32), 0), valid)
    sampling = SamplingConfig(temperature=TEMPERATURE)
    config = RolloutConfig(max_new_tokens=LENGTH, budget=5, buffer=2, eos_token_id=5, sampling=sampling)
    return rollout(MODEL, PARAMS, prompts, jax.random.key(54), policy=H2O(), config=config)


ADVANTAGES = jnp.asarray(np.random.default_rng(1).normal(size=ROWS), jnp.float32)


def batch() -> TrainBatch:
    """The ratio is taken to the sampler, as in the loop."""
    return TrainBatch(trajectory(), ADVANTAGES, trajectory().logprobs)


def without_advantages() -> TrainBatch:
    """A batch in which only the distillation has a gradient."""
    return batch().replace(advantages=jnp.zeros(ROWS))


@functools.cache
def recording_update(config: UpdateConfig, model: LanguageModel = MODEL):
    """Compiled once for all batches of a shape."""
    return make_update(model, RECORD, config)


def metrics_and_gradients(
    config=UpdateConfig(),  # noqa: B008
    data=None,
    step=0,
    reference=None,
    model: LanguageModel = MODEL,
    params=PARAMS,
):
    """One update of copies of the parameters (it donates them)."""
    params, reference = copied((params, reference))
    state = init_state(params, RECORD, jax.random.key(3), reference).replace(step=jnp.int32(step))
    state, metrics = recording_update(config, model)(state, batch() if data is None else data)
    return jax.device_get((metrics, state.opt_state))


def assert_equal_steps(got, expected, most: float):
    """Compares two results of `metrics_and_gradients`.

    Args:
      most: tolerance of gradients, relative to the largest one; twice as much relative to each. Metrics: four times as
        much relative, 0.4 times absolute.
    """
    (metrics, grads), (expected_metrics, expected_grads) = got, expected
    assert expected_metrics["loss"] != 0
    # Squared products over responses, and the worst log-probability: only rounding, which depends on the CPU.
    rounding = ("rollout_corr/chi2_seq", "sampling/sampling_logp_difference/max")
    for name, value in expected_metrics.items():
        near_zero = 1.2 * most if name in rounding else 0.4 * most
        assert metrics[name] == pytest.approx(value, rel=4 * most, abs=near_zero), name
    scale = max(np.abs(x).max() for x in jax.tree.leaves(expected_grads))
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(expected_grads), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(y / scale, x / scale, 2 * most, most, err_msg=jax.tree_util.keystr(path))


def copied(tree):
    return jax.tree.map(lambda x: jax.device_put(np.array(x)), tree)


def rows_of(tree, which):
    return jax.tree.map(lambda x: jax.device_put(np.asarray(x)[which]), tree)


def norm(tree) -> float:
    """Over all leaves, in float64."""
    return float(np.sqrt(sum(np.sum(np.float64(x) ** 2) for x in jax.tree.leaves(tree))))


def distance(left, right) -> float:
    """|left - right| / |right| over all leaves, in float64."""
    pairs = [(np.float64(a), np.float64(b)) for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)]
    difference = sum(np.sum((a - b) ** 2) for a, b in pairs)
    return float(np.sqrt(difference / sum(np.sum(b**2) for _, b in pairs)))


def explicit_logprobs(params, mask):
    """Log-probabilities `[ROWS, LENGTH, 32]` of the response's distributions, from the model's plain call."""
    t = trajectory()
    return _logprobs(params, t.tokens, t.positions, mask)


@jax.jit
def _logprobs(params, tokens, positions, mask):
    logits = apply_model(MODEL, params, tokens, positions, mask)
    return jax.nn.log_softmax(logits[:, WIDTH - 1 : -1] / TEMPERATURE)


def explicit_token_logprobs(params, mask):
    return jnp.take_along_axis(explicit_logprobs(params, mask), trajectory().response[..., None], -1)[..., 0]
