"""Corrections and replay when responses get longer.

Question   Weights of whole responses spread with the length. Weights of single tokens do not, but leave the states
           uncorrected. A learner that replays the masks needs neither. Does this change the reward?
Task       Walks along the edges of a graph in the prompt (`lib.problems.Walk`), 16 to 512 tokens, every step equally
           hard, and drawn: a policy that is certain of its next token hides the mismatch.
Start      Supervised with the full cache until 97 % of 512 steps are right at temperature 1; shared by all arms and
           lengths of a seed. One budget for all lengths. Two eviction policies: long walks remain possible under H2O.
Rewards    On held-out rows, under the budget and with the full cache, at temperature 1 and greedy.
Rates      3e-5, 1e-4 and 3e-4: for every arm and length the best mean of sparse and dense greedy reward on one pilot
           seed, which is not reported. TIS also ran at the rate of shadow masks in the one cell where the rates differ
           by ten (horizon_rates.json): --tasks walk-64 --samplers h2o:12+4 --arms tis --learning-rates 3e-4
           --results experiments/results/horizon_rates.json
Command    python experiments/horizon.py [--tasks walk-64] [--arms …] [--seeds …] [--minutes …] [--workers 1]
Cost       0.6 CPU hours for the 114 runs of 16 and 64 tokens under TOVA, on one core of an Intel Xeon (family 6, model
           207); 3 for the 171 of 16, 64 and 256 tokens under H2O, on one of an AMD EPYC (family 25, model 1); 4 to 6
           minutes per run of 512 tokens. A start takes about 4 CPU minutes
Result     experiments/results/horizon.json, a row per run, pilots included
"""

from __future__ import annotations

from dataclasses import replace

import tyro

from lib.arms import arms_of
from lib.command import StudyArgs, as_written, grid_of, run, stopping
from lib.grid import Cell, Grid
from lib.problems import Walk
from lib.runs import Sizes
from lib.samplers import sampler_of
from lib.starts import StartLevel

ARMS = arms_of(
    (
        *("untrained", "full-cache", "naive", "tis", "tis-sequence", "mis-sequence", "icepop", "sparse-rl"),
        *("shadow", "shadow-anchor"),
    )
)
# Under TOVA walks of 256 tokens start at 0.2, below chance; under H2O at 0.8.
LENGTHS = {"tova-heads:12+4": (16, 64), "h2o:12+4": (16, 64, 256, 512)}
RATES = (3e-5, 1e-4, 3e-4)
SEEDS = (0, 1, 2)
SIZES = Sizes(rollouts=60, prompts=16, group=8, evaluate_every=30, evaluation_rows=256, start=StartLevel(rows=256))
CELLS = tuple(
    Cell(Walk(length), sampler_of(sampler), ARMS, SEEDS) for sampler, lengths in LENGTHS.items() for length in lengths
)


def study(args: StudyArgs) -> Grid:
    """One pilot seed: a second one would double the cost of long walks."""
    return replace(grid_of(args, "horizon", CELLS, RATES, SIZES), pilot_seeds=(100,))


def main(args: StudyArgs) -> None:
    with stopping():
        run(study(args), args)


if __name__ == "__main__":
    main(tyro.cli(StudyArgs, description=as_written(__doc__)))
