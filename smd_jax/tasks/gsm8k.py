"""Grade-school mathematics (arXiv:2110.14168): rows from a file, final answers compared by math-verify."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smd_jax.tasks.answers import BOXED, last_boxes
from smd_jax.tasks.datasets import numbered_rows
from smd_jax.tasks.task import Prompt, Row, column_of, missing_extra

INSTRUCTION = 'Think step by step, then give the final answer after "####".'
GSM8K_MARKER = "####"  # in GSM8K solutions the final answer follows it
GRADED_CHARACTERS = 2_000  # only the end of a completion is graded: matching all of a long ramble is slow and pointless
GRADING_SECONDS = 2  # for an answer such as 9^9^9^9, which sympy would work on for ever


def load_gsm8k(path: str | Path) -> Gsm8kTask:
    """The rows of a GSM8K file, one JSON object a line.

    Raises:
      ValueError: as `load_jsonl`, and for a solution without "#### <number>", naming the file and the line.
    """
    numbered = list(numbered_rows(Path(path), ("question", "answer")))
    for line, row in numbered:
        _check_gsm8k(row, f"{path}, line {line}")
    return Gsm8kTask([row for _, row in numbered])


# Compared and hashed by identity: lists of rows have no hash, and comparing all of them would serve nobody.
@dataclass(frozen=True, eq=False)
class Gsm8kTask:
    """Grade-school mathematics (arXiv:2110.14168), graded by math-verify; rows have "prompt" and "answer".

    Attributes:
      rows: `{"question": str, "answer": str}`, the answer a solution that ends with "#### <number>".
      instruction: added to every question on a line of its own.
    """

    rows: Sequence[Row]
    instruction: str = INSTRUCTION

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError("expected at least one row; got none")
        for index, row in enumerate(self.rows):
            _check_gsm8k(row, f"row {index}")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        row = self.rows[index]
        return {"prompt": question_prompt(row["question"], self.instruction), "answer": row["answer"]}

    def reward(self, prompts: Sequence[Prompt], completions: Sequence[str], **columns: Sequence[Any]) -> list[float]:
        """1.0 where the completion's final answer equals the number after "####" in the column "answer", else 0.0."""
        pairs = zip(column_of(columns, "answer"), completions, strict=True)
        return [float(same_answer(gsm8k_gold(answer), final_answer(completion))) for answer, completion in pairs]


def gsm8k_row(row: Row) -> Row:
    """The row of a task from one of GSM8K, as openai/gsm8k has it on the Hub.

    Raises:
      ValueError: a solution without "#### <number>".
    """
    _check_gsm8k(row, "a row of GSM8K")
    return {**row, "prompt": question_prompt(row["question"], INSTRUCTION)}


def question_prompt(question: str, instruction: str) -> str:
    """A question with the instruction on a line of its own."""
    return f"{question}\n{instruction}"


def gsm8k_gold(solution: str) -> str:
    """The number after the last "####" of a reference solution, without thousands separators."""
    return solution.rpartition(GSM8K_MARKER)[2].strip().replace(",", "")


def final_answer(completion: str) -> str:
    r"""The part of a completion to grade: the line after its last "####", or its end from the last boxed answer on,
    whichever comes last; without either its last 2,000 characters.

    math-verify looks for the answer there: in `\boxed{}` first, then after "answer", then the last number.
    """
    end = completion[-GRADED_CHARACTERS:]
    # The last one: an answer that is corrected later counts as corrected.
    _, marker, after = end.rpartition(GSM8K_MARKER)
    if marker and BOXED not in after:
        return after.strip().partition("\n")[0]
    return last_boxes(end)


def same_answer(gold: str, answer: str) -> bool:
    """Whether math-verify finds in `answer` an expression equal to `gold`: `$18`, `18.0`, `36/2` equal 18.

    An answer that takes longer than `GRADING_SECONDS` to compare is wrong. The clock is `signal.alarm`, which only the
    main thread may set: in any other thread there is no limit, so grade untrusted completions in the main thread.
    """
    try:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    except ModuleNotFoundError as error:
        raise missing_extra("math_verify") from error
    seconds = GRADING_SECONDS if threading.current_thread() is threading.main_thread() else 0  # 0 sets no clock
    # Priority 0 comes first: a boxed answer stands before any other number.
    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    expected, found = (parse(text, targets, parsing_timeout=seconds) for text in (gold, answer))
    return verify(expected, found, timeout_seconds=seconds)


def _check_gsm8k(row: Row, where: str) -> None:
    answer = row["answer"]
    if not isinstance(answer, str) or GSM8K_MARKER not in answer or not gsm8k_gold(answer):
        got = repr(answer[-60:]) if isinstance(answer, str) else f"{type(answer).__name__} {answer!r:.60}"
        raise ValueError(f"{where}: expected an answer that ends with '#### <number>'; got {got}")
