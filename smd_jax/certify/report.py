"""A verdict as lines for a terminal, as JSON, and as one HTML page with a picture."""

from __future__ import annotations

import base64
import html
import io
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from smd_jax.certify.verdict import Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Explanations that a report lists.
SHOWN = 8


def lines(verdict: Verdict) -> list[str]:
    """The verdict in at most 80 columns a line, except for long names."""
    mean, error = verdict.bias
    first, last = verdict.growth
    found = [
        f"tokens      {int(np.isfinite(verdict.difference).sum())} in {len(verdict.difference)} rows",
        f"|learner - sampler|   mean {verdict.mean_abs:.2e}, largest {verdict.max_abs:.2e} nats",
        f"signed      mean {mean:+.2e} ± {error:.1e} nats",
        f"by length   first third {first:.2e}, last third {last:.2e} nats",
        f"kind        {verdict.kind} (one policy: mean <= {verdict.tolerance:.1e}, largest <= {verdict.largest:.1e})",
    ]
    if verdict.is_one_policy:
        return [*found, "verdict     one policy"]
    for row, token, difference in worst(verdict):
        found.append(f"worst       row {row}, response token {token}: {difference:+.3f} nats")
    for finding in verdict.findings[:SHOWN]:
        found.append(f"tested      {finding.difference:.2e} left if {finding.detail}")
    for layer, difference in verdict.sensitive_layers[:3]:
        found.append(f"layer       {difference:.2e} left with layer {layer} dense")
    if verdict.kind == "single tokens":
        return [*found, "verdict     not one policy: single tokens differ; their rows may show why"]
    if verdict.cause is None:
        return [*found, "verdict     not one policy; no tested cause explains it"]
    cause = verdict.cause
    return [*found, f"verdict     not one policy: {cause.cause}: {cause.detail}", f"fix         {cause.fix}"]


def worst(verdict: Verdict, count: int = 3) -> list[tuple[int, int, float]]:
    """Row, response token and difference of the tokens that differ most."""
    size = np.where(np.isfinite(verdict.difference), np.abs(verdict.difference), -1)
    places = [np.unravel_index(flat, size.shape) for flat in np.argsort(-size, axis=None)[:count]]
    return [(int(row), int(token), float(verdict.difference[row, token])) for row, token in places]


def to_json(verdict: Verdict) -> dict[str, Any]:
    """The verdict for other programs; numbers in nats."""
    size = np.abs(verdict.difference)
    mean, error = verdict.bias
    first, last = verdict.growth
    columns = np.isfinite(size).any(axis=0)
    return {
        "one_policy": verdict.is_one_policy,
        "kind": verdict.kind,
        "mean_abs": verdict.mean_abs,
        "max_abs": verdict.max_abs,
        "tolerance": verdict.tolerance,
        "largest": verdict.largest,
        "mean": mean,
        "standard_error": error,
        "first_third": first,
        "last_third": last,
        "cause": None if verdict.cause is None else verdict.cause._asdict() | {"fix": verdict.cause.fix},
        "tested": [finding._asdict() | {"fix": finding.fix} for finding in verdict.findings],
        "by_row": np.nanmean(size, axis=1).tolist(),
        "by_response_token": np.nanmean(size[:, columns], axis=0).tolist(),
        "worst": [{"row": row, "token": token, "difference": value} for row, token, value in worst(verdict, 20)],
        "with_layer_dense": [{"layer": layer, "mean_abs": value} for layer, value in verdict.sensitive_layers],
    }


def to_html(verdict: Verdict, title: str) -> str:
    """One page without references to other files."""
    text = html.escape("\n".join(lines(verdict)))
    buffer = io.BytesIO()
    picture(verdict).savefig(buffer, format="png", dpi=120)
    source = base64.b64encode(buffer.getvalue()).decode()
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<body><h1>{html.escape(title)}</h1><pre>{text}</pre>"
        f'<img alt="difference by token, and the rest under each tested cause" src="data:image/png;base64,{source}">'
        "</body></html>\n"
    )


def picture(verdict: Verdict) -> Figure:
    """Left the difference of every token, right what each tested cause leaves of the mean."""
    from matplotlib.figure import Figure  # not pyplot, which has global state and needs a display
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    size = np.abs(verdict.difference)
    image = left.imshow(np.log10(np.maximum(size, 1e-8)), aspect="auto", interpolation="nearest", cmap="viridis")
    figure.colorbar(image, ax=left, label="log10 |learner - sampler| (nats)")
    left.set(xlabel="response token", ylabel="row", title="difference by token")
    for axis in (left.xaxis, left.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    shown = verdict.findings[:SHOWN][::-1]
    names = [fill(f"{finding.cause}: {finding.detail}", 42) for finding in shown]
    # By position: bars at equal names would merge.
    places = range(len(shown) + 1)
    right.barh(places, [*(max(finding.difference, 1e-8) for finding in shown), verdict.mean_abs])
    right.set_yticks(places, [*names, "as recorded"], fontsize=6)
    right.axvline(verdict.tolerance, color="black", linestyle=":")
    right.set(xscale="log", xlabel="mean |difference| (nats)", title="rest under each tested cause")
    return figure
