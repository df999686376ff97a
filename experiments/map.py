"""Where does replaying the sampler's masks pay, where does correcting a dense learner, and where neither?

Cells      Tasks x samplers: running sums of 12 digits, copied sums of 8, sorting of 12 (experiments/study/problems.py),
           under budgets from mild to cruel, and policies whose choice of keys depends on the parameters (TOVA of each
           head, SnapKV, H2O) or does not (StreamingLLM, Random).
Start      Supervised with the full cache until 97 % of the steps are right at temperature 1, so that no arm gains by a
           lower entropy alone; the same for all arms of a seed, and for all cells of a task.
Arms       naive, TIS, shadow masks; the last two with a frozen dense teacher, too; and shadow masks and TIS on the same
           weights, half and half (experiments/study/mixed.py).
Rates      Of 3e-5, 1e-4 and 3e-4 with a warm-up, for every arm of every task the one with the best mean of sparse and
           dense greedy reward on pilot seeds, which are not reported and judged on rows of their own, under TOVA of
           each head and the cruel budget.
Rewards    On 512 held-out rows: under the budget and with the full cache, at temperature 1 and greedy.
Command    python experiments/map.py [--tasks …] [--samplers …] [--arms …] [--seeds …] [--minutes …]
           Runs that have ended are kept, and not made again when the study goes on.
Result     experiments/results/map.json, a row a run, pilot included; the picture is made by experiments/report.py.
"""

from __future__ import annotations

import tyro

from study.arms import arms_of
from study.command import StudyArgs, grid_of, run, stopping
from study.grid import Cell
from study.problems import problem_of
from study.runs import Sizes
from study.samplers import sampler_of

ARMS = arms_of(("untrained", "naive", "tis", "shadow", "tis-anchor", "shadow-anchor", "mixed-50"))
RATES = (3e-5, 1e-4, 3e-4)
SIZES = Sizes(rollouts=60, evaluate_every=30)
SEEDS = (0, 1)
BUDGETS = {"sums-12": ("17+2", "14+2"), "copy-8": ("14+2", "10+2"), "sorting-12": ("17+2", "14+2")}
POLICIES = ("tova-heads", "snapkv", "h2o", "streaming", "random")
CELLS = tuple(
    Cell(problem_of(task), sampler_of(f"{policy}:{budget}"), ARMS, SEEDS, sampler_of(f"tova-heads:{budgets[1]}"))
    for task, budgets in BUDGETS.items()
    for policy in POLICIES
    for budget in budgets
)


def main(args: StudyArgs) -> None:
    with stopping():
        run(grid_of(args, "map", CELLS, RATES, SIZES), args)


if __name__ == "__main__":
    main(tyro.cli(StudyArgs, description=__doc__))
