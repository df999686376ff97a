"""A rollout is learnt from in several passes of several minibatches: their order, and their metrics as one."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from smd_jax.learner.state import Metrics
from smd_jax.metrics import SAMPLER_LEARNER_METRICS


def order_of_pass(
    groups: int, number: int, seed: Sequence[int], counted_groups: np.ndarray | None = None
) -> np.ndarray:
    """The order of the groups in one pass over a rollout; minibatch i of n takes places i, i + n, ….

    Args:
      number: number of the pass. The first keeps the order of the rollout, whose prompts come at random.
      seed: what the order depends on, with the number.
      counted_groups: `[groups]`; those that count come first, so that every minibatch has its share of them.
    """
    if number == 0:
        return np.arange(groups)
    # False sorts before True, and a stable sort keeps the random order among those that count.
    order = np.random.default_rng([*seed, number]).permutation(groups)
    return order if counted_groups is None else order[np.argsort(~counted_groups[order], kind="stable")]


def over_steps(steps: Sequence[Metrics], before: Metrics) -> Metrics:
    """The metrics of a rollout from those of its optimizer steps; none without any step.

    Args:
      before: SAMPLER_LEARNER_METRICS of the whole rollout before the first step, in place of the steps' own. Where it
        is empty they are those of the first step, which must have seen the whole rollout.

    Returns:
      Smallest and largest weights of a correction as such; means over the steps of everything else.
    """
    if not steps:
        return {}
    first = {name: value for name, value in steps[0].items() if name in SAMPLER_LEARNER_METRICS}
    over = {name: _of_steps(name, [metrics[name] for metrics in steps]) for name in steps[0].keys() - first.keys()}
    return over | (before or first)


def _of_steps(name: str, values: list[jax.Array]) -> jax.Array:
    # A mean of extremes would be no extreme.
    reductions = {"rollout_corr/rollout_is_min": jnp.min, "rollout_corr/rollout_is_max": jnp.max}
    return values[0] if len(values) == 1 else reductions.get(name, jnp.mean)(jnp.stack(values))
