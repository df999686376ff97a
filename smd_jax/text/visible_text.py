"""Makes text of a model safe to print: control characters are shown instead of executed."""

from __future__ import annotations

import unicodedata

# Emoji and scripts such as Persian need these two inside of words.
JOINERS = {"\u200c", "\u200d"}


def visible(text: str) -> str:
    """Replaces every control or format character except newlines by visible text.

    An escape sequence becomes `␛[31m`, so that a completion cannot colour, clear or retitle a terminal. Characters that
    change the direction of writing, and lone surrogates, become `\\u202e` and the like.
    """
    return "".join(_visible(character) for character in text)


def one_line(text: str, limit: int = 500) -> str:
    """`visible` text in one line of at most `limit` characters; newlines become ⏎."""
    line = visible(text).replace("\n", "⏎")
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _visible(character: str) -> str:
    if character == "\n" or character in JOINERS:
        return character
    if character == "\t":
        return "    "
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)  # the pictures of control characters: ␛ for escape
    # Control, format, surrogate, and the two separators that break lines.
    if code == 0x7F or unicodedata.category(character) in {"Cc", "Cf", "Cs", "Zl", "Zp"}:
        return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return character
