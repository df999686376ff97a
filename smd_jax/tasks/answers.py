r"""Reference answers as text, and the last boxed answer of a text.

answer_texts(7)                                    ["7"]
answer_texts([4, "5"])                             ["4", "5"]       several right answers: one is enough
last_box(r"\boxed{4}. Wait: \boxed{3}.")           "3"
"""

from __future__ import annotations

from decimal import Decimal
from numbers import Real

BOXED = "\\boxed{"


def answer_texts(answer: object) -> list[str]:
    """Lists every spelling of a reference answer that counts as right; empty for None.

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
        case float() | Decimal():
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
