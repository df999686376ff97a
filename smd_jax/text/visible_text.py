"""Texts of a model on a terminal: what would move the cursor, hide or reorder text is shown in place of done."""

from __future__ import annotations

import unicodedata

# Emoji and scripts such as Persian need these two inside of words, and they move nothing.
JOINERS = {"\u200c", "\u200d"}


def visible(text: str) -> str:
    """The text with its newlines, and every other control or format character as text.

    An escape sequence becomes what it is made of, `␛[31m`: nothing that a model writes can colour, clear or retitle a
    terminal. Characters that turn the direction of writing or stand for half of another one become `\\u202e`.
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
