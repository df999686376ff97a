"""Grade-school mathematics (arXiv:2110.14168): prompts of its rows, and final answers compared by math-verify."""

from __future__ import annotations

import threading

from smd_jax.tasks.answers import last_box
from smd_jax.tasks.task import Row, missing_extra

INSTRUCTION = 'Think step by step, then give the final answer after "####".'
GSM8K_MARKER = "####"  # in GSM8K solutions the final answer follows it
GRADED_CHARACTERS = 2_000  # at the end of a completion; matching a longer text is slow
GRADING_SECONDS = 2  # sympy never finishes an answer such as 9^9^9^9


def gsm8k_row(row: Row) -> Row:
    """The task's row of a row of openai/gsm8k.

    Raises:
      ValueError: a solution without "#### <number>".
    """
    answer = row["answer"]
    if not isinstance(answer, str) or GSM8K_MARKER not in answer or not gsm8k_gold(answer):
        got = repr(answer[-60:]) if isinstance(answer, str) else f"{type(answer).__name__} {answer!r:.60}"
        raise ValueError(f"expected an answer that ends with '#### <number>'; got {got}")
    return {**row, "prompt": f"{row['question']}\n{INSTRUCTION}"}


def gsm8k_gold(solution: str) -> str:
    """The number after the last "####" of a reference solution, without thousands separators."""
    return solution.rpartition(GSM8K_MARKER)[2].strip().replace(",", "")


def final_answer(completion: str) -> str:
    r"""The part of a completion to grade: its last boxed answer, or the line after its last "####", whichever comes
    last; without either the last 2,000 characters, in which math-verify looks for "answer" and for the last number.
    """
    end = completion[-GRADED_CHARACTERS:]
    # The last marker, because the last correction counts.
    _, marker, after = end.rpartition(GSM8K_MARKER)
    boxed = last_box(after)
    if boxed is not None:
        return rf"\boxed{{{boxed}}}"
    return after.strip().partition("\n")[0] if marker else end


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
