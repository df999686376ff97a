"""Evaluation under several ways of decoding: completions, rewards, intervals, metrics."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.devices.sharding import make_mesh
from smd_jax.eviction.policies import H2O, SnapKV
from smd_jax.learner.state import TrainState
from smd_jax.message.quantization import QuantConfig
from smd_jax.message.sampling import SamplingConfig
from smd_jax.sampler.config import RolloutConfig
from smd_jax.sampler.fixed_batch import rollout
from smd_jax.tasks.rewards import Rewards, RewardWarning, TooManyFailures
from smd_jax.testing import count_compilations, random_params
from smd_jax.text.prompts import decode_completions
from smd_jax.train.evaluation import Decode, Evaluated, EvaluationConfig, Evaluator, as_trained, every_evaluation
from smd_jax.train.rollouts import encode_rows
from tests.documented_metrics import documented
from tests.toy_loop import MODEL, PAD, TOKENIZER, new_loop

GREEDY = SamplingConfig(temperature=0.0)
SIZES = RolloutConfig(max_new_tokens=6, budget=5, buffer=2, pad_token_id=PAD)
DECODES = (Decode("dense"), Decode("short", H2O(), budget=4))


class Numbered:
    """Prompts of several lengths; a completion's reward is the number of its prompt plus one for every "a"."""

    def __init__(self, size: int = 7):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"prompt": "xyz="[-1 - index % 4 :] * (1 + index % 2), "number": index}

    def reward(self, prompts: Any, completions: Any, **columns: Any) -> list[float]:
        return [number + text.count("a") for number, text in zip(columns["number"], completions, strict=True)]


@pytest.fixture(scope="module")
def params() -> dict[str, Any]:
    return random_params(MODEL.config)


def evaluator(rows: int = 4, group_size: int = 1, decodes: tuple[Decode, ...] = DECODES, **options: Any) -> Evaluator:
    config = EvaluationConfig(
        decodes=decodes, rollout=SIZES, prompt_width=9, group_size=group_size, rows=rows, **options
    )
    return Evaluator(MODEL, Numbered(), TOKENIZER, config)


@pytest.mark.slow
def test_every_row_counts_once_in_batches_of_any_size(params):
    """Seven prompts in padded batches of four give the same results as one batch of seven."""
    one, four = evaluator(rows=7), evaluator(rows=4)
    with count_compilations() as compiled:
        results = four.run(params)
    assert compiled["rollout_program"] == 2, "one program for each way of decoding, with the last batch"
    for result, whole in zip(results, one.run(params), strict=True):
        assert result.rewards.shape == (7, 1) and result.rewards.dtype == np.float32
        assert result.completions == whole.completions
        counted = [[number + text.count("a") for text in texts] for number, texts in enumerate(result.completions)]
        assert result.rewards.tolist() == counted
        np.testing.assert_array_equal(result.lengths, whole.lengths)
        assert result.tokens_per_second > 0
    assert results[0].completions != results[1].completions


@pytest.mark.slow
def test_completions_equal_those_of_rollout(params):
    """Greedy, so that PRNG keys do not matter."""
    decodes = (Decode("dense", sampling=GREEDY), Decode("short", H2O(), budget=4, sampling=GREEDY))
    task = Numbered()
    prompts = encode_rows(MODEL, TOKENIZER, [task[i] for i in range(7)], 9)
    for decode, result in zip(decodes, evaluator(decodes=decodes).run(params), strict=True):
        config = replace(SIZES, sampling=GREEDY, budget=4)
        expected = rollout(MODEL, params, prompts, jax.random.key(5), policy=decode.policy, config=config)
        texts = decode_completions(TOKENIZER, expected.response, expected.response_mask)
        assert [text for (text,) in result.completions] == texts
        np.testing.assert_array_equal(result.lengths[:, 0], expected.lengths())


def test_stop_strings_end_completions_of_every_way_of_decoding(params):
    """Completions are those without stop strings, cut after the stop string. All ways share one stop table."""
    whole = evaluator().run(params)
    stop = next(text[0] for (text,) in whole[0].completions if text[0].isascii() and len(text) > 1)
    stopping = evaluator(stop_strings=(stop,))
    assert len({id(rollouts.stop) for rollouts in stopping.rollouts.values()}) == 1
    for result, unstopped in zip(stopping.run(params), whole, strict=True):
        cut = [[text[: text.find(stop) + 1] if stop in text else text] for (text,) in unstopped.completions]
        assert result.completions == cut
        assert cut != unstopped.completions or result.name == "short"


# A model with random weights also samples ids without a token.
@pytest.mark.filterwarnings("ignore:expected sampled ids with a token")
def test_completions_are_grouped_by_prompt(params):
    """Three per prompt, which differ and depend on the seed."""
    (result,) = evaluator(rows=6, group_size=3, decodes=DECODES[:1]).run(params)
    assert result.rewards.shape == (7, 3) and np.floor(result.rewards).min(axis=1).tolist() >= list(range(7))
    assert len({tuple(texts) for texts in result.completions}) == 7
    assert all(len(set(texts)) > 1 for texts in result.completions)
    (again,) = evaluator(rows=6, group_size=3, decodes=DECODES[:1]).run(params)
    (other,) = evaluator(rows=6, group_size=3, decodes=DECODES[:1], seed=1).run(params)
    assert again.completions == result.completions != other.completions


@pytest.mark.slow
def test_batches_divide_over_a_mesh(params):
    one = evaluator(rows=4, decodes=DECODES[1:2])
    spread = replace(one, mesh=make_mesh(2, 2))
    assert (one.prompts_at_once, spread.prompts_at_once) == (4, 4)
    assert replace(spread, config=replace(one.config, rows=1)).prompts_at_once == 4, "one on every device at least"
    assert replace(spread, config=replace(one.config, rows=100)).prompts_at_once == 8, "seven prompts, rounded up"
    assert spread.run(params)[0].completions == one.run(params)[0].completions


def test_metrics_of_an_evaluation_in_a_run(params):
    seen = []
    state = TrainState(jnp.int32(0), params, (), None, jax.random.key(0))
    metrics = every_evaluation(new_loop(), evaluator(decodes=DECODES))(state)
    assert set(metrics) == {path.format(name=name) for path in documented("Evaluations") for name in ("dense", "short")}
    evaluator(decodes=DECODES[:1]).run(params, report=lambda *x: seen.append(x))
    assert seen == [("dense", 4, 7), ("dense", 7, 7)]


# --- numbers


def evaluated(rewards: Sequence[Sequence[float]]) -> Evaluated:
    values = np.array(rewards, np.float32)
    lengths = np.full(values.shape, 3)
    return Evaluated(
        "dense", values, lengths, np.zeros(values.shape, bool), [["x"] * values.shape[1]] * len(values), 64, 100.0
    )


def test_interval_of_rewards_by_hand():
    # Means 1, 2, 3, 4: s = sqrt(5 / 3), t(0.975, 3) = 3.182446; completions of a prompt are averaged first.
    low, high = evaluated([[1, 1], [1, 3], [3, 3], [6, 2]]).interval
    half = 3.182446 * math.sqrt(5 / 3) / 2
    assert (low, high) == pytest.approx((2.5 - half, 2.5 + half), rel=1e-6)


def test_interval_of_right_and_wrong_by_hand():
    # Wilson, 8 of 10: (p + z² / 2n ± z sqrt(p (1 - p) / n + z² / 4n²)) / (1 + z² / n), z = 1.959964.
    assert evaluated([[1]] * 8 + [[0]] * 2).interval == pytest.approx((0.490162, 0.943318), abs=1e-6)
    # None of 16: the upper end is z² / (n + z²).
    assert evaluated([[0, 0]] * 16).interval == pytest.approx((0.0, 0.193612), abs=1e-5)
    # Some prompts have right and wrong completions: the t interval.
    assert evaluated([[1, 0], [1, 1], [0, 0]]).interval == pytest.approx((0.5 - 1.242069, 0.5 + 1.242069), rel=1e-5)


def test_equal_means_and_one_prompt_have_no_interval():
    """Student's t would have a width of 0."""
    for rewards in ([[-1.0]] * 4, [[1, 0]] * 4, [[1, 1, 1, 1]]):
        assert np.isnan(evaluated(rewards).interval).all()
    assert evaluated([[1, 0]]).row["reward_low"] is None


def test_completions_without_a_reward_are_left_out():
    nan = math.nan
    result = evaluated([[1, nan], [nan, nan], [3, 3], [2, 4]])
    assert result.reward == pytest.approx(7 / 3) and result.row["without_reward"] == 3
    # Prompts with a reward have the means 1, 3, 3: s = sqrt(4 / 3), t(0.975, 2) = 4.302653.
    half = 4.302653 * math.sqrt(4 / 3) / math.sqrt(3)
    assert result.interval == pytest.approx((7 / 3 - half, 7 / 3 + half), rel=1e-6)
    nothing = evaluated([[nan], [nan]])
    assert math.isnan(nothing.reward) and nothing.row["reward"] is None


class Graded(Numbered):
    """Nine rows, of which the first `graded` have a reward."""

    def __init__(self, graded: int):
        super().__init__(9)
        self.graded = graded

    def reward(self, prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
        return [1.0 if number < self.graded else None for number in columns["number"]]


def test_failures_count_over_all_rows(params):
    """The only row of the last batch has no reward: 1 of 9, and a quarter may fail."""
    evaluate = replace(evaluator(decodes=DECODES[:1]), task=Graded(8))
    with pytest.warns(RewardWarning):
        (result,) = evaluate.run(params)
    assert result.row["without_reward"] == 1 and result.reward == 1.0
    with pytest.warns(RewardWarning), pytest.raises(TooManyFailures, match="at most 25% .*; got 3 of 9"):
        replace(evaluate, task=Graded(6)).run(params)


def test_a_reward_without_its_column_is_refused():
    def needs_wanted(completions: Any, wanted: Any) -> list[float]:
        return [0.0] * len(completions)

    with pytest.raises(ValueError, match=r"expected evaluation rows with \['wanted'\], .*; got columns \['number'\]"):
        replace(evaluator(), rewards=Rewards((needs_wanted,), seconds=None))


def test_rows_and_metrics():
    result = replace(evaluated([[1], [0]]), lengths=np.array([[3], [6]]), clipped=np.array([[False], [True]]))
    assert result.metrics.keys() == {path.format(name="dense") for path in documented("Evaluations")}
    assert result.metrics["eval/dense/mean_length"] == 4.5 and result.metrics["eval/dense/clipped_ratio"] == 0.5
    assert (result.row["prompts"], result.row["completions_per_prompt"], result.row["reward"]) == (2, 1, 0.5)


def test_cache_bytes_of_a_sequence(params):
    shape = MODEL.shape
    key_and_value = 2 * shape.num_kv_heads * shape.head_dim * 4 * shape.num_layers
    dense, short = (result.cache_bytes for result in evaluator().run(params))
    # Prompt and response; budget and buffer, with the attention that each key has received in float32.
    received = shape.num_kv_heads * 4 * shape.num_layers
    assert (dense, short) == ((9 + 6) * key_and_value, (4 + 2) * (key_and_value + received))


# --- ways of decoding


def test_a_decode_inherits_options_that_it_does_not_set():
    base = RolloutConfig(max_new_tokens=32, budget=8, buffer=4, eos_token_id=2, prefill_chunk=16)
    assert Decode("x", H2O()).rollout(base) == base
    assert Decode("x", H2O(), 5, 3, GREEDY).rollout(base) == RolloutConfig(
        max_new_tokens=32,
        budget=5,
        buffer=3,
        eos_token_id=2,
        pad_token_id=0,
        min_new_tokens=0,
        prefill_chunk=16,
        sampling=GREEDY,
    )
    quantised = Decode("x", quant=QuantConfig(bits=8, group=4)).rollout(base)
    assert quantised.quant == QuantConfig(bits=8, group=4) and quantised.prefill_chunk is None
    trained = RolloutConfig(max_new_tokens=32, budget=8, buffer=4, quant=QuantConfig(bits=8, group=4))
    assert as_trained(H2O(), trained).rollout(trained) == trained
    with pytest.raises(ValueError, match="group that divides the buffer"):
        Decode("x", quant=QuantConfig(bits=8, group=32)).rollout(base)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rows": 0}, "expected rows >= 1"),
        ({"group_size": 5, "rows": 4}, "expected rows >= group_size = 5, .*; got 4"),
        ({"decodes": ()}, "expected at least one way of decoding; got none"),
        ({"decodes": (Decode("a"), Decode("a"))}, "different names; got a more than once"),
        ({"prompt_width": 0}, "expected prompt_width >= 1"),
    ],
)
def test_bad_configurations(wrong, message):
    with pytest.raises(ValueError, match=message):
        replace(evaluator().config, **wrong)


def test_bad_decodes_and_tasks():
    with pytest.raises(ValueError, match="expected a name of letters.*; got 'a b'"):
        Decode("a b")
    with pytest.raises(ValueError, match="expected a budget of at least 32 keys"):
        evaluator(decodes=(Decode("x", SnapKV(), 8),))
    with pytest.raises(ValueError, match="at least one row; got none"):
        replace(evaluator(), task=Numbered(0))
