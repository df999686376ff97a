"""Does the map's answer hang on choices that it made for all arms: steps per rollout, the teacher's weight and share?

Cell       The showdown's: sorting 12 digits, TOVA of each head, 11 + 2 keys; see experiments/map.py, whose starts,
           seeds, rates and rows these runs share.
Arms       TIS and shadow masks with 1 and 16 optimizer steps a rollout in place of 4; the frozen teacher with a weight
           of 0.01 and 1 in place of 0.1, and on a quarter of the rows.
Found      It does not: shadow masks stay as far ahead of TIS with 1 and 16 steps; a quarter of the rows for the
           teacher does as well as all of them.
Command    python experiments/choices.py [--arms …] [--seeds …] [--minutes …]
           Runs that have ended are kept, and not made again when the study goes on.
Cost       0.4 CPU hours, 77 runs, on one core of an Intel Xeon (family 6, model 207), starts not counted
Result     experiments/results/choices.json, a row a run, pilot included
"""

from __future__ import annotations

import tyro

from map import DECIDING_SEEDS, RATES, SHOWDOWN, SIZES
from study.arms import arms_of
from study.command import StudyArgs, as_written, grid_of, run, stopping
from study.grid import Cell
from study.problems import problem_of
from study.samplers import sampler_of

ARMS = arms_of(
    (
        *("tis-1-step", "tis-16-steps", "shadow-1-step", "shadow-16-steps"),
        *("shadow-anchor-0.01", "shadow-anchor-1", "shadow-anchor-quarter"),
    )
)
TASK, SAMPLER = SHOWDOWN
CELLS = (Cell(problem_of(TASK), sampler_of(SAMPLER), ARMS, DECIDING_SEEDS),)


def main(args: StudyArgs) -> None:
    with stopping():
        run(grid_of(args, "choices", CELLS, RATES, SIZES), args)


if __name__ == "__main__":
    main(tyro.cli(StudyArgs, description=as_written(__doc__)))
