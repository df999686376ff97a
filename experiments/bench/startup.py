"""How long does a user wait for the first training step, and how does that grow with the layers?

Question   Seconds from the start of a process to the end of its first GRPO step, with an empty compilation cache and
           with one that an earlier start has filled; and seconds of `import smd_jax` beyond those of its dependencies.
Command    python experiments/bench/startup.py --json
Cost       about five minutes on a quiet machine with two cores
Result     experiments/results/startup_cpu.json

Model      SmolLM2-135M's shape (hidden 576, 9 query and 3 KV heads of 64, FFN 1,536, vocabulary 49,152, tied) with
           random weights, in float32, of 4, 8, 16 and 32 layers, and of the 30 that it has.
Step       2 prompts of 96 columns, 4 completions each of 32 tokens at most, H2O with 48 + 16 keys, AdamW: small,
           because compiling does not depend on the number of rows. `second_step_seconds` is what a step takes by
           itself.
Processes  start one after another, each with as many threads as JAX likes: compilers use several cores. No arithmetic
           of a model is measured, so there is no `limit_share`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.append(str(Path(__file__).resolve().parents[1]))  # of what the studies share

from bench.turns import Row, environment, lines, write
from smd_jax.monitor.progress import summary_table

ENGINE = Path(__file__).parent / "engines" / "smd_startup.py"
PACKAGES = "jax, jax.numpy, flax.linen, flax.struct"


@dataclass(frozen=True)
class Args:
    """Times first training steps, with and without compiled programs on disk."""

    layers: tuple[int, ...] = (4, 8, 16, 30, 32)  # of the models
    imports: int = 7  # how often each import is timed
    json: bool = False  # print one JSON object a line in place of a table
    out: Path | None = None  # write the rows, with date and command, to this file


def first_steps(layers: int) -> list[Row]:
    """A start with an empty cache, and one with what it left there."""
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for kept in ("cold", "warm"):
            command = [sys.executable, str(ENGINE), "--layers", str(layers), "--cache", cache]
            began = time.time()
            [row] = lines([*command, "--began", str(began)])
            rows.append(row | {"cache": kept})
    return rows


def import_row(repeats: int) -> Row:
    """Seconds of an import, median over fresh processes, and what of it is not that of its dependencies."""
    dependencies = []
    beyond = []
    code = f"import time; a = time.perf_counter(); import {PACKAGES}; b = time.perf_counter(); import smd_jax; "
    code += "print(b - a, time.perf_counter() - b)"
    for _ in range(repeats):
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment())
        first, second = map(float, done.stdout.split())
        dependencies.append(first)
        beyond.append(second)
    row = {"engine": "ours", "what": "import smd_jax", "seconds": statistics.median(beyond), "seconds_min": min(beyond)}
    return row | {"dependencies_seconds": statistics.median(dependencies), "repeats": repeats}


def table(rows: list[Row]) -> None:
    steps = [row for row in rows if "layers" in row]
    names = [f"{row['layers']} layers, {row['cache']}" for row in steps]
    keys = ("seconds", "import_seconds", "first_step_seconds", "second_step_seconds")
    cells = [(name, *(row[key] for key in keys)) for name, row in zip(names, steps, strict=True)]
    columns = ("", "from the start", "of it imports", "first step", "second step")
    summary_table("Seconds to the end of the first training step", columns, cells)
    [imported] = [row for row in rows if "layers" not in row]
    print(f"import smd_jax: {imported['seconds']:.2f} s beyond {PACKAGES}")


def main(args: Args) -> None:
    rows = [import_row(args.imports)]
    for layers in args.layers:
        rows += first_steps(layers)
        if args.json:
            print("\n".join(json.dumps(row) for row in rows[-2:]), flush=True)
    if not args.json:
        table(rows)
    if args.out is not None:
        write(args.out, rows)


if __name__ == "__main__":
    main(tyro.cli(Args))
