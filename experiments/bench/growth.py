"""How time and memory of rollout and update grow with the length of a response, under one budget.

Question   What does a token cost at 512 and at 32,768 tokens, with a cache of 128 + 32 keys and its shadow mask?
Sizes      The model of experiments/bench/rollout.py, float32, one CPU core. Rollout: 8 rows, prompts of 64
           tokens, Knorm. Update: 32,768 tokens in one pass, as 64 rows of 512 tokens, … or one row; the mask
           of a random policy.
Measure    CPU microseconds per token, the least of the turns; every length is its own process. Rollouts take turns;
           updates run one length after another, because of their memory.
           Rollout, memory: bytes of the cache, and of the temporary arrays of a segment. Update, memory: what XLA plans
           for the program (arguments, results, temporary arrays), and the peak of the process, libraries and
           compilation included.
Command    python experiments/bench/growth.py --json
Cost       fifteen minutes on a quiet core, 12 GB of memory
Result     experiments/results/growth_cpu.json
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for the packages bench and lib

from bench.turns import Row, take_turns, write
from lib.files import RESULTS
from smd_jax.monitor.progress import summary_table

ENGINES = Path(__file__).parent / "engines"
PROMPT, BUDGET, BUFFER = 64, 128, 32
ROWS = 8  # of a rollout


@dataclass(frozen=True)
class Args:
    """Times rollouts and updates at several lengths, in turns."""

    lengths: tuple[int, ...] = (512, 2048, 8192, 32768)  # tokens of a row, ascending
    turns: int = 3
    json: bool = False  # write experiments/results/growth_cpu.json


def rollout_command(args: Args, tokens: int) -> list[str]:
    words = ["--batch", ROWS, "--prompt", PROMPT, "--new-tokens", tokens - PROMPT, "--budget", BUDGET]
    words += ["--buffer", BUFFER, "--repeats", args.turns, "--driven"]
    return [sys.executable, str(ENGINES / "smd_rollout.py"), *map(str, words)]


def update_command(args: Args, tokens: int) -> list[str]:
    """As many rows as the longest row has tokens."""
    rows = max(args.lengths) // tokens
    words = ["--tokens", tokens, "--sequences", rows, "--microbatch", rows, "--prompt", PROMPT]
    words += ["--visibility", "shadow", "--budget", BUDGET, "--buffer", BUFFER, "--repeats", args.turns, "--driven"]
    return [sys.executable, str(ENGINES / "smd_update.py"), *map(str, words)]


def rollouts(args: Args) -> list[Row]:
    rows = take_turns(args.turns, [rollout_command(args, tokens) for tokens in args.lengths])
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
    rows = rollouts(args) + updates(args)
    names = ("program", "tokens", "rows", "microseconds_per_token")
    cells = []
    for row in rows:
        planned = row.get("planned_bytes", row.get("cache_bytes", 0) + row.get("temp_bytes", 0))
        cells.append((*(row[name] for name in names), planned / 1e6, row["peak_bytes"] / 1e9))
    columns = ("program", "tokens", "rows", "CPU µs per token", "planned MB", "peak GB")
    summary_table("growth under one budget", columns, cells)
    if args.json:
        write(RESULTS / "growth_cpu.json", rows)


if __name__ == "__main__":
    main(tyro.cli(Args))
