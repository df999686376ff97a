"""Evictions as actions: gates that reward trains, beside policies that follow a rule."""

from __future__ import annotations

from collections.abc import Sequence

from reporting.page import Section, apart, by_seed, cost, difference, mean_of, signed, table
from study.files import Row
from study.intervals import Estimate, paired
from study.runs import DECODINGS

JOINT, ALONE = "gate-joint", "gate-alone"


def section(rows: Sequence[Row]) -> Section:
    reported = [row for row in rows if not row["pilot"]]
    parts, said = [], []
    for task in dict.fromkeys(row["task"] for row in reported):
        arms = arms_of_task([row for row in reported if row["task"] == task])
        best = best_rule(arms)
        lines = []
        for name, found in arms.items():
            numbers = [f"{mean_of(found, kind).mean:.3f}" for kind in DECODINGS]
            lead = "" if best is None or name == best else signed(difference(found, arms[best], "sparse"))
            lines.append([f"`{name}`", len(found), *numbers, lead, signed(beside_full_cache(found, arms))])
        columns = ["arm", "seeds", *(kind.replace("_", " ") for kind in DECODINGS), "sparse − best trained rule"]
        columns.append("sparse − start with the full cache")
        parts += [f"{task}:", table(columns, lines)]
        if best is not None and JOINT in arms:
            said.append(sentence(task, arms, best))
    some = reported[0]
    return Section(
        "Eviction as an action",
        "A gate draws what is forgotten, the draw is recorded with the mask, and the learner recomputes its "
        "probability: does it help to let reward train what to forget?",
        " ".join(said) or "Not all arms are there yet.",
        f"{some['budget']} + {some['buffer']} keys of up to {some['length']}; *shadow* trains tokens under a policy "
        "that follows a rule, which *untrained* does not; gates are linear in key, value, position and age, and "
        "`gate-alone` leaves the model as it is. No arm has a teacher; three rules were trained under, Random, H2O and "
        "SnapKV.\n\n" + "\n\n".join(parts),
        "python experiments/eviction_action.py",
        cost(rows),
        ("eviction_action.json",),
    )


def arms_of_task(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by arm, and with rules by policy."""
    arms: dict[str, list[Row]] = {}
    for row in rows:
        name = row["arm"] if row["policy"] == "gate" else f"{row['policy']}, {row['arm']}"
        arms.setdefault(name, []).append(row)
    return arms


def best_rule(arms: dict[str, list[Row]]) -> str | None:
    """Of the rules under which tokens were trained, the one with the highest reward under the budget."""
    rules = [name for name in arms if name.endswith(", shadow")]
    return max(rules, key=lambda name: mean_of(arms[name], "sparse").mean) if rules else None


def sentence(task: str, arms: dict[str, list[Row]], best: str) -> str:
    """What gates came to in one task, and the fixed rule that fits it best."""
    rules = sum(name.endswith(", shadow") for name in arms)
    trained = f"the best of {rules} rules under which tokens alone were trained ({best.split(',')[0]})"
    lead = apart(difference(arms[JOINT], arms[best], "sparse"), trained)
    text = f"In {task} tokens and gates that are trained together end under the budget {lead}"
    if ALONE in arms:
        alone = apart(difference(arms[ALONE], arms[best], "sparse"), "it")
        text += f", and gates alone, on a model that stays as it is, {alone}"
        text += f" and {apart(beside_full_cache(arms[ALONE], arms), 'what that model has with its full cache')}"
    fixed = [name for name in arms if name.endswith(", untrained")]
    if fixed:
        fits = max(fixed, key=lambda name: mean_of(arms[name], "sparse").mean)
        joint, fixed_rule = (f"{mean_of(arms[name], 'sparse').mean:.3f}" for name in (JOINT, fits))
        text += f"; together they reach {joint}, and without any training the rule `{fits.split(',')[0]}` {fixed_rule}"
    return f"{text}."


def beside_full_cache(found: Sequence[Row], arms: dict[str, list[Row]]) -> Estimate:
    """The sparse reward less the start's with the full cache, which is the same under every rule."""
    start = next(rows for name, rows in arms.items() if name.endswith(", untrained"))
    return paired(by_seed(found, "sparse"), by_seed(start, "dense"))
