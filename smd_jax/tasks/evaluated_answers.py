"""Replaces answers that a verifier of reasoning-gym would execute.

Some verifiers call `eval` on completions, others sympy's `parse_expr`, which calls `eval`. An answer such as
`__import__("os").system(...)` would run with the user's rights. So an answer that is neither a literal nor arithmetic
becomes "?", which no verifier can read, and gets the reward of an unreadable answer.

`tests/house/test_security.py` compares both lists with the sources of the installed package.
"""

from __future__ import annotations

import ast
import re

# Verifiers that call `eval` on answers written as Python lists.
LITERALS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
# Verifiers that call `sympy.parse_expr`.
EXPRESSIONS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
UNREADABLE = "?"

# Characters of an expression: no quotes, brackets or colons.
_CHARACTERS = re.compile(r"[\w\s+\-*/^().,!=]*")
_FUNCTIONS = {
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "sec", "csc", "cot"),
    *("exp", "log", "ln", "sqrt", "Abs", "abs", "factorial", "Rational", "erf"),
}
_CALLS = re.compile(r"([^\W\d]\w*)\s*\(")
# A call of something that is no name; an attribute; a name with two underscores.
_OTHER_CODE = re.compile(r"\)\s*\(|\.\s*[^\W\d]|__")


def readable_answer(dataset: str, answer: str) -> str:
    """The answer, or "?" if the verifier of this dataset might run code in it."""
    if dataset in LITERALS and not _runs_nothing(answer):
        return UNREADABLE
    if dataset in EXPRESSIONS and not _is_arithmetic(answer):
        return UNREADABLE
    return answer


def _runs_nothing(text: str) -> bool:
    try:
        ast.literal_eval(text.strip())
    except (SyntaxError, RecursionError, MemoryError):
        return True  # `eval` raises, too
    except (ValueError, TypeError):  # Python that is no literal
        return False
    return True


def _is_arithmetic(text: str) -> bool:
    if not _CHARACTERS.fullmatch(text) or _OTHER_CODE.search(text):
        return False
    return all(name in _FUNCTIONS for name in _CALLS.findall(text))
