"""Rows, their rewards, the files they come from, and the order in which training visits them."""

import re
import sys
import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reasoning_gym.dataset import ReseedingDataset

from smd_jax.tasks.build import TaskChoice, build_task, gsm8k_row
from smd_jax.tasks.reasoning_gym import ReasoningGymTask
from smd_jax.tasks.reward_functions import GRADED_CHARACTERS, final_answer, gsm8k_gold, math_answer, same_answer
from smd_jax.tasks.sorting import DistractorSortConfig, DistractorSortDataset
from smd_jax.tasks.sources import DataSource, load_rows
from smd_jax.tasks.task import Task, batch_columns, batch_indices, prompt_text
from smd_jax.testing import byte_tokenizer
from tests.hub_files import write_lines
from tests.paths import ROOT

GSM8K_FILE = ROOT.parent / "shared" / "data" / "gsm8k" / "test.jsonl"

DUCKS = {"question": "16 eggs less 3 and 4, at $2?", "answer": "16 - 3 - 4 = <<16-3-4=9>>9 eggs.\n9 * 2 = $18\n#### 18"}


# --- reasoning_gym


def sort_task(**parameters):
    return ReasoningGymTask("distractor_sort", seed=3, size=50, parameters=tuple(parameters.items()))


@pytest.mark.parametrize(
    "name", ["distractor_sort", "chain_sum", "number_sorting", "letter_counting", "spell_backward", "gcd"]
)
def test_the_oracle_answer_is_rewarded(name):
    task = ReasoningGymTask(name, seed=0, size=5)
    assert isinstance(task, Task)
    rows = [task[i] for i in range(len(task))]
    prompts, answers = [row["prompt"] for row in rows], [row["answer"] for row in rows]
    tagged = "<think>Hm</think> <answer>0</answer>, no: <answer> {}</answer>!"
    for form in (" {}\n", "<think>{} or 1?</think>\n{}", tagged):
        completions = [form.format(*[answer] * form.count("{}")) for answer in answers]
        assert task.reward(prompts, completions, **batch_columns(rows)) == [1.0] * 5
    assert max(task.reward(prompts, ["?"] * 5, **batch_columns(rows))) < 1.0


def test_an_answer_that_is_no_number_is_wrong():
    """Its distance to the right answer is NaN."""
    task = ReasoningGymTask("complex_arithmetic", seed=0, size=3)
    rows = [task[i] for i in range(3)]
    wrong = task.reward([row["prompt"] for row in rows], ["n an", "nan+nani", "NaNj"], **batch_columns(rows))
    assert max(wrong) < 0.1


def test_tasks_are_values():
    assert sort_task(num_digits=4) == sort_task(num_digits=4)
    assert hash(sort_task(num_digits=4)) == hash(sort_task(num_digits=4))
    assert sort_task(num_digits=4)[7] == sort_task(num_digits=4)[7]
    assert sort_task() != sort_task(num_digits=4)
    for outside in (-1, 50):
        with pytest.raises(IndexError, match=f"expected a row from 0 to 49; got {outside}"):
            sort_task()[outside]


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ImportError, match=r"needs reasoning_gym.*pip install 'smd_jax\[train\]'"):
        sort_task()
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match=r"needs math_verify.*pip install 'smd_jax\[train\]'"):
        same_answer("1", "1")


# --- sorting


@settings(deadline=None)
@given(digits=st.integers(1, 12), letters=st.integers(0, 20), seed=st.integers(0, 2**40), index=st.integers(0, 10**6))
def test_questions_hide_the_digits_of_the_answer(digits, letters, seed, index):
    config = DistractorSortConfig(num_digits=digits, num_distractors=letters, seed=seed)
    item = DistractorSortDataset(config)[index]
    question, end = item["question"][:-1], item["question"][-1]
    found = re.findall(r"\d", question)
    assert (len(found), len(question), end) == (digits, digits + letters, "=")
    assert item["answer"] == "".join(sorted(found))


def test_a_row_never_changes():
    # Written down once: training runs and their tables depend on it.
    item = DistractorSortDataset(DistractorSortConfig(seed=0))[0]
    assert (item["question"], item["answer"]) == ("s6jh5348dy3inawq9ducd8hv=", "33456889")


def test_seeds_share_no_rows():
    datasets = [DistractorSortDataset(DistractorSortConfig(seed=seed, size=200)) for seed in (0, 1)]
    first, second = ({item["question"] for item in dataset} for dataset in datasets)
    assert (len(first), len(second), len(first & second)) == (200, 200, 0)


def test_reasoning_gym_can_reseed_the_dataset():
    endless = iter(ReseedingDataset(DistractorSortDataset(DistractorSortConfig(seed=0, size=2)), chunk_size=2))
    assert len({next(endless)["question"] for _ in range(6)}) == 6


@pytest.mark.parametrize(
    ("completion", "exact", "partial"),
    [
        ("01233789", 1.0, 1.0),
        ("01233780", 0.0, 7 / 8),
        ("0123", 0.0, 4 / 8),
        ("0123378900000000", 0.0, 8 / 16),
        ("98733210", 0.0, 2 / 8),
        ("", 0.0, 0.0),
    ],
)
def test_scores_of_answers(completion, exact, partial):
    entry = {"answer": "01233789"}
    assert DistractorSortDataset(DistractorSortConfig(seed=0)).score_answer(completion, entry) == exact
    graded = DistractorSortDataset(DistractorSortConfig(seed=0, partial_credit=True))
    assert graded.score_answer(completion, entry) == partial
    assert graded.score_answer(None, entry) == 0.0


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"num_digits": 0}, "expected num_digits >= 1, a whole number; got 0"),
        ({"num_distractors": -1}, "expected num_distractors >= 0, a whole number; got -1"),
        ({"letters": "ab7"}, "expected letters: .* got 'ab7'"),
        ({"letters": ""}, "expected letters: .* got ''"),
    ],
)
def test_bad_sorting_tasks(parameters, message):
    with pytest.raises(ValueError, match=message):
        sort_task(**parameters)
    with pytest.raises(ValueError, match="expected size >= 1, a whole number; got 0"):
        ReasoningGymTask("distractor_sort", seed=0, size=0)


# --- GSM8K


def graded(row, completion):
    return math_answer([completion], [row["answer"]])[0]


def test_only_the_end_of_a_completion_is_graded():
    assert final_answer("#### 18" + "." * GRADED_CHARACTERS) == "." * GRADED_CHARACTERS
    assert final_answer("7 " * 10**6 + "#### 18") == "18"
    assert final_answer("#### 7\nand\n#### 18\nend") == "18"


def test_grading_works_outside_the_main_thread():
    rewards = []
    thread = threading.Thread(target=lambda: rewards.append(graded(DUCKS, "#### 18")))
    thread.start()
    thread.join()
    assert rewards == [1.0]


def test_an_answer_that_cannot_be_computed_is_wrong():
    assert not same_answer("18", "9^9^9^9")


@pytest.mark.parametrize("answer", ["18", "so it is ####", "####  \n", 18])
def test_a_solution_without_a_final_answer(tmp_path, answer):
    path = write_lines(tmp_path / "rows.jsonl", [{"question": "?", "answer": answer}])
    with pytest.raises(
        ValueError, match="rows.jsonl, line 1: .* expected an answer that ends with '#### <number>'; got"
    ):
        build_task(TaskChoice("gsm8k", source=str(path)))


@pytest.mark.skipif(not GSM8K_FILE.exists(), reason=f"needs {GSM8K_FILE}")
def test_real_gsm8k_solutions_earn_their_reward():
    solutions = [gsm8k_row(row)["answer"] for row in load_rows(DataSource(str(GSM8K_FILE), split="train[:200]"))]
    assert math_answer(solutions, solutions) == [1.0] * 200
    plain = [f"The answer is {gsm8k_gold(solution)}." for solution in solutions]
    assert math_answer(plain, solutions) == [1.0] * 200
    wrong = [re.sub(r"#### (.*)", r"#### 1\1", solution) for solution in solutions]  # one digit more in front
    assert math_answer(wrong, solutions) == [0.0] * 200


# --- chat templates


THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking is false %}<no>{% endif %}{{ tone }}"


def test_a_row_tells_its_chat_template():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = THINKS
    row = {"prompt": "1+1?"}
    assert prompt_text(row, tokenizer) == "1+1?"
    told = {"enable_thinking": False, "tone": None}  # a data set fills in None for what other rows have
    assert prompt_text(row | {"chat_template_kwargs": told}, tokenizer) == "1+1?<no>"
    assert prompt_text(row | {"chat_template_kwargs": None}, tokenizer) == "1+1?"
    with pytest.raises(ValueError, match="a row: expected chat_template_kwargs as a dict"):
        prompt_text(row | {"chat_template_kwargs": "enable_thinking"}, tokenizer)


# --- the order of the rows


@given(size=st.integers(1, 40), batch=st.integers(1, 50), seed=st.integers(0, 2**32 - 1))
def test_every_epoch_visits_every_row_once(size, batch, seed):
    steps = -(-3 * size // batch)
    visited = np.concatenate([batch_indices(size, batch, step, seed) for step in range(steps)])
    for epoch in range(3):
        assert Counter(visited[epoch * size : (epoch + 1) * size].tolist()) == Counter(range(size))


def test_the_order_depends_on_step_and_seed_alone():
    first = batch_indices(1000, 8, 77, seed=5)
    batch_indices(10, 8, 3, seed=0)
    np.testing.assert_array_equal(first, batch_indices(1000, 8, 77, seed=5))
    assert first.tolist() != batch_indices(1000, 8, 77, seed=6).tolist()
    assert batch_indices(1000, 1000, 0, 5).tolist() != batch_indices(1000, 1000, 1, 5).tolist()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0, 1, 0, 0), "step >= 0; got 0, 1 and 0"),
        ((1, 0, 0, 0), "step >= 0; got 1, 0 and 0"),
        ((1, 1, -1, 0), "step >= 0; got 1, 1 and -1"),
        ((1, 1, 0, -1), "seed >= 0, a whole number; got -1"),
    ],
)
def test_bad_positions(arguments, said):
    with pytest.raises(ValueError, match=said):
        batch_indices(*arguments)
