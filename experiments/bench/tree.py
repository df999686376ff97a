"""What does an update of a tree save, and how close is it to what the arithmetic allows?

Question   Branches of a tree share their beginning, and `make_packed_update(share_beginnings=True)` reads it once. How
           much time and memory does that save against one row per branch, and how much could it save?
Command    python experiments/bench/tree.py --out experiments/results/tree_cpu.json
Cost       ten minutes on two idle cores
Result     seconds and bytes of an update in each way, the ratios to separate rows, and the bound

One tree: a prompt of 512 tokens and 2 to 16 branches of 128 sampled tokens each, a decoder of 3.4 M parameters,
nothing evicted. "rows" has one row per branch in one microbatch, "rows, one at a time" in microbatches of one row.
"shared prompt" is `rows_per_prompt`, which reads the prompt once and attends row by row; "tree" has all branches in one
row. The ways take turns in one process. `seconds` and `cpu_seconds` (of the process, which other load on the machine
changes less) are medians. `ratio` is the median of the turns' own ratios of separate rows to this way, with the least
and the largest, and `cpu_ratio` the same of CPU seconds. Separate rows are those of the way named in `baseline`, the
faster of the two in CPU seconds. `temp_bytes` is what XLA's memory analysis says of the program that makes the
gradients of a microbatch, besides arguments and results.

`bound` counts products: those with weights (3 times the forward pass), attention over visible pairs (2 products forward
and 5 backward) and logits of sampled tokens (4 times, because they are made again). It assumes one rate for all of them
and no other cost. So it leaves out the optimizer, and that attention's products are slower than those with weights; a
tree has more of them per token. `of_bound` is ratio / bound, `cpu_of_bound` is cpu_ratio / bound.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

sys.path.append(str(Path(__file__).resolve().parents[1]))  # of what the studies share

import smd_jax as smd
from lib.files import write_rows
from lib.provenance import provenance
from smd_jax.config import ModelConfig
from smd_jax.learner.objective import make_objective
from smd_jax.learner.packed import make_packed_update, packed_part, packs_of
from smd_jax.learner.prepare import prepare
from smd_jax.learner.state import TrainBatch, init_state
from smd_jax.learner.update import make_update
from smd_jax.model.shared_prompt import shared_prompt
from smd_jax.testing import random_params, tiny_model_config

MODEL = smd.Decoder(
    tiny_model_config(hidden_size=256, intermediate_size=768, num_layers=4, num_heads=8, num_kv_heads=2, head_dim=32)
)
OPTIMIZER = optax.adamw(1e-5)
ROWS = "rows", "rows, one at a time"


@dataclass(frozen=True)
class Args:
    """Times the update of a tree against separate rows, in turns."""

    out: Path | None = None  # rows go there
    turns: int = 5
    prompt: int = 512  # tokens that all branches share
    response: int = 128  # tokens of a branch
    branches: tuple[int, ...] = (2, 4, 8, 16)


@dataclass(frozen=True)
class Way:
    """One way to run the update: its step, and the bytes of its program."""

    step: Callable[..., Any]
    temp_bytes: int


def tree_of(args: Args, branches: int) -> smd.tree.Tree:
    """A prompt and random branches that differ from their first token on."""
    rng = np.random.default_rng(0)

    def ids(count: int) -> np.ndarray:
        return rng.integers(64, MODEL.config.vocab_size, count)

    sampled = np.ones(args.response, bool)
    logprobs = np.full(args.response, -np.log(MODEL.config.vocab_size))
    children = (np.concatenate([[1 + branch], ids(args.response - 1)]) for branch in range(branches))
    return smd.tree.Tree(
        (smd.tree.Node(ids(args.prompt)), *(smd.tree.Node(child, 0, sampled, logprobs) for child in children))
    )


def flops(config: ModelConfig, tokens: int, pairs: int, targets: int) -> float:
    """Of the products of an update.

    Args:
      tokens: that the layers read. pairs: of a query and a key that it sees. targets: tokens with logits.
    """
    attention = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    weights = config.hidden_size * (2 * attention + 2 * kv + 3 * config.intermediate_size)
    layer = 3 * 2 * tokens * weights + 7 * 2 * pairs * attention
    return config.num_layers * layer + 4 * 2 * targets * config.hidden_size * config.vocab_size


def bound(args: Args, branches: int) -> float:
    """Products of separate rows / products of the tree."""
    length, targets = args.prompt + args.response, branches * args.response
    row = length * (length + 1) // 2
    prompt = args.prompt * (args.prompt + 1) // 2
    of_rows = flops(MODEL.config, branches * length, branches * row, targets)
    of_tree = flops(MODEL.config, args.prompt + targets, prompt + branches * (row - prompt), targets)
    return of_rows / of_tree


def ways(args: Args, branches: int, state: Any, batch: TrainBatch) -> dict[str, Way]:
    """All ways to run the update, compiled."""
    config = smd.UpdateConfig()
    one_row = smd.UpdateConfig(microbatch_size=1)
    shared = smd.UpdateConfig(rows_per_prompt=branches)
    packed = smd.UpdateConfig(microbatch_size=1, pack_columns=args.prompt + branches * args.response)
    places = packs_of(batch.trajectory, packed, share_beginnings=True)
    assert len(places.tokens) == 1, "one tree, one row"

    def bytes_of(config: smd.UpdateConfig, packs: Any = None, rows: int = branches) -> int:
        model = shared_prompt(MODEL, config.rows_per_prompt, args.prompt)

        def gradients(state: Any, prepared: Any) -> Any:
            part = prepared if packs is None else packed_part(prepared, jax.tree.map(lambda x: x[0], packs))
            return jax.value_and_grad(make_objective(model, config, state), has_aux=True)(state.params, part)

        prepared = jax.jit(lambda state, batch: prepare(MODEL, smd.UpdateConfig(), state.params, batch))(state, batch)
        prepared = jax.tree.map(lambda x: x[:rows] if x.ndim else x, prepared)
        analysis: Any = jax.jit(gradients).lower(state, prepared).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    together, alone = ROWS
    return {
        together: Way(make_update(MODEL, OPTIMIZER, config), bytes_of(config)),
        alone: Way(make_update(MODEL, OPTIMIZER, one_row), bytes_of(one_row, rows=1)),
        "shared prompt": Way(make_update(MODEL, OPTIMIZER, shared), bytes_of(shared)),
        "tree": Way(make_packed_update(MODEL, OPTIMIZER, packed, share_beginnings=True), bytes_of(packed, places)),
    }


def measure(args: Args, branches: int) -> list[dict[str, Any]]:
    """The rows of one number of branches."""
    trajectory = smd.tree.to_trajectory(tree_of(args, branches).branches())
    advantages = jnp.asarray(np.random.default_rng(1).normal(size=branches), jnp.float32)
    batch = TrainBatch(trajectory, advantages, trajectory.logprobs)
    state = init_state(random_params(MODEL.config), OPTIMIZER, jax.random.key(0))
    found = ways(args, branches, state, batch)
    seconds: dict[str, list[float]] = {name: [] for name in found}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in found}
    for turn in range(args.turns + 1):
        for name, way in found.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            state, metrics = way.step(state, batch)
            jax.block_until_ready((state.params, metrics))
            if turn:  # the first one compiles
                seconds[name].append(time.perf_counter() - start)
                cpu_seconds[name].append(time.process_time() - cpu_start)
    rows = []
    limit = bound(args, branches)
    baseline = min(ROWS, key=lambda name: statistics.median(cpu_seconds[name]))
    for name, way in found.items():
        ratios = of_turns(seconds[baseline], seconds[name])
        cpu_ratio = statistics.median(of_turns(cpu_seconds[baseline], cpu_seconds[name]))
        row = {"branches": branches, "way": name, "prompt": args.prompt, "response": args.response}
        row |= {"seconds": statistics.median(seconds[name]), "cpu_seconds": statistics.median(cpu_seconds[name])}
        row |= {"turns": args.turns, "baseline": baseline, "ratio": statistics.median(ratios)}
        row |= {"ratio_min": min(ratios), "ratio_max": max(ratios), "cpu_ratio": cpu_ratio}
        row |= {"bound": limit, "of_bound": statistics.median(ratios) / limit, "cpu_of_bound": cpu_ratio / limit}
        row |= {"temp_bytes": way.temp_bytes}
        rows.append(row)
        print(as_row(row), flush=True)
    return rows


def of_turns(rows: list[float], way: list[float]) -> list[float]:
    """Ratio of separate rows to a way in every turn."""
    return [theirs / mine for theirs, mine in zip(rows, way, strict=True)]


def as_row(row: dict[str, Any]) -> str:
    ratio = f"{row['ratio']:.2f} x ({row['ratio_min']:.2f} to {row['ratio_max']:.2f}), bound {row['bound']:.2f}"
    cpu = f"{row['cpu_seconds']:.2f} CPU s, {row['cpu_ratio']:.2f} x"
    memory = f"{row['temp_bytes'] / 2**20:.0f} MiB"
    return f"{row['branches']:>2} branches, {row['way']:<20}{row['seconds']:.2f} s  {ratio}  {cpu}  {memory}"


def main(args: Args) -> None:
    facts = provenance()
    rows = []
    for branches in args.branches:
        rows += [row | facts for row in measure(args, branches)]
        if args.out is not None:
            write_rows(args.out, rows)
    print(facts["cpu"])


if __name__ == "__main__":
    main(tyro.cli(Args))
