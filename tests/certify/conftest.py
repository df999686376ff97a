"""A rollout under TOVA and its record, for the tests of smd-certify."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import smd_jax as smd
from smd_jax.certify.causes import PromptFacts
from smd_jax.certify.record import Record, arrays_of, check_record
from smd_jax.testing import random_params, tiny_model_config

CONFIG = tiny_model_config(num_layers=3)
MODEL = smd.Decoder(CONFIG)
FACTS = PromptFacts(bos=1, system=(7, 8, 9), generation=(5, 6))
LENGTHS = (12, 9, 7, 6)
SIZES = (CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.vocab_size)


def wide_params(config, seed=0):
    """Random parameters, large enough for attention to matter."""
    return jax.tree.map(lambda x: 2 * x if x.ndim == 2 else x, random_params(config, seed))


def sample(model, params, tokens, valid=None, *, key=0, policy: Any = smd.eviction.H2O(), **sizes):  # noqa: B008
    """Samples a rollout of these prompts; `valid`: None without padding."""
    valid = np.ones(tokens.shape, bool) if valid is None else valid
    prompts = smd.PromptBatch(jnp.asarray(tokens), jnp.asarray(valid))
    config = smd.RolloutConfig(buffer=4, **sizes)
    return smd.rollout(model, params, prompts, jax.random.key(key), policy=policy, config=config)


def sample_rollout(params, sampling=None):
    """Four prompts of different lengths that begin with the system message and end with the generation prompt."""
    width = max(LENGTHS)
    tokens = np.array(jax.random.randint(jax.random.key(0), (4, width), 10, 250))
    for row, length in enumerate(LENGTHS):
        tokens[row, width - length : width - length + 3] = FACTS.system
        tokens[row, -2:] = FACTS.generation
    valid = np.arange(width) >= width - np.array(LENGTHS)[:, None]
    sizes = {"max_new_tokens": 32, "budget": 12, "sampling": sampling or smd.SamplingConfig()}
    return sample(MODEL, params, tokens, valid, key=1, policy=smd.eviction.TOVA(), **sizes)


def record_of(arrays) -> Record:
    return check_record(arrays, *SIZES)


def altered(arrays, **changed):
    """The arrays with other ones; None leaves one out."""
    return {name: x for name, x in {**arrays, **changed}.items() if x is not None}


@pytest.fixture(scope="module")
def params():
    return wide_params(CONFIG)


@pytest.fixture(scope="module")
def arrays(params):
    return arrays_of(sample_rollout(params))
