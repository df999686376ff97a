"""Choices that the map makes for all arms, made otherwise: steps per rollout, the teacher's weight and share."""

from __future__ import annotations

from collections.abc import Sequence

from reporting.page import Section, cost, difference, mean_of, of_arms, plain, signed, table
from study.files import Row

# The map's arm -> the same with another choice, and what that is.
CHOICES = {
    "tis": {"tis-1-step": "1 step a rollout in place of 4", "tis-16-steps": "16 steps"},
    "shadow": {"shadow-1-step": "1 step a rollout in place of 4", "shadow-16-steps": "16 steps"},
    "shadow-anchor": {
        "shadow-anchor-0.01": "teacher's weight 0.01 in place of 0.1",
        "shadow-anchor-1": "teacher's weight 1",
        "shadow-anchor-quarter": "teacher on a quarter of the rows",
    },
}


def section(rows: Sequence[Row], decisive: Sequence[Row]) -> Section:
    """
    Args:
      rows: of the choices. decisive: reported rows of the map's cell that they are made in.
    """
    found = of_arms([row for row in rows if not row["pilot"]])
    usual = of_arms(decisive)
    lines = []
    for arm, others in CHOICES.items():
        lines.append([f"`{arm}`, as in the map", *_numbers(usual[arm]), "", ""])
        for name, says in others.items():
            if name in found:
                gains = [signed(difference(found[name], usual[arm], kind)) for kind in ("sparse", "dense")]
                lines.append([f"{says}", *_numbers(found[name]), *gains])
    columns = ["arm", "seeds", "rate", "sparse", "dense", "sparse − map's choice", "dense − map's choice"]
    return Section(
        "Choices that are the same for all arms",
        "Does the map's answer hang on four optimizer steps a rollout, or on the teacher's weight and share of rows?",
        answer(found, usual),
        "The showdown's cell, starts and seeds; rates from the same grid, chosen anew for every line, so that steps "
        "and rate change together; differences paired by seed.\n\n" + table(columns, lines),
        "python experiments/choices.py",
        cost(rows),
        ("choices.json",),
    )


def _numbers(rows: Sequence[Row]) -> list[str]:
    rewards = [f"{mean_of(rows, kind).mean:.3f}" for kind in ("sparse", "dense")]
    return [str(len(rows)), f"{rows[0]['learning_rate']:g}", *rewards]


def answer(found: dict[str, list[Row]], usual: dict[str, list[Row]]) -> str:
    """The lead of shadow masks by number of steps, and the best weight of the teacher."""
    pairs = {1: ("shadow-1-step", "tis-1-step"), 4: ("shadow", "tis"), 16: ("shadow-16-steps", "tis-16-steps")}
    arms = usual | found
    leads = [
        f"{plain(difference(arms[shadow], arms[tis], 'sparse'))} with {steps} step{'s' if steps > 1 else ''}"
        for steps, (shadow, tis) in pairs.items()
        if {shadow, tis} <= arms.keys()
    ]
    text = f"Under the budget, shadow masks less TIS: {', '.join(leads)} a rollout."
    teachers = [name for name in ("shadow-anchor", *CHOICES["shadow-anchor"]) if name in arms]
    if len(teachers) > 1:
        best = max(teachers, key=lambda name: mean_of(arms[name], "sparse").mean)
        says = {"shadow-anchor": "a weight of 0.1 on all rows"} | CHOICES["shadow-anchor"]
        reward = mean_of(arms[best], "sparse").mean
        others = [difference(arms[name], arms["shadow-anchor"], "sparse") for name in teachers[1:]]
        sure = sum(found.established for found in others)
        text += (
            f" Of the teachers the one with the best reward under the budget: {says[best]} ({reward:.3f}); "
            f"{sure or 'none'} of the {len(others)} other choices is established apart from the map's."
        )
    return text
