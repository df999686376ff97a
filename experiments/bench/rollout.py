"""Are rollouts of smd_jax faster than those of the libraries that users have?

Question   Tokens per second, time of a step, and bytes of the cache of the same model in smd_jax, in transformers'
           `generate`, in Tunix' vanilla sampler and in kvpress, on one CPU core in float32. And on a GPU: how near is a
           step of ours to the time that its bytes take, and how many rows fit?
Command    python experiments/bench/rollout.py --hf-python PATH --tunix-python PATH --kvpress-python PATH --json
           python experiments/bench/rollout.py --flat           (does a step at token 4,000 cost what one at 400 costs?)
           python experiments/bench/rollout.py --continuous     (responses of 64 to 2,048 tokens: our engine against
                                                                 our fixed batch, which waits for its longest row)
           python experiments/bench/rollout.py --engine ours --bits 8 4 2 --batch 64 --lengths 512
                                                                (ours in full precision beside its quantised caches)
           python experiments/bench/rollout.py --parts          (where a step of ours goes: products, attention, …)
           python experiments/bench/rollout.py --device gpu --check --json --out runs/rollout_gpu.json
Cost       twelve minutes on a quiet machine, and 8 GB of memory, because all engines are alive at once; --flat one
           minute, --continuous seven, --device gpu at most ten
Result     rollout_cpu.json: 2.7 (512 tokens) and 3.4 (2,048) times the best peer, 0.72 and 0.74 of the products' rate;
           rollout_flat_cpu.json: late is 1.01 times early; rollout_continuous_cpu.json: 1.88 and 2.39 times the fixed
           batch. On a GPU: not measured.

Model      Qwen2: hidden 256, 4 layers, 8 query and 2 KV heads of 32, FFN 768, vocabulary 1,024, tied embeddings.
Sizes      32 prompts of 64 tokens without padding; 512 and 2,048 new tokens, and no token ends a response. Sampling at
           temperature 1 from the whole vocabulary. Budget 128 and buffer 32 in ours and in kvpress.
Engines    ours          policy Knorm, a cheap one, which is the rule of kvpress' press, too
           ours-h2o      a policy that sums up the attention each key receives
           ours-snapkv   one that keeps the newest queries; not by default
           ours-dense    policy Dense: our dense cache
           ours-4bit     with --bits 4: the same with a quantised cache, groups as long as the buffer
           hf            `generate` with its dynamic cache; hf-static: with its static one, not by default
           tunix         the vanilla sampler, a dense cache
           kvpress       DecodingPress around KnormPress, 128 keys every 32 steps
           All give log-probabilities of what they drew; what each peer runs is said at the top of its file in
           experiments/bench/engines/. Those of transformers come from the scores of all steps, kept until the end;
           without them `generate` was 4 % faster here.
Fairness   Every engine is a process of its own, pinned to one core; all are compiled or warm first and then take turns,
           generation by generation, prefill included. `tokens_per_s` is that of the median turn.
Fields     ms_per_step_early and _late: median over 160 steps around token 400, and around token 4,000 or at the end of
           a shorter response; null where an engine is one program (tunix, our fixed batch). The table's late/early is
           that of CPU times, which other programs on the machine disturb less.
           cache_bytes: of ours, the donated state of the compiled program of a segment (keys, values, and the columns
           and statistics beside them); of peers, the keys and values that they hold at the end.
           expected_cache_bytes: the formula 2 · layers · KV heads · (budget + buffer) · head_dim · bytes · rows.
           limit_share: the model's arithmetic per second, over the rate of bare matrix products of its shapes, as many
           rows at a time as a step has, in the same run on the same core (experiments/bench/limits.py). Null with
           --continuous, where rows end at different times, and with --roofline, which says `share_of_roofline`.
           max_abs_dlogp: our learner's log-probabilities under the recorded mask against the sampler's, on four rows.
           --out adds seconds, memory, versions and the share of live rows (`utilisation`) to each row.

Environments of the peers, none of which may be smd_jax's own:

    python3.11 -m venv hf      && hf/bin/pip install torch==2.13.0 numpy && hf/bin/pip install transformers==5.23.0
    python3.11 -m venv kvpress && kvpress/bin/pip install torch==2.13.0 numpy && kvpress/bin/pip install kvpress==0.5.5
    python3.12 -m venv tunix   && tunix/bin/pip install google-tunix==0.1.7 jax==0.12.0.1 flax==0.12.12
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import tyro

sys.path.append(str(Path(__file__).resolve().parents[1]))  # of what the studies share

from bench.limits import product_command, with_limits
from bench.turns import Row, lines, take_turns, write
from smd_jax.monitor.progress import summary_table

HERE = Path(__file__).parent
Engine = Literal["ours", "ours-snapkv", "ours-h2o", "ours-dense", "hf", "hf-static", "tunix", "kvpress"]
POLICY = {"ours": "knorm", "ours-snapkv": "snapkv", "ours-h2o": "h2o", "ours-dense": "dense"}
PEERS = ("hf", "tunix", "kvpress")
FLAT = 4096  # new tokens of the run that compares early with late steps
FIELDS = ("engine", "device", "batch", "prompt", "new_tokens", "budget", "buffer", "tokens_per_s")
FIELDS += ("ms_per_step_early", "ms_per_step_late", "cache_bytes", "expected_cache_bytes", "max_abs_dlogp")
FIELDS += ("limit_share",)


@dataclass(frozen=True)
class Args:
    """Times sampling of several libraries, in turns."""

    engine: tuple[Engine, ...] = ()  # a peer without interpreter is left out
    hf_python: str | None = None  # interpreter with torch and transformers
    tunix_python: str | None = None  # interpreter with Tunix
    kvpress_python: str | None = None  # interpreter with kvpress
    lengths: tuple[int, ...] = (512, 2048)  # new tokens of a row
    bits: tuple[Literal[8, 4, 2], ...] = ()  # ours with quantised caches, too
    batch: int = 32  # rows decoded at the same time
    prompt: int = 64  # tokens of a prompt
    budget: int = 128  # keys kept per layer and KV head
    buffer: int = 32  # steps between two compressions
    repeats: int = 3  # measured turns of each
    flat: bool = False  # ours at 4,096 new tokens
    parts: bool = False  # a step of ours in pieces, in place of a comparison
    continuous: bool = False  # ours with responses of different lengths
    rows: int = 256  # responses of --continuous
    spread: tuple[Literal["log", "even"], ...] = ("log", "even")  # their lengths: even ratios, or even steps
    device: Literal["cpu", "gpu", "tpu"] = "cpu"  # must be what JAX runs on; gpu, tpu: --roofline
    roofline: bool = False  # ours at the size of Qwen3-1.7B: bytes of a step, largest batch
    check: bool = False  # of --roofline: first compare a small model with the learner
    confirm: bool = False  # of --roofline: run the largest batches
    memory: float | None = None  # GiB, for --roofline where the device does not say
    quick: bool = False  # tiny sizes, to see that it runs
    json: bool = False  # print one JSON object a line in place of a table
    out: Path | None = None  # write the rows, with date and command, to this file

    def python(self, engine: Engine) -> str | None:
        """The interpreter of an engine, None without one."""
        found = {"tunix": self.tunix_python, "kvpress": self.kvpress_python}
        return sys.executable if engine in POLICY else found.get(engine, self.hf_python)


def with_defaults(args: Args) -> Args:
    """Tiny sizes if they are asked for, and the engines of the comparison that is."""
    if args.roofline or args.device != "cpu":
        return replace(args, roofline=True, engine=args.engine or ("ours",))
    engines: tuple[Engine, ...] = ("ours", "ours-h2o")
    engines += () if args.flat else ("ours-dense", "hf", "tunix", "kvpress")
    args = replace(args, engine=args.engine or engines, lengths=(FLAT,) if args.flat else args.lengths)
    if not args.quick:
        return args
    return replace(args, lengths=(48,), batch=4, prompt=8, budget=16, buffer=8, repeats=1, rows=12)


def response(args: Args, new_tokens: int) -> list[object]:
    """Sizes of a rollout, as flags of an engine."""
    same = ["--batch", args.batch, "--prompt", args.prompt, "--new-tokens", new_tokens]
    return [*same, "--budget", args.budget, "--buffer", args.buffer]


def sizes(args: Args, new_tokens: int) -> list[object]:
    """What the command line of every engine says that takes turns."""
    return [*response(args, new_tokens), "--repeats", args.repeats, "--driven"]


def commands(args: Args, new_tokens: int) -> Iterator[list[str]]:
    """The command line of every engine that is asked for and can be measured."""
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


def continuous_commands(args: Args, spread: str) -> Iterator[list[str]]:
    """Our engine and our fixed batch on the same rows."""
    longest = max(args.lengths)
    ours = [sys.executable, HERE / "engines" / "smd_rollout.py", "--policy", "knorm", *sizes(args, longest)]
    for form in ((), ("--fixed",)):
        yield [str(word) for word in (*ours, "--rows", args.rows, "--spread", spread, *form)]


def ratio(value: float, rows: list[Row], names: tuple[str, ...]) -> float | None:
    """To the best of the engines whose names begin so."""
    others = [row["tokens_per_s"] for row in rows if row["engine"].startswith(names)]
    return value / max(others) if others else None


def table(title: str, rows: list[Row]) -> None:
    """Prints the rows of one run; ratios are to rows of the same run."""
    columns = (
        "engine",
        "tokens/s",
        "/CPU s",
        "× best peer",
        "× Tunix",
        "× fixed",
        "live rows",
        "ms early",
        "ms late",
        "late/early",
        "of the products",
    )
    cells = []
    for row in rows:
        speed = row["tokens_per_s"]
        best = speed * row["seconds"] / row["cpu_seconds_min"]  # as many in a second of CPU time of the least turn
        ratios = [ratio(speed, rows, names) for names in (PEERS, ("tunix",), ("ours-fixed",))]
        times = (row["ms_per_step_early"], row["ms_per_step_late"])
        flat = None if times[0] is None else row["cpu_ms_per_step_late"] / row["cpu_ms_per_step_early"]
        live = row["utilisation"] if row.get("spread") else None
        limit = row.get("limit_share")
        cells.append((row["engine"], round(speed), round(best), *ratios, live, *times, flat, limit))
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
    """Without the columns that no row fills."""
    filled = [n for n in range(len(columns)) if any(line[n] is not None for line in cells)]
    summary_table(title, [columns[n] for n in filled], [[line[n] for n in filled] for line in cells])


def runs(args: Args) -> Iterator[tuple[str, list[Row]]]:
    """Title and rows of each comparison."""
    sizes = f"{args.batch} rows at a time, budget {args.budget} + {args.buffer}"
    if args.continuous:
        for spread in args.spread:
            title = f"{args.rows} responses of up to {max(args.lengths)} tokens, {spread} spread; {sizes}"
            yield title, take_turns(args.repeats, continuous_commands(args, spread))
        return
    for new_tokens in args.lengths:
        engines = [*commands(args, new_tokens), product_command(args.batch, args.repeats)]
        yield f"{new_tokens} new tokens; {sizes}", with_limits(take_turns(args.repeats, engines))


def pieces(args: Args) -> Iterator[tuple[str, list[Row]]]:
    """Title and rows of a step of each of our engines, in pieces."""
    for new_tokens in args.lengths:
        for engine in args.engine:
            if engine not in POLICY:
                continue
            command: list[object] = [sys.executable, HERE / "engines" / "smd_profile.py", "--policy", POLICY[engine]]
            command += response(args, new_tokens)
            yield f"A step of {engine}, {new_tokens} new tokens", list(lines([str(word) for word in command]))


def parts_table(title: str, rows: list[Row]) -> None:
    columns = ("part", "ms of a step", "share", "operations")
    cells = [(row["part"], row["ms_per_step"], row["share"], row["operations_per_step"]) for row in rows]
    summary_table(title, columns, cells)


def roofline_command(args: Args) -> list[str]:
    """Ours on a device, in a process whose memory is its own."""
    words: list[object] = [sys.executable, HERE / "engines" / "smd_roofline.py", "--device", args.device]
    words += ["--engine", *args.engine, *(() if args.memory is None else ("--memory", args.memory))]
    return [str(word) for word in words] + [f"--{flag}" for flag in ("check", "confirm", "quick") if vars(args)[flag]]


def roofline(args: Args) -> None:
    """Prints and saves each row when it comes."""
    header = {}
    found = []
    for row in lines(roofline_command(args)):
        if "versions" in row:
            header = row
            continue
        found.append(row)
        said = {name: row[name] for name in FIELDS} if args.json and "engine" in row else row
        print(json.dumps(said), flush=True)
        if args.out is not None:
            write(args.out, found, header)


def main(args: Args) -> None:
    args = with_defaults(args)
    if args.roofline:
        roofline(args)
        return
    found = []
    for title, rows in pieces(args) if args.parts else runs(args):
        found += rows
        if args.json:
            said = rows if args.parts else [{name: row[name] for name in FIELDS} for row in rows]
            print("\n".join(map(json.dumps, said)), flush=True)
        else:
            (parts_table if args.parts else table)(title, rows)
        if args.out is not None:
            write(args.out, found)


if __name__ == "__main__":
    main(tyro.cli(Args))
