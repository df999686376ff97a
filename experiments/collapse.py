"""Which learners collapse, and how soon: 500 rollouts with half of the keys.

Question   The papers report that naive training under a compressed cache collapses. Two learners have that name: one
           whose ratio is taken to the dense learner's own old log-probabilities (`naive`, as in the papers' code:
           see docs/older_studies.md), and one whose ratio is taken to the sampler's (`bypass`). Which of them
           collapses, at which learning rate, and after how many rollouts?
Plan       experiments/PLAN.md, section "Collapse": prediction, primary contrast, what counts as a collapse.
Cells      Sorting 12 digits, SnapKV and Random with 11 + 2 of 26 keys.
Start      As in experiments/room.py.
Arms       naive, bypass, TIS, shadow; each at five learning rates, all reported.
Rollouts   500 of 16 x 8 responses, 4 optimizer steps on each; an evaluation every 20. Every point of the curve has the
           agreement of sampler and learner since the previous point (5th percentile over tokens).
Command    python experiments/collapse.py --workers 1 [--samplers …] [--arms …] [--seeds …] [--minutes …]
           In a clean clone. Finished runs are kept; --rows-from FILE adds the rows of another clone.
Result     experiments/results/collapse.json, one row per run
"""

from __future__ import annotations

from dataclasses import replace

from lib.arms import arms_of
from lib.command import run_study
from lib.grid import Cell
from lib.problems import problem_of
from lib.samplers import sampler_of
from room import SIZES as ROOM_SIZES

ARMS = arms_of(("naive", "bypass", "tis", "shadow"))
SEEDS = tuple(range(10, 20))
RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
SIZES = replace(ROOM_SIZES, rollouts=500)
CELLS = tuple(
    Cell(problem_of("sorting-12"), sampler_of(label), ARMS, SEEDS) for label in ("snapkv:11+2", "random:11+2")
)


if __name__ == "__main__":
    run_study(__doc__, "collapse", CELLS, SIZES, RATES, criteria=())
