"""Queries scaled by their position (Ministral 3): config.json, and sampler and learner as one policy.

The numbers are compared with transformers' in tests/model/test_family_logits.py.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest

from smd_jax.config import YarnRope
from smd_jax.model.decoder import Decoder
from smd_jax.model.hf_config import hf_config_from_model, model_config_from_hf, model_type_of
from smd_jax.sampler.config import RolloutConfig
from smd_jax.sampler.fixed_batch import rollout
from tests.families import PLAIN
from tests.tiny_update import spread_params
from tests.under_test import POLICIES, gap, left_padded

ROPE = YarnRope(4.0, 4, attention_factor=1.0, query_beta=0.5)
CONFIG = replace(PLAIN, num_layers=1, rope_scaling=ROPE)
PUBLISHED = {
    "rope_type": "yarn",
    "type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "max_position_embeddings": 262144,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def test_config_json():
    whole = model_config_from_hf({"model_type": "ministral3", "rope_parameters": PUBLISHED})
    expected = YarnRope(16.0, 16384, attention_factor=1.0, query_beta=0.1)
    assert whole.rope_scaling == expected and whole.max_positions == 262144 and whole.head_dim == 128
    assert model_config_from_hf({"model_type": "ministral3"}) == whole, "transformers' own default"
    written = hf_config_from_model(whole, "bfloat16")
    assert written["model_type"] == "ministral3" and written["rope_parameters"]["llama_4_scaling_beta"] == 0.1
    assert model_config_from_hf(written) == whole


def test_refused():
    assert model_type_of(replace(CONFIG, rope_scaling=replace(ROPE, query_beta=0.0)), "ministral3") == "llama"
    with pytest.raises(ValueError, match="RoPE of all channels in all layers with query_beta; got rotary_dim=4"):
        replace(CONFIG, rotary_dim=4)
    with pytest.raises(ValueError, match="expected a finite query_beta >= 0; got -1.0"):
        replace(ROPE, query_beta=-1.0)


def test_sampler_and_learner_are_one_policy():
    """Over several contexts, and each query has its own scale: with one scale the learner is another policy."""
    params, prompts = spread_params(0, CONFIG), left_padded([12, 5, 3], 12, CONFIG.vocab_size)
    sizes = RolloutConfig(24, budget=10, buffer=6)
    drawn = rollout(Decoder(CONFIG), params, prompts, jax.random.key(3), policy=POLICIES["SnapKV"], config=sizes)
    assert gap(Decoder(CONFIG), drawn, params=params).max() <= 2e-5
    plain = replace(CONFIG, rope_scaling=replace(ROPE, query_beta=0.0))
    assert gap(Decoder(plain), drawn, params=params).max() > 1e-2
