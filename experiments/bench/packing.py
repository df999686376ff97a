"""Time of an update with packed rows.

Question   `UpdateConfig.pack_columns` packs several sequences into one row of the update, and its code is long. Is it
           worth it in the best case, with many short responses and a few long ones?
Command    python experiments/bench/packing.py --out experiments/results/packing_cpu.json
Cost       eight minutes on two busy cores
Result     seconds of an update, and the ratio of each way to packing

64 responses after prompts of 32 to 64 tokens, up to 512 tokens each, a decoder of 3.4 M parameters, microbatches of
4 rows. 60 responses have 8 to 48 tokens and 4 have 300 to 380. "padded" is the update over all 576 columns; "bucketed"
runs over the columns that the longest response needs, in 4 widths, as `LoopConfig.update_widths` does; "packed" shares
rows of 576 columns. The three take turns; `seconds` is the median, and `ratio` the median of the turns' own ratios to
"packed", with the least and the largest.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for the packages bench and lib

import smd_jax as smd
from lib.files import write_rows
from lib.provenance import provenance
from smd_jax.learner.packed import make_packed_update
from smd_jax.learner.state import TrainBatch, init_state
from smd_jax.learner.update import make_update
from smd_jax.message.masks import Segments
from smd_jax.message.trajectory import Trajectory
from smd_jax.testing import random_evictions, random_params, tiny_model_config
from smd_jax.train.minibatches import response_widths, shortened

MODEL = smd.Decoder(
    tiny_model_config(hidden_size=256, intermediate_size=768, num_layers=4, num_heads=8, num_kv_heads=2, head_dim=32)
)
PROMPT, RESPONSE, ROWS, LONG = 64, 512, 64, 4
BUDGET, BUFFER = 48, 16
CONFIG = smd.UpdateConfig(microbatch_size=4)
OPTIMIZER = optax.adamw(1e-5)


@dataclass(frozen=True)
class Args:
    """Times the update with padded, bucketed and packed rows, in turns."""

    out: Path | None = None  # file of the rows
    turns: int = 7


def trajectory() -> Trajectory:
    """Random tokens of very unequal responses, under a mask of random evictions."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(PROMPT // 2, PROMPT + 1, ROWS)
    responses = rng.permutation(np.concatenate([rng.integers(300, 381, LONG), rng.integers(8, 49, ROWS - LONG)]))
    columns = np.arange(PROMPT + RESPONSE)[None]
    valid = (columns >= PROMPT - prompts[:, None]) & (columns < PROMPT + responses[:, None])
    config = MODEL.config
    mask = random_evictions(
        PROMPT + RESPONSE,
        Segments(PROMPT, BUFFER, BUDGET),
        batch=ROWS,
        layers=config.num_layers,
        kv_heads=config.num_kv_heads,
    )
    return Trajectory(
        tokens=jnp.asarray(np.where(valid, rng.integers(1, config.vocab_size, valid.shape), 0), jnp.int32),
        valid=jnp.asarray(valid),
        logprobs=jnp.full((ROWS, RESPONSE), -np.log(config.vocab_size), jnp.float32),
        terminated=jnp.ones(ROWS, bool),
        mask=mask.replace(evicted_at=jnp.where(jnp.asarray(valid)[:, None, None], mask.evicted_at, 0)),
    )


def seconds_of(step: Callable[..., Any], state: Any, batch: TrainBatch) -> tuple[Any, float]:
    start = time.perf_counter()
    state, metrics = step(state, batch)
    jax.block_until_ready((state.params, metrics))
    return state, time.perf_counter() - start


def main(args: Args) -> None:
    advantages = jnp.asarray(np.random.default_rng(1).normal(size=ROWS), jnp.float32)
    whole = trajectory()
    short = shortened(whole, response_widths(RESPONSE, 4))
    update = make_update(MODEL, OPTIMIZER, CONFIG)
    packed = make_packed_update(MODEL, OPTIMIZER, replace(CONFIG, pack_columns=PROMPT + RESPONSE))
    ways = {"padded": (update, whole), "bucketed": (update, short), "packed": (packed, whole)}
    state = init_state(random_params(MODEL.config), OPTIMIZER, jax.random.key(0))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(args.turns + 1):
        for name, (step, rollout) in ways.items():
            state, spent = seconds_of(step, state, TrainBatch(rollout, advantages, rollout.logprobs))
            if turn:  # the first one compiles
                seconds[name].append(spent)
    rows = []
    for name, (_, rollout) in ways.items():
        ratios = [mine / theirs for mine, theirs in zip(seconds[name], seconds["packed"], strict=True)]
        row = {"rows": name, "columns": rollout.tokens.shape[1], "seconds": statistics.median(seconds[name])}
        row |= {"ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}
        rows.append(row | {"turns": args.turns, "padding": float(1 - rollout.valid.mean())})
        print(as_row(row))
    facts = provenance()
    print(facts["cpu"])
    if args.out is not None:
        write_rows(args.out, [row | facts for row in rows])


def as_row(row: dict[str, Any]) -> str:
    ratio = f"{row['ratio']:.2f} ({row['ratio_min']:.2f} to {row['ratio_max']:.2f}) x packed"
    return f"{row['rows']:<10}{row['columns']:>5} columns  {row['seconds']:.2f} s  {ratio}"


if __name__ == "__main__":
    main(tyro.cli(Args))
