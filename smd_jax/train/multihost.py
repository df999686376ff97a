"""What processes tell each other of a rollout: each sampled and graded its own rows, and all must know of all.

Completions and rewards of the whole batch are then in every process, so that statistics of groups, advantages and the
choice of groups are the same everywhere. Tokens and masks stay on the devices of their process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from smd_jax.devices.process_rows import Feeders
from smd_jax.devices.processes import all_or_none, gather_json
from smd_jax.message.trajectory import Trajectory
from smd_jax.tasks.graded import Failure, Graded


class Told(NamedTuple):
    """What is said of rows.

    Attributes:
      completions: their texts. graded: their rewards.
      took: numbers about how they were sampled. Of times, named `time/…`, the longest of all processes is told, for
        which the others wait; of the rest the mean.
    """

    completions: list[str]
    graded: Graded
    took: dict[str, float]


def shared(who: Feeders, sample: Callable[[], tuple[Trajectory, Told]]) -> tuple[Trajectory, Told]:
    """What `sample` gives for the rows of this process, with what is told of the rows of all.

    Raises:
      OtherProcessError: `sample` raised something in another process.
    """
    if jax.process_count() == 1:
        return sample()
    with all_or_none():
        trajectory, told = sample()
    return trajectory, _told(who.of_teams(gather_json(_said(told))))


def _said(told: Told) -> dict[str, Any]:
    graded = told.graded
    return {
        "completions": told.completions,
        # Python's floats hold every float32, and JSON writes them so that they come back as they were.
        "rewards": graded.rewards.tolist(),
        "parts": {name: part.tolist() for name, part in graded.parts.items()},
        "failures": [list(failure) for failure in graded.failures],
        "took": told.took,
    }


def _told(said: list[dict[str, Any]]) -> Told:
    rows = len(said[0]["rewards"])
    failures = [Failure(team * rows + row, *rest) for team, part in enumerate(said) for row, *rest in part["failures"]]
    graded = Graded(
        np.array([reward for part in said for reward in part["rewards"]], np.float32),
        {name: np.array([x for part in said for x in part["parts"][name]], np.float32) for name in said[0]["parts"]},
        tuple(failures),
    )
    took = {name: _of_all(name, [part["took"][name] for part in said]) for name in said[0]["took"]}
    return Told([text for part in said for text in part["completions"]], graded, took)


def _of_all(name: str, numbers: list[float]) -> float:
    return max(numbers) if name.startswith("time/") else float(np.mean(numbers))
