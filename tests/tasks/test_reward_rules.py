"""Several reward functions: TRL's contract, the weighted sum, and what a failure does. Numbers worked out by hand."""

import asyncio
import math
import warnings
from decimal import Decimal
from fractions import Fraction

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from smd_jax.tasks.rewards import Rewards, RewardWarning, TooManyFailures
from smd_jax.tasks.task import completion_of, completion_text, question_of
from tests import reward_cases

CHAT = [{"role": "system", "content": "Short."}, {"role": "user", "content": "Well?"}]


def here(*functions, **options) -> Rewards:
    """In this process: what a function does is the same in one of its own."""
    return Rewards(functions, **{"seconds": None, "max_failed": 1.0} | options)


def graded(rewards: Rewards, completions, prompts=None, **columns):
    ids = [list(completion.encode()) for completion in completions]
    return rewards.grade(prompts or ["p"] * len(completions), completions, ids, columns)


def numbers(array) -> list[float | None]:
    return [None if math.isnan(x) else x for x in array.tolist()]


# --- TRL's contract


def test_a_weighted_sum():
    rewards = here(reward_cases.length, reward_cases.matches, weights=(0.5, 2.0))
    got = graded(rewards, ["abcd", "ab"], answer=["abcd", "x"])
    assert {name: part.tolist() for name, part in got.parts.items()} == {"length": [4, 2], "matches": [1, 0]}
    assert got.rewards.tolist() == [0.5 * 4 + 2.0 * 1, 0.5 * 2]
    assert got.rewards.dtype == np.float32 and got.failures == () and got.rewarded_rows.all()


def test_none_is_no_part_of_the_sum():
    got = graded(here(reward_cases.length, reward_cases.only_digits), ["12", "ab"])
    assert numbers(got.parts["only_digits"]) == [12, None]
    assert got.rewards.tolist() == [14, 2]
    assert got.failures == ()


@pytest.mark.parametrize(
    "values",
    [
        *([True, np.float16(0.5)], (1, 0.5), iter([1.0, 0.5]), np.array([1.0, 0.5]), jnp.array([1, 0.5], jnp.bfloat16)),
        *([ml_dtypes.float8_e4m3fn(1.0), np.array(0.5)], [Fraction(2, 2), Decimal("0.5")], [jnp.array(1), 0.5]),
    ],
)
def test_numbers_of_every_kind_become_float32(values):
    assert graded(here(lambda completions: values), ["a", "b"]).rewards.tolist() == [1.0, 0.5]


def test_a_function_gets_what_it_names():
    seen = {}

    def named(completions, level, completion_ids, unknown=3):
        seen.update(locals())
        return [0.0, 0.0]

    def everything(prompts, **rest):
        seen["rest"] = {"prompts": prompts, **rest}
        return [0.0, 0.0]

    graded(here(named, everything), ["a", "bc"], prompts=["p", "q"], level=[1, 2], answer=["x", "y"])
    assert seen["level"] == [1, 2] and seen["completion_ids"] == [[97], [98, 99]] and seen["unknown"] == 3
    given = {"prompts": ["p", "q"], "completions": ["a", "bc"], "completion_ids": [[97], [98, 99]]}
    assert seen["rest"] == given | {"level": [1, 2], "answer": ["x", "y"]}


def test_a_function_may_change_what_it_gets():
    def empties(prompts, answer):
        prompts[0][0]["content"] = "changed"
        prompts.clear()
        answer.clear()
        return [1.0]

    prompts, columns = [[{"role": "user", "content": "a"}]], {"answer": ["x"]}
    parts = graded(here(empties, lambda prompts, answer: [float(answer == ["x"])]), ["x"], prompts, **columns).parts
    assert [part.tolist() for part in parts.values()] == [[1.0], [1.0]]
    assert prompts == [[{"role": "user", "content": "a"}]] and columns == {"answer": ["x"]}


def test_a_function_that_changes_what_it_gets_and_fails_is_asked_again_with_all_of_it():
    def consumes(completions, answer):
        found = []
        while completions:
            gold = answer.pop(0).pop()
            found.append(float(completions.pop(0)) - gold)
        return found

    golds = [[1], [2], [3]]
    with pytest.warns(RewardWarning, match="could not convert string to float: 'bad'"):
        got = graded(Rewards((consumes,), seconds=None, max_failed=0.5), ["5", "6", "bad"], answer=golds)
    assert numbers(got.rewards) == [4, 4, None] and golds == [[1], [2], [3]]


def test_chat_prompts_have_chat_completions():
    seen = []

    def sees(completions):
        seen.extend(completions)
        return [0.0, 0.0]

    got = graded(here(reward_cases.content, sees), ["yes, or no", "no"], prompts=[CHAT, CHAT])
    assert got.parts["content"].tolist() == [1.0, 0.0]
    assert seen[1] == [{"role": "assistant", "content": "no"}]
    assert [completion_text(completion_of(prompt, "t")) for prompt in ("p", CHAT)] == ["t", "t"]
    assert (question_of("p"), question_of(CHAT)) == ("p", "Well?")


def test_async_functions():
    """Also from within an event loop, as in a notebook; and all calls have one loop, to which a client may belong."""
    loops = []

    async def remembers(completions):
        loops.append(asyncio.get_running_loop())
        return [0.0 for _ in completions]

    rewards = here(reward_cases.slow_length, remembers)

    async def in_a_notebook():
        return graded(rewards, ["abc", "d"])

    assert graded(rewards, ["abc", "d"]).rewards.tolist() == [3, 1]
    assert asyncio.run(in_a_notebook()).rewards.tolist() == [3, 1]
    assert loops[0] is loops[1]


# --- failures


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (reward_cases.as_number, r"ValueError: could not convert string to float: 'bad' \(.*cases.py, line \d+\)"),
        (reward_cases.not_finite, "expected a finite float32 or None; got nan"),
        (reward_cases.as_text, "expected a number or None; got '1.0'"),
    ],
)
def test_the_row_that_failed_is_found(function, message):
    rewards = here(function, reward_cases.length)
    with pytest.warns(RewardWarning, match=f"reward '{function.__name__}' failed on completion 1: {message}; .*'q'"):
        got = graded(rewards, ["1", "bad", "1"], prompts=["p", "q", "r"])
    assert numbers(got.parts[function.__name__]) == [1, None, 1]
    assert numbers(got.parts["length"]) == [1, 3, 1], "what another function says of that row is kept"
    assert numbers(got.rewards) == [2, None, 2], "and still the row has no reward"
    assert got.rewarded_rows.tolist() == [True, False, True]
    assert [(failure.row, failure.function) for failure in got.failures] == [(1, function.__name__)]


def returns(value, alone=None):
    """A reward function that returns `value`, for a completion by itself `alone`."""
    return lambda completions: alone if alone and len(completions) == 1 else value


NO_OPINION = here(reward_cases.only_digits, reward_cases.never_an_opinion)


@pytest.mark.parametrize(
    ("rewards", "message", "expected"),
    [
        (here(returns([3e38, 1.0]), weights=(10.0,)), "sum .* failed on completion 0: .*no finite float32", [None, 10]),
        (NO_OPINION, "on completion 1: expected a number from at least one; got None from", [7, None]),
        *(
            (here(returns([value, 1.0])), "expected a number or None; got", [None, 1])
            for value in ["1", 1j, np.timedelta64(1, "s"), [1.0], np.ones(1)]
        ),
        *(
            (here(returns([value, 1.0])), "expected a finite float32 or None; got", [None, 1])
            for value in (1e39, -1e39, float("inf"), 10**400)
        ),
        # Such as one mean of all in a list: of each completion alone it would look like a reward.
        (here(returns([1.0], [1.0])), "expected 2 rewards, one per completion; got 1", [None, None]),
        (here(returns([1.0] * 3, [1.0])), "expected 2 rewards, one per completion; got 3", [None, None]),
        *(
            (here(returns(value)), "expected a list of [12] rewards, one per completion; got", [None, None])
            for value in (2.0, "12", b"12", {0: 1.0, 1: 2.0}, {1.0, 2.0})
        ),
    ],
)
def test_what_is_no_reward(rewards, message, expected):
    with pytest.warns(RewardWarning, match=message):
        got = graded(rewards, ["7", "x"])
    assert numbers(got.rewards) == expected


def test_a_function_that_fails_on_all_together_only():
    rewards = here(reward_cases.afraid_of_company)
    with pytest.warns(
        RewardWarning, match="'afraid_of_company' failed on 3 completions together, but on none of them separately"
    ):
        got = graded(rewards, ["a", "b", "c"])
    assert got.rewards.tolist() == [1, 1, 1] and got.failures == ()


def test_every_kind_is_said_once():
    rewards = here(reward_cases.as_number)
    with pytest.warns(RewardWarning) as said:
        graded(rewards, ["bad", "worse", "1"])
        graded(rewards, ["bad", "1"])
    assert len(said) == 1
    with warnings.catch_warnings():  # where a warning would be an error
        graded(rewards, ["bad", "1"])


@pytest.mark.parametrize(
    ("failed", "most", "stops"), [(1, 0.25, False), (2, 0.25, True), (1, 0.0, True), (4, 1.0, False)]
)
def test_how_many_failures_end_a_run(failed, most, stops):
    completions = ["bad"] * failed + ["1"] * (4 - failed)
    with pytest.warns(RewardWarning):
        if stops:
            with pytest.raises(TooManyFailures, match=f"at most {most:.0%} .*; got {failed} of 4. .*could not convert"):
                graded(here(reward_cases.as_number, max_failed=most), completions)
        else:
            assert len(graded(here(reward_cases.as_number, max_failed=most), completions).failures) == failed


def test_ctrl_c_is_no_failure():
    def interrupted(completions):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        graded(here(interrupted), ["a", "b"])


# --- what is refused before anything is sampled


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"functions": ()}, "at least one reward function"),
        ({"weights": (1.0, 2.0)}, r"expected 1 weights, one per reward function; got 2: \(1.0, 2.0\)"),
        ({"weights": (float("nan"),)}, "finite weights"),
        ({"names": ()}, "expected 1 names"),
        ({"functions": (reward_cases.length,) * 2}, r"different names.*got \('length', 'length'\)"),
        ({"seconds": 0.0}, "time limit > 0 seconds"),
        ({"seconds": 2_592_000.0}, "at most 1,000,000; got 2592000.0"),
        ({"max_failed": 1.5}, "share of failures from 0 to 1; got 1.5"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        Rewards(**{"functions": (reward_cases.length,), "seconds": None} | options)


def test_a_function_that_asks_for_what_is_not_there():
    def of_trl(completions, trainer_state, **columns):
        return []

    rewards = here(of_trl)
    for check in (lambda: rewards.prepare(["answer"]), lambda: graded(rewards, ["a"], answer=["b"])):
        names = r"\['answer', 'completion_ids', 'completions', 'prompts'\]"
        message = rf"expected reward 'of_trl' to ask for some of {names}; got \['trainer_state'\]"
        with pytest.raises(ValueError, match=message):
            check()


def test_arguments_of_different_lengths():
    with pytest.raises(ValueError, match="expected 2 values in 'answer', one per completion; got 3"):
        graded(here(reward_cases.length), ["a", "b"], answer=[1, 2, 3])
    with pytest.raises(ValueError, match="expected 2 values in 'completion_ids', one per completion; got 1"):
        here(reward_cases.length).grade(["p", "q"], ["a", "b"], [[1]], {})
