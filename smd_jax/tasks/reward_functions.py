"""Ready reward functions, which also work in TRL.

If a completion has `<answer>…</answer>`, `math_answer`, `exact_match` and `token_f1` read the last one only.
"""

from __future__ import annotations

import functools
import re
import string
import threading
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from types import SimpleNamespace
from typing import Any

import numpy as np

from smd_jax.tasks.task import Completion, completion_text, missing_extra
from smd_jax.typed_fields import check_types

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
BOXED = "\\boxed{"
GSM8K_MARKER = "####"  # in GSM8K solutions the final answer follows it
GRADED_CHARACTERS = 2_000  # at the end of a completion; matching a longer text is slow
GRADING_SECONDS = 2  # sympy never finishes an answer such as 9^9^9^9
_INSIDE = r"(?:(?!</?think>|</?answer>).)*"  # anything but the four tags
THINK_ANSWER = rf"<think>{_INSIDE}</think>\s*<answer>{_INSIDE}</answer>"  # each of them once
# The place between a Chinese, Japanese or Korean character, a quotation mark, or a word with a colon, and a number. Not
# after full-width signs, which are part of the number.
_GLUED = re.compile(
    r"(?:(?<=[\u3000-\u30fb\u30fd-\u30ff\u3400-\u9fff\uac00-\ud7af\uff01-\uff0a\uff0c\uff1a-\uff65`\"\u201c])"
    r"|(?<=[^\W\d_]{2}:))(?<![0-9]\uff0c)(?=[-+]?[0-9])"
)
# A fraction, and the punctuation after it, with which math-verify finds only its numerator.
_FRACTION = re.compile(r"(\d/\d+\)*)(?![\d/]|[.,]\d)(?:\s*(?:\*\*|[^\w\s+*^()%=<>-]))+")
# A heading after "####", such as "Step 2: add" or "2. Check".
_HEADING = re.compile(r"(?i)(step|part|case|problem)\b|\d+[.)]\s+[a-z]")
# A word, or one character of Chinese or Japanese, which have no spaces.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\s\u3040-\u30ff\u3400-\u9fff]+")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def math_answer(
    completions: Sequence[Completion], answer: Sequence[object], **columns: Sequence[Any]
) -> list[float | None]:
    r"""1.0 where the last answer of a completion equals the reference by math-verify, else 0.0.

    Args:
      answer: a number, LaTeX (`\frac{1}{2}`), a solution with `\boxed{…}` or `$…$`, one that ends with "#### 18", or a
        list of these: one is enough. None (does not apply) for a reference in which math-verify finds nothing.
    """
    return [_math_reward(_answer_part(text), gold) for text, gold in zip(completions, answer, strict=True)]


def exact_match(
    completions: Sequence[Completion], answer: Sequence[object], **columns: Sequence[Any]
) -> list[float | None]:
    """1.0 where completion and reference have the same words (arXiv:1606.05250), without case, punctuation, articles.

    Args:
      answer: text, a number, or a list of them: one is enough. None: does not apply.
    """
    pairs = zip(map(_words, map(_answer_part, completions)), answer, strict=True)
    return [_best(lambda gold, words=words: float(words == _words(gold)), golds) for words, golds in pairs]


def token_f1(
    completions: Sequence[Completion], answer: Sequence[object], **columns: Sequence[Any]
) -> list[float | None]:
    """F1 over the words of completion and reference (arXiv:1606.05250), without case, punctuation, articles.

    Args:
      answer: text, a number, or a list of them: the nearest counts. None: does not apply.
    """
    pairs = zip(map(_words, map(_answer_part, completions)), answer, strict=True)
    return [_best(lambda gold, words=words: _f1(words, _words(gold)), golds) for words, golds in pairs]


@dataclass(frozen=True)
class RougeL:
    """ROUGE-L (F1 over the longest common subsequence of stemmed words, by rouge-score) minus a penalty on length:

        rouge_l - length_penalty * min(1, max(0, words / words of the reference - 1))

    The penalty is subtracted, so that the shorter of two summaries without a common word is better.

    Attributes:
      length_penalty: at least 0; the full penalty applies from twice the reference's words on.

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: for a negative or infinite penalty.
    """

    length_penalty: float = 0.1
    __name__ = "rouge_l"

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 <= self.length_penalty < float("inf"):
            raise ValueError(f"expected length_penalty >= 0; got {self.length_penalty}")

    def __call__(
        self, completions: Sequence[Completion], summary: Sequence[object], **columns: Sequence[Any]
    ) -> list[float | None]:
        """Grades by the nearest of several references. None: does not apply."""
        pairs = zip(map(completion_text, completions), summary, strict=True)
        return [_best(lambda gold, text=text: self._score(text, gold), golds) for text, golds in pairs]

    def _score(self, text: str, gold: str) -> float:
        longer = len(text.split()) / max(len(gold.split()), 1) - 1
        return _rouge_scorer().score(gold, text)["rougeL"].fmeasure - self.length_penalty * min(max(longer, 0.0), 1.0)


@dataclass(frozen=True)
class FormatReward:
    """1.0 where the whole stripped completion matches a pattern, else 0.0.

    Some chat templates end the prompt with `<think>`. So a completion that closes this tag without opening it is read
    as if it began with the tag.

    Attributes:
      pattern: a regular expression, in which a dot matches newlines. By default `<think>…</think><answer>…</answer>`,
        each tag once.
    """

    pattern: str = THINK_ANSWER
    __name__ = "format_reward"

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"expected a regular expression; got {self.pattern!r} ({error})") from error

    def __call__(self, completions: Sequence[Completion], **columns: Sequence[Any]) -> list[float]:
        form = re.compile(self.pattern, re.DOTALL)
        texts = [completion_text(completion).strip() for completion in completions]
        opened = [f"<think>{text}" if "</think>" in text and "<think>" not in text else text for text in texts]
        return [float(form.fullmatch(text) is not None) for text in opened]


@dataclass(frozen=True)
class Overlong:
    """DAPO's soft penalty on length (arXiv:2503.14476 eq. 13), over the tokens of a completion, EOS included:

        0 up to max_length - cache, then linearly down to -1 at max_length, and -1 beyond

    Attributes:
      max_length: tokens of the longest completion allowed, such as a rollout's `max_new_tokens`.
      cache: number of tokens over which the penalty grows.
    """

    max_length: int
    cache: int
    __name__ = "overlong"

    def __post_init__(self) -> None:
        if not 0 < self.cache <= self.max_length:
            raise ValueError(f"expected 0 < cache <= max_length tokens; got {self.cache} and {self.max_length}")

    def __call__(self, completion_ids: Sequence[Sequence[int]], **columns: Sequence[Any]) -> list[float]:
        free = self.max_length - self.cache
        return [max(min(free - len(tokens), 0) / self.cache, -1.0) for tokens in completion_ids]


rouge_l = RougeL()
format_reward = FormatReward()


def answer_texts(answer: object) -> list[str]:
    """Lists every spelling of a reference answer that counts as right; empty for None and NaN.

    Args:
      answer: a text, a number, or a list of them, of which one is enough. A decimal number is written without an
        exponent, which would read as a product with e, and is also right without zeros at its end: 7.0 as "7".

    Raises:
      ValueError: another type.
    """
    match answer:
        case None:
            return []
        case str():
            return [answer]
        case float() | np.floating() | Decimal() if answer != answer:
            return []
        case float() | np.floating() | Decimal():
            exact = Decimal(str(answer))
            return [*dict.fromkeys([f"{exact:f}", f"{exact.normalize():f}"])]
        case Real():
            return [str(answer)]
        case list() | tuple():
            return [text for one in answer for text in answer_texts(one)]
        case _:
            raise ValueError(
                f"expected an answer as text, a number or a list of them; got {type(answer).__name__} {answer!r:.80}"
            )


def last_box(text: str) -> str | None:
    r"""The content of the last `\boxed{…}` that closes, because the last correction counts. It may hold braces."""
    start = text.rfind(BOXED)
    while start >= 0:
        depth = 1
        for end in range(start + len(BOXED), len(text)):
            depth += (text[end] == "{") - (text[end] == "}")
            if not depth:
                return text[start + len(BOXED) : end]
        start = text.rfind(BOXED, 0, start)
    return None


def gsm8k_gold(solution: str) -> str:
    """The number after the last "####" of a reference solution, without thousands separators."""
    return solution.rpartition(GSM8K_MARKER)[2].strip().replace(",", "")


def final_answer(completion: str) -> str:
    r"""The part of a completion's last 2,000 characters to grade: the last boxed answer, or the line after the last
    "####", whichever comes last; without either all of them, in which math-verify looks for "answer" and for the last
    number. If the line after "####" is a heading, or has no number or LaTeX, the lines after it are graded. Outside of
    a box, a number is separated from a preceding colon, quotation mark or CJK character, and a fraction from the
    punctuation after it, because math-verify finds no number or only the numerator there.
    """
    end = completion[-GRADED_CHARACTERS:]
    # The last marker, because the last correction counts.
    _, marker, after = end.rpartition(GSM8K_MARKER)
    boxed = last_box(after)
    if boxed is not None:
        return rf"\boxed{{{boxed}}}"
    if marker:
        line, _, rest = after.strip().partition("\n")
        is_answer = re.search(r"[\d$\\]", line) and not _HEADING.match(line)
        end = line if is_answer or not rest.strip() else rest
    end = _GLUED.sub(" ", end.replace("\u2212", "-"))  # the minus sign of typography
    return end if re.search(r"[$\\]", end) else _FRACTION.sub(r"\1 ", end)


def same_answer(gold: str, answer: str) -> bool:
    """Whether math-verify finds in `answer` an expression equal to `gold`: `$18`, `18.0`, `36/2` equal 18.

    An answer that takes longer than `GRADING_SECONDS` to compare is wrong. The timer is `signal.alarm`, which works in
    the main thread only: in any other thread there is no limit.
    """
    try:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    except ModuleNotFoundError as error:
        raise missing_extra("math_verify") from error
    seconds = GRADING_SECONDS if threading.current_thread() is threading.main_thread() else 0  # 0 sets no clock
    # Priority 0 comes first: a boxed answer is preferred to any other number.
    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    expected, found = (parse(text, targets, parsing_timeout=seconds) for text in (gold, answer))
    return verify(expected, found, timeout_seconds=seconds)


def _math_reward(text: str, golds: object) -> float | None:
    expected = map(_math_gold, answer_texts(golds))
    # math-verify can compare a reference if it finds it equal to itself.
    readable = [gold for gold in expected if same_answer(gold, gold)]
    if not readable:
        return None
    found = final_answer(text)
    return float(any(same_answer(gold, found) for gold in readable))


def _math_gold(gold: str) -> str:
    if GSM8K_MARKER in gold:
        return gsm8k_gold(gold)
    # math-verify finds LaTeX only inside of math delimiters or a box.
    boxed = last_box(gold)
    if boxed is None and re.search(r"(?<!\\)\$|\\\(", gold):  # `\$36` is an amount
        return gold
    return rf"\boxed{{{gold if boxed is None else boxed}}}"


def _answer_part(completion: Completion) -> str:
    text = completion_text(completion)
    tagged = ANSWER.findall(text)
    return tagged[-1] if tagged else text


def _best(score: Callable[[str], float], golds: object) -> float | None:
    """The highest score among the references; None without a reference."""
    return max(map(score, answer_texts(golds)), default=None)


def _words(text: str) -> list[str]:
    """Normalises as SQuAD does: case, punctuation, articles, white space. Keeps articles or punctuation if nothing
    else is left: "A" is the answer to a multiple-choice question."""
    plain = text.lower().translate(_NO_PUNCTUATION)
    return _ARTICLES.sub(" ", plain).split() or plain.split() or text.split()


def _f1(words: list[str], gold: list[str]) -> float:
    if not words or not gold:
        return float(words == gold)
    common = sum((Counter(words) & Counter(gold)).values())
    # 2 P R / (P + R), with P = common / words and R = common / gold.
    return 2 * common / (len(words) + len(gold))


@functools.cache
def _rouge_scorer() -> Any:
    """Imports rouge_score, an extra that takes a second. Its own tokenizer drops all letters but a to z."""
    try:
        from nltk.stem.porter import PorterStemmer
        from rouge_score.rouge_scorer import RougeScorer
    except ModuleNotFoundError as error:
        raise missing_extra("rouge_score") from error
    stem = PorterStemmer().stem

    def tokenize(text: str) -> list[str]:
        text = unicodedata.normalize("NFC", text.lower())
        # Letters with their marks, and digits.
        plain = "".join(c if unicodedata.category(c)[0] in "LM" or c.isdecimal() else " " for c in text)
        words = _WORD.findall(plain)
        return [stem(word) if word.isascii() and len(word) > 3 else word for word in words]

    return RougeScorer(["rougeL"], tokenizer=SimpleNamespace(tokenize=tokenize))
