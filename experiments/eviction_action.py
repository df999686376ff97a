"""Evictions drawn from a learned gate and trained with the reward of the response.

Question   Does it help to train what the cache forgets?
Tasks      Running sums and sorting of 12 digits. Sums need each digit once, in order, so the oldest key may go. Sorting
           looks at all digits at every step, so written tokens may go.
Budget     14 + 2 slots for 26 positions. A complete answer loses nine keys per layer and KV head in five compressions.
           The prompt of 13 loses none: its draw would be shared by a group, and advantages within the group could not
           train it.
Start      Supervised with the full cache until 97 % of the steps are right at temperature 1, as in the map.
Arms       untrained     under every policy, and under two fixed rules that fit one task each: `recent`, `oldest`
           shadow        tokens trained under Random, H2O and SnapKV
           gate-frozen   tokens trained, evictions drawn from an untrained (uniform) gate
           gate-alone    the gate trained, tokens frozen
           gate-joint    both trained
Gate       Linear in key, value, position and age, per layer and KV head: 68 numbers per head
           (`smd_jax.message.gate.LinearGate`). Its learning rate is GATE_SPEED times that of the tokens, chosen among
           30, 100 and 300 on pilot seeds and validation rows (eviction_action_speed.json, `--choose-speed` of commit
           b191876).
Rates      3e-5, 1e-4 and 3e-4: for every arm of every cell the best mean of sparse and dense greedy reward on pilot
           seeds.
Rewards    On 512 held-out rows: under the budget and with the full cache, at temperature 1 and greedy.
Command    python experiments/eviction_action.py [--tasks …] [--samplers …] [--arms …] [--seeds …] [--minutes …]
Cost       1.3 CPU hours for 182 runs on one core of an Intel Xeon (family 6, model 207)
Result     experiments/results/eviction_action.json, a row per run, pilots included
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import jax
import optax
import tyro

import smd_jax as smd
from lib.arms import Arm, arms_of
from lib.command import StudyArgs, as_written, grid_of, run, stopping
from lib.grid import Cell
from lib.problems import problem_of
from lib.runs import Sizes
from lib.samplers import sampler_of
from smd_jax.message.gate import EVICTION_GATE, Gate, LinearGate, add_gate
from smd_jax.model.protocol import ModelShape, Params

TASKS = ("sums-12", "sorting-12")
SEEDS = (0, 1, 2, 3, 4)
RATES = (3e-5, 1e-4, 3e-4)
SIZES = Sizes()
GATE_SPEED = 30.0


@dataclass(frozen=True)
class GateArm(Arm):
    """An arm whose sampler draws evictions from a gate.

    Attributes:
      gate: whose parameters the start gets.
      trains_tokens: whether the model is trained.
      trains_gate: whether the gate is trained.
      gate_speed: learning rate of the gate over that of the tokens.
    """

    trains_tokens: bool = True
    trains_gate: bool = True
    gate_speed: float = GATE_SPEED
    gate: Gate = LinearGate()

    @property
    def update(self) -> smd.UpdateConfig:
        return smd.UpdateConfig(
            visibility=self.visibility,
            policy_coef=1.0 if self.trains_tokens else 0.0,
            eviction_coef=1.0 if self.trains_gate else 0.0,
            correction=self.correction,
        )

    def with_own_parameters(self, params: Params, shape: ModelShape) -> Params:
        return add_gate(
            params,
            self.gate,
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
    """The optimizer of each parameter, by name."""
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


def main(args: StudyArgs) -> None:
    with stopping():
        run(grid_of(args, "eviction_action", cells(), RATES, SIZES), args)


if __name__ == "__main__":
    main(tyro.cli(StudyArgs, description=as_written(__doc__)))
