"""The progress of a run as all of its processes see it: they stop together and save together."""

from __future__ import annotations

import signal
from typing import NamedTuple

from smd_jax.devices.processes import gather_json
from smd_jax.runs.run_log import RunLog
from smd_jax.runs.stop import StopSignals


class ProgressState(NamedTuple):
    """Decides what every process of a run does next.

    Attributes:
      stopped: the signal that one of the processes received; None without any.
      is_best: whether the newest rollout has the best value of the objective.
      start_is_evaluated: whether the run log has an evaluation from before the first rollout.
    """

    stopped: signal.Signals | None
    is_best: bool
    start_is_evaluated: bool


def gather_progress(stop: StopSignals, log: RunLog, done: int) -> ProgressState:
    """The progress after `done` rollouts; all processes must call it.

    The run log of the first process decides. A signal may reach any process.
    """
    own = (stop.received, log.is_best(done), log.start_is_evaluated)
    gathered = gather_json(own)
    received = next((number for number, *_ in gathered if number is not None), None)
    return ProgressState(None if received is None else signal.Signals(received), *gathered[0][1:])
