"""What does a rollout ahead of the update gain, when grading takes its time?

Question   `rollouts_ahead=1` draws and grades the next rollout in a thread beside the update. On one device both share
           it, so that what can be gained is the time in which the host waits for rewards. How much of it is?
Command    python experiments/bench/ahead.py --out experiments/results/rollouts_ahead.json
Cost       five minutes on two idle cores
Result     a row for each time that a reward takes; not measured yet on idle cores

A decoder of 3.4 M parameters, 8 prompts x 8 completions of 64 tokens under H2O (32 + 8 keys), one optimizer step a
rollout. The reward waits, as one that asks another machine does, and computes next to nothing. Runs with and without a
rollout ahead take turns, some steps at a time; the first step of such a turn has nothing ahead, and its last draws
nothing. `seconds`: median of a turn, by its steps; `ratio`: without over with, the median of pairs, and the least and
largest.
`waited`: the reward's time in a step. The most that can be gained is what there is of it, or of the update's, if that
is shorter.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import optax
import tyro

sys.path.append(str(Path(__file__).resolve().parents[1]))  # of what the studies share

import smd_jax as smd
from lib.command import as_written
from lib.files import write_rows
from lib.provenance import provenance
from smd_jax.commands.compilation_cache import keep_programs
from smd_jax.learner.state import TrainState
from smd_jax.monitor.progress import summary_table
from smd_jax.tasks.reasoning_gym import ReasoningGymTask
from smd_jax.tasks.rewards import Rewards
from smd_jax.testing import byte_tokenizer, random_params, tiny_model_config
from smd_jax.train.async_rollout import one_behind
from smd_jax.train.grpo import GRPOLoop

MODEL = smd.Decoder(
    tiny_model_config(hidden_size=256, intermediate_size=768, num_layers=4, num_heads=8, num_kv_heads=2, head_dim=32)
)
NO_TOKEN = 263  # of the vocabulary, and none that the tokenizer stops at: all completions are whole


@dataclass(frozen=True)
class Args:
    """Times steps with and without a rollout ahead, in turns."""

    out: Path | None = None  # rows go there
    waits: tuple[float, ...] = (0.0, 1.0, 4.0)  # seconds of a reward, for all completions of a rollout
    steps: int = 5  # of a turn
    turns: int = 5  # of each


def waiting(seconds: float) -> Any:
    """A reward of a machine elsewhere."""

    def shorter(completions: Sequence[str], **columns: Any) -> list[float]:
        time.sleep(seconds)
        return [-float(len(completion)) for completion in completions]

    return shorter


def loop_of(seconds: float, ahead: int) -> GRPOLoop:
    config = smd.GRPOConfig(
        prompts_per_step=8,
        group_size=8,
        prompt_width=128,
        policy=smd.eviction.H2O(),
        rollout=smd.RolloutConfig(64, 32, 8, NO_TOKEN, 256),
        rollouts_ahead=ahead,
    )
    task = ReasoningGymTask("chain_sum", seed=0, size=400)
    rewards = Rewards((waiting(seconds),), seconds=None)
    return GRPOLoop(MODEL, task, byte_tokenizer(chat=False), optax.adamw(1e-5), config, rewards=rewards)


def state_of(ahead: int) -> TrainState:
    state = smd.init_state(random_params(MODEL.config), optax.adamw(1e-5), jax.random.key(0))
    return one_behind(state) if ahead else state


def turn(loop: GRPOLoop, state: TrainState, steps: int) -> tuple[TrainState, float]:
    """Seconds of some steps."""
    began = time.perf_counter()
    for number in range(steps):
        last = number + 1 == steps
        state, _ = loop.step(state, lambda last=last: not last)
    jax.block_until_ready(state.params)
    return state, time.perf_counter() - began


def row_of(seconds: float, steps: int, turns: int) -> dict[str, Any]:
    loops = [loop_of(seconds, ahead) for ahead in (0, 1)]
    states = [state_of(ahead) for ahead in (0, 1)]
    found: list[list[float]] = [[], []]
    for number in range(turns + 1):
        for ahead, loop in enumerate(loops):
            states[ahead], took = turn(loop, states[ahead], steps)
            if number:  # the first turn compiles
                found[ahead].append(took / steps)
    ratios = [without / beside for without, beside in zip(*found, strict=True)]
    return {
        "waited": seconds,
        "steps": steps,
        "turns": turns,
        "seconds_0": round(statistics.median(found[0]), 3),
        "seconds_1": round(statistics.median(found[1]), 3),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
    }


def main(args: Args) -> None:
    keep_programs()
    rows = []
    for seconds in args.waits:
        rows.append(row_of(seconds, args.steps, args.turns) | provenance())
        if args.out is not None:
            write_rows(args.out, rows)
    names = ("waited", "seconds_0", "seconds_1", "ratio", "ratio_min", "ratio_max")
    summary_table("a rollout ahead", names, [tuple(row[name] for name in names) for row in rows])


if __name__ == "__main__":
    main(tyro.cli(Args, description=as_written(__doc__)))
