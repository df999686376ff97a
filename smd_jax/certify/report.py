"""A verdict as lines for a terminal, and as JSON."""

from __future__ import annotations

from typing import Any

import numpy as np

from smd_jax.certify.verdict import Verdict

# Explanations that a report lists.
SHOWN = 8


def lines(verdict: Verdict) -> list[str]:
    """The verdict in at most 80 columns a line, except for long names."""
    found = [
        f"tokens      {int(np.isfinite(verdict.difference).sum())} in {len(verdict.difference)} rows",
        f"|learner - sampler|   mean {verdict.mean_abs:.2e}, largest {verdict.max_abs:.2e} nats",
        f"one policy  up to a mean of {verdict.tolerance:.1e} nats",
    ]
    if verdict.is_one_policy:
        return [*found, "verdict     one policy"]
    for row, token, difference in worst(verdict, 3):
        found.append(f"worst       row {row}, response token {token}: {difference:+.3f} nats")
    for finding in verdict.findings[:SHOWN]:
        found.append(f"tested      {finding.difference:.2e} left if {finding.said}")
    if verdict.cause is None:
        return [*found, "verdict     not one policy; no tested cause explains it"]
    cause = verdict.cause
    return [*found, f"verdict     not one policy: {cause.cause}: {cause.said}", f"mend        {cause.mend}"]


def worst(verdict: Verdict, count: int) -> list[tuple[int, int, float]]:
    """Row, response token and difference of the tokens that differ most."""
    size = np.nan_to_num(np.abs(verdict.difference), nan=-1)
    places = [np.unravel_index(flat, size.shape) for flat in np.argsort(-size, axis=None)[:count]]
    return [(int(row), int(token), float(verdict.difference[row, token])) for row, token in places]


def to_json(verdict: Verdict) -> dict[str, Any]:
    """The verdict for other programs; numbers in nats."""
    size = np.abs(verdict.difference)
    return {
        "one_policy": verdict.is_one_policy,
        "mean_abs": verdict.mean_abs,
        "max_abs": verdict.max_abs,
        "tolerance": verdict.tolerance,
        "cause": None if verdict.cause is None else verdict.cause._asdict(),
        "tested": [finding._asdict() for finding in verdict.findings],
        "by_row": np.nanmean(size, axis=1).tolist(),
        "by_response_token": np.nanmean(size[:, np.isfinite(size).any(axis=0)], axis=0).tolist(),
        "worst": [{"row": row, "token": token, "difference": value} for row, token, value in worst(verdict, 20)],
    }
