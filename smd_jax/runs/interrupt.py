"""Saves what a run has reached before an error ends it.

rollout 7 ─► update ─► rollout 8 ─ error ─► checkpoint 8 ─► the same error, with a note on what was saved
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import jax


class SaveOnError:
    """A context around the rollouts of a run.

    Args:
      save: saves what was reached and describes it in one line, which becomes a note of the error.
    """

    def __init__(self, save: Callable[[], str]) -> None:
        self._save = save

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # An exit of the interpreter is no Exception, and must not wait for a disk.
        if isinstance(error, Exception):
            error.add_note(self._save())


def with_notes(error: BaseException) -> str:
    """The message of an error, with its notes below it."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def is_whole(state: Any) -> bool:
    """Whether all arrays exist. An update that fails has already donated the buffers of its state."""
    return not any(x.is_deleted() for x in jax.tree.leaves(state) if isinstance(x, jax.Array))
