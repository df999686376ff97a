"""One rollout ahead of the update: while the learner takes its steps on rollout n, rollout n + 1 is drawn beside it.

    parameters    θ0 ── update 0 ──► θ1 ── update 1 ──► θ2
    rollout       0: θ0 (before)     1: θ0              2: θ1        drawn with the parameters before the last update

What a rollout is drawn with stands in the state (`TrainState.behind`), so a restored state goes on bitwise: whether the
rollout was begun in a thread or is drawn when it is asked for makes no difference to it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from smd_jax.learner.state import Metrics, TrainState
from smd_jax.model.protocol import Params

# What the first optimizer step says of learner and sampler is, of a rollout that is one update old, its age.
STALENESS = {
    "staleness/ratio_min": "sampling/token_ratio/min",
    "staleness/ratio_mean": "sampling/token_ratio/mean",
    "staleness/ratio_max": "sampling/token_ratio/max",
    "staleness/kl": "mismatch_kl",
}

T = TypeVar("T")


def one_behind(state: TrainState) -> TrainState:
    """The state of a new run with rollouts ahead: its first rollout is drawn with the parameters as they are."""
    return state.replace(behind=copied(state.params))


def copied(params: Params) -> Params:
    """Parameters that stay when an update takes over the buffers of the others."""
    return jax.tree.map(jnp.copy, params)


def staleness_metrics(first_step: Metrics, index: int) -> Metrics:
    """How far the learner has moved since the rollout was drawn; from the metrics of its first optimizer step."""
    found = {name: first_step[source] for name, source in STALENESS.items()}
    return found | {"staleness/rollouts": jnp.float32(min(index, 1))}


class _Begun(NamedTuple, Generic[T]):
    index: int
    params: Params
    result: Future[T]


class Ahead(Generic[T]):
    """At most one rollout that is drawn in a thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._begun: _Begun[T] | None = None

    def begin(self, index: int, params: Params, draw: Callable[[], T]) -> None:
        """Begins rollout `index`, with these parameters."""
        self._begun = _Begun(index, params, self._pool.submit(draw))

    def wait(self) -> None:
        """Until the rollout that was begun, if one was, is over. What it raised is raised by `take`."""
        if self._begun is not None:
            wait([self._begun.result])

    def take(self, index: int, params: Params, draw: Callable[[], T]) -> T:
        """Rollout `index` with these parameters: the one that was begun, or else drawn now. Raises what that raised."""
        begun, self._begun = self._begun, None
        if begun is None:
            return draw()
        # Always waited for: nobody else may use the devices' memory and the reward functions meanwhile.
        drawn = begun.result.result()
        return drawn if begun.index == index and _same_buffers(begun.params, params) else draw()


def _same_buffers(left: Params, right: Params) -> bool:
    """Whether these are the very same arrays; another run of one loop has others."""

    def place(x: jax.Array) -> int:
        return x.addressable_data(0).unsafe_buffer_pointer()

    return [place(x) for x in jax.tree.leaves(left)] == [place(x) for x in jax.tree.leaves(right)]
