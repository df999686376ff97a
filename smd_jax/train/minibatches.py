"""Splits a rollout into batches of the learner: width in columns, passes and minibatches, metrics.

A rollout has `max_new_tokens` columns per row, and the learner would spend time on padding. So it runs over the columns
that the longest response needs, rounded up to one of a few widths; each width is compiled when it is first needed:

    max_new_tokens 256, 4 widths      64, 128, 192, 256         longest response 97 tokens ─► 128
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from smd_jax.devices.sharding import shard_batch
from smd_jax.learner.state import Metrics, TrainState
from smd_jax.message.trajectory import Trajectory
from smd_jax.metrics import CORRECTION_METRICS, SAMPLER_LEARNER_METRICS
from smd_jax.train.loop_config import LoopConfig

# Means over counted tokens, or over responses with any.
TOKEN_MEANS = frozenset(CORRECTION_METRICS) | {
    *("entropy", "kl", "cispo_clip_ratio", "sapo_gate_mean"),
    *("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"),
    *("val/clipfrac_avg", "critic/values/mean", "critic/returns/mean", "critic/vf_explained_var"),
}
# Of every step, whether it learns or not.
STEP_MEANS = frozenset({"learning_rate", "update/skipped", "update/padding", "update/shared"})

# Smallest distance between two widths: compiling one more program takes longer than fewer columns ever save.
LEAST_STEP = 32


def response_widths(max_new_tokens: int, sizes: int, ways: int = 1) -> tuple[int, ...]:
    """At most `sizes` widths in equal steps of at least `LEAST_STEP`, ascending; the last is `max_new_tokens`.

    Each differs from the last one by a multiple of `ways`, so that all of them divide over `ways` devices, prompt
    included, if the last one does.
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
_first_columns = jax.jit(Trajectory.first_columns, static_argnums=1)


def minibatches(
    batch: Any, state: TrainState, config: LoopConfig, mesh: Mesh, counted_rows: np.ndarray | None = None
) -> Iterator[tuple[Any, bool]]:
    """The minibatches of one rollout, in `num_iterations` passes, each with whether any of its rows counts. Groups stay
    whole.

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
            chosen = order[first :: config.minibatches]
            rows = jnp.asarray(groups[chosen].reshape(-1))
            # A single minibatch keeps its order: another one would only change rounding.
            part = shard_batch(batch if config.minibatches == 1 else _take_rows(batch, rows), mesh)
            yield part, counted_groups is None or bool(counted_groups[chosen].any())


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
      For TOKEN_MEANS the mean over the counted tokens of all steps. Minima and maxima of correction weights over the
      steps with tokens. The difference of evictions at the first step, before the gate moves. For STEP_MEANS the mean
      over all steps, for everything else over the steps with something to learn from, in DPO weighted by their pairs:
      the others have loss and gradient 0. STEP_WEIGHTS are removed.
    """
    return _of_steps(steps) | before if steps else {}


@jax.jit
def _of_steps(steps: Sequence[Metrics]) -> Metrics:
    stacked = jax.tree.map(lambda *values: jnp.stack(values), *steps)
    ones = jnp.ones(len(steps))
    # A custom update may return no weights.
    tokens, learns = (stacked.pop(name, ones) for name in ("update/tokens", "update/learns"))
    counts = (tokens > 0) | ~(tokens > 0).any()

    def reduced(name: str, values: Array) -> Array:
        if name in (*SAMPLER_LEARNER_METRICS, "evictions/logp_difference/max"):
            return values[0]
        if name == "rollout_corr/rollout_is_min":
            return values.min(where=counts, initial=jnp.inf)
        if name == "rollout_corr/rollout_is_max":
            return values.max(where=counts, initial=-jnp.inf)
        return _mean(values, tokens if name in TOKEN_MEANS else ones if name in STEP_MEANS else learns)

    return {name: reduced(name, values) for name, values in stacked.items()}


def _mean(values: Array, weights: Float[Array, " steps"]) -> Array:
    """The weighted mean; the plain mean if all weights are 0."""
    weights = jnp.where(weights.any(), weights, 1.0)
    # Shares first, so that a single step keeps its value bitwise. A step that does not count may hold NaN.
    return jnp.where(weights > 0, values * (weights / weights.sum()), 0.0).sum()
