"""The reward functions that are ready, on numbers worked out by hand."""

import functools
import math
import pickle
from decimal import Decimal

import numpy as np
import pytest

from smd_jax.tasks import reward_functions
from smd_jax.tasks.reward_functions import (
    FormatReward,
    Overlong,
    RougeL,
    exact_match,
    format_reward,
    math_answer,
    rouge_l,
    token_f1,
)
from smd_jax.tasks.rewards import Rewards, function_name
from smd_jax.tasks.task import completion_of


def one(function, completion, **columns):
    """The reward of one completion, which is the same for a chat prompt."""
    (reward,) = function(completions=[completion], **{name: [value] for name, value in columns.items()})
    chat = completion_of([{"role": "user", "content": "?"}], completion)
    (of_chat,) = function(completions=[chat], **{name: [value] for name, value in columns.items()})
    assert reward == of_chat
    return reward


@pytest.mark.parametrize(
    ("gold", "completion", "reward"),
    [
        ("18", "So it is 18.", 1.0),
        ("18", "So it is 19.", 0.0),
        ("She pays 9 * 2.\n#### 18", "#### 18.0", 1.0),
        ("#### 1,800", r"\boxed{1800}", 1.0),
        (r"\frac{1}{2}", r"Half of it: $\frac{2}{4}$", 1.0),
        (r"\frac{1}{2}", "0.5", 1.0),
        (r"\frac{1}{2}", "2", 0.0),
        (r"Thus $x = \boxed{7}$.", r"\boxed{7}", 1.0),
        (r"(3, \frac{\pi}{2})", r"\boxed{(3, \frac{\pi}{2})}", 1.0),
        (r"(3, \frac{\pi}{2})", r"\boxed{(\frac{\pi}{2}, 3)}", 0.0),
        ("18", "<think>17 or 18</think><answer>18</answer> and not 5", 1.0),
        ("18", "", 0.0),
        ("18", "eighteen", 0.0),
        ("18", "####", 0.0),
        ("18", "####\n18 dollars\nQuestion: what is 7?", 1.0),
        ("18", "18, no:\n#### 19", 0.0),
        # A heading is no answer.
        ("18", "#### Conclusion\nThe answer is 18.", 1.0),
        ("18", "17\n#### Final answer\n18", 1.0),
        ("18", "18\n#### Final answer\n19", 0.0),
        ("18", r"\boxed{19}, not 18", 0.0),
        ("70,000", "$70,000", 1.0),
        ("", "18", None),
        # A correction counts.
        ("3", r"$\boxed{4}$. Wait, 1 + 2 is three. So it is $$\boxed{3}$$", 1.0),
        ("4", r"\boxed{4}. Wait, 1 + 2 is three. So it is \boxed{3}.", 0.0),
        (r"\frac{1}{2}", r"\(\boxed{\frac{1}{3}}\)\nor rather \(\boxed{\frac{1}{2}}\)", 1.0),
        ("4, 5", r"\boxed{4, 5}", 1.0),
        ("3", "#### 4\nWait.\n#### 3", 1.0),
        ("3", "#### 4\nWait: \\boxed{3}", 1.0),
        ("4", r"\boxed{4}. Wait: \boxed{3", 1.0),
        ("50", r"\boxed{4}. Wait, \boxed{50\%}", 1.0),
        # Without a blank before the number.
        ("5", "2加3等于5。答案是5。", 1.0),
        ("5", "答えは5です", 1.0),
        ("5", "#### 共5个", 1.0),
        ("5", "정답은5", 1.0),
        ("-5", "Answer:-5.", 1.0),
        ("5", "Ответ:6", 0.0),
        ("5", "答案：－5", 0.0),
        ("5", "It is `5`.", 1.0),
        ("5", 'It is "5".', 1.0),
        ("-28", "The answer is \u221228.", 1.0),
        # A fraction with punctuation after it.
        ("7/13", "The answer is 7/13.", 1.0),
        ("3/4", "The answer is **3/4**.", 1.0),
        ("3", "The answer is **3/4**.", 0.0),
        ("2", "So 2/3!", 0.0),
        ("3/4", "#### (3/4)。", 1.0),
        ("3/2", "(1/2)*3", 1.0),
        # Step headings.
        ("12", "#### Step 2: Add\n6+6 = 12\n\nThe answer is 12.", 1.0),
        ("2", "#### Step 2: Add\n6+6 = 12\n\nThe answer is 12.", 0.0),
        ("12", "##### 2. Final\n**12**", 1.0),
        ("2", "#### 2.\nDone.", 1.0),
        # Amounts in dollars, as MATH writes them.
        (r"\$36", r"\boxed{36}", 1.0),
        (r"\$18.90", r"\boxed{\$18.90}", 1.0),
        (r"\$36", r"\boxed{37}", 0.0),
        ("2024年5月", r"\boxed{2024年5月}", 1.0),
        ("2024年5月", r"\boxed{2023年5月}", 0.0),
    ],
)
def test_math_answer(gold, completion, reward):
    assert one(math_answer, completion, answer=gold) == reward


@pytest.mark.parametrize("function", [math_answer, exact_match, token_f1, rouge_l])
@pytest.mark.parametrize(
    ("gold", "completion", "reward"),
    [
        (7, "7", 1.0),
        (0, "0", 1.0),
        (7, "8", 0.0),
        (7.0, "7", 1.0),
        (7.0, "7.0", 1.0),
        (2.5, "2.5", 1.0),
        (1e-7, "0.0000001", 1.0),
        (Decimal("7.50"), "7.50", 1.0),
        ([4, 5], "5", 1.0),
        ([4, "5"], "5", 1.0),
        ([4, 5], "6", 0.0),
        (np.float32(7.0), "7", 1.0),
        (np.float32(1e-5), "0.00001", 1.0),
        (None, "7", None),
        (float("nan"), "7", None),
        (np.float32("nan"), "7", None),
        ([], "7", None),
    ],
)
def test_a_number_is_an_answer(function, gold, completion, reward):
    if function is rouge_l:
        assert one(function, completion, summary=gold) == reward
    else:
        assert one(function, completion, answer=gold) == reward


def test_an_answer_of_another_type():
    with pytest.raises(ValueError, match="expected an answer as text, a number or a list of them; got dict {'a': 1}"):
        one(exact_match, "7", answer={"a": 1})


@pytest.mark.parametrize(
    ("gold", "completion", "match", "f1"),
    [
        ("The Eiffel Tower", "eiffel tower!", 1.0, 1.0),
        # Common: eiffel, tower. 2 of 4 words, 2 of 2 of the reference.
        ("The Eiffel Tower", "It is the Eiffel Tower", 0.0, 2 * 2 / (4 + 2)),
        # Words count as often as both have them: "to" and "be" twice, "or" and "not" once against "to" twice.
        ("to be or not to be", "to to to", 0.0, 2 * 2 / (3 + 6)),
        ("yes", "no", 0.0, 0.0),
        (["Paris", "city of light"], "the City of Light", 1.0, 1.0),
        ("Paris", "<think>London?</think>\n<answer>Paris.</answer>", 1.0, 1.0),
        # Articles and punctuation count where nothing else is.
        ("A", "a.", 1.0, 1.0),
        ("A", "the", 0.0, 0.0),
        ("A", "", 0.0, 0.0),
        ("-", "+", 0.0, 0.0),
        ("-", "<answer> - </answer>", 1.0, 1.0),
        ("Paris", "", 0.0, 0.0),
    ],
)
def test_words_of_an_answer(gold, completion, match, f1):
    assert one(exact_match, completion, answer=gold) == match
    assert one(token_f1, completion, answer=gold) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("gold", "completion", "rouge", "longer"),
    [
        ("police killed the gunman", "police killed the gunman", 1.0, 0.0),
        # arXiv W04-1013, section 3.1: the longest common subsequence has 3 of 4 words, then 2 of 4. "police" and "kill"
        # with stems: "killed" is "kill".
        ("police killed the gunman", "police kill the gunman", 1.0, 0.0),
        ("police killed the gunman", "the gunman kill police", 0.5, 0.0),
        # 3 words of 6, and of 4: F1 = 2 * 3 / 10; half as long again.
        ("police killed the gunman", "police said they the gunman fled", 2 * 3 / (6 + 4), 0.5),
        # Nothing in common, more than twice as long.
        ("police killed the gunman", "a b c d e f g h i j", 0.0, 1.0),
        (["no word of it", "police killed the gunman"], "police killed the gunman", 1.0, 0.0),
        ("police killed the gunman", "", 0.0, 0.0),
        # Other scripts: words, or letters where there are no blanks.
        ("Кошка сидит на ковре", "кошка на ковре", 2 * 3 / (4 + 3), 0.0),
        ("北京是首都", "北京", 2 * 2 / (5 + 2), 0.0),
        ("un café noir", "un cafe\u0301 rouge", 2 * 2 / (3 + 3), 0.0),
        ("दिन", "दान", 0.0, 0.0),
    ],
)
def test_rouge_l(gold, completion, rouge, longer):
    assert one(rouge_l, completion, summary=gold) == pytest.approx(rouge - 0.1 * longer)
    assert one(RougeL(length_penalty=2.0), completion, summary=gold) == pytest.approx(rouge - 2.0 * longer)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>a\nb</think>\n<answer>c</answer>\n", 1.0),
        ("<think>a</think><answer>c</answer> and more", 0.0),
        ("<answer>c</answer><think>a</think>", 0.0),
        ("<think>a</think><think>b</think><answer>c</answer>", 0.0),
        ("<think>a<answer>b</think><answer>c</answer>", 0.0),
        ("c", 0.0),
        # Where the chat template has written the first tag, as DeepSeek-R1's does.
        ("\na</think>\n<answer>c</answer>", 1.0),
        ("a</think><answer>c</answer> and more", 0.0),
        ("a</think>b</think><answer>c</answer>", 0.0),
        ("a<answer>c</answer>", 0.0),
    ],
)
def test_format(completion, reward):
    assert one(format_reward, completion) == reward


def test_a_format_of_ones_own():
    assert one(FormatReward(r"Answer: \d+"), " Answer: 17 ") == 1.0
    assert one(FormatReward(r"Answer: .+"), "Answer: 1\n7") == 1.0
    with pytest.raises(ValueError, match=r"expected a regular expression; got '\(' \(missing \)"):
        FormatReward("(")


def test_overlong():
    """arXiv:2503.14476 eq. 13, with L_max 10 and L_cache 4."""
    lengths = [0, 6, 7, 9, 10, 11, 100]
    ids = [list(range(n)) for n in lengths]
    assert Overlong(max_length=10, cache=4)(completion_ids=ids) == [0, 0, -0.25, -0.75, -1, -1, -1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Overlong(10, 0), "expected 0 < cache <= max_length tokens; got 0 and 10"),
        (lambda: Overlong(10, 11), "got 11 and 10"),
        (lambda: RougeL(-1.0), "length_penalty >= 0; got -1.0"),
        (lambda: RougeL(math.nan), "length_penalty >= 0; got nan"),
    ],
)
def test_bad_parameters(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_all_of_them_have_names_and_go_to_processes():
    functions = (math_answer, exact_match, token_f1, rouge_l, format_reward, Overlong(8, 4))
    names = [function_name(function) for function in functions]
    assert (
        names[:-1] == [n for n in names if getattr(reward_functions, n, None) in functions] and names[-1] == "overlong"
    )
    assert function_name(functools.partial(math_answer)) == "math_answer"
    assert pickle.loads(pickle.dumps(functions)) == functions
    assert Rewards(functions).logged_names == tuple(names)  # each could be sent
