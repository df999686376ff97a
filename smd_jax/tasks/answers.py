r"""Reference answers as text, and the boxed answer that a completion ends with.

answer_texts(7)                                    ["7"]
answer_texts([4, "5"])                             ["4", "5"]       several right answers: one is enough
last_boxes(r"\boxed{4}. Wait: \boxed{3}")          r"\boxed{3}"
last_boxes(r"\boxed{4} and \boxed{3}")             both: they are one answer
"""

from __future__ import annotations

import re
from decimal import Decimal
from numbers import Real

BOXED = "\\boxed{"

# What joins two boxes to one answer: a comma or a word, in or between formulas, perhaps with the next variable's name.
_SPACE = r"(?:\s|\$|~|\\[\[\]()\s,;:!]|\\q?quad\b)*"
_WORD = r"(?:and|or|&|\\text\s*\{\s*,?\s*(?:and|or)?\s*,?\s*\})"
_NAME = r"(?:[A-Za-z]\w*(?:_\{\w+\})?" + _SPACE + "=)?"
_JOINT = re.compile(f"{_SPACE}(?:[,;]{_SPACE}{_WORD}?|{_WORD}){_SPACE}{_NAME}{_SPACE}")
_CLOSES_FORMULA = re.compile(r"\s*(?:\$\$?|\\\)|\\\])")


def answer_texts(answer: object) -> list[str]:
    """Every way to write a reference answer that counts as right; empty where there is none.

    Args:
      answer: a text, a number, or a list of them, of which one is enough. Where a decimal number is whole, 7.0, both
        "7.0" and "7" are right.

    Raises:
      ValueError: another type.
    """
    match answer:
        case None:
            return []
        case str():
            return [answer]
        case bool() | int():
            return [str(answer)]
        case float() | Decimal():
            return _decimal_texts(answer)
        case Real():
            return [str(answer)]
        case list() | tuple():
            return [text for one in answer for text in answer_texts(one)]
        case _:
            raise ValueError(
                f"expected an answer as text, a number or a list of them; got {type(answer).__name__} {answer!r:.80}"
            )


def last_boxes(text: str) -> str:
    r"""The text from its last boxed answer on: an answer that is corrected later counts as corrected.

    Boxes that a comma, "and" or "or" joins are one answer, such as the solutions of an equation. Text without a second
    `\boxed{…}` is returned as it is.
    """
    boxes = list(_boxes(text))
    first = len(boxes) - 1
    while first > 0 and _JOINT.fullmatch(text[boxes[first - 1][1] : boxes[first][0]]):
        first -= 1
    if first < 1:
        return text
    behind = text[boxes[first - 1][1] :]
    # The formula that the box before lies in closes here, and opens no other.
    return _CLOSES_FORMULA.sub("", behind, count=1) if _CLOSES_FORMULA.match(behind) else behind


def last_boxed(solution: str) -> str:
    r"""What the last `\boxed{…}` of a solution encloses, braces inside of it included.

    Raises:
      ValueError: there is none, or it never closes.
    """
    start = solution.rfind(BOXED)
    if start < 0:
        raise ValueError(f"expected a solution with its answer in \\boxed{{}}; got {solution[-60:]!r}")
    end = _end_of_box(solution, start)
    if end is None:
        raise ValueError(f"expected a \\boxed{{}} that closes; got {solution[start:][:60]!r}")
    return solution[start + len(BOXED) : end - 1]


def _boxes(text: str) -> list[tuple[int, int]]:
    """Begin and end of every box that closes; a box within a box is part of the outer one."""
    boxes = list[tuple[int, int]]()
    start = text.find(BOXED)
    while start >= 0:
        end = _end_of_box(text, start)
        if end is not None:
            boxes.append((start, end))
        start = text.find(BOXED, start + len(BOXED) if end is None else end)
    return boxes


def _end_of_box(text: str, start: int) -> int | None:
    """The place behind the brace that closes the box at `start`; None where none does."""
    depth = 0
    for place in range(start + len(BOXED) - 1, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if not depth:
            return place + 1
    return None


def _decimal_texts(number: float | Decimal) -> list[str]:
    """Without an exponent, which would read as a product with e."""
    exact = number if isinstance(number, Decimal) else Decimal(repr(number))
    if not exact.is_finite():
        return [str(number)]
    text = f"{exact:f}"
    whole = exact.to_integral_value()
    return [text] if whole != exact or text == f"{whole:f}" else [text, f"{whole:f}"]
