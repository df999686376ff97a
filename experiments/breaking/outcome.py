"""The outcome of an injected fault."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple


class Outcome(NamedTuple):
    """The outcome of one fault.

    Attributes:
      survived: whether the run ended like an unbroken one, or was refused as expected.
      lost: finished rollouts that must be repeated.
      unreadable: checkpoints that do not load after the fault.
    """

    survived: bool
    lost: int = 0
    unreadable: int = 0


# Injects faults of one kind into runs in the given folder.
Fault = Callable[[Path, random.Random], Iterator[Outcome]]


def refusal(action: Callable[[], Any], kind: type[Exception]) -> str:
    """Runs `action` and returns the message of the `kind` that it raises; empty if it raises nothing."""
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            action()
    except kind as error:
        return str(error)
    return ""
