"""Gradients before any training: what they are worth, and what a frozen mask leaves out."""

from __future__ import annotations

from collections.abc import Sequence

from reporting.page import Section, machines, table
from study.files import Row

ARMS = ("naive", "tis", "mis-sequence", "icepop", "sparse-rl", "shadow", "mixed-50", "anchor", "shadow-anchor")
# What might lower the noise of guesses, on top of the replayed masks.
HELPS = ("to-go", "oracle", "overlap", "ratio", "certain", "entropy-0.2", "variate", "to-go-variate", "to-go-oracle")
COMPARED = ("naive", "tis", "mis-sequence", "shadow", "anchor", "shadow-anchor")
BIASED = ("naive", "tis", "icepop", "mis-sequence", "shadow")
Place = tuple[str, str, int]


def section(rows: Sequence[Row], decisive: Place) -> Section:
    """
    Args:
      decisive: task, policy and budget of the cell whose arms are all shown.
    """
    arms = {(place_of(row), row["arm"]): row for row in rows if row["kind"] == "gradient"}
    places = list(dict.fromkeys(place for place, _ in arms))
    here = {arm: row for (place, arm), row in arms.items() if place == decisive}
    parts = [
        "A step of given length along the gradient of one rollout (32 × 8 responses; of walks 8 × 8) changes the "
        "sparse reward in proportion to its *alignment* with that reward's own gradient (masks frozen), and in the "
        "mean over rollouts by its signal: *snr* is signal over noise of one rollout. *cosine* is that of the means: "
        "what is left when the noise is gone, the bias; as the noise is taken out of it, it can pass 1. One start a "
        "cell; ± is the 95 % jackknife over its rollouts.",
        f"Sorting, {name_of(here['shadow'])}:",
        arm_table(here, (*ARMS, *HELPS)),
        "Alignment with the gradient of the sparse reward, by cell:",
        table(
            ["cell", "sparse", "dense", *(f"`{arm}`" for arm in COMPARED)],
            [
                [
                    f"{place[0]}, {name_of(arms[place, 'shadow'])}",
                    f"{arms[place, 'shadow']['sparse']:.2f}",
                    f"{arms[place, 'shadow']['dense']:.2f}",
                    *(with_half(arms[place, arm], "alignment_reward") for arm in COMPARED),
                ]
                for place in places
            ],
        ),
    ]
    parts += [
        "What might lower the noise, by cell: alignment on top of the replayed masks, whose own is the first column. "
        "What each is: [`coefficients.py`](experiments/study/coefficients.py).",
        table(
            ["cell", *(f"`{arm}`" for arm in ("shadow", *HELPS))],
            [
                [
                    f"{place[0]}, {name_of(arms[place, 'shadow'])}",
                    *(without_half(arms[place, arm], "alignment_reward") for arm in ("shadow", *HELPS)),
                ]
                for place in places
            ],
        ),
        "Bias, by cell: cosine of an arm's mean gradient to GRPO's of the policy that samples, and to that of the same "
        "policy with its full cache, which corrections are to estimate. – where the noise leaves nothing to be said.",
        table(
            ["cell", *(f"`{arm}`, {kind}" for arm in BIASED for kind in ("sparse", "dense"))],
            [
                [
                    f"{place[0]}, {name_of(arms[place, 'shadow'])}",
                    *(known_cosine(arms[place, arm], kind) for arm in BIASED for kind in ("sparse", "dense")),
                ]
                for place in places
            ],
        ),
    ]
    steps = [row for row in rows if row["kind"] == "step" and row["direction"] == "gradient"]
    if steps:
        parts += [
            "What a frozen mask leaves out: a small step along the gradient of the sparse reward, whose slope the "
            "frozen mask predicts, against the change that is realised when the sampler chooses its keys anew (common "
            "random numbers). Lengths are such that the reward should change by 0.01, 0.03 and 0.1 to either side. "
            "Longer steps give less than predicted where the choice does not depend on the parameters, too: rewards "
            "are curved. The comparison that counts is with `random` and `streaming`, whose choice no step changes. "
            "*control*: with the full cache, where nothing is chosen; in sorting it is none, because from a start that "
            "is right to 0.98 its shortest step already loses reward to both sides, far outside of where a slope "
            "says anything.",
            step_table(steps),
        ]
    shadow, tis = (here[arm]["alignment_reward"] for arm in ("shadow", "tis"))
    best = max(HELPS, key=lambda arm: here[arm]["alignment_reward"])
    helped, taught, teacher = (here[arm]["alignment_reward"] for arm in (best, "shadow-anchor", "anchor"))
    # Arms of the same rollouts, so that a count over cells says more than their intervals.
    better = {arm: sum(gain(arms[place, arm], arms[place, "shadow"]) > 0 for place in places) for arm in HELPS}
    steadiest = max(HELPS, key=lambda arm: better[arm])
    gains = [gain(arms[place, steadiest], arms[place, "shadow"]) for place in places]
    answer = (
        f"At one start of the showdown's cell a rollout's gradient is aligned with that of the sparse reward by "
        f"{shadow:.3f} with shadow masks, and by {tis:.3f} with TIS. Of nine ways to lower the noise on top of the "
        f"masks the best, `{best}`, comes to {helped:.3f}; a frozen teacher beside them to {taught:.3f}, and alone to "
        f"{teacher:.3f}. Over all cells the steadiest of the nine, `{steadiest}`, is ahead of the masks alone in "
        f"{better[steadiest]} of {len(places)}, and by {max(gains):.3f} at most, so that none is an option of the "
        "library."
    ) + of_steps(steps, decisive)
    return Section(
        "Gradients, before any training",
        "From one policy and the same rollouts: what is every arm's gradient worth, and what does a frozen mask leave "
        "out where the choice of keys moves with the parameters?",
        answer,
        "\n\n".join(parts),
        "python experiments/gradients.py",
        f"{sum(cpu_seconds(rows).values()) / 3600:.1f} CPU hours, {machines(rows)}",
        ("gradients.json",),
    )


def place_of(row: Row) -> Place:
    return row["task"], row["policy"], row["budget"]


def name_of(row: Row) -> str:
    return f"{row['policy']}, {row['budget']} + {row['buffer']} keys"


def arm_table(here: dict[str, Row], names: Sequence[str]) -> str:
    columns = ["gradient", "snr", "cosine to sparse GRPO", "cosine to dense GRPO", "alignment with sparse reward"]
    fields = ("snr", "cosine_sparse", "cosine_dense", "alignment_reward")
    return table(columns, [[f"`{name}`", *(with_half(here[name], field) for field in fields)] for name in names])


def step_table(steps: Sequence[Row]) -> str:
    lines = []
    for row in steps:
        control = ", control" if row["arm"] == "full-cache-exact" else ""
        numbers = [with_half(row, name) for name in ("predicted", "realised", "ratio")]
        lines.append([f"{row['task']}, {name_of(row)}{control}", f"{row['step']:.2g}", *numbers])
    return table(["cell", "length of the step", "predicted slope", "realised slope", "realised / predicted"], lines)


def of_steps(steps: Sequence[Row], decisive: Place) -> str:
    """What came of the shortest steps, by policy, in the decisive cell's task and budget."""
    shortest: dict[Place, Row] = {}
    for row in steps:
        place = place_of(row)
        like = (place[0], place[2]) == (decisive[0], decisive[2]) and row["arm"] != "full-cache-exact"
        if like and (place not in shortest or row["step"] < shortest[place]["step"]):
            shortest[place] = row
    learns, fixed = (
        [f"{row['policy']} {with_half(row, 'ratio')}" for row in shortest.values() if row["choice_learns"] is learns]
        for learns in (True, False)
    )
    said = [
        f"{', '.join(found)} where the choice of keys {depends} on the parameters"
        for found, depends in ((learns, "depends"), (fixed, "does not depend"))
        if found
    ]
    return f" Realised over predicted slope of a step that should give 0.01: {'; '.join(said)}." if said else ""


def gain(ours: Row, theirs: Row) -> float:
    """In alignment with the sparse reward's gradient; 0 where one of them has none that is known."""
    mine, their = ours["alignment_reward"], theirs["alignment_reward"]
    return 0.0 if mine is None or their is None else mine - their


def with_half(row: Row, name: str) -> str:
    value, half = row[name], row[f"{name}_half"]
    if value is None:
        return "–"
    return f"{value:.3f}" + ("" if half is None else f" ± {half:.3f}")


def without_half(row: Row, name: str) -> str:
    return "–" if row[name] is None else f"{row[name]:.3f}"


def known_cosine(row: Row, objective: str) -> str:
    """A cosine whose interval is not as wide as what it could be."""
    value, half = row[f"cosine_{objective}"], row[f"cosine_{objective}_half"]
    return "–" if value is None or half is None or half > 0.5 else f"{value:.2f} ± {half:.2f}"


def cpu_seconds(rows: Sequence[Row]) -> dict[tuple[object, ...], float]:
    """Of every cell and kind, whose rows share them."""
    return {
        (place_of(row), row["seed"], row["kind"] == "step", row["arm"] == "full-cache-exact"): row["cpu_seconds"]
        for row in rows
    }
