"""How the lead of replay grows with the mismatch between sampler and learner.

Question   `mismatch_kl`, in nats a token, can be measured before any training. From which value on does replaying the
           evictions pay, and how much?
Plan       experiments/PLAN.md, section "Dose": prediction, regression, primary contrast.
Cells      Sorting 12 digits and walks of 64 steps, under TOVA of each head and H2O, with six budgets each: from nearly
           all keys to a third of them.
Arms       naive, TIS, shadow, mixed-50, each at the rate that experiments/room.py chose for the reward under the budget
           of the same task. The pilot rows are those of room.
Rollouts   As in experiments/room.py.
Command    python experiments/dose.py --workers 1 [--tasks …] [--samplers …] [--arms …] [--seeds …] [--minutes …]
           In a clean clone. Finished runs are kept; --rows-from FILE adds the rows of another clone.
Result     experiments/results/dose, a file per task, a row a run
"""

from __future__ import annotations

from lib.arms import arms_of
from lib.command import run_study
from lib.files import RESULTS
from lib.grid import BY_CACHE, Cell
from lib.problems import problem_of
from lib.samplers import sampler_of
from room import FIRST_RATES, SAMPLERS, SIZES

ARMS = arms_of(("untrained", "naive", "tis", "shadow", "mixed-50"))
SEEDS = tuple(range(10, 16))
BUDGETS = {
    "sorting-12": ("23+2", "20+2", "17+2", "14+2", "11+2", "8+2"),
    "walk-64": ("72+4", "60+4", "48+4", "36+4", "28+4", "22+4"),
}


def cells() -> tuple[Cell, ...]:
    """Budget by budget, so that a stopped study has both tasks and both policies."""
    return tuple(
        Cell(
            problem_of(task),
            sampler_of(f"{policy}:{budgets[place]}"),
            ARMS,
            SEEDS,
            pilot=sampler_of(SAMPLERS[task][0]),
        )
        for place in range(6)
        for task, budgets in BUDGETS.items()
        for policy in ("tova-heads", "h2o")
    )


if __name__ == "__main__":
    pilots, criteria = RESULTS / "room", BY_CACHE[:1]
    run_study(
        __doc__, "dose", cells(), SIZES, first_rates=FIRST_RATES, criteria=criteria, pilots_from=pilots, by_task=True
    )
