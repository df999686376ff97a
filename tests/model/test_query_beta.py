"""Queries scaled by their position (Ministral 3): sampler and learner are one policy.

Logits are compared with transformers in tests/model/test_family_logits.py.
"""

from dataclasses import replace

import jax

from smd_jax.config import YarnRope
from smd_jax.model.decoder import Decoder
from smd_jax.sampler.config import RolloutConfig
from smd_jax.sampler.fixed_batch import rollout
from tests.families import PLAIN
from tests.tiny_update import spread_params
from tests.under_test import POLICIES, gap, left_padded

ROPE = YarnRope(4.0, 4, attention_factor=1.0, query_beta=0.5)
CONFIG = replace(PLAIN, num_layers=1, rope_scaling=ROPE)


def test_sampler_and_learner_are_one_policy():
    """The rollout spans several original contexts. With one scale for all queries the learner is another policy."""
    params, prompts = spread_params(0, CONFIG), left_padded([12, 5, 3], 12, CONFIG.vocab_size)
    sizes = RolloutConfig(max_new_tokens=24, budget=10, buffer=6)
    drawn = rollout(Decoder(CONFIG), params, prompts, jax.random.key(3), policy=POLICIES["SnapKV"], config=sizes)
    assert gap(Decoder(CONFIG), drawn, params=params).max() <= 2e-5
    plain = replace(CONFIG, rope_scaling=replace(ROPE, query_beta=0.0))
    assert gap(Decoder(plain), drawn, params=params).max() > 1e-2
