"""Room and time: what each learner reaches from a start that lacks skill, after 240 rollouts.

Question   From starts that cannot solve the task with any cache, which learner ends with the higher reward, decoded
           under the budget and with the full cache?
Plan       experiments/PLAN.md, section "Room and time": arms, rates, seeds, primary contrast, what would refute it.
Cells      Sorting 12 digits, copied sums of 8, walks of 64 steps; two policies whose choice depends on the parameters;
           two budgets. The first cell of each task chooses the learning rates of that task. It was chosen only by
           supervised policies, so that the budget costs part of the reward.
Start      Supervised with the full cache until half of the steps are right greedily. Files under experiments/starts.
Rollouts   240 of 16 x 8 responses, 4 optimizer steps on each; an evaluation every 20.
Rates      1e-4, 3e-4, 1e-3; wider while the best one is at the edge. One rate by the reward under the budget and one by
           the reward with the full cache, both on pilot seeds 100 and 101; every arm is reported at each.
Rewards    On 256 held-out rows, mean of the last three evaluations: budget and full cache, temperature 1 and greedy.
Command    python experiments/room.py --workers 1 [--tasks …] [--samplers …] [--arms …] [--seeds …] [--minutes …]
           In a clean clone. Finished runs are kept; --rows-from FILE adds the rows of another clone.
Result     experiments/results/room/, a file a task, a row a run, pilot runs included
"""

from __future__ import annotations

from lib.arms import Arm, arms_of
from lib.command import run_study
from lib.grid import BY_CACHE, Cell
from lib.problems import problem_of
from lib.runs import Sizes
from lib.samplers import sampler_of
from lib.starts import StartLevel

# Every cell has the main arms. The first cell of a task adds the teachers, that of sorting all others.
MAIN = arms_of(("untrained", "full-cache", "naive", "tis", "shadow", "mixed-50"))
RIVALS = arms_of(("icepop", "sparse-rl-paper", "tis-1.5", "tis-5", "geometric", "gspo"))
TEACHERS = arms_of(("shadow-anchor", "anchor-alone", "anchor-then-shadow"))
SHARES = arms_of(("shadow-published", "mixed-20", "mixed-80"))
SEEDS = tuple(range(10, 18))
FIRST_RATES = (1e-4, 3e-4, 1e-3)
START = StartLevel(0.5, greedy=True, every=5)
SIZES = Sizes(rollouts=240, prompts=16, minibatches=4, evaluate_every=20, evaluation_rows=256, last=3, start=START)
# In run order. The first sampler of a task chooses its rates.
SAMPLERS = {
    "sorting-12": ("tova-heads:11+2", "snapkv:11+2", "tova-heads:14+2", "snapkv:14+2"),
    "copy-8": ("tova-heads:10+2", "h2o:10+2", "tova-heads:14+2", "h2o:14+2"),
    "walk-64": ("tova-heads:20+4", "h2o:12+4", "tova-heads:12+4", "h2o:20+4"),
}


def cells() -> tuple[Cell, ...]:
    """The cells in run order: the primary contrast, the other tasks, the other samplers."""
    (sorting, samplers), *_ = SAMPLERS.items()
    primary = [cell(sorting, samplers[0], arms) for arms in (MAIN, RIVALS, TEACHERS)]
    others = [cell(task, names[0], (*MAIN, *TEACHERS)) for task, names in SAMPLERS.items() if task != sorting]
    # One more sampler of every task before the third of any.
    rest = [cell(task, names[place], MAIN) for place in (1, 2, 3) for task, names in SAMPLERS.items()]
    return (*primary, *others, cell(sorting, samplers[0], SHARES), *rest)


def cell(task: str, sampler: str, arms: tuple[Arm, ...]) -> Cell:
    return Cell(problem_of(task), sampler_of(sampler), arms, SEEDS, pilot=sampler_of(SAMPLERS[task][0]))


if __name__ == "__main__":
    run_study(__doc__, "room", cells(), SIZES, first_rates=FIRST_RATES, criteria=BY_CACHE, by_task=True)
