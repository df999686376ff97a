"""The picture of a report: a bar for each tested cause, whole rows and tokens."""

from __future__ import annotations

import numpy as np

from smd_jax.certify.report import picture
from smd_jax.certify.verdict import Finding, Verdict

SAME = "log-probabilities belong to the token of a turn that is "  # over 60 characters with the cause


def test_every_tested_cause_has_a_bar_and_its_own_name():
    findings = tuple(Finding("tokens misaligned", SAME + end, 0.1) for end in ("one before", "one after"))
    figure = picture(Verdict(np.full((3, 4), 0.2), 1e-4, 1e-3, None, findings))
    left, right = figure.axes[:2]
    assert len({bar.get_extents().y0 for bar in right.patches}) == 3, "two causes and the record"
    names = [label.get_text().replace("\n", " ") for label in right.get_yticklabels()]
    assert names == [*(f"tokens misaligned: {SAME}{end}" for end in ("one after", "one before")), "as recorded"]
    # Rows and tokens are whole numbers.
    figure.draw_without_rendering()
    for ticks in (left.get_xticks(), left.get_yticks()):
        assert (ticks % 1 == 0).all() and len(ticks)
