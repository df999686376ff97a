"""TriAttention's query centers and invalid inputs. Its scores are tested in tests/eviction/test_eviction.py."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from smd_jax.eviction.policies import TriAttention
from smd_jax.message.query_centers import QueryCenters
from smd_jax.model.decoder import Decoder
from smd_jax.model.query_centers import measure_query_centers
from smd_jax.runs.settings import to_jsonable
from smd_jax.sampler.config import RolloutConfig
from smd_jax.sampler.fixed_batch import rollout
from smd_jax.testing import tiny_model_config
from tests import numpy_decoder
from tests.query_centers import drawn_centers
from tests.under_test import left_padded, make_params

ONE_LAYER = tiny_model_config(num_layers=1, tie_embeddings=False)


def test_measured_centers_match_numpy():
    """Over two prompts of different lengths; padding does not count."""
    prompts, params = left_padded([9, 5], 9, ONE_LAYER.vocab_size), make_params(ONE_LAYER)
    centers = measure_query_centers(Decoder(ONE_LAYER), params, prompts.tokens, prompts.valid)
    found = []
    for tokens, valid in zip(np.asarray(prompts.tokens), np.asarray(prompts.valid), strict=True):
        x = np.asarray(params["embed"]["embedding"], np.float64)[tokens[valid]]
        q, _, _ = numpy_decoder.projections(x, np.zeros(len(x), int), params["layers_0"], ONE_LAYER)
        found.append(q[..., :4] + 1j * q[..., 4:])
    queries = np.concatenate(found, axis=1)
    np.testing.assert_allclose(centers.mean[0], queries.mean(axis=1), atol=2e-6)
    np.testing.assert_allclose(centers.length[0], np.abs(queries).mean(axis=1), atol=2e-6)
    np.testing.assert_allclose(centers.frequencies[0], 10_000.0 ** (-np.arange(4) / 4))


def test_centers_are_a_static_argument():
    one, other = drawn_centers(heads=4, half=4), drawn_centers(heads=4, half=4)
    assert one == other and hash(TriAttention(one)) == hash(TriAttention(other))
    assert one != QueryCenters(one.mean * 0.5, one.length, one.frequencies)
    saved = to_jsonable(TriAttention(one))
    assert isinstance(saved, dict) and saved["centers"] == {"_class": "QueryCenters", "digest": one.digest}


def test_invalid_inputs_are_refused():
    mean, length = np.ones((1, 4, 4), complex), np.ones((1, 4, 4))
    with pytest.raises(ValueError, match=r"expected mean and length \[layers, heads, head_dim / 2\]; got \(4, 4\)"):
        QueryCenters(mean[0], length, np.ones(4))
    with pytest.raises(ValueError, match=r"expected frequencies \(1, 4\) or \(4,\); got \(3,\)"):
        QueryCenters(mean, length, np.ones(3))
    with pytest.raises(ValueError, match="expected finite query centers"):
        QueryCenters(mean * np.nan, length, np.ones(4))
    with pytest.raises(ValueError, match="expected mean absolute values of at least"):
        QueryCenters(mean, length / 2, np.ones(4))
    with pytest.raises(ValueError, match="expected TriAttention.longest >= 1; got 0"):
        TriAttention(drawn_centers(heads=4, half=4), longest=0)
    two_layers = replace(ONE_LAYER, num_layers=2)
    inputs = (left_padded([9], 9, 8), jax.random.key(0))
    sizes = RolloutConfig(max_new_tokens=4, budget=4, buffer=2)
    for config, centers, message in (
        (two_layers, drawn_centers(heads=4, half=4), "expected query centers of at least 2 layers; got 1"),
        (ONE_LAYER, drawn_centers(heads=3, half=4), r"expected query centers of a multiple of 2 heads and 4 freq"),
    ):
        with pytest.raises(ValueError, match=message):
            rollout(Decoder(config), make_params(config), *inputs, policy=TriAttention(centers), config=sizes)
    halved, mixed = replace(ONE_LAYER, rotary_dim=4), replace(ONE_LAYER, rope_interleaved=True)
    for config, message in ((halved, "got 4 of them$"), (mixed, "got 8 of them in neighbouring pairs")):
        with pytest.raises(ValueError, match=f"expected RoPE that pairs the halves of all 8 channels; {message}"):
            measure_query_centers(Decoder(config), {}, inputs[0].tokens, inputs[0].valid)


def test_layers_without_rope_have_zero_frequencies():
    """The model also has attention sinks."""
    config = replace(ONE_LAYER, num_layers=2, rope_layers=(True, False), attention_sinks=True)
    prompts = left_padded([9], 9, 8)
    centers = measure_query_centers(Decoder(config), make_params(config), prompts.tokens, prompts.valid)
    assert centers.frequencies[0].all() and not centers.frequencies[1].any()
