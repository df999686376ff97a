"""A learned gate beside the model's own attention: which of them learns better what to forget?

Question   Neural Garbage Collection (arXiv:2604.18002) draws evictions from the model's own attention scores and trains
           them with the reward of the response. A gate (`smd.eviction.LinearGate`) has parameters of its own. Which
           one gains more, where no hand-written rule fits?
Plan       experiments/PLAN.md, section "A gate against the model's own attention": prediction and primary contrast.
Cells      Sorting 12 digits, 13 + 2 of 26 keys. Every prompt fits, so every draw belongs to one response.
Start      Supervised with the full cache until 97 % of the steps are right at temperature 1.
Arms       untrained          under every rule
           shadow             tokens trained, under TOVA of each head and under H2O
           gate-frozen        tokens trained, evictions drawn from an untrained (uniform) gate
           gate-joint         tokens and gate trained
           attention-frozen   tokens trained, evictions drawn from the model's attention
           attention-joint    both trained, at temperature 1 and (sampler "attention-cold") 0.3
Rollouts   240 of 16 x 8 responses, one optimizer step on each; an evaluation every 20. `sparse_decided`, in the curve:
           greedy tokens, and the keys with the lowest worth are evicted without chance.
Command    python experiments/learned_eviction.py --workers 1 [--samplers …] [--arms …] [--seeds …] [--minutes …]
           In a clean clone. Finished runs are kept; --rows-from FILE adds the rows of another clone.
Result     experiments/results/learned_eviction.json, a row a run
"""

from __future__ import annotations

from dataclasses import replace

import tyro

from eviction_action import SHADOW, GateArm
from lib.arms import Arm, arms_of
from lib.command import StudyArgs, as_written, grid_of, run, stopping
from lib.grid import Cell
from lib.problems import problem_of
from lib.runs import Sizes
from lib.samplers import sampler_of
from smd_jax.message.gate import AttentionGate

SEEDS = tuple(range(10, 18))
RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
FIRST_RATES = (1e-4, 3e-4, 1e-3)
SIZES = Sizes(rollouts=240, prompts=16, evaluate_every=20, evaluation_rows=256, last=3)
RULES = ("tova-heads", "h2o", "tova", "snapkv", "streaming", "random", "knorm", "recent")


def attention_arm(name: str, *, trained: bool) -> GateArm:
    return GateArm(name, "shadow", SHADOW, trains_gate=trained, gate=AttentionGate())


GATES: dict[str, tuple[Arm, ...]] = {
    "gate": (GateArm("gate-joint", "shadow", SHADOW), GateArm("gate-frozen", "shadow", SHADOW, trains_gate=False)),
    "attention": (
        attention_arm("attention-joint", trained=True),
        attention_arm("attention-frozen", trained=False),
    ),
    "attention-cold": (attention_arm("attention-joint", trained=True),),
}


def cells() -> tuple[Cell, ...]:
    """The arms of the primary contrast first."""
    arms = GATES | {rule: arms_of(("untrained", "shadow")) for rule in RULES[:2]}
    arms |= {rule: arms_of(("untrained",)) for rule in RULES[2:]}
    problem = problem_of("sorting-12")
    return tuple(Cell(problem, sampler_of(f"{policy}:13+2"), found, SEEDS) for policy, found in arms.items())


def main(args: StudyArgs) -> None:
    with stopping():
        grid = grid_of(args, "learned_eviction", cells(), RATES, SIZES)
        first = None if args.learning_rates else FIRST_RATES
        run(replace(grid, criteria=(("sparse", "sparse_greedy"),), first_rates=first), args)


if __name__ == "__main__":
    main(tyro.cli(StudyArgs, description=as_written(__doc__)))
