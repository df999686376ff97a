"""Does it help to train what to forget? Evictions drawn from a learned gate, with the reward of the response.

    python experiments/eviction_action.py                          all of it; rows that are kept are not made again
    python experiments/eviction_action.py --tasks sums-12 --samplers gate:14+2 --arms gate-alone
    python experiments/eviction_action.py --quick                  everything once, too small to mean anything

Rows: experiments/results/eviction_action.json.

Tasks: running sums and sorting, 12 digits, 14 + 2 slots for 26 positions; starts with a dense reward of 0.97. The two
want opposite things: sums need a digit once, in order, so that the oldest may go; sorting looks at all digits at every
step, so that what was written may go.

    untrained                under every policy, and under two fixed rules that happen to fit: `recent`, `oldest`
    shadow                   tokens trained under Random, H2O and SnapKV
    gate-frozen              tokens trained, evictions drawn from a gate that never moves: uniform, as Random's
    gate-alone               the gate trained, tokens frozen
    gate-joint               both, one policy over tokens and evictions: the exact gradient of its expected reward

A gate is linear in key, value, position and age, per layer and KV head (`smd_jax.gate.LinearGate`): 68 numbers a head.
Its learning rate is GATE_SPEED times that of the tokens, whatever that is: a gate starts from zeros and has to come to
logits of about one, where the model's weights move by thousandths. Every arm chooses its rate from the same three, on
pilot seeds. `sparse_decided` in a row's curve: neither tokens nor evictions by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import jax
import optax
import tyro

import smd_jax as smd
from smd_jax.gate import EVICTION_GATE, LinearGate, add_gate
from smd_jax.model.protocol import ModelShape, Params
from study.arms import Arm, arms_of
from study.command import StudyArgs, grid_of, run
from study.grid import Cell
from study.problems import problem_of
from study.runs import Sizes
from study.samplers import sampler_of

TASKS = ("sums-12", "sorting-12")
SEEDS = (0, 1, 2, 3, 4)
RATES = (3e-5, 1e-4, 3e-4)
SIZES = Sizes()
GATE_SPEED = 300.0  # Adam's steps of 0.009 to 0.09: from zeros to logits of about one within some tens of rollouts


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
        sizes = {"num_layers": shape.num_layers, "num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim}
        return add_gate(params, LinearGate(), **sizes)

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


def main(args: StudyArgs) -> None:
    run(grid_of(args, "eviction_action", cells(), RATES, SIZES), args)


if __name__ == "__main__":
    main(tyro.cli(StudyArgs))
