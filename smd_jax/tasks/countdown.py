"""Countdown: reach a target from given numbers by + - * /, every number used exactly once.

    numbers [44, 19, 35], target 98        "… <answer>44 + 19 + 35</answer>"  ─►  1.0

A completion is never executed: its arithmetic is parsed, checked node by node, and computed in fractions.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from smd_jax.tasks.reward_functions import ANSWER
from smd_jax.tasks.task import Completion, Row, completion_text

ARITHMETIC = re.compile(r"[0-9+\-*/() ]{1,200}")  # no solution has more characters

# Characters that models write instead of the given operators.
TYPOGRAPHY = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "[": "(", "]": ")", "\n": " "})

OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def countdown_row(row: Row) -> Row:
    """The task's row of `{"nums": list[int], "target": int}`, the columns of Jiayi-Pan/Countdown-Tasks-3to4."""
    if not isinstance(row["nums"], list) or not all(isinstance(x, int) for x in (*row["nums"], row["target"])):
        raise ValueError(
            f"expected nums as a list of whole numbers and target as one; got {row['nums']!r:.80} and "
            f"{row['target']!r:.80}"
        )
    numbers = ", ".join(map(str, row["nums"]))
    prompt = (
        f"Using the numbers {numbers}, write an arithmetic expression that equals {row['target']}. You may use + - * / "
        "and parentheses, and must use every number exactly once. Think step by step, then give the expression alone "
        "in <answer> </answer>, for example <answer>(1 + 2) * 3</answer>."
    )
    return {**row, "prompt": prompt}


def countdown_answer(
    completions: Sequence[Completion], nums: Sequence[Sequence[int]], target: Sequence[int], **columns: Sequence[Any]
) -> list[float]:
    """1.0 where the last `<answer>` of a completion reaches the row's "target" with its "nums", else 0.0."""
    rows = zip(completions, nums, target, strict=True)
    return [float(reaches(last_answer(completion_text(text)), given, wanted)) for text, given, wanted in rows]


def last_answer(completion: str) -> str:
    """The content of the last pair of <answer> tags, without a right-hand side; empty without tags."""
    answers = ANSWER.findall(completion)
    return answers[-1].partition("=")[0].strip() if answers else ""


def reaches(expression: str, numbers: Sequence[int], target: int) -> bool:
    """Whether the expression uses each of the numbers exactly once and equals the target exactly.

    It may hold whole numbers, the four binary operators and parentheses; no signs, no powers.
    """
    expression = expression.translate(TYPOGRAPHY)
    if not ARITHMETIC.fullmatch(expression):
        return False
    used = list[int]()
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body, used)
    except (SyntaxError, ZeroDivisionError):
        return False
    return value == target and sorted(used) == sorted(numbers)


def _value(node: ast.expr, used: list[int]) -> Fraction:
    """Computes an expression and collects its numbers; raises SyntaxError for what the game does not allow."""
    match node:
        case ast.Constant(value=int() as value):
            used.append(value)
            return Fraction(value)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in OPERATORS:
            return OPERATORS[type(operation)](_value(left, used), _value(right, used))
        case _:
            raise SyntaxError
