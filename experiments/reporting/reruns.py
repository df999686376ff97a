"""Two cells run again with seeds that nobody had used: do the leads repeat?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

from lib.files import Row
from lib.intervals import paired
from reporting.page import by_seed, check_complete, plain, reported, table
from reporting.room import key_of

SEEDS = tuple(range(18, 24))
OURS, RIVAL = "mixed-50", "tis"
ARMS = (OURS, RIVAL, "shadow", "naive")
KIND = "sparse_greedy"  # greedy under the budget
# Name -> file of the rows, and the cell: task, policy, budget.
CELLS = {
    "lead by mismatch: sorting-12, tova-heads, 14 keys": ("dose", ("sorting-12", "tova-heads", 14)),
    "other cells: sorting-12, snapkv, 11 keys": ("room", ("sorting-12", "snapkv", 11)),
}


def without(files: Mapping[str, Sequence[Row]]) -> dict[str, list[Row]]:
    """File -> the rows that its study reports by its own plan; the reruns have seeds that other studies use, too."""
    again = {file for file, _ in CELLS.values()}
    return {
        name: [row for row in rows if row["seed"] not in SEEDS] if name in again else list(rows)
        for name, rows in files.items()
    }


def section(rows: Mapping[str, Sequence[Row]]) -> str:
    """Raises ValueError until both cells are complete."""
    lines = []
    for name, (file, cell) in CELLS.items():
        inside = [row for row in reported(rows[file]) if key_of(row) == cell]
        again = {arm: rewards(inside, arm, SEEDS) for arm in (OURS, RIVAL)}
        check_complete([arm for arm, found in again.items() if found.keys() == set(SEEDS)], again, f"the rerun {name}")
        seeds = {row["seed"] for row in inside} - set(SEEDS)
        first = paired(*(rewards(inside, arm, seeds) for arm in (OURS, RIVAL)))
        second = paired(again[OURS], again[RIVAL])
        within = abs(second.mean - first.mean) <= first.half
        lines.append([name, first.count, plain(first), second.count, plain(second), "yes" if within else "no"])
    columns = ["cell", "seeds", f"{OURS} minus {RIVAL}", "new seeds", "again", "within the first interval"]
    return f"""## Reruns with unused seeds

Two cells, seeds {SEEDS[0]} to {SEEDS[-1]}, new starts, the same rates. Greedy under the budget:

{table(columns, lines)}

If nothing but the seeds differs, the new mean lies in the first interval in about 85 % of such pairs. This rule was
written after the runs, before any comparison. The first cell ran in both studies; in [other cells](#other-cells) it has
a narrower interval, outside of which the new mean lies. {of_cpus(rows)}
"""


def of_cpus(rows: Mapping[str, Sequence[Row]]) -> str:
    """The largest difference of two rows that differ in their study and CPU only: of those two in both studies."""
    keys = itemgetter("task", "policy", "budget", "arm", "learning_rate", "seed", "start", "rollouts")

    def gaps(kind: str) -> str:
        one, other = ({keys(row): row[kind] for row in reported(rows[name])} for name in ("room", "dose"))
        of_arm = {
            arm: [abs(one[key] - other[key]) for key in one.keys() & other.keys() if key[3] == arm] for arm in ARMS
        }
        return ", ".join(f"{max(found):.2f} ({arm})" for arm, found in of_arm.items())

    return f"""The same arm, rate, seed and start on two kinds of CPU give greedy rewards that differ by up to
{gaps(KIND)} under the budget, and with the full cache by up to {gaps("dense_greedy")}."""


def rewards(rows: Iterable[Row], arm: str, seeds: Iterable[int]) -> dict[int, float]:
    """Seed -> reward of an arm at its rate for decoding under the budget.

    Raises:
      ValueError: if the arm has a second rate in the new seeds, which ran at one.
    """
    rows = [row for row in rows if row["arm"] == arm]
    rates = {row["learning_rate"] for row in rows if row["seed"] in SEEDS}
    if len(rates) > 1:
        raise ValueError(f"expected one learning rate of {arm} in seeds {SEEDS[0]} to {SEEDS[-1]}; got {sorted(rates)}")
    wanted = set(seeds)
    return by_seed((row for row in rows if row["seed"] in wanted and row["learning_rate"] in rates), KIND)
