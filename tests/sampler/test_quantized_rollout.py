"""Rollouts with a quantised cache: identity at every bit width, cache sizes, and the update."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from smd_jax.config import ModelConfig
from smd_jax.eviction.policies import H2O, Dense
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.forward import make_replay
from smd_jax.learner.state import TrainBatch, init_state
from smd_jax.learner.update import make_update
from smd_jax.losses.policy import LossConfig
from smd_jax.message.masks import NEVER, Segments
from smd_jax.message.quantization import QuantConfig
from smd_jax.message.sampling import SamplingConfig
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.decoder import Decoder
from smd_jax.model.protocol import Params
from smd_jax.sampler.config import cache_bytes
from smd_jax.sampler.fixed_batch import RolloutConfig, rollout, rollout_program
from smd_jax.sampler.prefill import prefill
from smd_jax.sampler.static import Sampler
from smd_jax.testing import tiny_model_config
from tests.under_test import POLICIES, SHAPES, eviction_times, gap, left_padded, make_params, polished_rollout

WIDTH, RESPONSE = 12, 80
LENGTHS = [12, 5, 9, 3, 12, 1, 7, 12]
KEY = 4  # with some others two keys nearly tie, and the batch decides which one is evicted
SIZES = RolloutConfig(
    max_new_tokens=RESPONSE, budget=11, buffer=8, eos_token_id=7, sampling=SamplingConfig(temperature=0.9)
)
# One of 96 tokens ends a response: some rows end early, others never.
GQA, MHA = (replace(SHAPES[name], vocab_size=96) for name in ("GQA", "MHA"))

Run = tuple[Decoder, Trajectory]


def quantised(bits: Any) -> QuantConfig:
    """Two groups of keys in a segment, two of values in a head."""
    return QuantConfig(bits=bits, group=4, value_group=4)


@cache
def roll(name: str, quant: QuantConfig, shape: ModelConfig = GQA, sampler: Callable[..., Trajectory] = rollout) -> Run:
    """Samples unequal prompts, and asserts that some rows end early and others do not."""
    model, params = Decoder(shape), make_params(shape)
    prompts = left_padded(LENGTHS, WIDTH, shape.vocab_size)
    config = replace(SIZES, quant=quant)
    trajectory = sampler(model, params, prompts, jax.random.key(KEY), policy=POLICIES[name], config=config)
    lengths = np.asarray(trajectory.lengths())
    assert lengths.min() < RESPONSE == lengths.max(), f"choose another KEY: all or no rows end early, after {lengths}"
    return model, trajectory


def quantised_mask(run: Run) -> Any:
    mask = run[-1].mask
    assert mask.quantized is not None
    return mask


# Identity.


def wrong_replays(mask: Any) -> dict[str, Any]:
    """Replays that are nearly right."""
    quantized = mask.quantized
    return {
        "in full precision": mask.replace(quantized=None),
        "one token late": mask.replace(quantized=quantized.replace(first=quantized.first + 1), segments=()),
        "by shorter segments": mask.replace(quantized=quantized.replace(length=4), segments=()),
        "by larger groups": mask.replace(quantized=quantized.replace(config=replace(quantized.config, group=8))),
        "with another layer's bits": mask.replace(
            quantized=quantized.replace(parity=jax.tree.map(lambda x: x[:, ::-1], quantized.parity))
        ),
    }


# Every width, every kind of statistic, a cache that evicts nothing, and budgets that differ between layers.
EVERY_WIDTH = [("H2O", 8), ("H2O", 2), ("Dense", 8), ("RKV", 4), ("Pyramid of H2O", 4)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "bits"), EVERY_WIDTH)
def test_identity(name: str, bits: Any):
    """Two layers, grouped heads, unequal prompts, rows that end early, a partial last segment."""
    run = roll(name, quantised(bits))
    difference = gap(*run)
    print(f"{name}, {bits} bits: max |dlogp| {difference.max():.1e}")
    assert len(difference) > RESPONSE and difference.max() <= 2e-5
    assert gap(*run, run[-1].dense_mask()).max() > 1e-3


@pytest.mark.slow
def test_wrong_replays_miss():
    """At 8 bits, where quantisation changes least."""
    run = roll("H2O", quantised(8))
    for kind, mask in wrong_replays(quantised_mask(run)).items():
        assert gap(*run, mask).max() > 1e-3, f"the learner does not notice a replay {kind}"


@pytest.mark.slow
def test_identity_with_compiler_optimizations():
    """In MHA, with value groups larger than a head."""
    assert gap(*roll("H2O", QuantConfig(bits=2, group=8), MHA, polished_rollout)).max() <= 2e-5


@pytest.mark.slow
def test_float64():
    with jax.enable_x64(True):
        difference = gap(*roll("H2O", quantised(2), replace(GQA, dtype="float64", num_layers=1)))
    assert difference.dtype == np.float64 and difference.max() <= 1e-10


@pytest.mark.slow
def test_bfloat16():
    """Rounding moves quotients by hundredths, which the recorded parities correct."""
    run = roll("H2O", quantised(2), replace(GQA, dtype="bfloat16"))
    mask = quantised_mask(run)
    with_bits, full = (gap(*run, m).mean() for m in (mask, mask.replace(quantized=None)))
    assert with_bits <= 2e-2 and 10 * with_bits < full


def test_a_dense_quantised_cache_records_its_segments():
    run = roll("Dense", quantised(8))
    np.testing.assert_array_equal(np.unique(eviction_times(run[-1])), [0, NEVER])
    quantized = quantised_mask(run).quantized
    assert (quantized.first, quantized.length, quantised_mask(run).segments) == (WIDTH, 8, ())
    columns = WIDTH + RESPONSE
    assert quantized.parity.keys.shape == quantized.parity.values.shape == (len(LENGTHS), 2, 2, columns, 1)
    assert quantized.parity.keys.dtype == np.uint8


# Sizes.

WIDE = tiny_model_config(num_layers=2, head_dim=64, num_heads=2)
LONG = RolloutConfig(max_new_tokens=256, budget=64, buffer=32)


def cache_arrays(policy: Any, config: RolloutConfig, shape: ModelConfig, rows: int) -> list[Any]:
    """Keys and values that the decode loop carries."""
    prompts = left_padded([40] * rows, 40, shape.vocab_size)

    def read(params: Params) -> Any:
        rng = jax.random.split(jax.random.key(0), rows)
        prefilled = prefill(Sampler(Decoder(shape), policy, config, 40), params, prompts, rng)
        return [(layer.keys, layer.values, layer.quantized) for layer in prefilled.cache]

    return jax.tree.leaves(jax.eval_shape(read, make_params(shape)))


@pytest.mark.parametrize(
    ("policy", "quant", "dtype"),
    [
        (Dense(), None, "float32"),
        (Dense(), QuantConfig(bits=4, group=16, value_group=64), "float32"),
        (H2O(), QuantConfig(bits=8), "bfloat16"),
        (POLICIES["Pyramid"], None, "bfloat16"),
        (POLICIES["Pyramid"], QuantConfig(bits=2), "float32"),
    ],
)
def test_cache_bytes_equal_those_of_the_arrays(policy: Any, quant: QuantConfig | None, dtype: Any):
    shape, config = replace(WIDE, dtype=dtype), replace(LONG, quant=quant)
    arrays = [x for x in cache_arrays(policy, config, shape, 2) if x is not None]
    assert cache_bytes(shape, policy, config, 40, 2) == sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)


def temporary_bytes(quant: QuantConfig | None, layers: int) -> int:
    shape = replace(WIDE, num_layers=layers)
    prompts = left_padded([40] * 4, 40, shape.vocab_size)
    params = jax.eval_shape(lambda: make_params(shape))
    config = replace(LONG, max_new_tokens=512, quant=quant)
    lowered = rollout_program.lower(Decoder(shape), params, prompts, jax.random.key(0), policy=Dense(), config=config)
    analysis: Any = lowered.compile().memory_analysis()
    return analysis.temp_size_in_bytes


@pytest.mark.slow
def test_layers_are_dequantised_one_at_a_time():
    """XLA would otherwise dequantise all layers once per segment."""
    full, small = (temporary_bytes(quant, 2) - temporary_bytes(quant, 1) for quant in (None, QuantConfig(bits=2)))
    print(f"bytes of a layer: {full}, at 2 bits {small}")
    assert full >= 2 * small


# The train step.


def batch_of(trajectory: Trajectory) -> TrainBatch:
    return TrainBatch(trajectory, jnp.asarray(np.random.default_rng(0).normal(size=len(LENGTHS)), jnp.float32), None)


@pytest.mark.slow
def test_the_update_replays_the_quantised_cache():
    """Microbatches change nothing, and a dense learner reads keys in full precision."""
    model, trajectory = roll("H2O", quantised(2))
    params = make_params(model.config)
    whole, split = [], []
    for microbatch, results in ((None, whole), (2, split)):
        update = make_update(model, optax.sgd(1.0), UpdateConfig(loss=LossConfig(), microbatch_size=microbatch))
        state = init_state(jax.tree.map(jnp.copy, params), optax.sgd(1.0), jax.random.key(0))
        results += update(state, batch_of(trajectory))
    assert float(whole[1]["mismatch_kl"]) <= 1e-6
    for x, y in zip(*(jax.tree.leaves(state.params) for state, _ in (whole, split)), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
    dense = make_replay(model, "dense")(params, trajectory)
    difference = np.abs(dense - trajectory.logprobs)[np.asarray(trajectory.response_mask)]
    assert difference.max() > 1e-3
    np.testing.assert_allclose(difference, gap(model, trajectory, trajectory.dense_mask()), atol=1e-6)


# Bad input.


def test_invalid_groups_are_refused():
    with pytest.raises(ValueError, match="group that divides the buffer.* got group 32 and buffer 8"):
        replace(SIZES, quant=QuantConfig(bits=4))
    with pytest.raises(ValueError, match="value_group that divides head_dim 8; got 3"):
        roll("Knorm", QuantConfig(bits=4, group=4, value_group=3))


def test_other_segments_and_parity_shapes_are_refused():
    run = roll("H2O", quantised(8))
    mask, (model, trajectory) = quantised_mask(run), run
    with pytest.raises(ValueError, match="by which the cache was quantised, first=12 and length=8; got Segments"):
        mask.with_segments((Segments(WIDTH, 16, 27),))
    fewer = mask.quantized.replace(parity=jax.tree.map(lambda x: x[:, :1], mask.quantized.parity))
    with pytest.raises(ValueError, match=r"parities \(8, 2, 2, 92\).*got \(8, 1, 2, 92\)"):
        gap(model, trajectory, mask.replace(quantized=fewer))
