"""How time and memory of rollout and update grow with the length of a response, under one budget.

Question   What does a token cost at 512 and at 32,768 tokens, with a cache of 128 + 32 keys and its shadow mask?
Sizes      The model of experiments/bench/rollout.py, float32, one CPU core. Rollout: 8 rows, prompts of 64
           tokens, Knorm. Update: 32,768 tokens in one pass, as 64 rows of 512 tokens, … or one row; the mask
           of a random policy.
Measure    CPU microseconds per token, the minimum over turns; every length is its own process. Rollouts take turns;
           updates run one length after another, because of their memory.
           Rollout, memory: bytes of the cache, and of the temporary arrays of a segment. Update, memory: what XLA plans
           for the program (arguments, results, temporary arrays), and the peak of the process, libraries and
           compilation included.
Command    python experiments/bench/growth.py --out experiments/results/growth_cpu.json
Cost       fifteen minutes on a quiet core, 12 GB of memory
Result     experiments/results/growth_cpu.json
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for the packages bench and lib

from bench.turns import Row, engine, keep, take_turns

PROMPT = 64
CACHE = {"budget": 128, "buffer": 32}
ROWS = 8  # of a rollout


@dataclass(frozen=True)
class Args:
    """Times rollouts and updates at several lengths, in turns."""

    lengths: tuple[int, ...] = (512, 2048, 8192, 32768)  # tokens of a row, ascending
    turns: int = 3
    out: Path | None = None  # write the rows, with date and command, to this file


def update_command(args: Args, tokens: int) -> list[str]:
    """Every update has as many tokens as the longest row, in rows of `tokens`."""
    rows = max(args.lengths) // tokens
    sizes: Row = {"tokens": tokens, "sequences": rows, "microbatch": rows, "prompt": PROMPT, "repeats": args.turns}
    return engine("smd_update", sizes | CACHE | {"rows_per_prompt": 1})


def rollouts(args: Args) -> list[Row]:
    same = {"batch": ROWS, "prompt": PROMPT, "repeats": args.turns, "policy": "knorm", "bits": None}
    sizes = [same | CACHE | {"new_tokens": tokens - PROMPT} for tokens in args.lengths]
    rows = take_turns(args.turns, [engine("smd_rollout", size) for size in sizes])
    kept = ("cache_bytes", "temp_bytes", "peak_bytes", "max_abs_dlogp", "versions")
    return [
        {"program": "rollout", "tokens": tokens, "rows": ROWS, "seconds": row["cpu_seconds_min"]}
        | {"microseconds_per_token": 1e6 * row["cpu_seconds_min"] / ROWS / (tokens - PROMPT)}
        | {name: row[name] for name in kept}
        for tokens, row in zip(args.lengths, rows, strict=True)
    ]


def updates(args: Args) -> list[Row]:
    rows = [row for tokens in args.lengths for row in take_turns(args.turns, [update_command(args, tokens)])]
    return [
        {"program": "update", "tokens": row["tokens"], "rows": row["sequences"], "seconds": row["cpu_seconds_min"]}
        | {"microseconds_per_token": 1e6 * row["cpu_seconds_min"] / row["tokens"] / row["sequences"]}
        | {name: row[name] for name in ("planned_bytes", "peak_bytes", "versions")}
        for row in rows
    ]


def main(args: Args) -> None:
    keep(rollouts(args) + updates(args), args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
