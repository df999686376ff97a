"""Causes that smd-certify names for prompts above the budget, and for samplers in bfloat16."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import smd_jax as smd
from smd_jax.certify import verdict
from smd_jax.certify.causes import PromptFacts
from smd_jax.certify.record import arrays_of, check_record
from smd_jax.certify.verdict import Models, certify
from smd_jax.message.masks import NEVER
from smd_jax.testing import tiny_model_config
from tests.certify.conftest import sample, wide_params

CONFIG = tiny_model_config(num_layers=2, num_heads=4, num_kv_heads=2)


def rolled_out(model: smd.Decoder, params: Any, **sizes: Any) -> smd.Trajectory:
    """Eight prompts of 20 tokens under H2O with 12 + 4 keys: each row reads one response token before any eviction."""
    return sample(model, params, jax.random.randint(jax.random.key(0), (8, 20), 10, 250), key=1, budget=12, **sizes)


def cause_of(models: Models, arrays: dict[str, np.ndarray], rows: int = 8) -> str | None:
    record = check_record(arrays, CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.vocab_size)
    verdict = certify(models, record.first_rows(rows), PromptFacts())
    return None if verdict.cause is None else verdict.cause.cause


@pytest.mark.slow
def test_stale_weights_are_not_called_evictions():
    model, params = smd.Decoder(CONFIG), wide_params(CONFIG)
    keys = iter(jax.random.split(jax.random.key(2), 1000))
    older = jax.tree.map(lambda x: x * (1 + 0.03 * jax.random.normal(next(keys), x.shape)), params)
    arrays = arrays_of(rolled_out(model, older, max_new_tokens=32))
    assert cause_of(Models(model, params), arrays) == "stale weights"
    assert cause_of(Models(model, params), arrays, rows=3) == "undecided"


def test_three_rows_do_not_tell_unrecorded_evictions_from_stale_weights():
    model, params = smd.Decoder(CONFIG), wide_params(CONFIG)
    arrays = arrays_of(rolled_out(model, params, max_new_tokens=32))
    unrecorded = {name: array for name, array in arrays.items() if name != "evicted_at"}
    assert cause_of(Models(model, params), unrecorded, rows=3) == "undecided"


def test_too_few_uncertain_first_tokens_leave_the_cause_undecided():
    """Nearly certain tokens agree under other weights too, and a single token may agree by chance."""
    base, changed = np.log(np.array([[0.5, 0.5]] * 4)), np.log(np.array([[1.0, 2.0]] * 4))

    def cause(difference, first):
        return verdict._without_evictions(difference, np.asarray(first), verdict.TOLERANCE)

    assert cause(changed, base[:, 0]).cause == "evictions not recorded"
    certain = cause(changed, np.full(4, -0.01))
    assert certain.cause == "undecided" and "too few uncertain first tokens" in certain.detail
    assert cause(changed[:3], base[:3, 0]).cause == "undecided"
    differ = cause(changed + 0.1, base[:, 0])
    assert differ.cause == "stale weights" and "the first tokens have it, too" in differ.detail


@pytest.mark.parametrize(
    ("sampled", "differences", "expected"),
    [
        ([0.5, 0.5], [0.0, 0.0], "evictions"),
        ([0.99, 0.99], [0.0, 0.0], "undecided"),
        ([0.5, 0.5], [0.0, 1.0], "stale weights"),  # the second token is also before the eviction
        ([0.5, 0.99], [0.75 * verdict.EARLY, 0.0], "evictions"),  # and is not after it, if it is nearly certain
    ],
)
def test_nearly_certain_tokens_before_an_eviction_do_not_count(
    sampled, differences, expected, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(verdict, "_swap", lambda replays: (None, ()))
    evicted_at = np.where(np.arange(5) == 0, 3, NEVER) * np.ones((4, 1, 1, 1), int)  # query 3 samples the last token
    record = SimpleNamespace(has_evictions=True, evicted_at=evicted_at, prompt_lengths=np.full(4, 2))
    logprobs = np.log([*sampled, 0.5]) * np.ones((4, 1))
    replays = object.__new__(verdict._Replays)
    vars(replays).update(record=record, inside=np.ones((4, 3), bool), responses=3, sampled=logprobs[..., None])
    cause, _ = verdict._by_elimination(replays, np.array([[*differences, 1.0]] * 4)[..., None], None, 0.1, 1e-4)
    assert cause is not None and cause.cause == expected


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [smd.SamplingConfig(top_p=0.8), smd.SamplingConfig(top_k=12)])
def test_a_support_that_a_sampler_in_bfloat16_does_not_record_is_found(sampling: smd.SamplingConfig):
    precise, params = smd.Decoder(CONFIG), wide_params(CONFIG)
    rounded = smd.Decoder(dataclasses.replace(CONFIG, dtype="bfloat16"))
    arrays = arrays_of(rolled_out(rounded, params, max_new_tokens=24, sampling=sampling))
    without = {name: array for name, array in arrays.items() if not name.startswith("support")}
    assert cause_of(Models(rounded, params, (precise, params), "float32"), without) == "sampling support"
