"""Speed of a GRPO update in smd_jax, TRL and plain torch on one CPU core.

Question   Seconds and peak memory of a whole update (forward, loss, backward, AdamW; no reference model, no generation)
           of the same model in every library, in float32.
Command    python experiments/bench/update.py --torch-python PATH --trl-python PATH --out FILE
           python experiments/bench/update.py --prompts --lengths 576          (prompts read once for a group)
Cost       about six minutes on a quiet machine; 8 GB of memory, because all engines are alive at once
Result     experiments/results/update_cpu.json, update_prompts_cpu.json

Model      Qwen2: hidden 256, 4 layers, 8 query and 2 KV heads of 32, FFN 768, vocabulary 1,024, tied embeddings.
Sizes      576 tokens (64 of prompt), 32 sequences in microbatches of 8: all engines; ours with the dense mask, and with
           the shadow mask of a cache of 128 + 32 keys.
           4,096 tokens (64 of prompt), 4 sequences in microbatches of 1: torch, and ours with the dense mask and with
           that of a cache of 256 + 128 keys. Masks come from a random policy; no rollout runs.
           --prompts: ours only, 576 tokens, groups of 8 in a microbatch, shadow mask; the prompt is read once per
           group or in every row.
Fairness   Every engine is its own process, pinned to one core. All compile first, then take turns, update by update.
           No padding, so that torch may use its causal kernel without a mask. No gradient checkpointing in the peers,
           no remat of layers in ours (it does recompute logits and measures entropy and mismatch, as always). The
           header of each file in experiments/bench/engines/ lists the settings of its library.
           `seconds` is the median, `cpu_seconds_min` the least CPU time, the better number on a shared machine.
           `limit_share`: share of the rate of bare matrix products, see experiments/bench/limits.py.
           `peak_bytes` is the peak of the whole process, libraries and compilation included.

Environments of the peers, separate from that of smd_jax:

    python3.11 -m venv torch && torch/bin/pip install torch==2.13.0 numpy && torch/bin/pip install transformers==5.23.0
    python3.11 -m venv trl   && trl/bin/pip install torch==2.13.0 numpy \\
                             && trl/bin/pip install transformers==5.23.0 trl==1.16.0 accelerate==1.15.0 datasets==5.2.0
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for the packages bench and lib

from bench.limits import with_limits
from bench.turns import Row, engine, keep, take_turns


@dataclass(frozen=True)
class Size:
    """Sizes of one update; `budget` and `buffer` of the shadow mask, and the `peers` that run at this size."""

    sequences: int
    prompt: int
    microbatch: int
    budget: int
    buffer: int
    peers: tuple[str, ...]


SIZES = {
    576: Size(32, 64, 8, 128, 32, ("torch", "trl")),
    4096: Size(4, 64, 1, 256, 128, ("torch",)),
}


@dataclass(frozen=True)
class Args:
    """Times GRPO updates of several libraries, in turns."""

    torch_python: str | None = None  # interpreter with torch and transformers; without one torch is left out
    trl_python: str | None = None  # interpreter with TRL; without one TRL is left out
    lengths: tuple[int, ...] = tuple(SIZES)  # tokens of a sequence, of the sizes above
    repeats: int = 5  # measured updates of each engine
    prompts: bool = False  # ours only, 576 tokens: prompts read once per group
    out: Path | None = None  # write the rows, with date and command, to this file


def settings(args: Args, tokens: int, prompt: int) -> Row:
    """Settings that all engines share."""
    size = SIZES[tokens]
    found: Row = {"tokens": tokens, "sequences": size.sequences, "prompt": prompt}
    return found | {"microbatch": size.microbatch, "repeats": args.repeats, "rows_per_prompt": 1}


def commands(args: Args, tokens: int) -> Iterator[list[str]]:
    """Command lines of the engines that run at this length."""
    size = SIZES[tokens]
    same = settings(args, tokens, size.prompt)
    for cache in ({"budget": None, "buffer": None}, {"budget": size.budget, "buffer": size.buffer}):
        yield engine("smd_update", same | cache)
    for name, python in (("torch", args.torch_python), ("trl", args.trl_python)):
        if name in size.peers and python is not None:
            yield engine(f"{name}_update", same, python)


def compare(args: Args, tokens: int) -> list[Row]:
    """One row per engine."""
    rows = SIZES[tokens].microbatch * tokens
    product = engine("product", {"rows": rows, "repeats": args.repeats, "backward": True})
    return with_limits(take_turns(args.repeats, [*commands(args, tokens), product]), update=True)


def shared_prompts(args: Args, tokens: int) -> list[Row]:
    """Two rows per prompt length: the prompt read in every row, and once per microbatch."""
    size = SIZES[tokens]
    found = []
    for prompt in (tokens // 9, tokens // 3, 7 * tokens // 9):
        ours = settings(args, tokens, prompt) | {"budget": prompt + size.buffer, "buffer": size.buffer}
        engines = [engine("smd_update", ours | {"rows_per_prompt": rows}) for rows in (1, size.microbatch)]
        found += take_turns(args.repeats, engines)
    return found


def main(args: Args) -> None:
    measure = shared_prompts if args.prompts else compare
    keep([row for tokens in args.lengths for row in measure(args, tokens)], args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
