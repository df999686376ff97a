"""One rollout ahead: while the learner takes its steps on rollout n, a thread samples rollout n + 1.

    parameters    θ0 ── update 0 ──► θ1 ── update 1 ──► θ2
    rollout       0: θ0 (before)     1: θ0              2: θ1        sampled with the parameters before the last update

`TrainState.sampler_params` holds the parameters that sample the next rollout. So a restored state continues bitwise,
whether the rollout was begun in a thread or is sampled on demand.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import jax
import jax.numpy as jnp

from smd_jax.learner.state import Metrics, TrainState
from smd_jax.model.protocol import Params
from smd_jax.train.samples import Samples

# At the first optimizer step the ratio of the learner to the sampler measures the rollout's age of one update.
STALENESS = {
    "staleness/ratio_min": "sampling/token_ratio/min",
    "staleness/ratio_mean": "sampling/token_ratio/mean",
    "staleness/ratio_max": "sampling/token_ratio/max",
    "staleness/kl": "mismatch_kl",
}


def with_sampler_params(state: TrainState) -> TrainState:
    """Sets `sampler_params` for a new run with rollouts ahead: its own parameters sample the first rollout."""
    return state.replace(sampler_params=jax.tree.map(jnp.copy, state.params))  # the update donates its parameters


def staleness_metrics(first_step: Metrics, index: int) -> Metrics:
    """How far the learner has moved since the rollout was sampled, from the metrics of its first optimizer step."""
    ratios = {name: first_step[source] for name, source in STALENESS.items()}
    return ratios | {"staleness/rollouts": jnp.float32(min(index, 1))}


class RolloutAhead:
    """Samples at most one rollout in a thread.

    Args:
      sample: called in the thread with the parameters, the run's key and the number of the rollout. `take` calls the
        returned function, which may grade the rollout, in its own thread.
    """

    def __init__(self, sample: Callable[[Params, jax.Array, int], Callable[[], Samples]]) -> None:
        self._sample = sample
        self._pool = ThreadPoolExecutor(1)
        # Number of the rollout, and the parameters that sample it.
        self._begun: tuple[int, Params, Future[Callable[[], Samples]]] | None = None

    def begin(self, index: int, params: Params, key: jax.Array) -> None:
        """Begins to sample rollout `index`."""
        self._begun = index, params, self._pool.submit(self._sample, params, jnp.copy(key), index)

    def wait(self) -> None:
        """Waits for the rollout in the thread; its error is raised by `take`."""
        if self._begun is not None:
            wait([self._begun[2]])

    def take(self, index: int, params: Params) -> Samples | None:
        """The rollout that was begun with this number and these parameters; None if there is none.

        Raises the error of a failed rollout.
        """
        begun, self._begun = self._begun, None
        if begun is None:
            return None
        number, sampled_with, result = begun
        # Waits in any case: two rollouts at once would share the devices' memory and the reward functions.
        finish = result.result()
        return finish() if number == index and _same_buffers(sampled_with, params) else None


def _same_buffers(left: Params, right: Params) -> bool:
    """Whether these are the same arrays in memory; another run of the same loop has different ones."""

    left_at, right_at = ([x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)] for tree in (left, right))
    return left_at == right_at
