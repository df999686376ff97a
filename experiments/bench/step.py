"""Speed of a whole GRPO step in smd_jax and TRL, with a real model on one CPU core.

Question   Seconds and peak memory of a step (rollout, reward, update) of SmolLM2-135M-Instruct in float32.
Sizes      4 prompts of 12 numbers to add, 8 completions each of exactly 256 tokens at temperature 1; one optimizer step
           of AdamW in microbatches of 4 completions; no reference model.
Engines    ours          R-KV with 128 + 32 keys in the sampler, shadow masks in the learner, which reads a prompt once
                         for the 4 completions of a microbatch (`rows_per_prompt`, smd-train's --share-prompts)
           ours-dense    a full cache and a dense learner
           trl           GRPOTrainer with transformers' `generate`
           The header of each file in experiments/bench/engines/ lists its settings.
Fairness   Every engine is its own process on the same core. All warm up, then take turns, step by step. No completion
           ends early, so all engines train the same tokens; ours-dense reads as many as TRL. Ratios depend on the CPU:
           torch's matmuls are fast on Intel.
Fields     seconds: median of the steps; rollout_seconds: from the start of a step until its reward is asked.
           max_abs_dlogp: ours, learner against sampler, over all tokens.
Command    make smollm2
           python experiments/bench/step.py --trl-python PATH --out experiments/results/step_cpu.json
Cost       15 minutes and 16 GB of memory, because all engines stay alive
Result     experiments/results/step_cpu.json

The environment of TRL is that of experiments/bench/update.py.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for the packages bench and lib

from bench.turns import Row, engine, keep, take_turns


@dataclass(frozen=True)
class Args:
    """Times whole GRPO steps of both libraries, in turns."""

    model: Path = Path("runs/smollm2")  # Hugging Face checkpoint directory
    trl_python: str | None = None  # interpreter with TRL; without one TRL is left out
    completions: int = 32  # of a step
    new_tokens: int = 256  # of a completion
    budget: int = 128  # keys kept per layer and KV head
    repeats: int = 2  # measured steps of each
    out: Path | None = None  # write the rows, with date and command, to this file


def commands(args: Args) -> list[list[str]]:
    sizes: Row = {"model": str(args.model), "completions": args.completions, "new_tokens": args.new_tokens}
    sizes |= {"group": 8, "microbatch": 4, "repeats": args.repeats}
    # Rows of one prompt: a microbatch. 1: every row reads its own prompt.
    ways = ({"budget": args.budget, "rows_per_prompt": sizes["microbatch"]}, {"budget": None, "rows_per_prompt": 1})
    ours = [engine("smd_step", sizes | {"buffer": 32} | way) for way in ways]
    return ours if args.trl_python is None else [*ours, engine("trl_step", sizes, args.trl_python)]


def main(args: Args) -> None:
    keep(take_turns(args.repeats, commands(args)), args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
