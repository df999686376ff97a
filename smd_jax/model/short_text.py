"""Shortens values and lists in error messages: a downloaded file may hold texts of any length."""

from __future__ import annotations

_SHOWN = 80
_WORDS = 8


def shown(value: object) -> str:
    """The representation of a value, cut after 80 characters."""
    # A text is cut before it is quoted, so that a text of any length costs nothing.
    text = repr(value[: _SHOWN + 1]) if isinstance(value, str | bytes) else repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def some(words: list[str]) -> str:
    """The first words of a list, each cut after 80 characters, and how many more there are."""
    cut = [word if len(word) <= _SHOWN else word[: _SHOWN - 1] + "…" for word in words[:_WORDS]]
    more = f", and {len(words) - _WORDS} more" if len(words) > _WORDS else ""
    return ", ".join(cut) + more
