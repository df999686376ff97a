"""smd-certify replays the records of samplers, names the cause of a mismatch, and reads the facts of a tokenizer."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import smd_jax as smd
from smd_jax.certify import report, verdict
from smd_jax.certify.causes import CAUSES, Conditions, PromptFacts, prompt_facts
from smd_jax.certify.record import arrays_of, check_record
from smd_jax.certify.replay import Replayed, replay
from smd_jax.certify.verdict import Models, certify
from smd_jax.config import Experts
from smd_jax.learner import blocks
from smd_jax.message.drawable_tokens import DrawableTokens
from smd_jax.message.quantization import QuantConfig
from smd_jax.testing import byte_tokenizer, random_params, tiny_model_config
from tests.certify.conftest import (
    CONFIG,
    FACTS,
    MODEL,
    SIZES,
    altered,
    record_of,
    sample,
    sample_rollout,
    wide_params,
)


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


def test_positions_beyond_the_context_are_refused(params, arrays):
    far = np.broadcast_to(np.arange(44) + MODEL.shape.max_positions - 5, (4, 44))
    with pytest.raises(ValueError, match="positions: expected numbers below .*the model's context"):
        cause_of(params, record_of({**arrays, "positions": far}))


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


SAME = "log-probabilities belong to the token of a turn that is "  # over 60 characters with the cause


def test_every_tested_cause_has_a_bar_and_its_own_name():
    findings = tuple(verdict.Finding("tokens misaligned", SAME + end, 0.1) for end in ("one before", "one after"))
    figure = report.picture(verdict.Verdict(np.full((3, 4), 0.2), 1e-4, 1e-3, None, findings))
    left, right = figure.axes[:2]
    assert len({bar.get_extents().y0 for bar in right.patches}) == 3, "two causes and the record"
    names = [label.get_text().replace("\n", " ") for label in right.get_yticklabels()]
    assert names == [*(f"tokens misaligned: {SAME}{end}" for end in ("one after", "one before")), "as recorded"]
    # Rows and tokens are whole numbers.
    figure.draw_without_rendering()
    for ticks in (left.get_xticks(), left.get_yticks()):
        assert (ticks % 1 == 0).all() and len(ticks)


MESSAGES = "{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}"
ASKED = "{% if add_generation_prompt %}<|im_start|>a{% endif %}"
# As Llama 3.2: BOS, a system message, and turns that begin with the same special token.
LLAMA = "{{ bos_token }}<|im_start|>s" + MESSAGES + ASKED
# As SmolLM2, whose BOS token begins each turn.
SMOLLM = "{{ bos_token }}s{% for m in messages %}{{ bos_token }}{{ m['content'] }}{% endfor %}" + ASKED
# As Phi-3: EOS where no answer is asked for.
PHI = MESSAGES + ASKED.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")


@pytest.mark.parametrize(
    ("template", "bos", "system"),
    [(LLAMA, "<s>", "<|im_start|>s"), (SMOLLM, "<|im_start|>", "<|im_start|>s"), (PHI, None, "")],
)
def test_system_message_and_generation_prompt(template: str, bos: str | None, system: str):
    tokenizer: Any = byte_tokenizer()
    if bos is not None:
        tokenizer.add_special_tokens({"bos_token": bos})
    tokenizer.chat_template = template
    facts = prompt_facts(tokenizer)
    assert tokenizer.decode(facts.system) == system
    assert tokenizer.decode(facts.generation) == "<|im_start|>a"


def test_a_system_message_follows_bos():
    prompts = np.array([[1, 20, 21, 22], [1, 30, 31, 32]])
    facts = PromptFacts(bos=1, system=(7, 8))
    (cause,) = (each for each in CAUSES if each.name == "chat template")

    def only_case(tokens: np.ndarray) -> tuple[str, np.ndarray, np.ndarray]:
        size = np.full(2, tokens.shape[1])
        arrays = {"tokens": tokens, "prompt_lengths": size - 1, "lengths": size}
        arrays["logprobs"] = np.full(tokens.shape, -1.0, np.float32)
        (case,) = cause.cases(check_record(arrays, 1, 1, 64, None), facts)
        return case.detail, case.conditions.tokens, case.conditions.positions

    with_system = np.insert(prompts, [1, 1], [7, 8], axis=1)
    detail, tokens, positions = only_case(prompts)
    assert "template's system message" in detail
    np.testing.assert_array_equal(tokens[:, :6], with_system)
    np.testing.assert_array_equal(positions[:, :6], np.tile(np.arange(6), (2, 1)))
    detail, tokens, positions = only_case(with_system)
    assert "no system message" in detail
    np.testing.assert_array_equal(tokens[:, :4], prompts)
    np.testing.assert_array_equal(positions[:, :4], np.tile(np.arange(4), (2, 1)))


def test_prompt_facts_of_tokenizers():
    facts = prompt_facts(byte_tokenizer())
    assert len(facts.generation) > 0
    assert prompt_facts(byte_tokenizer(chat=False)).generation == ()
    failing: Any = byte_tokenizer()
    failing.chat_template = "{{ raise_exception('no') }}"
    assert prompt_facts(failing) == PromptFacts(bos=failing.bos_token_id)


def test_a_chat_template_is_rendered_in_a_limited_process(monkeypatch: pytest.MonkeyPatch):
    """A record may come with an untrusted tokenizer."""
    tokenizer = byte_tokenizer()
    expected = prompt_facts(tokenizer)
    monkeypatch.setattr(type(tokenizer), "apply_chat_template", None)
    assert prompt_facts(tokenizer) == expected
