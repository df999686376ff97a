"""Records of samplers: read, checked, replayed, and the cause of a mismatch named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import smd_jax as smd
from smd_jax.certify import report
from smd_jax.certify.causes import CAUSES, Conditions, PromptFacts, prompt_facts
from smd_jax.certify.record import load_record, save_record
from smd_jax.certify.verdict import Models, Verdict, certify, logprobs_of, replay_logits
from smd_jax.commands.certify import main
from smd_jax.config import Experts
from smd_jax.message.masks import NEVER
from smd_jax.testing import byte_tokenizer, random_params, tiny_model_config, write_random_checkpoint

CONFIG = tiny_model_config(num_layers=3)
MODEL = smd.Decoder(CONFIG)
FACTS = PromptFacts(bos=1, system=(7, 8, 9), generation=(5, 6))
LENGTHS = (12, 9, 7, 6)


def wide_params(config):
    """Random parameters that are large enough for attention to matter."""
    return jax.tree.map(lambda x: 2 * x if x.ndim == 2 else x, random_params(config))


@pytest.fixture(scope="module")
def params():
    return wide_params(CONFIG)


def rolled_out(params, sampling=None) -> smd.Trajectory:
    """Four prompts of different lengths that begin with the system message and end with the generation prompt."""
    width = max(LENGTHS)
    tokens = np.array(jax.random.randint(jax.random.key(0), (4, width), 10, 250))
    for row, length in enumerate(LENGTHS):
        tokens[row, width - length : width - length + 3] = FACTS.system
        tokens[row, -2:] = FACTS.generation
    valid = np.arange(width) >= width - np.array(LENGTHS)[:, None]
    sizes = smd.RolloutConfig(max_new_tokens=32, budget=12, buffer=4, sampling=sampling or smd.SamplingConfig())
    prompts = smd.PromptBatch(jnp.asarray(tokens), jnp.asarray(valid))
    return smd.rollout(MODEL, params, prompts, jax.random.key(1), policy=smd.eviction.TOVA(), config=sizes)


@pytest.fixture(scope="module")
def rollout(params):
    return rolled_out(params)


def named(params, record, **more):
    verdict = certify(Models(MODEL, params, **more), record, FACTS)
    return verdict.cause.cause if verdict.cause else None, verdict


def sampler_under(params, record, conditions, temperature=1.0, model=MODEL) -> smd.Trajectory:
    """The record whose log-probabilities come from a replay under the conditions."""
    return record.replace(logprobs=logprobs_of(record.response, replay_logits(model, params, conditions), temperature))


# --- verdicts


@pytest.mark.slow
def test_a_rollout_is_one_policy(params, rollout):
    cause, verdict = named(params, rollout)
    assert Conditions.of(rollout).evicted.any()
    assert verdict.is_one_policy and cause is None and verdict.max_abs < 2e-5


@pytest.mark.slow
def test_recorded_support_is_one_policy(params):
    filtered = rolled_out(params, smd.SamplingConfig(top_k=6))
    assert named(params, filtered)[1].is_one_policy
    cause, verdict = named(params, filtered.replace(drawable=None))
    assert cause == "sampling support" and not verdict.is_one_policy


CASES = [(cause.name, number) for cause in CAUSES for number in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), CASES)
def test_an_injected_cause_is_named(params, rollout, name, number):
    (cause,) = (cause for cause in CAUSES if cause.name == name)
    cases = list(cause.cases(Conditions.of(rollout), FACTS))
    if number >= len(cases):
        pytest.skip("the cause has one case")
    said, conditions = cases[number]
    found, verdict = named(params, sampler_under(params, rollout, conditions))
    assert found == name, report.lines(verdict)
    assert verdict.cause is not None and verdict.cause.said == said


@pytest.mark.parametrize(
    ("name", "number", "changed"),
    [
        ("BOS token", 0, lambda p: [1, *p]),
        ("chat template", 0, lambda p: p[3:]),
        ("chat template", 1, lambda p: p[:-2]),
    ],
)
def test_conditions_of_other_prompts(params, rollout, name, number, changed):
    """As rows that were built with these prompts. Nothing is evicted, so that positions of keys do not matter."""
    (cause,) = (cause for cause in CAUSES if cause.name == name)
    dense = rollout.replace(mask=rollout.dense_mask())
    conditions = list(cause.cases(Conditions.of(dense), FACTS))[number][1]
    ids = [row[real].tolist() for row, real in zip(np.asarray(rollout.tokens), np.asarray(rollout.valid), strict=True)]
    prompts = [changed(row[:length]) for row, length in zip(ids, LENGTHS, strict=True)]
    responses = [row[length:] for row, length in zip(ids, LENGTHS, strict=True)]
    other = smd.Trajectory.from_records(
        *(prompts, responses, list(np.asarray(rollout.logprobs))),
        terminated=[False] * 4,
        layers=1,
        kv_heads=1,
        evicted_at=[np.full((1, 1, len(p) + len(r)), NEVER) for p, r in zip(prompts, responses, strict=True)],
    )
    np.testing.assert_allclose(
        sampler_under(params, rollout, conditions).logprobs, smd.replay(MODEL, params, other).logprobs, atol=2e-5
    )


def test_a_shorter_prompt_moves_evictions():
    """Without the tokens at columns 2 and 3, those before them move by two, and so do evictions up to there."""
    conditions = Conditions(
        tokens=np.array([[0, 11, 12, 13, 14, 15]]),
        positions=np.array([[0, 0, 1, 2, 3, 4]]),
        evicted_at=np.array([[[[0, 2, 3, 5, 5, NEVER]]]], np.int32),
        start=np.array([1]),
        first=4,
    )
    moved = conditions.without(np.array([2]), 2)
    assert moved.tokens[0, 3:].tolist() == [11, 14, 15]
    assert moved.positions[0, 3:].tolist() == [0, 1, 2]
    assert moved.evicted_at[0, 0, 0].tolist() == [0, 0, 0, 4, 5, NEVER]


def test_other_injected_causes_are_named(params, rollout):
    stated = Conditions.of(rollout)
    cause, verdict = named(params, sampler_under(params, rollout, stated, temperature=0.8))
    assert cause == "temperature" and verdict.cause is not None and "0.8;" in verdict.cause.said
    moved = rollout.replace(logprobs=jnp.roll(rollout.logprobs, 1, axis=1))
    assert named(params, moved)[0] == "tokens misaligned"
    older = jax.tree.map(lambda x: 0.95 * x, params)
    stale = sampler_under(older, rollout, stated)
    assert named(params, stale)[0] == "stale weights"
    cause, verdict = named(params, stale, previous=older)
    assert cause == "stale weights" and verdict.findings[0].difference < 1e-5
    low = smd.Decoder(dataclasses.replace(CONFIG, dtype="bfloat16"))
    rounded = sampler_under(params, rollout, stated, model=low)
    assert named(params, rounded, other=(low, params), other_dtype="bfloat16")[0] == "dtype"
    verdict = certify(Models(low, params, (MODEL, params), "float32"), rounded, FACTS)
    assert verdict.is_one_policy and verdict.cause is None
    # A sampler that is as far off on the other side did not compute in bfloat16.
    own = sampler_under(params, rollout, stated)
    mirrored = rollout.replace(logprobs=jnp.minimum(2 * own.logprobs - rounded.logprobs, 0))
    assert named(params, mirrored, other=(low, params), other_dtype="bfloat16")[0] == "stale weights"


def test_two_swapped_layers_are_found(params, rollout):
    swapped = rollout.replace(mask=smd.ShadowMask(rollout.mask.evicted_at[:, jnp.array([0, 2, 1])]))
    cause, verdict = named(params, swapped)
    assert cause == "layers or heads swapped"
    assert verdict.cause is not None and "layers 1 and 2 were swapped" in verdict.cause.said


MIXED = dataclasses.replace(
    CONFIG, experts=Experts(count=4, per_token=2, intermediate_size=16, layers=(True, False, True))
)


def test_expert_routing_is_replayed(rollout, tmp_path: Path):
    """Of a model with experts in two of three layers: tokens go where the record says, not where the router would."""
    model, params = smd.Decoder(MIXED), wide_params(MIXED)
    shape = (*rollout.tokens.shape, 2, 4)
    drawn = np.argsort(np.random.default_rng(0).random(shape), axis=-1)[..., :2].astype(np.int8)
    routed = rollout.replace(routing=jnp.asarray(drawn), expert_count=4)
    recorded = sampler_under(params, routed, Conditions.of(routed), model=model)
    save_record(tmp_path / "routed.npz", recorded)
    sizes: dict[str, Any] = {"layers": 3, "kv_heads": MIXED.num_kv_heads, "vocab_size": MIXED.vocab_size}
    again = load_record(tmp_path / "routed.npz", **sizes, experts=model.shape.routing)
    assert certify(Models(model, params), again, FACTS).is_one_policy
    assert not certify(Models(model, params), recorded.replace(routing=None), FACTS).is_one_policy
    own = sampler_under(params, routed, Conditions.of(rollout), model=model)
    verdict = certify(Models(model, params), own, FACTS)
    assert verdict.cause is not None and verdict.cause.cause == "expert routing"
    with pytest.raises(ValueError, match="expected no routing, because the model has no experts"):
        certify(Models(MODEL, params), recorded)


def test_numbers_of_a_verdict():
    verdict = Verdict(np.array([[0.1, -0.1, 0.4], [0.2, 0.2, np.nan]]), 1e-4)
    assert verdict.mean_abs == pytest.approx(0.2) and verdict.max_abs == pytest.approx(0.4)
    assert report.worst(verdict, 2) == [(0, 2, 0.4), (1, 0, 0.2)]


# --- the record

SIZES: dict[str, Any] = {"layers": CONFIG.num_layers, "kv_heads": CONFIG.num_kv_heads, "vocab_size": CONFIG.vocab_size}


@pytest.mark.parametrize("sampling", [smd.SamplingConfig(), smd.SamplingConfig(top_k=6, temperature=0.5)], ids=str)
def test_a_file_comes_back(params, tmp_path: Path, sampling: smd.SamplingConfig):
    ours, path = rolled_out(params, sampling), tmp_path / "rollout.npz"
    save_record(path, ours)
    again = load_record(path, **SIZES)
    valid = np.asarray(ours.valid)
    np.testing.assert_array_equal(np.asarray(again.tokens)[valid], np.asarray(ours.tokens)[valid])
    for name in ("valid", "logprobs", "temperature"):
        np.testing.assert_array_equal(getattr(again, name), getattr(ours, name))
    np.testing.assert_array_equal(Conditions.of(again).evicted_at, Conditions.of(ours).evicted_at)
    for drawable in (ours.drawable, again.drawable):
        assert (drawable is None) == (sampling.top_k == 0)
    if ours.drawable is not None and again.drawable is not None:
        mine, other = (x.to_boolean(CONFIG.vocab_size, jnp.arange(32)) for x in (ours.drawable, again.drawable))
        np.testing.assert_array_equal(mine, other)
    first = load_record(path, **SIZES, rows=2)
    np.testing.assert_array_equal(first.logprobs, ours.logprobs[:2])
    with pytest.raises(FileExistsError):
        save_record(path, ours)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tokens": None}, "tokens missing"),
        ({"masks": np.zeros(1, int)}, "got masks"),
        ({"logprobs": np.zeros((4, 44), int)}, "logprobs: expected floats with 2 axes; got int64"),
        ({"logprobs": np.zeros(44, np.float32)}, r"logprobs: expected floats with 2 axes; got float32 \(44,\)"),
        ({"logprobs": np.zeros((3, 44), np.float32)}, "logprobs: expected 4 rows; got 3"),
        ({"logprobs": np.full((4, 44), np.nan)}, "finite log-probabilities; got nan .row 0, response token 0"),
        ({"tokens": np.full((4, 44), 264)}, "ids from 0 to 263, the vocabulary; got 264 .row 0, prompt token 0"),
        ({"lengths": np.array([12, 9, 7, 6])}, "expected 1 <= prompt_lengths < lengths <= 44"),
        ({"temperature": np.float32(0)}, "expected a temperature > 0"),
        ({"evicted_at": np.zeros((4, 3, 5, 44), int)}, r"evicted_at of row 0 to be \(3, 2, 44\)"),
        ({"support_ids": np.zeros(3, int)}, "expected support_ids and support_offsets together"),
        ({"support_ids": np.zeros(3, int), "support_offsets": np.arange(4)}, "expected one more than 128 response"),
        ({"routing": np.zeros((4, 44, 2, 2), int)}, "expected experts with routed_experts"),
    ],
)
def test_a_bad_record_is_refused(rollout, tmp_path: Path, changed: dict[str, Any], said: str):
    save_record(tmp_path / "good.npz", rollout)
    with np.load(tmp_path / "good.npz") as good:
        arrays = {name: array for name, array in {**good, **changed}.items() if array is not None}
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(ValueError, match=said):
        load_record(tmp_path / "bad.npz", **SIZES)


def test_facts_of_a_tokenizer():
    assert len(prompt_facts(byte_tokenizer()).generation) > 0
    assert prompt_facts(byte_tokenizer(chat=False)).generation == ()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_random_checkpoint(tmp_path / "model", config=CONFIG)
    ours = rolled_out(smd.load_checkpoint(tmp_path / "model")[1])
    save_record(tmp_path / "good.npz", ours)
    main([str(tmp_path / "good.npz"), "--model", str(tmp_path / "model")])
    assert "one policy" in capsys.readouterr().out
    save_record(tmp_path / "bad.npz", ours.replace(logprobs=jnp.roll(ours.logprobs, 1, axis=1)))
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path / "bad.npz"), "--model", str(tmp_path / "model"), "--out", str(tmp_path / "bad.json")])
    assert stopped.value.code == 1 and "tokens misaligned" in capsys.readouterr().out
    written = json.loads((tmp_path / "bad.json").read_text(encoding="utf-8"))
    assert written["cause"]["cause"] == "tokens misaligned" and written["one_policy"] is False
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path / "missing.npz"), "--model", str(tmp_path / "model")])
    assert stopped.value.code == 2 and "expected a readable record" in capsys.readouterr().err
