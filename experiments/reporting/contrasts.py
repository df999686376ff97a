"""The planned contrasts of all studies, with Holm's correction over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from reporting.page import table


class Contrast(NamedTuple):
    """A primary contrast of `experiments/PLAN.md`.

    Attributes:
      study: a link to its section. what: the two arms and the reward. found: the difference and its interval.
      p: two-sided, not corrected.
    """

    study: str
    what: str
    found: str
    p: float


def holm(values: Sequence[float], planned: int) -> list[float]:
    """Holm's adjusted p-values, in the order given; planned contrasts without a value count as if theirs were larger.

    Holm (1979), A simple sequentially rejective multiple test procedure.
    """
    adjusted = [0.0] * len(values)
    largest = 0.0
    for place, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, (planned - place) * values[index]))
        adjusted[index] = largest
    return adjusted


def section(found: Sequence[Contrast | None]) -> str:
    """A line per study, those without rows left out; they count for the correction all the same."""
    contrasts = [contrast for contrast in found if contrast is not None]
    adjusted = holm([contrast.p for contrast in contrasts], len(found))
    lines = [
        [contrast.study, contrast.what, contrast.found, f"{contrast.p:.2g}", f"{p:.2g}"]
        for contrast, p in zip(contrasts, adjusted, strict=True)
    ]
    return f"""## Planned contrasts

One per study, chosen before its rows. *p* is of the paired t test over seeds, for collapse of Fisher's exact test. The
last column has Holm's correction over the {len(found)} studies. All other differences of this report are exploratory.

{table(["study", "contrast", "difference", "p", "p, corrected"], lines)}
"""
