"""Importance weights of a dense learner on what a sampler with a small cache drew: how many responses they leave.

xi = p_learner / p_sampler of a token; the weight of a response after n tokens is the product of its first n. Under the
sampler the mean of either is 1, as long as the sampler can draw what the learner can.

In float64 and from logarithms: nothing is cut, as the library's metrics cut a logarithm at 20, because weights of long
responses go beyond that.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import smd_jax as smd
from smd_jax.learner.config import Visibility
from study.files import Row, number

OUTSIDE = (0.5, 2.0)  # the bounds that corrections put around a token's ratio


@functools.partial(jax.jit, static_argnums=(0, 3))
def _log_ratio(model: smd.Decoder, params: Any, part: smd.Trajectory, visibility: Visibility) -> jax.Array:
    mask = part.mask if visibility == "shadow" else part.dense_mask()
    return smd.replay(model, params, part, mask).logprobs - part.logprobs


def log_ratios(
    model: smd.Decoder, params: Any, trajectory: smd.Trajectory, visibility: Visibility, at_once: int
) -> np.ndarray:
    """`[responses, tokens]` log p_learner - log p_sampler; meaningless where there is no token.

    Args:
      visibility: the learner's, "dense" or "shadow".
      at_once: responses that are read together, a divisor of their number.
    """
    found = []
    for first in range(0, len(trajectory.tokens), at_once):
        part = jax.tree.map(lambda leaf, at=first: leaf[at : at + at_once], trajectory)
        found.append(np.asarray(_log_ratio(model, params, part, visibility)))
    return np.concatenate(found)


def effective_sample_size(log_weights: np.ndarray) -> float:
    """(mean w)^2 / mean w^2: as many equal weights, as a share of them, would do as well. At least 1 over their number.

    Args:
      log_weights: logarithms of the weights, of any shape with one or more.
    """
    # A common factor cancels: the largest weight becomes 1, and nothing overflows.
    weights = np.exp(np.asarray(log_weights, np.float64) - np.max(log_weights))
    return float(weights.mean() ** 2 / (weights**2).mean())


def chi_square(log_weights: np.ndarray) -> float:
    """mean w^2 - 1: the chi-square divergence of the learner from the sampler, estimated on the sampler's draws.

    A few draws miss the rare large weights, and give too little.
    """
    return float(np.exp(2 * np.asarray(log_weights, np.float64)).mean() - 1)


def token_weights(log_ratio: np.ndarray, mask: np.ndarray) -> Row:
    """Of single tokens.

    Args:
      log_ratio: float `[responses, tokens]`, log p_learner - log p_sampler. mask: bool, the tokens that were drawn.
    """
    inside = log_ratio[mask].astype(np.float64)
    sizes = np.abs(inside)
    low, high = np.log(OUTSIDE)
    return {
        "mean_abs_dlogp": number(sizes.mean()),
        "p999_abs_dlogp": number(np.percentile(sizes, 99.9)),
        "max_abs_dlogp": number(sizes.max()),
        "outside": number(((inside < low) | (inside > high)).mean()),
        "token_ess": number(effective_sample_size(inside)),
        "token_chi2": number(chi_square(inside)),
    }


def response_weights(log_ratio: np.ndarray, mask: np.ndarray, lengths: Sequence[int]) -> list[Row]:
    """Of the first n tokens of every response, and of those tokens one by one, for each n of `lengths`.

    A response that has ended keeps its weight: `alive` is the share of those that have n tokens.

    Args:
      log_ratio, mask: as in `token_weights`.
    """
    inside = np.where(mask, log_ratio, 0.0).astype(np.float64)
    rows = []
    for length in lengths:
        log_weights = inside[:, :length].sum(axis=1)
        tokens = inside[:, :length][mask[:, :length]]
        rows.append(
            {
                "tokens": length,
                "alive": number((mask.sum(axis=1) >= length).mean()),
                "response_ess": number(effective_sample_size(log_weights)),
                "response_chi2": number(chi_square(log_weights)),
                "response_log_sd": number(log_weights.std(ddof=1)),
                "token_ess": number(effective_sample_size(tokens)),
                "token_chi2": number(chi_square(tokens)),
            }
        )
    return rows
