"""Speed of a GRPO update in smd_jax, TRL and plain torch on one CPU core.

Question   Seconds and peak memory of a whole update (forward, loss, backward, AdamW; no reference model, no generation)
           of the same model in every library, in float32.
Command    python experiments/bench/update.py --torch-python PATH --trl-python PATH --json
           python experiments/bench/update.py --prompts --lengths 576 --json   (prompts read once for a group)
Cost       about six minutes on a quiet machine; 8 GB of memory, because all engines are alive at once
Result     experiments/results/update_cpu.json, update_prompts_cpu.json

Model      Qwen2: hidden 256, 4 layers, 8 query and 2 KV heads of 32, FFN 768, vocabulary 1,024, tied embeddings.
Sizes      576 tokens (64 of prompt), 32 sequences in microbatches of 8: all engines; ours with the dense mask, and with
           the shadow mask of a cache of 128 + 32 keys.
           4,096 tokens (64 of prompt), 4 sequences in microbatches of 1: torch, and ours with the dense mask and with
           that of a cache of 256 + 128 keys. --boolean adds the same mask as T × T booleans: its cost without our
           attention. Masks come from a random policy; no rollout runs.
           --prompts: ours only, 576 tokens, groups of 8 in a microbatch, shadow mask; the prompt is read once per
           group or in every row.
Fairness   Every engine is its own process, pinned to one core. All compile first, then take turns, update by update.
           No padding, so that torch may use its causal kernel without a mask. No gradient checkpointing in the peers,
           no remat of layers in ours (it does recompute logits and measures entropy and mismatch, as always). The
           header of each file in experiments/bench/engines/ lists the settings of its library.
           `seconds` is the median, `cpu_seconds_min` the least CPU time, the better number on a shared machine.
           `limit_share` is the model's arithmetic per second over the rate of bare matrix products of its shapes, in
           the same run on the same core (experiments/bench/limits.py).
           `peak_bytes` is the peak of the whole process, libraries and compilation included.

Environments of the peers, separate from that of smd_jax:

    python3.11 -m venv torch && torch/bin/pip install torch==2.13.0 numpy && torch/bin/pip install transformers==5.23.0
    python3.11 -m venv trl   && trl/bin/pip install torch==2.13.0 numpy \\
                             && trl/bin/pip install transformers==5.23.0 trl==1.16.0 accelerate==1.15.0 datasets==5.2.0
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for the packages bench and lib

from bench.limits import product_command, with_limits
from bench.turns import Row, take_turns, write
from smd_jax.monitor.progress import summary_table

HERE = Path(__file__).parent
OURS = (sys.executable, str(HERE / "engines" / "smd_update.py"))
Engine = Literal["ours", "torch", "trl"]


@dataclass(frozen=True)
class Size:
    """Sizes of one update; `budget` and `buffer` of the shadow mask, and the `peers` that run at this size."""

    sequences: int
    prompt: int
    microbatch: int
    budget: int
    buffer: int
    peers: tuple[Engine, ...]


SIZES = {
    576: Size(32, 64, 8, 128, 32, ("torch", "trl")),
    4096: Size(4, 64, 1, 256, 128, ("torch",)),
}


@dataclass(frozen=True)
class Args:
    """Times GRPO updates of several libraries, in turns."""

    engine: tuple[Engine, ...] = ("ours", "torch", "trl")  # a peer without interpreter is left out
    torch_python: str | None = None  # interpreter with torch and transformers
    trl_python: str | None = None  # interpreter with TRL
    lengths: tuple[int, ...] = tuple(SIZES)  # tokens of a sequence
    repeats: int = 5  # measured updates of each
    boolean: bool = False  # add ours with the mask as T × T booleans (minutes per turn)
    untied: bool = False  # a separate output projection
    prompts: bool = False  # ours only: prompts read once per group
    json: bool = False  # print one JSON object per line instead of a table
    out: Path | None = None  # write the rows, with date and command, to this file

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.lengths) - set(SIZES)):
            raise SystemExit(f"expected lengths from {sorted(SIZES)}; got {unknown}")
        if self.prompts and (single := [tokens for tokens in self.lengths if SIZES[tokens].microbatch == 1]):
            raise SystemExit(
                f"expected, with --prompts, --lengths whose microbatches have a prompt to share; got {single}, whose "
                "microbatches are single rows"
            )

    def python(self, engine: Engine) -> str | None:
        """The interpreter of an engine, None without one."""
        found = {"torch": self.torch_python, "trl": self.trl_python}
        return sys.executable if engine == "ours" else found[engine]


def sizes_of(args: Args, tokens: int, prompt: int) -> list[str]:
    """Command-line flags that all engines share."""
    size = SIZES[tokens]
    words: list[object] = ["--tokens", tokens, "--sequences", size.sequences, "--prompt", prompt]
    words += ["--microbatch", size.microbatch, "--repeats", args.repeats, *(["--untied"] if args.untied else [])]
    return [str(word) for word in words]


def shadow(budget: int, buffer: int) -> list[str]:
    """Flags of ours with a shadow mask."""
    return ["--visibility", "shadow", "--budget", str(budget), "--buffer", str(buffer)]


def commands(args: Args, tokens: int) -> Iterator[list[str]]:
    """Command lines of the selected engines that run at this length."""
    size = SIZES[tokens]
    same = sizes_of(args, tokens, size.prompt)
    masked = shadow(size.budget, size.buffer)
    for engine in args.engine:
        python = args.python(engine)
        if engine == "ours":
            forms = ([], masked, [*masked, "--boolean"]) if args.boolean else ([], masked)
            yield from ([*OURS, *same, *more] for more in forms)
        elif engine in size.peers and python is not None:
            yield [python, str(HERE / "engines" / f"{engine}_update.py"), *same]


def compare(args: Args, tokens: int) -> list[Row]:
    """One row per engine."""
    engines = [[*command, "--driven"] for command in commands(args, tokens)]
    rows = SIZES[tokens].microbatch * tokens
    product = product_command(rows, args.repeats, "--backward", *(["--untied"] if args.untied else []))
    return with_limits(take_turns(args.repeats, [*engines, product]), update=True)


def shared_prompts(args: Args, tokens: int) -> list[Row]:
    """Two rows per prompt length: the prompt read in every row, and once per microbatch."""
    size = SIZES[tokens]
    found = []
    for prompt in (tokens // 9, tokens // 3, 7 * tokens // 9):
        ours = [*OURS, *sizes_of(args, tokens, prompt), *shadow(prompt + size.buffer, size.buffer)]
        once = ["--rows-per-prompt", str(size.microbatch)]
        found += take_turns(args.repeats, [[*ours, *more, "--driven"] for more in ([], once)])
    return found


def table(tokens: int, rows: list[Row]) -> None:
    names = [", ".join(row[key] for key in ("engine", "visibility", "mask") if key in row) for row in rows]
    if rows[0].get("prompt") != rows[-1].get("prompt"):
        columns = ("engine", "prompt", "rows that read it together", "seconds", "peak GB")
        keys = ("prompt", "rows_per_prompt", "seconds")
        picked = [(*(row[key] for key in keys), row["peak_bytes"] / 1e9) for row in rows]
    else:
        columns = ("engine", "seconds", "least", "CPU, least", "of the products", "peak GB")
        keys = ("seconds", "seconds_min", "cpu_seconds_min", "limit_share")
        picked = [(*(row[key] for key in keys), row["peak_bytes"] / 1e9) for row in rows]
    cells = [(name, *values) for name, values in zip(names, picked, strict=True)]
    summary_table(f"One update of {SIZES[tokens].sequences} sequences of {tokens} tokens", columns, cells)


def main(args: Args) -> None:
    found = []
    for tokens in args.lengths:
        rows = (shared_prompts if args.prompts else compare)(args, tokens)
        found += rows
        if args.json:
            print("\n".join(json.dumps(row) for row in rows), flush=True)
        else:
            table(tokens, rows)
    if args.out is not None:
        write(args.out, found)


if __name__ == "__main__":
    main(tyro.cli(Args))
