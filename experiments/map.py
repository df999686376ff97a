"""Compares replay and corrections of a dense learner over many tasks, samplers and budgets.

Cells      Tasks and samplers: running sums of 12 digits, copied sums of 8, sorting of 12 (experiments/lib/problems.py),
           each under a milder and a crueller budget. Eviction policies that depend on the parameters (TOVA of each
           head, SnapKV, H2O) and that do not (StreamingLLM, Random).
Start      Supervised with the full cache until 97 % of the steps are right at temperature 1, so that a lower entropy
           gains nothing with the full cache. Shared by all arms of a seed and all cells of a task.
Arms       Everywhere: untrained, naive, TIS, shadow masks, the last two with a frozen dense teacher, and shadow masks
           and TIS on the same weights (smd.learner.DenseLearner). In the showdown (sorting, TOVA of each head, the
           crueller budget): every method of the library, and teachers without any reward.
Rollouts   60 of 32 x 8 responses, 4 optimizer steps on each.
Rates      3e-5, 1e-4 and 3e-4: for every arm of every task the best mean of sparse and dense greedy reward on pilot
           seeds and validation rows, under TOVA of each head and the crueller budget.
Rewards    On 512 held-out rows: under the budget and with the full cache, at temperature 1 and greedy. Five seeds in
           the cells that choose the rates, two elsewhere.
Chosen     Budgets and optimizer steps, on a few runs of seed 100, so that a cell leaves room to learn.
Command    python experiments/map.py [--tasks …] [--samplers …] [--arms …] [--seeds …] [--minutes …]
Cost       2.9 CPU hours for the 633 runs, starts not counted, most of them on one core of an Intel Xeon (family 6,
           model 207 or 167)
Result     experiments/results/map.json, a row per run, pilots included
"""

from __future__ import annotations

import tyro

from lib.arms import Arm, arms_of
from lib.command import StudyArgs, as_written, grid_of, run, stopping
from lib.grid import Cell
from lib.problems import problem_of
from lib.runs import Sizes
from lib.samplers import sampler_of

ARMS = arms_of(("untrained", "naive", "tis", "shadow", "tis-anchor", "shadow-anchor", "mixed-50"))
ALL_ARMS = arms_of(
    (
        *("untrained", "full-cache", "naive", "bypass", "tis", "tis-sequence", "mis-sequence", "icepop", "sparse-rl"),
        *("shadow", "naive-anchor", "tis-anchor", "shadow-anchor", "shadow-forward", "shadow-reverse"),
        *("shadow-published", "mixed-20", "mixed-50", "mixed-80", "anchor-alone", "forward-alone"),
    )
)
RATES = (3e-5, 1e-4, 3e-4)
SIZES = Sizes(rollouts=60, minibatches=4, evaluate_every=30)
# The milder budget, the crueller one, and the policies.
TASKS = {
    "sorting-12": (("14+2", "11+2"), ("tova-heads", "snapkv", "h2o", "streaming", "random")),
    "sums-12": (("17+2", "14+2"), ("tova-heads", "h2o", "streaming")),
    "copy-8": (("14+2", "10+2"), ("tova-heads", "h2o", "streaming")),
}
SHOWDOWN = ("sorting-12", "tova-heads:11+2")
SEEDS = (0, 1)
DECIDING_SEEDS = (0, 1, 2, 3, 4)


def cells() -> tuple[Cell, ...]:
    found = []
    for task, ((mild, cruel), policies) in TASKS.items():
        decides = sampler_of(f"tova-heads:{cruel}")
        for policy in policies:
            for budget in (cruel, mild):
                sampler = sampler_of(f"{policy}:{budget}")
                arms: tuple[Arm, ...] = ALL_ARMS if (task, sampler.label) == SHOWDOWN else ARMS
                seeds = DECIDING_SEEDS if sampler == decides else SEEDS
                found.append(Cell(problem_of(task), sampler, arms, seeds, pilot=decides))
    return tuple(found)


def main(args: StudyArgs) -> None:
    with stopping():
        run(grid_of(args, "map", cells(), RATES, SIZES), args)


if __name__ == "__main__":
    main(tyro.cli(StudyArgs, description=as_written(__doc__)))
