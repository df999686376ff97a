"""Speed of a whole GRPO step in smd_jax and TRL, on a real model and real prompts.

Question   Seconds and peak memory of a step (rollout, grading, update) of SmolLM2-135M-Instruct on GSM8K, on two CPU
           cores in float32, and the share of the time that its arithmetic needs.
Command    make smollm2
           python experiments/bench/step.py --data train.jsonl --trl-python PATH --full-length \\
               --out experiments/results/step_cpu.json
           python experiments/bench/step.py --data train.jsonl --completions 16 --new-tokens 32 --repeats 1  (a trial)
Cost       20 minutes with --repeats 1 --microbatch 4. All engines stay alive, and one in its step needs up to 9 GB
Result     experiments/results/step_cpu.json, one turn each

Model      SmolLM2-135M-Instruct (Llama: hidden 576, 30 layers, 9 query and 3 KV heads of 64, FFN 1,536, vocabulary
           49,152, tied embeddings), made by experiments/smollm2.py; another Llama or Qwen2 checkpoint by --model.
Sizes      The first 8 rows of the file, 8 completions each, of up to 256 tokens at temperature 1 from the whole
           vocabulary. One optimizer step of AdamW in microbatches of 8 completions; no reference model.
Engines    ours          R-KV with 128 + 32 keys in the sampler, shadow masks in the learner
           ours-dense    a dense cache and a dense learner
           trl           GRPOTrainer with transformers' `generate`
           The header of each file in experiments/bench/engines/ lists its settings.
Fairness   Every engine is its own process on the same cores. All warm up, then take turns, step by step, on the same
           prompts. With --full-length no completion ends early, so all engines do the same work; without it compare
           `ms_per_token`. One function grades in all engines (whole_step.py) and separates rollout from update.
Fields     seconds: median; seconds_min; cpu_seconds_min of both cores. rollout_, grading_ and update_seconds: medians.
           tokens: completion tokens of a step; mean_length; ms_per_token: of the whole step.
           peak_bytes: of the whole process, libraries and compilation included.
           limit_seconds: time of the model's arithmetic at the rate of bare matrix products of its shapes, in the same
           run on the same cores (experiments/bench/limits.py). limit_share: limit_seconds / seconds.
           update_limit_seconds: the update's part of it.
           max_abs_dlogp: ours, learner against sampler, over all tokens.

Environment of TRL, separate from that of smd_jax:

    python3.11 -m venv trl   && trl/bin/pip install torch==2.13.0 numpy \\
                             && trl/bin/pip install transformers==5.23.0 trl==1.16.0 accelerate==1.15.0 datasets==5.2.0
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for the packages bench and lib

from bench.engines.common import read_sizes
from bench.limits import product_command, with_step_limits
from bench.turns import Row, take_turns, write
from smd_jax.monitor.progress import summary_table

HERE = Path(__file__).parent
Engine = Literal["ours", "ours-dense", "trl"]
PEERS = ("trl",)
PARTS = ("rollout_seconds", "grading_seconds", "update_seconds")
HELD = 2  # layers with their own matrices in the yardstick of the update; more would take memory


@dataclass(frozen=True)
class Args:
    """Times whole GRPO steps of several libraries, in turns."""

    data: Path  # GSM8K rows, one JSON object a line
    model: Path = Path("runs/smollm2")  # Hugging Face checkpoint directory
    engine: tuple[Engine, ...] = ("ours", "ours-dense", "trl")  # TRL needs an interpreter
    trl_python: str | None = None  # interpreter with TRL
    completions: int = 64  # of a step
    group: int = 8  # completions of a prompt
    new_tokens: int = 256  # longest completion
    microbatch: int = 8  # completions of one forward and backward pass
    budget: int = 128  # keys kept per layer and KV head
    buffer: int = 32  # steps between two compressions
    full_length: bool = False  # no token ends a completion: the same work in all engines
    threads: int = 2  # cores of every engine
    repeats: int = 2  # measured steps of each
    json: bool = False  # print one JSON object per line instead of a table
    out: Path | None = None  # write the rows, with date and command, to this file

    def python(self, engine: Engine) -> str | None:
        """The interpreter of an engine, None without one."""
        return self.trl_python if engine in PEERS else sys.executable


def commands(args: Args) -> Iterator[list[str]]:
    """Command lines of the selected engines that have an interpreter."""
    same = ["--model", args.model, "--data", args.data, "--completions", args.completions, "--group", args.group]
    same += ["--new-tokens", args.new_tokens, "--microbatch", args.microbatch, "--threads", args.threads]
    same += ["--repeats", args.repeats, *(["--full-length"] if args.full_length else []), "--driven"]
    for engine in args.engine:
        python = args.python(engine)
        if python is None:
            continue
        script: list[object] = [HERE / "engines" / f"{engine if engine in PEERS else 'smd'}_step.py"]
        if engine == "ours":
            script += ["--budget", args.budget, "--buffer", args.buffer]
        yield [str(word) for word in (python, *script, *same)]


def yardsticks(args: Args) -> Iterator[list[str]]:
    """Products of the sampler's rows, and of a microbatch of the update."""
    same = ("--model", str(args.model), "--threads", str(args.threads))
    yield product_command(args.completions, args.repeats, *same)
    rows = args.microbatch * args.new_tokens
    yield product_command(rows, args.repeats, *same, "--backward", "--held", str(HELD))


def compare(args: Args) -> list[Row]:
    """One row per engine, with the medians of its steps."""
    rows = take_turns(args.repeats, [*commands(args), *yardsticks(args)])
    found = []
    for row in with_step_limits(rows, read_sizes(args.model)):
        steps = row.pop("steps")
        drawn = [sum(new for _, new in step["tokens"]) for step in steps]
        each = [step["seconds"] / tokens * 1e3 for step, tokens in zip(steps, drawn, strict=True)]
        row |= {part: statistics.median(step[part] for step in steps) for part in PARTS}
        row |= {"tokens": statistics.mean(drawn), "mean_length": statistics.mean(drawn) / row["completions"]}
        row |= {"ms_per_token": statistics.median(each), "reward": statistics.mean(step["reward"] for step in steps)}
        found.append(row)
    return found


def table(args: Args, rows: list[Row]) -> None:
    """Prints the rows; ratios compare milliseconds per token."""
    peers = [row["ms_per_token"] for row in rows if row["engine"] in PEERS]
    times = []
    limits = []
    for row in rows:
        ratio = min(peers) / row["ms_per_token"] if peers else None
        times.append((row["engine"], row["seconds"], row["seconds_min"], *(row[part] for part in PARTS)))
        limits.append((row["engine"], row["mean_length"], row["ms_per_token"], ratio, row["limit_share"]))
        limits[-1] += (row["peak_bytes"] / 1e9,)
    ends = "none of which ends early" if args.full_length else "or fewer"
    title = f"A step of {args.completions} completions of {args.new_tokens} tokens, {ends}; {args.threads} cores"
    summary_table(title, ("engine", "seconds", "least", "rollout", "grading", "update"), times)
    columns = ("engine", "mean length", "ms a token", "× best peer", "of the limit", "peak GB")
    summary_table("For each completion token, and memory", columns, limits)


def main(args: Args) -> None:
    rows = compare(args)
    if args.json:
        print("\n".join(json.dumps(row) for row in rows), flush=True)
    else:
        table(args, rows)
    if args.out is not None:
        write(args.out, rows)


if __name__ == "__main__":
    main(tyro.cli(Args))
