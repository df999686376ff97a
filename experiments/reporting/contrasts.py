"""The planned contrasts of all studies, with Holm's correction over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lib.files import Row
from reporting.page import difference, p_value, plain, table


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


def paired_contrast(study: str, what: str, ours: Sequence[Row], theirs: Sequence[Row], kind: str) -> Contrast:
    """The mean difference of a reward, paired by seed."""
    return Contrast(study, what, plain(difference(ours, theirs, kind)), p_value(ours, theirs, kind))


def holm(values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given.

    Holm (1979), A simple sequentially rejective multiple test procedure.
    """
    adjusted = [0.0] * len(values)
    largest = 0.0
    for place, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, (len(values) - place) * values[index]))
        adjusted[index] = largest
    return adjusted


def section(contrasts: Sequence[Contrast]) -> str:
    """A line per study."""
    adjusted = holm([contrast.p for contrast in contrasts])
    lines = [
        [contrast.study, contrast.what, contrast.found, f"{contrast.p:.2g}", f"{p:.2g}"]
        for contrast, p in zip(contrasts, adjusted, strict=True)
    ]
    return f"""## Planned contrasts

One per study, chosen before its rows. The plan of the memory wall changed after a first run had shown +0.089 ± 0.054:
wider rates, the same seeds. *p* is of the paired t test over seeds, for collapse of Fisher's exact test. The last
column has Holm's correction over the {len(contrasts)} studies. All other differences of this report are exploratory.

{table(["study", "contrast", "difference", "p", "p, corrected"], lines)}
"""
