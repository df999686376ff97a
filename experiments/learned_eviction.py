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
           greedy tokens, and the keys with the lowest logits are evicted without chance.
Command    python experiments/learned_eviction.py --workers 1 [--samplers …] [--arms …] [--seeds …] [--minutes …]
           In a clean clone. Finished runs are kept; --rows-from FILE adds the rows of another clone.
Result     experiments/results/learned_eviction.json, a row a run
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import jax
import optax

import smd_jax as smd
from lib.arms import Arm, arms_of
from lib.command import run_study
from lib.grid import BY_CACHE, Cell
from lib.problems import problem_of
from lib.runs import Sizes
from lib.samplers import sampler_of
from smd_jax.message.gate import EVICTION_GATE, AttentionGate, Gate, LinearGate, add_gate
from smd_jax.model.protocol import ModelShape, Params

SEEDS = tuple(range(10, 18))
FIRST_RATES = (1e-4, 3e-4, 1e-3)
SIZES = Sizes(rollouts=240, prompts=16, evaluate_every=20, evaluation_rows=256, last=3)
GATE_SPEED = 30.0
RULES = ("tova-heads", "h2o", "tova", "snapkv", "streaming", "random", "knorm", "recent")


@dataclass(frozen=True)
class GateArm(Arm):
    """An arm whose sampler draws evictions from a gate; tokens are always trained.

    Attributes:
      gate: whose parameters the start gets.
      trains_gate: whether the evictions are trained.
      gate_speed: learning rate of the gate over that of the tokens.
    """

    trains_gate: bool = True
    gate_speed: float = GATE_SPEED
    gate: Gate = LinearGate()

    @property
    def update(self) -> smd.UpdateConfig:
        return replace(super().update, eviction_coef=1.0 if self.trains_gate else 0.0)

    def with_own_parameters(self, params: Params, shape: ModelShape) -> Params:
        layers, heads, size = shape.num_layers, shape.num_kv_heads, shape.head_dim
        return add_gate(params, self.gate, num_layers=layers, num_kv_heads=heads, head_dim=size)

    def optimizer(self, adam: Callable[[float], optax.GradientTransformation]) -> optax.GradientTransformation:
        parts: dict[Hashable, optax.GradientTransformation] = {
            "tokens": adam(1.0),
            "gate": adam(self.gate_speed) if self.trains_gate else optax.set_to_zero(),
        }
        return optax.partition(parts, labels)


def labels(params: Params) -> Params:
    """The optimizer of each parameter, by name."""
    return {
        name: jax.tree.map(lambda _, name=name: "gate" if name == EVICTION_GATE else "tokens", part)
        for name, part in params.items()
    }


def gate_arm(name: str, gate: Gate, *, trained: bool = True) -> GateArm:
    return GateArm(name, "shadow", smd.corrections.Shadow(), trains_gate=trained, gate=gate)


LINEAR, ATTENTION = LinearGate(), AttentionGate()
GATES: dict[str, tuple[Arm, ...]] = {
    "gate": (gate_arm("gate-joint", LINEAR), gate_arm("gate-frozen", LINEAR, trained=False)),
    "attention": (gate_arm("attention-joint", ATTENTION), gate_arm("attention-frozen", ATTENTION, trained=False)),
    "attention-cold": (gate_arm("attention-joint", ATTENTION),),
}


def cells() -> tuple[Cell, ...]:
    """The arms of the primary contrast first."""
    arms = GATES | {rule: arms_of(("untrained", "shadow")) for rule in RULES[:2]}
    arms |= {rule: arms_of(("untrained",)) for rule in RULES[2:]}
    problem = problem_of("sorting-12")
    return tuple(Cell(problem, sampler_of(f"{policy}:13+2"), found, SEEDS) for policy, found in arms.items())


if __name__ == "__main__":
    run_study(__doc__, "learned_eviction", cells(), SIZES, first_rates=FIRST_RATES, criteria=BY_CACHE[:1])
