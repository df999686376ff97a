"""Several turns with a tool, under a budget that cannot hold the dialogue.

Question   A policy looks up the values of letters with a tool, one a turn, and says all of them in the last turn. Which
           learner ends with the higher reward, decoded under the budget and with the full cache?
Task       `lib.lookup`: letters to look up, an answer of a value and eight letters of noise for each. The dialogue has
           60 tokens, the budget 32. Only the last turn has a reward: the share of right values; chance is 0.1.
Start      Supervised with the full cache on conversations without a mistake, until 60 % of the values are right at
           temperature 1; shared by all arms of a seed. The start of seed 100 has 0.74 there, and 0.36 under the budget;
           greedily 1.00 and 0.50. Budgets of 12 to 28 under TOVA, SnapKV and H2O left it near chance.
Arms       Shadow replay, TIS, naive, shadow and TIS half and half, a full cache, and the start. Every rollout of an arm
           that must be exact is checked.
Rates      3e-4 and 1e-3; wider while the best one is at the edge; by the mean of the greedy rewards under the budget
           and with the full cache on pilot seeds 100 and 101, which are not reported.
Contrast   Shadow minus TIS and shadow minus naive at the end, under the budget, at temperature 1: paired over seeds,
           95 % t interval. An interval that holds 0 refutes the claim that replay helps here.
Command    python experiments/agents.py --workers 1 [--arms …] [--seeds …] [--minutes …]; --quick for a smoke test.
           In a clean clone. Finished runs are kept; --rows-from FILE adds the rows of another clone.
Result     experiments/results/agents.json, a row a run, pilot runs included
"""

from __future__ import annotations

from lib.arms import arms_of
from lib.command import run_study
from lib.grid import Cell
from lib.lookup import Lookup
from lib.runs import Sizes
from lib.samplers import sampler_of
from lib.starts import StartLevel

ARMS = arms_of(("untrained", "full-cache", "naive", "tis", "shadow", "mixed-50"))
SEEDS = tuple(range(10, 16))
FIRST_RATES = (3e-4, 1e-3)
START = StartLevel(0.6, every=20, rows=256)
SIZES = Sizes(rollouts=120, prompts=16, minibatches=2, evaluate_every=20, evaluation_rows=256, last=3, start=START)
CELLS = (Cell(Lookup(4), sampler_of("h2o:32+4"), ARMS, SEEDS),)


if __name__ == "__main__":
    run_study(__doc__, "agents", CELLS, SIZES, first_rates=FIRST_RATES)
