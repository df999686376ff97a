"""How many rows of which length fit into 80 GB: what a budgeted cache buys, planned, with the learner beside it.

Question   Qwen2.5 with 0.5B, 1.5B and 7B parameters on GPUs of 80 GB: how many completions can be sampled at the same
           time, as long as 2,048 to 32,768 tokens, with the whole cache, with the whole cache in 4 bits, and with 512,
           1,024 or 2,048 keys and a buffer of 128? While nothing is done but sampling, and with a learner beside?
Found      What is long gains most: of 32,768 tokens a 7B model has room for some thirty times as many completions
           with 640 slots as with the whole cache, and of 2,048 tokens with a budget of 2,048 for fewer.
Command    python experiments/memory_wall.py --out experiments/results/memory_wall.json
           python experiments/memory_wall.py --out experiments/results/memory_wall.json --collect \\
               --table docs/memory_wall.md                                         the page, from the rows
Cost       some minutes on one core; nothing is allocated, no accelerator is needed
Result     experiments/results/memory_wall.json, a row for each setup, cache and length.

Planned    Every number here, by `smd_jax.memory.plan`; no GPU was at hand. What a compiler for the H100 says of the
           learner's part is in results/update_compiled_h100.json: the plan has 1.4 to 3 times the work of one row that
           XLA then uses, so that it errs towards too few rows.
Setups     bfloat16 compute. `sampling`: weights in bfloat16, no learner. `full`: all parameters and AdamW's state in
           float32, one row of a microbatch, gradients rematerialised, layers' attention by the GPU kernel. `lora`: the
           base in bfloat16, adapters of rank 16 and their AdamW in float32. `full, fsdp 8`: eight devices; rows are
           those of all eight together.
Rows       `rows`: completions that are decoded at the same time, all of one rollout, prompts (512 tokens) read one by
           one; 0 where not one fits. `budget`: keys, null where none goes. `ratio`: to the whole cache in bfloat16,
           null where that has none.
           `limit`: which phase, and which part of it, is largest when one row more does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import optax
import tyro
from jax.sharding import AbstractMesh, AxisType

from lib.files import Row, read_rows, write_rows, write_text
from lib.provenance import provenance
from smd_jax.byte_sizes import parse_bytes
from smd_jax.config import ModelConfig
from smd_jax.devices.sharding import AXES, row_ways
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.eviction.policies import Dense, SnapKV
from smd_jax.memory.plan import MemoryPlan, Workload, param_shapes, plan_memory
from smd_jax.message.quantization import QuantConfig
from smd_jax.model.decoder import Decoder
from smd_jax.model.lora import LoraConfig, add_lora
from smd_jax.model.protocol import Params
from smd_jax.sampler.config import RolloutConfig

PROMPT = 512
LENGTHS = (2_048, 8_192, 32_768)  # prompt and response together
BUFFER = 128
LEARNERS = ("sampling", "full", "lora", "full, fsdp 8")
Learner = Literal["sampling", "full", "lora", "full, fsdp 8"]


def qwen(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> ModelConfig:
    """Qwen2.5's shape; the two smaller ones share embedding and head."""
    return ModelConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        max_positions=32_768,
        qkv_bias=True,
        tie_embeddings=hidden < 3_584,
        rope_theta=1e6,
        dtype="bfloat16",
    )


HEADING = """# How many rows fit into 80 GB

Completions of Qwen2.5 that can be sampled at the same time, by length in tokens (with 512 of the prompt). In brackets:
the ratio to the full cache. The numbers are plans, not measurements: `experiments/memory_wall.py` lists what they
count. A budget as long as the sequence gains nothing. 0: weights and optimizer do not fit.

*sampling*: no learner. *full*: the learner trains all parameters with AdamW in float32. *lora*: it trains adapters of
rank 16. *full, fsdp 8*: eight devices, the rows of all together. What a budget costs in reward: [the
report](../REPORT.md).
"""

MODELS = {
    "0.5B": qwen(896, 4_864, 24, 14, 2, 151_936),
    "1.5B": qwen(1_536, 8_960, 28, 12, 2, 151_936),
    "7B": qwen(3_584, 18_944, 28, 28, 4, 152_064),
}


@dataclass(frozen=True)
class Cache:
    """What the sampler keeps of a sequence; `bits` None: all in the compute dtype."""

    name: str
    policy: EvictionPolicy
    budget: int
    bits: Literal[8, 4, 2] | None = None

    def config(self, response: int) -> RolloutConfig:
        quant = None if self.bits is None else QuantConfig(self.bits)
        return RolloutConfig(response, self.budget, BUFFER, quant=quant)


DENSE = Cache("dense", Dense(), 1)
CACHES = (
    DENSE,
    Cache("dense, 4 bits", Dense(), 1, 4),
    *(Cache(f"{budget} + {BUFFER}", SnapKV(), budget) for budget in (512, 1_024, 2_048)),
    Cache(f"512 + {BUFFER}, 4 bits", SnapKV(), 512, 4),
)


def workload(shape: ModelConfig, learner: Learner, cache: Cache, length: int, prompt: int) -> Workload:
    """What is planned, of one row a device."""
    model = Decoder(shape, remat=True, impl="mosaic_gpu")
    mesh = AbstractMesh((1, 8, 1, 1), AXES, axis_types=(AxisType.Auto,) * 4) if learner == "full, fsdp 8" else None
    ways = row_ways(mesh)
    return Workload(
        model,
        cache.policy,
        cache.config(length - prompt),
        prompt,
        rows=ways,
        optimizer=None if learner == "sampling" else optax.adamw(1e-6),
        prefill_rows=ways,
        microbatch_size=None if learner == "sampling" else ways,
        mesh=mesh,
        platform="gpu",
    )


def stored_shapes(shape: ModelConfig, learner: Learner) -> Params:
    """Shapes of the parameters: what is not trained is stored in the compute dtype."""
    wide = param_shapes(Decoder(shape))
    if learner.startswith("full"):
        return wide
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, shape.dtype), wide)
    if learner == "sampling":
        return params
    return jax.eval_shape(lambda params: add_lora(params, LoraConfig(16), jax.random.key(0)), params)


def planned(work: Workload, params: Params, rows: int) -> MemoryPlan:
    """The plan with so many rows, all of them decoded at once."""
    return plan_memory(replace(work, rows=rows), params, rows)


def bytes_of(work: Workload, params: Params, rows: int) -> int:
    """The most that this plan holds on a device."""
    return planned(work, params, rows).total


def most_rows(memory_bytes: int, needed: Callable[[int], int], ways: int = 1) -> int:
    """The largest multiple of `ways` for which `needed(rows) <= memory_bytes`; needs grow with the rows.

    A plan takes its time, and is nearly a straight line: the next number to try is where the line would end.
    """
    fits, least = 1, needed(ways)
    if least > memory_bytes:
        return 0
    beyond, most = 2, needed(2 * ways)
    while most <= memory_bytes:
        slope = (most - least) / (beyond - fits)
        fits, least = beyond, most
        # The update may need more than few rows of a rollout do: then the line is flat.
        beyond += int((memory_bytes - most) / slope) + 1 if slope else beyond
        most = needed(beyond * ways)
    while beyond - fits > 1:
        guess = fits + int((memory_bytes - least) * (beyond - fits) / (most - least))
        guess = min(max(guess, fits + 1), beyond - 1)
        size = needed(guess * ways)
        if size <= memory_bytes:
            fits, least = guess, size
        else:
            beyond, most = guess, size
    return fits * ways


def rows_of(name: str, shape: ModelConfig, learner: Learner, memory: str, lengths: Sequence[int]) -> Iterator[Row]:
    """A row for every length and cache; the first cache is what the others are compared with."""
    prompt = min(PROMPT, lengths[0] // 2)
    params = stored_shapes(shape, learner)
    for length in lengths:
        dense = 0
        for cache in CACHES:
            work = workload(shape, learner, cache, length, prompt)
            ways = row_ways(work.mesh)
            count = most_rows(parse_bytes(memory), partial(bytes_of, work, params), ways)
            dense = count if cache == DENSE else dense
            over = planned(work, params, count + ways)
            phase = "rollout" if over.rollout >= over.update else "update"
            yield {
                "model": name,
                "learner": learner,
                "cache": cache.name,
                "budget": cache.budget if cache.policy.evicts else None,
                "length": length,
                "prompt": prompt,
                "devices": 1 if work.mesh is None else work.mesh.size,
                "memory": memory,
                "rows": count,
                "ratio": round(count / dense, 2) if dense else None,
                "limit": f"{phase}: {over.largest}",
            }


@dataclass(frozen=True)
class Args:
    """Plans, and prints a table."""

    models: tuple[Literal["0.5B", "1.5B", "7B"], ...] = ("0.5B", "1.5B", "7B")
    learners: tuple[Learner, ...] = LEARNERS
    lengths: tuple[int, ...] = LENGTHS  # tokens of prompt and response
    memory: str = "80GB"  # of one device
    out: Path = Path("runs/memory_wall.json")  # rows
    table: Path | None = None  # Markdown file for the table
    collect: bool = False  # plan nothing: the table of the rows that are in --out


def table(rows: Sequence[Row]) -> str:
    """Rows that fit: a line for each model, learner and cache, a column for each length."""
    lengths = sorted({row["length"] for row in rows})
    found = {(row["model"], row["learner"], row["cache"], row["length"]): row for row in rows}
    lines = [" | ".join(["| model", "learner", "cache", *(f"{length:,}" for length in lengths)]) + " |"]
    lines.append("|---" * 3 + "|--:" * len(lengths) + "|")
    for model, learner, cache in dict.fromkeys(key[:3] for key in found):
        cells = [_cell(found[model, learner, cache, length]) for length in lengths]
        lines.append(" | ".join([f"| {model}", learner, cache, *cells]) + " |")
    return "\n".join(lines)


def _cell(row: Row) -> str:
    if row["ratio"] is None or row["cache"] == DENSE.name:
        return f"{row['rows']:,}"
    return f"{row['rows']:,} ({row['ratio']:g} x)"


def main(args: Args) -> None:
    if args.collect:
        rows = read_rows(args.out)
    else:
        origin = provenance(("jax",))
        rows = []
        for name in args.models:
            for learner in args.learners:
                for row in rows_of(name, MODELS[name], learner, args.memory, args.lengths):
                    rows.append(row | origin)
                    write_rows(args.out, rows)
    if args.table is not None:
        write_text(args.table, f"{HEADING}\n{table(rows)}\n")
    print(table(rows))


if __name__ == "__main__":
    main(tyro.cli(Args))
