"""Does it help to train what to forget? Evictions drawn from a learned gate, with the reward of the response.

Tasks      Running sums and sorting of 12 digits (experiments/study/problems.py). They want opposite things: sums need a
           digit once, in order, so that the oldest may go; sorting looks at all digits at every step, so that what
           was written may go.
Budget     14 + 2 slots for 26 positions, of the map's two budgets the crueller for sums and the milder for sorting: a
           complete answer loses nine keys per layer and KV head while it is written, in five compressions that its
           tokens feel, and the prompt of 13 none. (Of 12 + 2 or less, the prompt would be compressed, too, once for all
           responses of its group: a draw that advantages within a group teach nothing about.)
Start      Supervised with the full cache until 97 % of the steps are right at temperature 1, as in the map.
Arms       untrained     under every policy, and under two fixed rules that happen to fit: `recent`, `oldest`
           shadow        tokens trained under Random, H2O and SnapKV
           gate-frozen   tokens trained, evictions drawn from a gate that never moves: uniform, as Random's
           gate-alone    the gate trained, tokens frozen
           gate-joint    both, one policy over tokens and evictions: the exact gradient of its expected reward
Gate       Linear in key, value, position and age, per layer and KV head: 68 numbers a head, see
           `smd_jax.message.gate.LinearGate`. Its learning rate is GATE_SPEED times that of the tokens: it starts from
           zeros and has to come to logits of about one, where the model's weights move by thousandths.
Speed      Chosen before, with --choose-speed: gate-joint on sorting, at the middle rate, on the pilot seeds and on
           validation rows, which are not reported. Of 30, 100 and 300 the first: mean greedy rewards 0.9886, 0.9878 and
           0.9844.
Rates      Of 3e-5, 1e-4 and 3e-4, for every arm of every cell the one with the best mean of sparse and dense greedy
           reward on the pilot seeds.
Rewards    On 512 held-out rows: under the budget and with the full cache, at temperature 1 and greedy.
           `sparse_decided` in a row's curve: neither tokens nor evictions by chance.
Found      Reward finds what a task needs, and tokens need not move for it. The fixed rule that fits is as good in
           sums, and not in sorting. REPORT.md has the table.
Command    python experiments/eviction_action.py [--tasks …] [--samplers …] [--arms …] [--seeds …] [--minutes …]
           Runs that have ended are kept, and not made again when the study goes on.
           python experiments/eviction_action.py --choose-speed
Cost       1.3 CPU hours for 182 runs, on one core of an Intel Xeon (family 6, model 207)
Result     experiments/results/eviction_action.json, a row a run, pilot included; those that chose the speed are in
           eviction_action_speed.json beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial

import jax
import optax
import tyro

import smd_jax as smd
from smd_jax.message.gate import EVICTION_GATE, LinearGate, add_gate
from smd_jax.model.protocol import ModelShape, Params
from study.arms import Arm, arms_of
from study.command import StudyArgs, as_written, grid_of, run, stopping
from study.files import RESULTS, write_rows
from study.grid import PILOT_SEEDS, Cell, Grid, one_core_each
from study.problems import problem_of
from study.runs import Job, Sizes, finished
from study.samplers import sampler_of

TASKS = ("sums-12", "sorting-12")
SEEDS = (0, 1, 2, 3, 4)
RATES = (3e-5, 1e-4, 3e-4)
SIZES = Sizes()
GATE_SPEED = 30.0
GATE_SPEEDS = (30.0, 100.0, 300.0)  # to choose from


@dataclass(frozen=True)
class GateArm(Arm):
    """An arm whose sampler draws what it forgets.

    Attributes:
      trains_tokens, trains_gate: what moves.
      gate_speed: learning rate of the gate over that of the tokens.
    """

    trains_tokens: bool = True
    trains_gate: bool = True
    gate_speed: float = GATE_SPEED

    @property
    def update(self) -> smd.UpdateConfig:
        return smd.UpdateConfig(
            self.visibility,
            policy_coef=1.0 if self.trains_tokens else 0.0,
            eviction_coef=1.0 if self.trains_gate else 0.0,
            correction=self.correction,
        )

    def with_own_parameters(self, params: Params, shape: ModelShape) -> Params:
        return add_gate(
            params,
            LinearGate(),
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
        )

    def optimizer(self, adam: Callable[[float], optax.GradientTransformation]) -> optax.GradientTransformation:
        parts: dict[Hashable, optax.GradientTransformation] = {
            "tokens": adam(1.0) if self.trains_tokens else optax.set_to_zero(),
            "gate": adam(self.gate_speed) if self.trains_gate else optax.set_to_zero(),
        }
        return optax.partition(parts, labels)


def labels(params: Params) -> Params:
    """Which optimizer moves each parameter."""
    return {
        name: jax.tree.map(lambda _, name=name: "gate" if name == EVICTION_GATE else "tokens", part)
        for name, part in params.items()
    }


SHADOW = smd.corrections.Shadow()
GATE_ARMS = (
    GateArm("gate-frozen", "shadow", SHADOW, trains_gate=False),
    GateArm("gate-alone", "shadow", SHADOW, trains_tokens=False),
    GateArm("gate-joint", "shadow", SHADOW),
)


def cells() -> list[Cell]:
    found = []
    for task in TASKS:
        problem = problem_of(task)
        for policy in ("random", "h2o", "snapkv"):
            found.append(Cell(problem, sampler_of(f"{policy}:14+2"), arms_of(("untrained", "shadow")), SEEDS))
        for policy in ("recent", "oldest"):
            found.append(Cell(problem, sampler_of(f"{policy}:14+2"), arms_of(("untrained",)), SEEDS))
        found.append(Cell(problem, sampler_of("gate:14+2"), GATE_ARMS, SEEDS))
    return found


@dataclass(frozen=True)
class EvictionArgs(StudyArgs):
    choose_speed: bool = False  # run nothing but what GATE_SPEED is chosen by


def speed_jobs(sizes: Sizes) -> list[Job]:
    """gate-joint at every speed, on seeds and rows that are not reported."""
    joint, rate = GATE_ARMS[-1], RATES[1]
    arms = [replace(joint, name=f"{joint.name}-{speed:g}", gate_speed=speed) for speed in GATE_SPEEDS]
    problem, sampler = problem_of("sorting-12"), sampler_of("gate:14+2")
    return [Job(problem, sampler, arm, rate, seed, True, sizes) for arm in arms for seed in PILOT_SEEDS]


def choose_speed(grid: Grid) -> None:
    """Makes the rows that GATE_SPEED is chosen by, and writes them."""
    command = "python experiments/eviction_action.py --choose-speed"
    jobs = speed_jobs(grid.sizes)
    with one_core_each(grid.workers) as pool:
        rows = pool.map(partial(finished, runs=grid.runs, command=command), jobs, chunksize=1)
    path = RESULTS if grid.results.parent == RESULTS else grid.runs
    write_rows(path / "eviction_action_speed.json", rows)
    for job, row in zip(jobs, rows, strict=True):
        greedy = (row["sparse_greedy"] + row["dense_greedy"]) / 2
        print(f"{job.arm.name}, seed {job.seed}: mean of sparse and dense greedy reward {greedy:.4f}")


def main(args: EvictionArgs) -> None:
    with stopping():
        grid = grid_of(args, "eviction_action", cells(), RATES, SIZES)
        if args.choose_speed:
            choose_speed(grid)
        else:
            run(grid, args)


if __name__ == "__main__":
    main(tyro.cli(EvictionArgs, description=as_written(__doc__)))
