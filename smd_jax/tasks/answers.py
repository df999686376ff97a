r"""Reference answers as text, and the last boxed answer of a completion.

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

# Joins two boxes into one answer: a comma or a word, in or between formulas, perhaps with the next variable's name.
_SPACE = r"(?:\s|\$|~|\\[\[\]()\s,;:!]|\\q?quad\b)*"
_WORD = r"(?:and|or|&|\\text\s*\{\s*,?\s*(?:and|or)?\s*,?\s*\})"
_NAME = r"(?:[A-Za-z]\w*(?:_\{\w+\})?" + _SPACE + "=)?"
_JOINT = re.compile(f"{_SPACE}(?:[,;]{_SPACE}{_WORD}?|{_WORD}){_SPACE}{_NAME}{_SPACE}")
_CLOSES_FORMULA = re.compile(r"\s*(?:\$\$?|\\\)|\\\])")


def answer_texts(answer: object) -> list[str]:
    """Lists every spelling of a reference answer that counts as right; empty for None.

    Args:
      answer: a text, a number, or a list of them, of which one is enough. A whole decimal number such as 7.0 is also
        right as "7".

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
    r"""Cuts a text to start at its last boxed answer, because the last correction counts.

    Boxes joined by a comma, "and" or "or" are one answer, such as the solutions of an equation. A text with fewer than
    two boxes is returned unchanged.
    """
    boxes = list(_boxes(text))
    first = len(boxes) - 1
    while first > 0 and _JOINT.fullmatch(text[boxes[first - 1][1] : boxes[first][0]]):
        first -= 1
    if first < 1:
        return text
    behind = text[boxes[first - 1][1] :]
    # Removes the end of the formula that holds the box before.
    return _CLOSES_FORMULA.sub("", behind, count=1) if _CLOSES_FORMULA.match(behind) else behind


def last_boxed(solution: str) -> str:
    r"""The content of the last `\boxed{…}` of a solution, which may hold braces.

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
    """Start and end of every closed box, without boxes inside of others."""
    boxes = list[tuple[int, int]]()
    start = text.find(BOXED)
    while start >= 0:
        end = _end_of_box(text, start)
        if end is not None:
            boxes.append((start, end))
        start = text.find(BOXED, start + len(BOXED) if end is None else end)
    return boxes


def _end_of_box(text: str, start: int) -> int | None:
    """The position after the brace that closes the box at `start`, or None."""
    depth = 0
    for place in range(start + len(BOXED) - 1, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if not depth:
            return place + 1
    return None


def _decimal_texts(number: float | Decimal) -> list[str]:
    """Writes a number without an exponent, which would read as a product with e."""
    exact = number if isinstance(number, Decimal) else Decimal(repr(number))
    if not exact.is_finite():
        return [str(number)]
    text = f"{exact:f}"
    whole = exact.to_integral_value()
    return [text] if whole != exact or text == f"{whole:f}" else [text, f"{whole:f}"]
