"""Is a GRPO step of smd_jax faster than one of the libraries that users have, on a real model and real prompts?

Question   Seconds and peak memory of a whole step (rollout, grading, update) of SmolLM2-135M-Instruct on GSM8K in
           smd_jax, TRL and Tunix, on two CPU cores in float32; and how near is that to what its arithmetic takes?
Command    make smollm2
           python experiments/bench/step.py --data train.jsonl --trl-python PATH --tunix-python PATH --full-length \\
               --out experiments/results/step_cpu.json
           python experiments/bench/step.py --data train.jsonl --completions 16 --new-tokens 32 --repeats 1  (a trial)
Cost       20 minutes for ours, ours-dense and TRL with --repeats 1 --microbatch 4. Memory: all engines are alive at
           once, and one of them is in its step, up to 9 GB with --microbatch 4
Result     experiments/results/step_cpu.json: one turn each, Tunix not measured

Model      SmolLM2-135M-Instruct (Llama: hidden 576, 30 layers, 9 query and 3 KV heads of 64, FFN 1,536, vocabulary
           49,152, tied embeddings), unpacked by experiments/smollm2.py; any Llama or Qwen2 checkpoint by --model, which
           Tunix has to be able to read as a Llama.
Sizes      The first 8 rows of the file, a group of 8 completions each, of up to 256 tokens at temperature 1 from the
           whole vocabulary. One optimizer step of AdamW, in microbatches of 8 completions; no reference model.
Engines    ours          R-KV with 128 + 32 keys in the sampler, shadow masks in the learner
           ours-dense    a dense cache, and a dense learner
           trl           GRPOTrainer with transformers' `generate`
           tunix         GRPOLearner with its vanilla sampler
           What each of them runs is said at the top of its file in experiments/bench/engines/.
Fairness   Every engine is a process of its own on the same cores; all are warm first and then take turns, step by step,
           always of the same prompts. Completions are random and differ: with --full-length, which is the comparison
           that counts, none ends before its last token, and all engines do the same. Else look at `ms_per_token`.
           Rewards come from one function in all (whole_step.py): the last number is the answer. That function also
           divides a step: what is before it is rollout, what is after it is update.
Fields     seconds: median; seconds_min, and CPU time of both cores in cpu_seconds_min. rollout_, grading_ and
           update_seconds: medians. tokens: completion tokens of a step, mean_length: of a completion (both means of the
           steps), ms_per_token: of the whole step, to each completion token.
           peak_bytes: of the whole process, libraries and compilation included.
           limit_seconds: what the model's arithmetic in these steps would take at the rates of bare matrix products of
           its shapes, measured in the same run on the same cores: 64 rows at a time for the rollout, those of gradients
           for the update (experiments/bench/limits.py). limit_share: limit_seconds / seconds.
           update_limit_seconds: the update's part of it, the same for every library but for the keys that shadow masks
           hide. So nobody can be faster than 1 / limit_share times an engine without doing less.
           max_abs_dlogp: of ours, the learner's log-probabilities against the sampler's, over all tokens.

Environments of the peers, none of which may be smd_jax's own:

    python3.11 -m venv trl   && trl/bin/pip install torch==2.13.0 numpy \\
                             && trl/bin/pip install transformers==5.23.0 trl==1.16.0 accelerate==1.15.0 datasets==5.2.0
    python3.12 -m venv tunix && tunix/bin/pip install google-tunix==0.1.7 jax==0.12.0.1 flax==0.12.12
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

sys.path.append(str(Path(__file__).resolve().parents[1]))  # of what the studies share

from bench.engines.common import read_sizes
from bench.limits import product_command, with_step_limits
from bench.turns import Row, take_turns, write
from smd_jax.monitor.progress import summary_table

HERE = Path(__file__).parent
Engine = Literal["ours", "ours-dense", "trl", "tunix"]
PEERS = ("trl", "tunix")
PARTS = ("rollout_seconds", "grading_seconds", "update_seconds")
HELD = 2  # layers with matrices of their own in the yardstick of the update, whose factors take memory


@dataclass(frozen=True)
class Args:
    """Times whole GRPO steps of several libraries, in turns."""

    data: Path  # GSM8K rows, one JSON object a line
    model: Path = Path("runs/smollm2")  # Hugging Face checkpoint directory
    engine: tuple[Engine, ...] = ("ours", "ours-dense", "trl", "tunix")  # a peer without interpreter is left out
    trl_python: str | None = None  # interpreter with TRL
    tunix_python: str | None = None  # interpreter with Tunix
    completions: int = 64  # of a step
    group: int = 8  # completions of a prompt
    new_tokens: int = 256  # longest completion
    microbatch: int = 8  # completions of one forward and backward pass
    budget: int = 128  # keys kept per layer and KV head
    buffer: int = 32  # steps between two compressions
    full_length: bool = False  # no token ends a completion: the same work in all engines
    threads: int = 2  # cores of every engine
    repeats: int = 2  # measured steps of each
    json: bool = False  # print one JSON object a line in place of a table
    out: Path | None = None  # write the rows, with date and command, to this file

    def python(self, engine: Engine) -> str | None:
        """The interpreter of an engine, None without one."""
        found = {"trl": self.trl_python, "tunix": self.tunix_python}
        return found[engine] if engine in PEERS else sys.executable


def commands(args: Args) -> Iterator[list[str]]:
    """The command line of every engine that is asked for and can be measured."""
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
    """One row an engine, with the medians of its steps."""
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
    """Prints the rows; ratios are of the milliseconds of a token, which are those of the steps with --full-length."""
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
