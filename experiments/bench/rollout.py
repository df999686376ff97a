"""Sampling speed of smd_jax, transformers and kvpress on one CPU core.

Question   Tokens per second, time of a decoding step and bytes of the cache, for the same model in every library.
Command    python experiments/bench/rollout.py --hf-python PATH --kvpress-python PATH --json
           python experiments/bench/rollout.py --engine ours --bits 8 4 2 --batch 64 --lengths 512
                                                                (quantised caches)
Cost       twelve minutes on a quiet machine and 8 GB of memory, because all engines stay alive
Result     experiments/results/rollout_cpu.json, rollout_quantised_cpu.json

Model      Qwen2: hidden 256, 4 layers, 8 query and 2 KV heads of 32, FFN 768, vocabulary 1,024, tied embeddings.
Sizes      32 prompts of 64 tokens without padding; 512 and 2,048 new tokens, and no token ends a response. Temperature
           1, whole vocabulary. Budget 128 and buffer 32 in smd_jax and kvpress.
Engines    ours          policy Knorm, the rule of kvpress' press
           ours-h2o      sums the attention that each key receives
           ours-snapkv   keeps the newest queries; not by default
           ours-dense    policy Dense
           ours-4bit     with --bits 4: a quantised cache, groups as long as the buffer
           hf            `generate` with its dynamic cache; hf-static: its static cache, not by default
           kvpress       DecodingPress around KnormPress, 128 keys every 32 steps
           All return log-probabilities of the sampled tokens. The header of each file in experiments/bench/engines/
           lists the settings of its library.
Fairness   Every engine is its own process, pinned to one core. All compile or warm up first, then take turns,
           generation by generation, prefill included. `tokens_per_s` is that of the median turn.
Fields     ms_per_step_early and _late: median over 160 steps around token 400, and around token 4,000 or the end of a
           shorter response; null for engines that are one program. late/early in the table uses CPU time.
           cache_bytes: ours, the donated state of the compiled segment program; peers, the keys and values at the end.
           expected_cache_bytes: 2 · layers · KV heads · (budget + buffer) · head_dim · bytes · rows.
           limit_share: the model's arithmetic per second over the rate of bare matrix products of its shapes, in the
           same run on the same core (experiments/bench/limits.py).
           max_abs_dlogp: learner against sampler under the recorded mask, on four rows.
           --out adds seconds, memory and versions.

Environments of the peers, separate from that of smd_jax:

    python3.11 -m venv hf      && hf/bin/pip install torch==2.13.0 numpy && hf/bin/pip install transformers==5.23.0
    python3.11 -m venv kvpress && kvpress/bin/pip install torch==2.13.0 numpy && kvpress/bin/pip install kvpress==0.5.5
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import tyro

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for the packages bench and lib

from bench.limits import product_command, with_limits
from bench.turns import Row, take_turns, write
from smd_jax.monitor.progress import summary_table

HERE = Path(__file__).parent
Engine = Literal["ours", "ours-snapkv", "ours-h2o", "ours-dense", "hf", "hf-static", "kvpress"]
POLICY = {"ours": "knorm", "ours-snapkv": "snapkv", "ours-h2o": "h2o", "ours-dense": "dense"}
PEERS = ("hf", "kvpress")
FIELDS = ("engine", "device", "batch", "prompt", "new_tokens", "budget", "buffer", "tokens_per_s")
FIELDS += ("ms_per_step_early", "ms_per_step_late", "cache_bytes", "expected_cache_bytes", "max_abs_dlogp")
FIELDS += ("limit_share",)


@dataclass(frozen=True)
class Args:
    """Times sampling of several libraries, in turns."""

    engine: tuple[Engine, ...] = ()  # a peer without interpreter is left out
    hf_python: str | None = None  # interpreter with torch and transformers
    kvpress_python: str | None = None  # interpreter with kvpress
    lengths: tuple[int, ...] = (512, 2048)  # new tokens of a row
    bits: tuple[Literal[8, 4, 2], ...] = ()  # add ours with quantised caches
    batch: int = 32  # rows decoded at the same time
    prompt: int = 64  # tokens of a prompt
    budget: int = 128  # keys kept per layer and KV head
    buffer: int = 32  # steps between two compressions
    repeats: int = 3  # measured turns of each
    quick: bool = False  # tiny sizes, as a smoke test
    json: bool = False  # print one JSON object per line instead of a table
    out: Path | None = None  # write the rows, with date and command, to this file

    def python(self, engine: Engine) -> str | None:
        """The interpreter of an engine, None without one."""
        if engine in POLICY:
            return sys.executable
        return self.kvpress_python if engine == "kvpress" else self.hf_python


def with_defaults(args: Args) -> Args:
    """All engines by default; tiny sizes with --quick."""
    engines: tuple[Engine, ...] = ("ours", "ours-h2o", "ours-dense", "hf", "kvpress")
    args = replace(args, engine=args.engine or engines)
    if not args.quick:
        return args
    return replace(args, lengths=(48,), batch=4, prompt=8, budget=16, buffer=8, repeats=1)


def sizes(args: Args, new_tokens: int) -> list[object]:
    """Command-line flags that all engines share."""
    same = ["--batch", args.batch, "--prompt", args.prompt, "--new-tokens", new_tokens]
    return [*same, "--budget", args.budget, "--buffer", args.buffer, "--repeats", args.repeats, "--driven"]


def commands(args: Args, new_tokens: int) -> Iterator[list[str]]:
    """Command lines of the selected engines that have an interpreter."""
    for engine in args.engine:
        python = args.python(engine)
        if python is None:
            continue
        name = engine.removesuffix("-static")
        script: list[object] = [HERE / "engines" / f"{name}_rollout.py", *(["--static"] if engine != name else [])]
        if engine in POLICY:
            script = [HERE / "engines" / "smd_rollout.py", "--policy", POLICY[engine]]
        command = [str(word) for word in (python, *script, *sizes(args, new_tokens))]
        yield command
        if engine in POLICY:
            yield from ([*command, "--bits", str(bits)] for bits in args.bits)


def ratio(value: float, rows: list[Row], names: tuple[str, ...]) -> float | None:
    """Ratio of `value` to the best engine whose name starts with one of `names`; None without one."""
    others = [row["tokens_per_s"] for row in rows if row["engine"].startswith(names)]
    return value / max(others) if others else None


def table(title: str, rows: list[Row]) -> None:
    """Prints the rows of one run, with ratios to other rows of the run."""
    columns = (
        "engine",
        "tokens/s",
        "/CPU s",
        "× best peer",
        "ms early",
        "ms late",
        "late/early",
        "of the products",
    )
    cells = []
    for row in rows:
        speed = row["tokens_per_s"]
        best = speed * row["seconds"] / row["cpu_seconds_min"]  # per CPU second of the fastest turn
        against = ratio(speed, rows, PEERS)
        times = (row["ms_per_step_early"], row["ms_per_step_late"])
        flat = None if times[0] is None else row["cpu_ms_per_step_late"] / row["cpu_ms_per_step_early"]
        limit = row.get("limit_share")
        cells.append((row["engine"], round(speed), round(best), against, *times, flat, limit))
    print_filled(title, columns, cells)
    columns = ("engine", "cache MB", "of formula", "temporary MB", "peak GB", "max |Δ log p|")
    cells = []
    for row in rows:
        cache = row["cache_bytes"]
        expected = row["expected_cache_bytes"]
        temporary = row.get("temp_bytes")
        share = None if cache is None or expected is None else cache / expected
        sizes = (megabytes(cache), share, megabytes(temporary), row["peak_bytes"] / 1e9)
        cells.append((row["engine"], *sizes, row["max_abs_dlogp"]))
    print_filled("Memory and identity", columns, cells)


def megabytes(count: int | None) -> float | None:
    return None if count is None else count / 1e6


def print_filled(title: str, columns: tuple[str, ...], cells: list[tuple[str | float | None, ...]]) -> None:
    """Prints a table without its empty columns."""
    filled = [n for n in range(len(columns)) if any(line[n] is not None for line in cells)]
    summary_table(title, [columns[n] for n in filled], [[line[n] for n in filled] for line in cells])


def runs(args: Args) -> Iterator[tuple[str, list[Row]]]:
    """Title and rows of each comparison."""
    sizes = f"{args.batch} rows at a time, budget {args.budget} + {args.buffer}"
    for new_tokens in args.lengths:
        engines = [*commands(args, new_tokens), product_command(args.batch, args.repeats)]
        yield f"{new_tokens} new tokens; {sizes}", with_limits(take_turns(args.repeats, engines))


def main(args: Args) -> None:
    args = with_defaults(args)
    found = []
    for title, rows in runs(args):
        found += rows
        if args.json:
            print("\n".join(json.dumps({name: row[name] for name in FIELDS}) for row in rows), flush=True)
        else:
            table(title, rows)
        if args.out is not None:
            write(args.out, found)


if __name__ == "__main__":
    main(tyro.cli(Args))
