"""Evictions as actions: gates that reward trains, beside policies that follow a rule."""

from __future__ import annotations

from collections.abc import Sequence

from reporting.page import Section, cost, difference, mean_of, plain, table
from study.files import Row
from study.runs import DECODINGS

JOINT = "gate-joint"


def section(rows: Sequence[Row]) -> Section:
    reported = [row for row in rows if not row["pilot"]]
    parts, said = [], []
    for task in dict.fromkeys(row["task"] for row in reported):
        arms: dict[str, list[Row]] = {}
        for row in reported:
            if row["task"] == task:
                name = row["arm"] if row["policy"] == "gate" else f"{row['policy']}, {row['arm']}"
                arms.setdefault(name, []).append(row)
        lines = []
        for name, found in arms.items():
            numbers = [f"{mean_of(found, kind).mean:.3f}" for kind in DECODINGS]
            lines.append([f"`{name}`", len(found), *numbers])
        parts += [f"{task}:", table(["arm", "seeds", *(kind.replace("_", " ") for kind in DECODINGS)], lines)]
        rules = [name for name in arms if name.endswith(", shadow")]
        if JOINT in arms and rules:
            best = max(rules, key=lambda name: mean_of(arms[name], "sparse").mean)
            lead = difference(arms[JOINT], arms[best], "sparse")
            said.append(f"{plain(lead)} to the best trained rule ({best.split(',')[0]}) in {task}")
    some = reported[0]
    return Section(
        "Eviction as an action",
        "A gate draws what is forgotten, the draw is recorded with the mask, and the learner recomputes its "
        "probability: does it help to let reward train what to forget?",
        f"With gates that are trained beside the tokens the reward under the budget ends {', and '.join(said)}."
        if said
        else "Not all arms are there yet.",
        f"{some['budget']} + {some['buffer']} keys of up to {some['length']}; *shadow* trains tokens under a policy "
        "that follows a rule; gates are linear in key, value, position and age.\n\n" + "\n\n".join(parts),
        "python experiments/eviction_action.py",
        cost(rows),
        ("eviction_action.json",),
    )
