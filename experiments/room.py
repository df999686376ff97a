"""Room and time: what each learner reaches from a start that lacks skill, trained to the plateau.

Question   From starts that cannot solve the task with any cache, which learner ends with the higher reward, decoded
           under the budget and with the full cache?
Plan       experiments/PLAN.md, section "Room and time": arms, rates, seeds, primary contrast, what would refute it.
Cells      Sorting 12 digits, copied sums of 8, walks of 64 steps; two policies whose choice depends on the parameters;
           two budgets. The first cell of each task chooses the learning rates of that task.
Start      Supervised with the full cache until half of the steps are right greedily. Files under experiments/starts.
Rollouts   240 of 32 x 8 responses, 4 optimizer steps on each; an evaluation every 20.
Rates      1e-4, 3e-4, 1e-3; wider while the best one is at the edge. One rate by the reward under the budget and one by
           the reward with the full cache, both on pilot seeds 100 and 101; every arm is reported at each.
Rewards    On 512 held-out rows, mean of the last three evaluations: budget and full cache, temperature 1 and greedy.
Command    python experiments/room.py --workers 1 [--tasks …] [--samplers …] [--arms …] [--seeds …] [--minutes …]
           In a clean clone. Finished runs are kept; --rows-from FILE adds the rows of another clone.
Result     experiments/results/room.json, a row a run, pilot runs included
"""

from __future__ import annotations

from dataclasses import replace

import tyro

from study.arms import Arm, arms_of
from study.command import StudyArgs, as_written, grid_of, run, stopping
from study.grid import BY_CACHE, Cell
from study.problems import problem_of
from study.runs import Sizes
from study.samplers import sampler_of
from study.starts import StartLevel

# Every cell has the main arms. The first cell of sorting has all arms: the main ones, then the others.
MAIN = arms_of(("untrained", "full-cache", "naive", "tis", "shadow", "mixed-50"))
TEACHERS = arms_of(("shadow-anchor", "anchor-alone", "anchor-then-shadow"))
OTHERS = arms_of(
    (
        *("icepop", "sparse-rl-paper", "tis-1.5", "tis-5", "geometric", "gspo"),
        *("shadow-published", "mixed-20", "mixed-80"),
    )
)
SEEDS = tuple(range(10, 18))
RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
FIRST_RATES = (1e-4, 3e-4, 1e-3)
START = StartLevel(0.5, greedy=True, every=5)
SIZES = Sizes(rollouts=240, minibatches=4, evaluate_every=20, last=3, start=START)
# Of each task the first sampler chooses the rates. In the order in which the cells run.
SAMPLERS = {
    "sorting-12": ("tova-heads:11+2", "snapkv:11+2", "tova-heads:14+2", "snapkv:14+2"),
    "walk-64": ("h2o:12+4", "tova-heads:12+4", "h2o:20+4", "tova-heads:20+4"),
    "copy-8": ("tova-heads:10+2", "h2o:10+2", "tova-heads:14+2", "h2o:14+2"),
}


def cells() -> tuple[Cell, ...]:
    """The first cell of every task, the other arms of the first cell, then the other cells."""
    first = [cell(task, samplers[0], (*MAIN, *TEACHERS)) for task, samplers in SAMPLERS.items()]
    (task, samplers), *_ = SAMPLERS.items()
    more = [cell(task, samplers[0], OTHERS)]
    rest = [cell(task, sampler, MAIN) for task, samplers in SAMPLERS.items() for sampler in samplers[1:]]
    return (*first, *more, *rest)


def cell(task: str, sampler: str, arms: tuple[Arm, ...]) -> Cell:
    return Cell(problem_of(task), sampler_of(sampler), arms, SEEDS, pilot=sampler_of(SAMPLERS[task][0]))


def main(args: StudyArgs) -> None:
    with stopping():
        grid = grid_of(args, "room", cells(), RATES, SIZES)
        run(replace(grid, criteria=BY_CACHE, first_rates=None if args.learning_rates else FIRST_RATES), args)


if __name__ == "__main__":
    main(tyro.cli(StudyArgs, description=as_written(__doc__)))
