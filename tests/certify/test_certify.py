"""smd-certify reads, checks and replays records of samplers, and names the cause of a mismatch."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import smd_jax as smd
from smd_jax.certify import report, verdict
from smd_jax.certify.causes import CAUSES, Conditions, PromptFacts
from smd_jax.certify.record import Record, arrays_of, check_record, load_record, save_record
from smd_jax.certify.replay import Replayed, replay
from smd_jax.certify.verdict import Models, certify
from smd_jax.commands.certify import main
from smd_jax.config import Experts
from smd_jax.learner import blocks
from smd_jax.message.drawable_tokens import DrawableTokens
from smd_jax.message.masks import NEVER
from smd_jax.message.quantization import QuantConfig
from smd_jax.testing import random_params, tiny_model_config, write_random_checkpoint

CONFIG = tiny_model_config(num_layers=3)
MODEL = smd.Decoder(CONFIG)
FACTS = PromptFacts(bos=1, system=(7, 8, 9), generation=(5, 6))
LENGTHS = (12, 9, 7, 6)


def wide_params(config, seed=0):
    """Random parameters, large enough for attention to matter."""
    return jax.tree.map(lambda x: 2 * x if x.ndim == 2 else x, random_params(config, seed))


@pytest.fixture(scope="module")
def params():
    return wide_params(CONFIG)


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


@pytest.fixture(scope="module")
def arrays(params):
    return arrays_of(sample_rollout(params))


SIZES = (CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.vocab_size)


def record_of(arrays) -> Record:
    return check_record(arrays, *SIZES)


def altered(arrays, **changed):
    """The arrays with other ones; None leaves one out."""
    return {name: x for name, x in {**arrays, **changed}.items() if x is not None}


def cause_of(params, record, **more):
    verdict = certify(Models(MODEL, params, **more), record, FACTS)
    return verdict.cause.cause if verdict.cause else None, verdict


def record_under(params, arrays, conditions, temperature=1.0, model=MODEL):
    """The record with log-probabilities of a replay under these conditions."""
    record = record_of(arrays)
    columns, _ = record.response_columns
    response = np.take_along_axis(record.tokens, columns, axis=1)
    replayed = replay(model, params, conditions, columns.shape[1])
    logprobs = arrays["logprobs"].copy()
    recomputed = replayed.logprobs(response[..., None], [temperature])[..., 0, 0]
    np.put_along_axis(logprobs, columns, np.asarray(recomputed), axis=1)
    return record_of({**arrays, "logprobs": logprobs})


# --- verdicts


@pytest.mark.slow
def test_a_rollout_is_one_policy(params, arrays):
    cause, verdict = cause_of(params, record_of(arrays))
    assert record_of(arrays).has_evictions
    assert verdict.is_one_policy and cause is None and verdict.kind == "rounding" and verdict.max_abs < 2e-5


@pytest.mark.slow
def test_top_k_is_one_policy_with_recorded_support_only(params):
    fields = arrays_of(sample_rollout(params, smd.SamplingConfig(top_k=6)))
    assert cause_of(params, record_of(fields))[1].is_one_policy
    cause, verdict = cause_of(params, record_of(altered(fields, support_ids=None, support_offsets=None)))
    assert cause == "sampling support" and not verdict.is_one_policy


CASES = [(cause.name, number) for cause in CAUSES for number in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), CASES)
def test_an_injected_cause_is_named(params, arrays, name, number):
    (cause,) = (cause for cause in CAUSES if cause.name == name)
    cases = list(cause.cases(record_of(arrays), FACTS))
    if number >= len(cases):
        pytest.skip("the cause has one case")
    result, verdict = cause_of(params, record_under(params, arrays, cases[number].conditions))
    assert result == name, report.lines(verdict)
    assert verdict.cause is not None and verdict.cause.detail == cases[number].detail


def test_positions_of_slots_count_the_keys_of_the_first_head(arrays):
    record = record_of(arrays)
    (case,) = CAUSES[3].cases(record, PromptFacts(bos=None))
    for evicted_at, positions in zip(record.evicted_at[:, 0, 0], case.conditions.positions, strict=True):
        visible = [sum(key <= query < end for key, end in enumerate(evicted_at)) for query in range(len(evicted_at))]
        assert positions[: len(visible)].tolist() == [max(count - 1, 0) for count in visible]


def test_other_injected_causes_are_named(params, arrays):
    stated = Conditions.of(record_of(arrays))
    cause, verdict = cause_of(params, record_under(params, arrays, stated, temperature=0.8))
    assert cause == "temperature" and verdict.cause is not None and "0.8;" in verdict.cause.detail
    misaligned = record_of({**arrays, "logprobs": np.roll(arrays["logprobs"], 1, 1)})
    assert cause_of(params, misaligned)[0] == "tokens misaligned"
    older = jax.tree.map(lambda x: 0.95 * x, params)
    stale = record_under(older, arrays, stated)
    assert cause_of(params, stale)[0] == "stale weights"
    cause, verdict = cause_of(params, stale, previous=older)
    assert cause == "stale weights" and verdict.findings[0].difference < 1e-5
    low = smd.Decoder(dataclasses.replace(CONFIG, dtype="bfloat16"))
    rounded = record_under(params, arrays, stated, model=low)
    assert cause_of(params, rounded, other=(low, params), other_dtype="bfloat16")[0] == "dtype"
    verdict = certify(Models(low, params, (MODEL, params), "float32"), rounded, FACTS)
    assert verdict.is_one_policy and verdict.cause is None
    # Differences of the opposite sign do not come from bfloat16.
    own, of_low = (record_under(params, arrays, stated, model=model).logprobs for model in (MODEL, low))
    mirrored = record_of({**arrays, "logprobs": np.minimum(2 * own - of_low, 0)})
    assert cause_of(params, mirrored, other=(low, params), other_dtype="bfloat16")[0] == "stale weights"


def test_unrecorded_evictions_are_named(params):
    """First tokens agree, unlike under other weights. Padding after shorter rows is no eviction."""
    valid = np.arange(16) >= np.array([1, 0, 0, 0, 0, 0, 0, 0])[:, None]
    tokens = jax.random.randint(jax.random.key(0), valid.shape, 10, 250)
    fields = arrays_of(sample(MODEL, params, tokens, valid, key=5, max_new_tokens=24, budget=20))
    assert len(set(fields["lengths"])) == 2 and record_of(fields).has_evictions
    del fields["evicted_at"]
    assert not record_of(fields).has_evictions
    cause, verdict = cause_of(params, record_of(fields))
    assert cause == "evictions not recorded" and verdict.cause is not None
    assert "keys may have been evicted" in verdict.cause.detail and "record evicted_at" in verdict.cause.fix
    older = jax.tree.map(lambda x: 0.95 * x, params)
    assert cause_of(params, record_under(older, fields, Conditions.of(record_of(fields))))[0] == "stale weights"


def with_top_logprobs(params, arrays, rows, k=6):
    """Arrays of the first rows, cut after one response token, with the sampler's likeliest tokens."""
    record = record_of(arrays)
    columns, _ = record.response_columns
    replayed = replay(MODEL, params, Conditions.of(record), columns.shape[1])
    ids = np.asarray(replayed.likeliest(k)[0])
    cut = {**arrays, "lengths": arrays["prompt_lengths"] + 1}
    logprobs = np.asarray(replayed.logprobs(ids))[:, 0, :, 0]
    cut["top_ids"] = np.full((*arrays["tokens"].shape, k), -1)
    cut["top_logprobs"] = np.zeros(cut["top_ids"].shape, np.float32)
    for row, column in enumerate(columns[:, 0]):
        cut["top_ids"][row, column], cut["top_logprobs"][row, column] = ids[row, 0], logprobs[row]
    return {name: array[:rows] if array.ndim else array for name, array in cut.items()}


def test_top_logprobs_separate_causes(params, arrays):
    """A temperature explains the log-probability of any single token, but not those of its alternatives."""
    older = jax.tree.map(lambda x: 0.95 * x, params)
    stale = {**arrays, "logprobs": record_under(older, arrays, Conditions.of(record_of(arrays))).logprobs}
    fields = with_top_logprobs(older, stale, rows=1)
    without = altered(fields, top_ids=None, top_logprobs=None)
    assert cause_of(params, record_of(without))[0] in ("temperature", "sampling support")
    assert cause_of(params, record_of(fields))[0] == "stale weights"
    assert cause_of(older, record_of(fields))[1].is_one_policy


MOE = dataclasses.replace(
    CONFIG, experts=Experts(count=4, per_token=2, intermediate_size=16, layers=(True, False, True))
)


@pytest.mark.slow
def test_expert_routing_is_replayed(arrays):
    """Two of three layers have experts. Tokens go to the recorded experts, not to those of the router."""
    model, params = smd.Decoder(MOE), wide_params(MOE)
    experts = model.shape.routing
    assert experts is not None and experts.layers == (0, 2)
    shape = arrays["tokens"].shape
    routing = np.argsort(np.random.default_rng(0).random((*shape, 2, 4)), axis=-1)[..., :2]
    sizes = (*SIZES, experts)
    record = check_record({**arrays, "routing": routing}, *sizes)
    routed_logprobs = record_under(params, arrays, Conditions.of(record), model=model).logprobs
    recorded = check_record({**arrays, "logprobs": routed_logprobs, "routing": routing}, *sizes)
    assert recorded.first_rows(2).routing is not None
    assert certify(Models(model, params), recorded, FACTS).is_one_policy
    without = check_record({**arrays, "logprobs": routed_logprobs}, *sizes)
    assert not certify(Models(model, params), without, FACTS).is_one_policy
    own = record_under(params, arrays, Conditions.of(record_of(arrays)), model=model).logprobs
    ignored = check_record({**arrays, "logprobs": own, "routing": routing}, *sizes)
    verdict = certify(Models(model, params), ignored, FACTS)
    assert verdict.cause is not None and verdict.cause.cause == "expert routing"
    with pytest.raises(ValueError, match="routing: expected a model with experts; got Decoder without any"):
        certify(Models(MODEL, params), recorded)


@pytest.mark.slow
def test_the_arrays_of_a_rollout_include_its_routing():
    model, params = smd.Decoder(MOE), wide_params(MOE)
    valid = np.arange(10) >= np.array([[0], [3]])
    trajectory = sample(model, params, jnp.arange(20).reshape(2, 10), valid, max_new_tokens=12, budget=12)
    fields = arrays_of(trajectory)
    record = check_record(fields, *SIZES, model.shape.routing)
    assert record.routing is not None and (record.routing[1, 0] == np.asarray(trajectory.routing)[1, 3]).all()
    assert certify(Models(model, params), record).is_one_policy


def test_rollouts_that_no_record_can_hold_are_refused(params):
    trajectory = sample_rollout(params)
    shortest = DrawableTokens(None, min_new_tokens=4, eos_token_id=7)
    with pytest.raises(ValueError, match="expected min_new_tokens 0; got 4"):
        arrays_of(trajectory.replace(drawable=shortest))
    quant = QuantConfig(bits=4, group=4)
    quantised = sample(MODEL, params, jnp.arange(8)[None] + 10, max_new_tokens=4, budget=8, quant=quant)
    with pytest.raises(ValueError, match="expected a cache in full precision"):
        arrays_of(quantised)


def test_bad_routing_is_refused(arrays):
    sizes = (*SIZES, smd.Decoder(MOE).shape.routing)
    routing = np.tile(np.arange(2), (*arrays["tokens"].shape, 2, 1))
    for experts, message in (
        (routing + 3, "expected experts from 0 to 3, or -1; got 4 in row 0, token 0, layer 0"),
        (0 * routing, r"expected 2 different experts of a token, .*; got \[0, 0\] in row 0, token 0, layer 0"),
        (routing[:, :, :1], r"routing: expected the shape \(4, 44, 2, 2\); got \(4, 44, 1, 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            check_record({**arrays, "routing": experts}, *sizes)
    routing[0, 1], routing[0, 43] = -1, 9  # not recorded; of the last token, which was never read
    assert (np.asarray(check_record({**arrays, "routing": routing}, *sizes).routing)[0, [1, 43]] == -1).all()


def test_a_record_may_fill_the_context(params, arrays):
    """The longest row has 44 tokens; causes may add columns beyond the context."""
    fitting, small = (smd.Decoder(dataclasses.replace(CONFIG, max_positions=most)) for most in (44, 43))
    assert certify(Models(fitting, params), record_of(arrays), FACTS).is_one_policy
    with pytest.raises(ValueError, match=r"rows of at most 43 tokens \(the model's context\); got 44"):
        certify(Models(small, params), record_of(arrays), FACTS)


def test_causes_may_add_many_columns(params):
    """Prompt lengths differ by 56 tokens; the system message has 60."""
    tokens = np.random.default_rng(0).integers(10, 250, (2, 72))
    fields = {"tokens": tokens, "prompt_lengths": np.array([60, 4]), "lengths": np.array([72, 16])}
    fields["logprobs"] = np.full((2, 72), -1.0, np.float32)
    (padding,) = (cause for cause in CAUSES if cause.name == "padding attended")
    case = next(padding.cases(record_of(fields), FACTS))
    cause, verdict = cause_of(params, record_under(params, fields, case.conditions))
    assert cause == "padding attended", report.lines(verdict)
    facts = PromptFacts(bos=1, system=tuple(range(10, 70)))
    cases = [case for cause in CAUSES for case in cause.cases(record_of(fields), facts)]
    assert {case.conditions.tokens.shape for case in cases} == {(2, 72 + 60)}, "one compiled program"
    (system,) = (case for case in cases if "template's system message" in case.detail)
    np.testing.assert_array_equal(system.conditions.tokens[0], [*facts.system, *tokens[0]])


@pytest.mark.parametrize(
    ("layers", "order", "message"),
    [
        (2, [0, 2, 1, 3], "the KV heads came interleaved, as 2 tensor-parallel devices hold them"),
        (1, [2, 1, 0, 3], "the KV heads 0 and 2 were swapped"),
    ],
)
def test_kv_heads_in_another_order_are_found(layers, order, message):
    config = tiny_model_config(num_layers=layers, num_heads=4, num_kv_heads=4)
    model, params = smd.Decoder(config), wide_params(config)
    tokens = jax.random.randint(jax.random.key(0), (8, 12), 10, 250)
    fields = arrays_of(sample(model, params, tokens, max_new_tokens=16, budget=8))
    fields["evicted_at"] = fields["evicted_at"][:, :, order]
    verdict = certify(Models(model, params), check_record(fields, layers, 4, config.vocab_size))
    assert verdict.cause is not None and verdict.cause.cause == "layers or heads swapped"
    assert message in verdict.cause.detail and verdict.cause.difference < verdict.tolerance


def test_two_swapped_layers_are_found(params, arrays):
    swapped = arrays["evicted_at"][:, [0, 2, 1]]
    cause, verdict = cause_of(params, record_of({**arrays, "evicted_at": swapped}))
    assert cause == "layers or heads swapped"
    assert verdict.cause is not None and "layers 1 and 2 were swapped" in verdict.cause.detail


def with_nan_embedding(params, token):
    embedding = params["embed"]["embedding"].at[token].set(jnp.nan)
    return {**params, "embed": {"embedding": embedding}}


UNTIED = smd.Decoder(tiny_model_config(num_layers=1, tie_embeddings=False))


def test_a_learner_that_gives_nan_is_refused():
    """Only one row has NaN, but a record is certified as a whole."""
    params = random_params(UNTIED.config)
    tokens, shape = jnp.arange(24).reshape(3, 8) + 1, UNTIED.shape
    fields = arrays_of(sample(UNTIED, params, tokens, max_new_tokens=8, budget=32))
    unused = next(token for token in range(1, shape.vocab_size) if token not in fields["tokens"])
    fields["tokens"][2, 3] = unused
    record = check_record(fields, shape.num_layers, shape.num_kv_heads, shape.vocab_size)
    broken = with_nan_embedding(params, unused)
    with pytest.raises(ValueError, match="the learner; got NaN for 8 of 24 response tokens, the first in row 2, .* 0$"):
        certify(Models(UNTIED, broken), record)
    with pytest.raises(ValueError, match="from the previous weights; got NaN for 8 of 24"):
        certify(Models(UNTIED, params, previous=broken), record)
    with pytest.raises(ValueError, match="from the learner in bfloat16; got NaN for 8 of 24"):
        certify(Models(UNTIED, params, (UNTIED, broken), "bfloat16"), record)


def test_nan_under_a_condition_counts_as_the_largest_difference(params, arrays):
    replays = verdict._Replays(Models(MODEL, params), record_of(arrays), FACTS)
    replayed = replays.under(replays.stated)
    share = 1 / replays.inside.sum()
    assert replays.gaps(replayed, [1.0])[0] < 1e-5
    broken = replayed.replace(hidden=replayed.hidden.at[0, 0].set(jnp.nan))
    assert replays.gaps(broken, [1.0])[0] == pytest.approx(share * verdict.MOST_DIFFERENT, rel=1e-3)


def test_logits_are_computed_in_blocks(params, arrays, monkeypatch: pytest.MonkeyPatch):
    """Blocks of a few columns give the results of one block, and no array has the size of all logits."""
    record = record_of(arrays)
    columns, _ = record.response_columns
    ids = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (*columns.shape, 3), np.int32)
    support = np.concatenate([ids, np.full_like(ids, -1)], axis=-1)
    replayed = replay(MODEL, params, Conditions.of(record), columns.shape[1])
    programs: tuple[Any, ...] = (Replayed.logprobs, Replayed.likeliest)

    def compute():
        for program in programs:  # compiled programs do not read the changed constant
            program.clear_cache()
        over_all, over_support = (replayed.logprobs(ids, [0.5, 1.0, 2.0], sets) for sets in (None, support))
        return over_all, over_support, *replayed.likeliest(5, 0.7)

    def largest_array() -> int:
        texts = [
            programs[0].lower(replayed, ids, [0.5, 1.0, 2.0], support).as_text(),
            programs[1].lower(replayed, 5, 0.7).as_text(),
        ]
        shapes = [shape for text in texts for shape in re.findall(r"tensor<([\dx]+)x[fi]\d+>", text)]
        return max(int(np.prod([int(side) for side in shape.split("x")])) for shape in shapes)

    in_one_block, logits = compute(), columns.size * CONFIG.vocab_size
    assert largest_array() >= logits
    monkeypatch.setattr(blocks, "LOGIT_BYTES", logits)  # float32, so a block has a quarter of the columns
    by_blocks = compute()
    assert largest_array() <= logits // 4
    monkeypatch.undo()
    for one, other in zip(in_one_block, by_blocks, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    for program in programs:
        program.clear_cache()


def test_statistics_of_a_verdict_by_hand():
    difference = np.array([[0.1, -0.1, 0.4], [0.2, 0.2, np.nan]])
    result = verdict.Verdict(difference, 1e-4, 1e-3, None, ())
    assert result.mean_abs == pytest.approx(0.2) and result.max_abs == pytest.approx(0.4)
    assert result.bias == pytest.approx((0.16, np.std([0.1, -0.1, 0.4, 0.2, 0.2]) / 5**0.5))
    assert result.growth == pytest.approx((0.15, 0.4)) and result.kind == "bias"


def test_one_wrong_token_among_many_is_not_one_policy():
    difference = np.full((4, 2_000), 1e-6)
    difference[2, 7] = 0.7  # moves the mean by less than 1e-4
    result = verdict.Verdict(difference, 1e-4, 1e-3, None, ())
    assert result.mean_abs < 1e-4 and not result.is_one_policy and result.kind == "single tokens"
    assert "not one policy: single tokens differ" in report.lines(result)[-1]
    assert "row 2, response token 7: +0.700" in "\n".join(report.lines(result))


# --- the record


def test_evicted_at_and_kept_give_the_same_record(arrays):
    """A row of five tokens by hand: after query 2, keys 0 and 2 are left."""
    tokens = np.array([[5, 6, 7, 8, 9]])
    fields = {"tokens": tokens, "prompt_lengths": np.array([2]), "lengths": np.array([5])}
    fields["logprobs"] = np.full((1, 5), -1.0, np.float32)
    kept = {"kept_after": np.array([[2, -1]]), "kept": np.full((1, 2, 3, 2, 2), -1)}
    kept["kept"][0, 0] = [0, 2]
    evicted_at = np.full((1, 1, 1, 5), 99)
    evicted_at[..., 1] = 3
    one, other = record_of({**fields, **kept}), record_of({**fields, "evicted_at": evicted_at})
    expected = [NEVER, 3, NEVER, NEVER, NEVER]
    assert (one.evicted_at == expected).all() and (other.evicted_at == expected).all()


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_record_files_round_trip(arrays, tmp_path: Path, suffix):
    path = tmp_path / f"rollout{suffix}"
    save_record(path, arrays)
    record = load_record(path, *SIZES)
    jax.tree.map(np.testing.assert_array_equal, *map(dataclasses.asdict, (record, record_of(arrays))))
    with pytest.raises(FileExistsError, match="expected no file at"):
        save_record(path, arrays)
    routing = np.tile(np.arange(2), (*arrays["tokens"].shape, 2, 1))
    save_record(str(tmp_path / f"routed{suffix}"), {**arrays, "routing": routing})


def test_a_file_that_is_no_record(arrays, tmp_path: Path):
    path = tmp_path / "rollout.npz"
    with path.open("wb") as file:
        np.save(file, arrays["tokens"])
    with pytest.raises(ValueError, match="expected a readable record; got .*: one array, as np.save writes it"):
        load_record(path, *SIZES)
    path.write_bytes(b"abc")
    with pytest.raises(ValueError, match="got .*: no archive, as np.savez writes it$"):
        load_record(str(path), *SIZES)
    np.savez(path, **{**arrays, "tokens": np.array([[1, 2], [3]], object)})
    with pytest.raises(ValueError, match="got .*: an array of Python objects$"):
        load_record(path, *SIZES)
    np.savez_compressed(path, **arrays)
    content = path.read_bytes()
    # The name of the first array, 20 bytes of sizes, its compressed bytes. No block of deflate begins with 0xFF.
    block = content.index(b".npy") + len(b".npy") + 20
    compression = content.index(b"PK\x01\x02") + 10  # in the directory at the end
    for at, value in ((block, 0xFF), (compression, 99)):
        path.write_bytes(content[:at] + bytes([value]) + content[at + 1 :])
        with pytest.raises(ValueError, match="expected a readable record; got"):
            load_record(path, *SIZES)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lengths": None, "length": np.array([5])}, "lengths missing"),
        ({"reward": np.zeros(4)}, "got reward"),
        ({"tokens": np.zeros((4, 44))}, "tokens: expected integers; got float64"),
        ({"evicted_at": np.full((4, 3, 2, 44), -1)}, "expected evicted_at of at least 1"),
        ({"evicted_at": np.zeros(4, int)}, "evicted_at: expected the shape"),
        ({"routing": np.zeros((4, 44, 2, 2), int)}, "expected 2 different experts of a token"),
        ({"routing": np.zeros((4, 44), int)}, "routing: expected"),
    ],
)
def test_a_bad_record_is_not_written(arrays, tmp_path: Path, changed, message):
    path = tmp_path / "rollout.npz"
    with pytest.raises(ValueError, match=message):
        save_record(path, altered(arrays, **changed))
    assert not path.exists()


def top_arrays(ids, logprob):
    """The same two likeliest tokens everywhere."""
    shape = (4, 44, 2)
    return {"top_ids": np.broadcast_to(ids, shape), "top_logprobs": np.full(shape, logprob, np.float32)}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens": None}, "tokens missing"),
        ({"masks": np.zeros(1, int)}, "got masks"),
        ({"routing": np.zeros(1, int)}, "routing: expected no expert routing, because the model has no experts"),
        ({"logprobs": np.zeros((4, 44), int)}, "logprobs: expected float32 or float64, .*; got int64"),
        ({"logprobs": np.zeros((4, 44), np.float16)}, "logprobs: expected float32 or float64, .*; got float16"),
        ({"positions": np.full((4, 44), 2**33)}, "positions: expected numbers from 0 to .*; got 8589934592 in row 0"),
        ({"logprobs": np.zeros((4, 3), np.float32)}, r"logprobs: expected the shape \(4, 44\); got \(4, 3\)"),
        ({"logprobs": np.full((4, 44), np.nan)}, r"finite log-probabilities; got nan \(row 0, response token 0\)"),
        # `Trajectory.from_records` has the same limit: a certified record can be trained on.
        ({"logprobs": np.full((4, 44), 5e-4)}, "expected log-probabilities, which are at most 0 .*; got 0.0005"),
        ({"tokens": np.full((4, 44), 264)}, r"to 263, .*; got 264 \(prompt of row 0, token 0\). Was another"),
        ({"lengths": np.array([12, 9, 7, 6])}, "expected 1 <= prompt_lengths < lengths <= 44"),
        ({"temperature": np.float32(0)}, "temperature: expected a number > 0; got 0.0"),
        ({"evicted_at": np.zeros((4, 3, 5, 44), int)}, r"of row 0 to be \(3, 2, 44\) .*; got \(3, 5, 44\)"),
        ({"evicted_at": np.zeros((4, 3, 2, 44), int)}, "row 0"),
        ({"kept": np.zeros((4, 1, 3, 2, 1), int)}, "expected kept and kept_after together"),
        ({"support_ids": np.zeros(3, int)}, "expected support_ids and support_offsets together"),
        (top_arrays(-1, 0.0) | {"top_ids": None}, "expected top_ids and top_logprobs together"),
        (top_arrays(264, -1.0), "top_ids: expected ids below 264, or -1 for none; got 264 in row 0, column 12"),
        (top_arrays(5, -1.0), "top_ids: expected every id once for a token; got 5 twice in row 0, column 12"),
        (top_arrays([5, 6], np.nan), "top_logprobs: expected finite numbers <= 0; got nan in row 0, column 12"),
        (top_arrays([5, 6], -0.1), "top_logprobs: expected probabilities with a sum of at most 1; got 1.81 in row 0"),
        (
            {"tokens": np.full((4, 44), 2**63, np.uint64)},
            r"expected whole numbers below 2\^63; got 9223372036854775808 \(prompt of row 0\)",
        ),
        (
            top_arrays(np.uint64(2**64 - 1), -1.0),
            r"expected whole numbers below 2\^63; got 18446744073709551615 \(top_ids\)",
        ),
        ({"support_ids": np.zeros(3, int), "support_offsets": np.arange(4)}, "expected 129 rising offsets from 0 to 3"),
    ],
)
def test_a_bad_record_is_refused(arrays, changed, message):
    with pytest.raises(ValueError, match=message):
        record_of(altered(arrays, **changed))


@pytest.mark.parametrize("dtype", [np.int16, np.uint16, np.uint32, np.int64, np.uint64])
def test_integers_of_any_dtype(arrays, dtype):
    """Unsigned dtypes cannot hold -1, which marks padding."""
    largest = min(np.iinfo(dtype).max, int(NEVER))
    fields = {**arrays, "evicted_at": np.minimum(arrays["evicted_at"], largest), **top_arrays([5, 6], -1.0)}
    fields = {name: x if x.dtype.kind == "f" else x.astype(dtype) for name, x in fields.items()}
    expected, converted = (record_of(each) for each in ({**arrays, **top_arrays([5, 6], -1.0)}, fields))
    jax.tree.map(np.testing.assert_array_equal, dataclasses.asdict(converted), dataclasses.asdict(expected))


def test_positions_beyond_the_context_are_refused(params, arrays):
    far = np.broadcast_to(np.arange(44) + MODEL.shape.max_positions - 5, (4, 44))
    with pytest.raises(ValueError, match="positions: expected numbers below .*the model's context"):
        cause_of(params, record_of({**arrays, "positions": far}))


def test_a_key_that_comes_back_is_refused(arrays):
    kept = np.tile(np.arange(3), (4, 2, 3, 2, 1))
    kept[:, 0] += 1  # keys 1, 2, 3 first, then 0, 1, 2
    fields = altered(arrays, evicted_at=None)
    with pytest.raises(ValueError, match="row 0, compression 1"):
        record_of({**fields, "kept": kept, "kept_after": np.tile([5, 9], (4, 1))})
    with pytest.raises(ValueError, match=r"kept: expected the shape \(4, 3, 'layers', .*; got \(4, 2, 3, 2, 3\)"):
        record_of({**fields, "kept": kept, "kept_after": np.tile([5, 9, 9], (4, 1))})


# --- the command


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    write_random_checkpoint(place, config=CONFIG)
    return place


def test_exit_status_and_reports_of_the_command(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    params = smd.load_checkpoint(directory)[1]
    save_record(tmp_path / "good.npz", arrays_of(sample_rollout(params)))
    main([str(tmp_path / "good.npz"), "--model", str(directory), "--out", str(tmp_path / "good.json")])
    assert "one policy" in capsys.readouterr().out
    assert json.loads((tmp_path / "good.json").read_text(encoding="utf-8"))["one_policy"] is True
    bad = arrays_of(sample_rollout(params))
    bad["logprobs"] = np.roll(bad["logprobs"], 1, 1)
    save_record(tmp_path / "bad.npz", bad)
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path / "bad.npz"), "--model", str(directory), "--out", str(tmp_path / "bad.html")])
    assert stopped.value.code == 1 and "tokens misaligned" in capsys.readouterr().out
    page = (tmp_path / "bad.html").read_text(encoding="utf-8")
    assert "tokens misaligned" in page and "data:image/png;base64," in page and "http" not in page
    bare = shutil.copytree(directory, tmp_path / "bare", ignore=shutil.ignore_patterns("*token*", "*.jinja"))
    main([str(tmp_path / "good.npz"), "--model", str(bare)])
    assert "no tokenizer: BOS token and chat template are not tested" in capsys.readouterr().out
    main([str(tmp_path / "good.npz"), "--model", str(bare), "--tokenizer", str(directory)])
    assert "no tokenizer" not in capsys.readouterr().out
    overflowing = {**params, "norm": {"scale": jnp.full(CONFIG.hidden_size, 3e38)}}
    smd.save_checkpoint(tmp_path / "nan", overflowing, CONFIG)
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path / "good.npz"), "--model", str(tmp_path / "nan"), "--out", str(tmp_path / "nan.json")])
    assert stopped.value.code == 2 and "from the learner; got NaN for" in capsys.readouterr().err
    assert not (tmp_path / "nan.json").exists()
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path / "missing.npz"), "--model", str(directory)])
    assert stopped.value.code == 2 and "expected a readable record" in capsys.readouterr().err
