"""Time gained by a rollout ahead of the update when the reward waits.

Question   `rollouts_ahead=1` samples and grades the next rollout in a thread during the update. On one device both
           compete for it, so the gain is at most the time in which the host waits for rewards. How much is gained?
Command    python experiments/bench/ahead.py --out experiments/results/rollouts_ahead.json
Cost       five minutes on two cores
Result     one row for each waiting time of the reward

A decoder of 3.4 M parameters, 4 prompts x 2 completions of 32 tokens under H2O (16 + 8 keys), one optimizer step a
rollout. The reward runs in its own process and waits there, as one that asks another machine does. By default it waits
as long as an update takes, which is the best case. Runs with and without a rollout ahead alternate, a few steps at a
time. The first step of such a turn has no rollout ahead, and its last step begins none. `seconds_0`, `seconds_1`:
median time of a step without and with a rollout ahead; `ratio`: their quotient, the median over pairs of turns, with
the smallest and the largest. `waited`: waiting time of the reward; `update`: median time of an update without a rollout
ahead. The gain is limited by both.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import optax
import tyro

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for the packages bench and lib

from waiting_reward import WaitingReward

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
NO_TOKEN = 263  # the tokenizer never stops at it, so that every completion has 32 tokens


@dataclass(frozen=True)
class Args:
    """Times steps with and without a rollout ahead, alternately."""

    out: Path | None = None  # file of the rows
    waits: tuple[float, ...] = ()  # waiting times of the reward, in seconds; none: as long as an update takes
    steps: int = 5  # steps of a turn
    turns: int = 5  # turns of each kind


def loop_of(seconds: float, ahead: int) -> GRPOLoop:
    config = smd.GRPOConfig(
        prompts_per_step=4,
        group_size=2,
        prompt_width=128,
        policy=smd.eviction.H2O(),
        rollout=smd.RolloutConfig(max_new_tokens=32, budget=16, buffer=8, eos_token_id=NO_TOKEN, pad_token_id=256),
        rollouts_ahead=ahead,
    )
    task = ReasoningGymTask("chain_sum", seed=0, size=400)
    # Rewards in their own process are computed ahead, too; those of this process are not.
    rewards = Rewards((WaitingReward(seconds),), names=("waiting",), seconds=60.0)
    return GRPOLoop(MODEL, task, byte_tokenizer(chat=False), optax.adamw(1e-5), config, rewards=rewards)


def state_of(ahead: int) -> TrainState:
    state = smd.init_state(random_params(MODEL.config), optax.adamw(1e-5), jax.random.key(0))
    return one_behind(state) if ahead else state


def turn(loop: GRPOLoop, state: TrainState, steps: int) -> tuple[TrainState, float, list[float]]:
    """Time of a few steps, and the time of each update, in seconds."""
    began = time.perf_counter()
    updates = []
    for number in range(steps):
        last = number + 1 == steps
        state, metrics = loop.step(state, lambda last=last: not last)
        updates.append(metrics["time/update"])
    jax.block_until_ready(state.params)
    return state, time.perf_counter() - began, updates


def row_of(seconds: float, steps: int, turns: int) -> dict[str, Any]:
    loops = [loop_of(seconds, ahead) for ahead in (0, 1)]
    states = [state_of(ahead) for ahead in (0, 1)]
    found: list[list[float]] = [[], []]
    updates = list[float]()
    for number in range(turns + 1):
        for ahead, loop in enumerate(loops):
            states[ahead], took, of_updates = turn(loop, states[ahead], steps)
            if number:  # the first turn compiles
                found[ahead].append(took / steps)
                updates += of_updates if not ahead else []
    ratios = [without / beside for without, beside in zip(*found, strict=True)]
    return {
        "waited": seconds,
        "update": round(statistics.median(updates), 3),
        "steps": steps,
        "turns": turns,
        "seconds_0": round(statistics.median(found[0]), 3),
        "seconds_1": round(statistics.median(found[1]), 3),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
    }


def update_seconds(steps: int) -> float:
    """Median time of an update; the first turn compiles."""
    loop, state = loop_of(0.0, 0), state_of(0)
    state, _, _ = turn(loop, state, 1)
    return statistics.median(turn(loop, state, steps)[2])


def main(args: Args) -> None:
    keep_programs()
    rows = []
    for seconds in args.waits or (round(update_seconds(args.steps), 1),):
        rows.append(row_of(seconds, args.steps, args.turns) | provenance())
        if args.out is not None:
            write_rows(args.out, rows)
    names = ("waited", "update", "seconds_0", "seconds_1", "ratio", "ratio_min", "ratio_max")
    summary_table("a rollout ahead", names, [tuple(row[name] for name in names) for row in rows])


if __name__ == "__main__":
    main(tyro.cli(Args, description=as_written(__doc__)))
