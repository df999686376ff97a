"""Splits a rollout into batches of the learner: width in columns, passes and minibatches, metrics.

A rollout has `max_new_tokens` columns per row, and the learner would spend time on padding. So it runs over the columns
that the longest response needs, rounded up to one of a few widths; each width is compiled when it is first needed:

    max_new_tokens 256, 4 widths      64, 128, 192, 256         longest response 97 tokens ─► 128
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from smd_jax.devices.sharding import shard_batch
from smd_jax.learner.state import Metrics, TrainState
from smd_jax.message.trajectory import Trajectory
from smd_jax.metrics import SAMPLER_LEARNER_METRICS
from smd_jax.train.loop_config import LoopConfig

# Smallest distance between two widths: compiling one more program takes longer than fewer columns ever save.
LEAST_STEP = 32


def response_widths(max_new_tokens: int, sizes: int, ways: int = 1) -> tuple[int, ...]:
    """At most `sizes` widths in equal steps of at least `LEAST_STEP`, ascending; the last is `max_new_tokens`.

    Where that width and its prompt divide over `ways` devices, the others do, too: each is rounded up until it differs
    from the last one by a multiple of `ways`.
    """
    count = max(min(sizes, max_new_tokens // max(LEAST_STEP, ways)), 1)
    equal = (-(-max_new_tokens * number // count) for number in range(1, count + 1))
    return tuple(width + (max_new_tokens - width) % ways for width in equal)


def shortened(trajectory: Trajectory, widths: tuple[int, ...]) -> Trajectory:
    """The rollout at the smallest of these widths that holds its longest response.

    Reads the values, so it cannot run under jit.

    Args:
      widths: ascending; the last holds every response.
    """
    longest = int(jnp.max(trajectory.columns_after_prompt()))
    width = next(width for width in widths if width >= longest)
    return trajectory if width == widths[-1] else _first_columns(trajectory, width)


# One program per width instead of one per field.
@partial(jax.jit, static_argnums=1)
def _first_columns(trajectory: Trajectory, width: int) -> Trajectory:
    return trajectory.first_columns(width)


def minibatches(
    batch: Any, state: TrainState, config: LoopConfig, mesh: Mesh, counted_rows: np.ndarray | None = None
) -> Iterator[Any]:
    """The minibatches of one rollout, in `num_iterations` passes; each has whole groups.

    Args:
      batch: a pytree with equally many contiguous rows of every group: all its completions, or one pair.
      state: before the first step of this rollout. The order of a pass depends only on its key and step.
      counted_rows: `[rows]`, true for rows that count; None: all.
    """
    # Row numbers, one line per group.
    groups = np.arange(len(jax.tree.leaves(batch)[0])).reshape(config.prompts_per_step, -1)
    # Groups are never split, so a group counts if any of its rows does.
    counted_groups = None if counted_rows is None else np.any(counted_rows[groups], axis=1)
    # Read now: the first step donates the state's buffers.
    seed = [*np.asarray(jax.random.key_data(state.key)).ravel().tolist(), int(state.step)]
    for number in range(config.num_iterations):
        # The first pass keeps the order of the rollout, whose prompts are already shuffled.
        order = np.arange(len(groups))
        if number > 0:
            order = np.random.default_rng([*seed, number]).permutation(len(groups))
            if counted_groups is not None:
                # Groups that count come first, so that every minibatch has its share of them. False sorts before True,
                # and a stable sort keeps the random order among them.
                order = order[np.argsort(~counted_groups[order], kind="stable")]
        for first in range(config.minibatches):
            rows = groups[order[first :: config.minibatches]].reshape(-1)
            # A single minibatch keeps its order: another one would only change rounding.
            yield shard_batch(batch if config.minibatches == 1 else _take_rows(batch, jnp.asarray(rows)), mesh)


# One program per shape instead of one per field: a small model would wait for dispatch longer than for its update.
@jax.jit
def _take_rows(batch: Any, rows: jax.Array) -> Any:
    return jax.tree.map(lambda x: x[rows], batch)


def over_steps(steps: Sequence[Metrics], before: Metrics) -> Metrics:
    """The metrics of a rollout from those of its optimizer steps; empty without any step.

    Args:
      before: SAMPLER_LEARNER_METRICS of the whole rollout before the first step. They replace the steps' own. If it is
        empty, those of the first step are taken, which must have seen the whole rollout.

    Returns:
      Minima and maxima of correction weights over the steps; the difference of evictions at the first step, before the
      gate moves; means over the steps of everything else.
    """
    return _of_steps(steps) | before if steps else {}


@jax.jit
def _of_steps(steps: Sequence[Metrics]) -> Metrics:
    of_first_step = (*SAMPLER_LEARNER_METRICS, "evictions/logp_difference/max")
    reductions: dict[str, Callable[[Array], Array]] = dict.fromkeys(of_first_step, lambda values: values[0])
    reductions |= {"rollout_corr/rollout_is_min": jnp.min, "rollout_corr/rollout_is_max": jnp.max}
    stacked = jax.tree.map(lambda *values: jnp.stack(values), *steps)
    return {name: reductions.get(name, jnp.mean)(values) for name, values in stacked.items()}
