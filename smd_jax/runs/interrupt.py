"""An error that ends a run must not take along what the run has learnt: it is saved before the error goes on.

rollout 7 ─► update ─► rollout 8 ─ error ─► checkpoint 8 ─► the same error, with a note on what was saved
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import jax


class Rescue:
    """Around the rollouts of a run.

    Args:
      save: saves what was reached and says what it did, in one line. An error that leaves the rollouts gets it as a
        note, which Python prints below the message.
    """

    def __init__(self, save: Callable[[], str]) -> None:
        self._save = save

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Whatever went wrong; but what ends the interpreter is no error, and must not wait for a disk.
        if isinstance(error, Exception):
            error.add_note(self._save())


def with_notes(error: BaseException) -> str:
    """The message of an error, and its notes below it."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def is_whole(state: Any) -> bool:
    """Whether all arrays are still there. An update takes over the buffers of the state that it is given: if it fails,
    that state is gone."""
    return not any(x.is_deleted() for x in jax.tree.leaves(state) if isinstance(x, jax.Array))
