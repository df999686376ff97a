"""What is said of a fault."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple


class Outcome(NamedTuple):
    """Of one fault. Attributes: as the columns of the rows, of which `lost` is the steps lost."""

    survived: bool
    lost: int = 0
    unreadable: int = 0


# Faults of one kind, done to runs in a folder of their own.
Fault = Callable[[Path, random.Random], Iterator[Outcome]]


def refusal(action: Callable[[], Any], kind: type[Exception]) -> str:
    """The message with which an action is refused; empty where it is not."""
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            action()
    except kind as error:
        return str(error)
    return ""
