"""The day that a chat template reads by `strftime_now`, as a value: prompts of one run never depend on the date.

A template of Llama 3 or Granite writes today's date into every prompt. A run that is resumed on another day, or goes
over midnight, would sample from other prompts. So each call becomes the text that it gives on one day.
"""

from __future__ import annotations

import datetime
import functools
import re

NAME = "strftime_now"

_CALL = re.compile(rf"\b{NAME}\s*\(\s*(?:format\s*=\s*)?(?P<quote>['\"])(?P<format>[^'\"\\]*)(?P=quote)\s*\)")
_ANY_CALL = re.compile(rf"\b{NAME}\s*\(")


def reads_day(template: str) -> bool:
    """Whether a chat template asks for the date."""
    return _ANY_CALL.search(template) is not None


@functools.cache
def first_day() -> datetime.date:
    """The day on which this process first asked."""
    return datetime.date.today()


@functools.lru_cache(maxsize=16)
def with_day(template: str, day: datetime.date) -> str:
    """The template with the text of this day in place of every `strftime_now("…")`; hours and minutes are 0.

    Raises:
      ValueError: a format that is no plain text.
    """
    midnight = datetime.datetime.combine(day, datetime.time())
    fixed = _CALL.sub(lambda call: repr(midnight.strftime(call["format"])), template)
    if reads_day(fixed):
        raise ValueError(f"expected a chat template that calls {NAME} with a format in quotes; got another call")
    return fixed


def day_of(value: object) -> datetime.date:
    """A date, or a text such as "2026-01-31".

    Raises:
      ValueError: anything else.
    """
    if isinstance(value, datetime.date):
        return value
    try:
        return datetime.date.fromisoformat(str(value))
    except ValueError as error:
        raise ValueError(f"expected {NAME} as a day such as 2026-01-31; got {value!r:.40}") from error
