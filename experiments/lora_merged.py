"""May a sampler read merged weights while the learner trains adapters?

Question   A sampler decodes with W + scale * A B rounded to the dtype of W; the learner's forward pass has W and the
           adapters side by side. How far apart are their log-probabilities, and how far is that from what the adapters
           do at all? For adapters of several sizes, ||scale * A B|| as a share of ||W||.
Command    python experiments/lora_merged.py --model runs/smollm2            (make smollm2 writes it; --json: rows)
Cost       about five minutes on two CPU cores
Result     docs/lora.md
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import smd_jax as smd
from smd_jax.commands.compilation_cache import keep_programs
from smd_jax.model.lora import LORA, by_module
from smd_jax.monitor.progress import summary_table


@dataclass(frozen=True)
class Args:
    """Compares merged weights with adapters."""

    model: Path  # a checkpoint directory
    dtype: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")  # of the base, stored and computed
    share: tuple[float, ...] = (0.001, 0.01, 0.1)  # ||scale * A B|| / ||W|| of every matrix
    rank: int = 16  # of the adapters
    prompt: int = 16  # random prompt tokens
    length: int = 48  # response tokens
    rows: int = 4  # responses
    seed: int = 0  # of adapters, prompts and samples
    json: bool = False  # print one JSON object a line in place of a table


@dataclass(frozen=True)
class Row:
    """Mean and largest |log p_sampler - log p_learner| of sampled tokens in nats; the sampler reads adapters.

    Attributes:
      rounded: what merging rounds off as a share of what the adapters add, over all matrices:
        ||merged - (W + scale * A B)|| / ||scale * A B||.
    """

    dtype: str
    share: float
    response_tokens: int
    mean_adapters: float
    max_adapters: float
    mean_merged: float
    max_merged: float
    mean_base: float
    rounded: float


def adapters_of_size(params: smd.model.Params, share: float, args: Args) -> dict[str, Any]:
    """The parameters with random adapters that add this share of every matrix's norm to it."""
    lora = smd.model.LoraConfig(rank=args.rank)
    grown = smd.model.add_lora(params, lora, jax.random.key(args.seed))
    rng = np.random.default_rng(args.seed)
    for path, pair in by_module(grown[LORA]).items():
        kernel = grown
        module = grown[LORA].matrices
        for name in path:
            kernel, module = kernel[name], module[name]
        drawn = jnp.asarray(rng.normal(size=pair["lora_B"].shape), jnp.float32)
        norm = jnp.linalg.norm(lora.scale * pair["lora_A"] @ drawn)
        module["lora_B"] = drawn * share * jnp.linalg.norm(kernel["kernel"].astype(jnp.float32)) / norm
    return grown


def rounded_share(params: smd.model.Params, merged: smd.model.Params) -> float:
    """`Row.rounded`, summed in float64."""
    lost = added = 0.0
    scale = params[LORA].config.scale
    for path, pair in by_module(params[LORA]).items():
        before, after = params, merged
        for name in path:
            before, after = before[name], after[name]
        delta = scale * np.asarray(pair["lora_A"], np.float64) @ np.asarray(pair["lora_B"], np.float64)
        exact = np.asarray(before["kernel"], np.float64) + delta
        lost += float(np.sum((np.asarray(after["kernel"], np.float64) - exact) ** 2))
        added += float(np.sum(delta**2))
    return (lost / added) ** 0.5


def compare(dtype: Literal["float32", "bfloat16"], share: float, args: Args) -> Row:
    config, base = smd.load_checkpoint(args.model, dtype=dtype)
    model = smd.Decoder(config)
    params = adapters_of_size(base, share, args)
    tokens = jax.random.randint(jax.random.key(args.seed), (args.rows, args.prompt), 0, config.vocab_size, jnp.int32)
    drawn = smd.rollout(
        model,
        params,
        smd.PromptBatch(tokens, tokens >= 0),
        jax.random.key(args.seed + 1),
        policy=smd.eviction.StreamingLLM(),
        config=smd.RolloutConfig(args.length, budget=32, buffer=16),
    )
    replay = jax.jit(smd.replay, static_argnums=0)

    def gap(learner: smd.model.Params) -> np.ndarray:
        found = np.asarray(replay(model, learner, drawn).logprobs - drawn.logprobs)
        return np.abs(found)[np.asarray(drawn.response_mask)]

    whole = smd.model.merge_lora(params)
    own, merged, without = gap(params), gap(whole), gap(base)
    numbers = (own.mean(), own.max(), merged.mean(), merged.max(), without.mean(), rounded_share(params, whole))
    return Row(dtype, share, own.size, *(float(x) for x in numbers))


def main(args: Args) -> None:
    keep_programs()
    jax.config.update("jax_default_matmul_precision", "highest")
    rows = []
    for dtype in args.dtype:
        for share in args.share:
            rows.append(compare(dtype, share, args))
            if args.json:
                print(json.dumps(asdict(rows[-1])), flush=True)
    if not args.json:
        columns = ("dtype", "adapters' share", "learner: adapters", "learner: merged", "learner: base", "rounded off")
        cells = [(r.dtype, r.share, r.mean_adapters, r.mean_merged, r.mean_base, r.rounded) for r in rows]
        summary_table("mean |Δ log p| to a sampler that reads adapters, in nats", columns, cells)


if __name__ == "__main__":
    main(tyro.cli(Args))
