"""Where a run stands, as all of its processes see it: they stop together, and save together."""

from __future__ import annotations

import signal
from typing import NamedTuple

from smd_jax.devices.processes import gather_json
from smd_jax.runs.run_log import Journal, NoJournal
from smd_jax.runs.stop import StopSignals


class RunStanding(NamedTuple):
    """What every process of a run does next.

    Attributes:
      stopped: the signal that one of them was sent, None without any.
      has_ended: whether the objective's patience is at its end.
      may_end: whether it is at its end after one more value without a gain.
      is_best: whether the newest rollout has the best value of the objective.
      start_is_evaluated: whether the journal has an evaluation from before the first rollout.
    """

    stopped: signal.Signals | None
    has_ended: bool
    may_end: bool
    is_best: bool
    start_is_evaluated: bool


def standing(stop: StopSignals, journal: Journal | NoJournal, done: int) -> RunStanding:
    """After `done` rollouts. The journal of the first process decides; a signal may come to any of them. All processes
    must call it."""
    own = (stop.received, journal.has_ended, journal.may_end, journal.is_best(done), journal.start_is_evaluated)
    of_all = gather_json(own)
    received = next((number for number, *_ in of_all if number is not None), None)
    return RunStanding(None if received is None else signal.Signals(received), *of_all[0][1:])
