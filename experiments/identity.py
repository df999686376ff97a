"""Are sampler and learner one policy?

Question   For every eviction policy: how much does a token's log p in the learner's teacher-forced pass under the
           shadow mask differ from the sampler's log p? And in a dense learner?
           The same for caches of 8, 4 and 2 bits, replayed with the sampler's parities.
Command    python experiments/identity.py            (--json: one JSON object per policy)
Cost       about three minutes on two CPU cores
Result     float32: below 2e-5 at every number of bits; float64: below 1e-10; a dense learner differs by whole nats.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import smd_jax as smd
from smd_jax.commands.compilation_cache import cache_programs
from smd_jax.monitor.progress import summary_table
from smd_jax.testing import random_params, tiny_model_config

POLICIES: dict[str, smd.eviction.EvictionPolicy] = {
    "dense": smd.eviction.Dense(),
    "recent": smd.eviction.Recent(),
    "streaming_llm": smd.eviction.StreamingLLM(),
    "h2o": smd.eviction.H2O(),
    "tova": smd.eviction.TOVA(),
    "snapkv": smd.eviction.SnapKV(window=8),
    "rkv": smd.eviction.RKV(),
    "keydiff": smd.eviction.KeyDiff(),
    "knorm": smd.eviction.Knorm(),
    "random": smd.eviction.Random(),
    "pyramid_snapkv": smd.eviction.Pyramid(smd.eviction.SnapKV(window=8)),
    "protected_knorm": smd.eviction.Protect(smd.eviction.Knorm(), sinks=4, recent=8),
}


@dataclass(frozen=True)
class Args:
    """Compares sampler and learner, policy by policy."""

    policy: tuple[str, ...] = tuple(POLICIES)  # names; all by default
    quantized: tuple[str, ...] = ("dense", "streaming_llm", "h2o", "rkv")  # names, with a quantised cache
    bits: tuple[Literal[8, 4, 2], ...] = (8, 4, 2)  # of the quantised caches
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"  # compute dtype of the model
    budget: int = 48  # keys kept per layer and KV head
    buffer: int = 16  # queries between two compressions
    length: int = 256  # response tokens
    layers: int = 3  # of the model
    seed: int = 0  # of parameters, prompts and samples
    json: bool = False  # print one JSON object per policy instead of a table

    def __post_init__(self) -> None:
        unknown = sorted({*self.policy, *self.quantized} - set(POLICIES))
        if unknown:
            raise SystemExit(f"expected policies from {sorted(POLICIES)}; got {unknown}")


def prompts(seed: int, vocab_size: int) -> smd.PromptBatch:
    """Four random prompts of 64, 61, 40 and 5 tokens."""
    tokens = jax.random.randint(jax.random.key(seed), (4, 64), 0, vocab_size, jnp.int32)
    valid = jnp.arange(64)[None] >= jnp.array([0, 3, 24, 59])[:, None]
    return smd.PromptBatch(tokens=tokens, valid=valid)


def compare(name: str, bits: Literal[8, 4, 2] | None, args: Args) -> dict[str, Any]:
    """One policy's result with a cache of these bits (None: full precision); differences are in nats."""
    config = tiny_model_config(num_layers=args.layers, hidden_size=64, intermediate_size=128, head_dim=16)
    model = smd.Decoder(replace(config, dtype=args.dtype))
    wide = jnp.float64 if args.dtype == "float64" else jnp.float32
    # Sharper attention than at initialisation, so that evictions matter.
    params = jax.tree.map(lambda x: 1.5 * x.astype(wide), random_params(config, args.seed))
    # Groups as long as possible, up to KIVI's 32: their length must divide the buffer.
    quant = None if bits is None else smd.QuantConfig(bits=bits, group=math.gcd(args.buffer, 32))
    trajectory = smd.rollout(
        model,
        params,
        prompts(args.seed, model.shape.vocab_size),
        jax.random.key(args.seed + 1),
        policy=POLICIES[name],
        config=smd.RolloutConfig(max_new_tokens=args.length, budget=args.budget, buffer=args.buffer, quant=quant),
    )
    replay = jax.jit(smd.replay, static_argnums=0)
    response = np.asarray(trajectory.response_mask)

    def difference(mask: smd.ShadowMask) -> np.ndarray:
        return np.abs(replay(model, params, trajectory, mask).logprobs - trajectory.logprobs)[response]

    shadow = difference(trajectory.mask)
    dense = difference(trajectory.dense_mask())
    row = {"policy": name, "bits": bits, "dtype": args.dtype, "layers": args.layers}
    row |= {"response_tokens": int(response.sum()), "budget": args.budget, "buffer": args.buffer}
    row |= {"max_abs_dlogp": float(shadow.max()), "mean_abs_dlogp": float(shadow.mean())}
    return row | {"dense_max_abs_dlogp": float(dense.max())}


def main(args: Args) -> None:
    cache_programs()
    if args.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    # Otherwise GPUs multiply float32 in TensorFloat-32, and sampler and learner round differently.
    jax.config.update("jax_default_matmul_precision", "highest")
    rows = []
    quantized = [(name, bits) for name in args.quantized for bits in args.bits]
    for name, bits in [*((name, None) for name in args.policy), *quantized]:
        rows.append(compare(name, bits, args))
        if args.json:
            print(json.dumps(rows[-1]), flush=True)
    if not args.json:
        columns = ("policy", "bits", "max |Δ log p|", "mean |Δ log p|", "dense learner, max")
        names = ("policy", "bits", "max_abs_dlogp", "mean_abs_dlogp", "dense_max_abs_dlogp")
        cells = [[row[name] for name in names] for row in rows]
        summary_table(f"Sampler against learner, {args.dtype}, budget {args.budget} + {args.buffer}", columns, cells)


if __name__ == "__main__":
    main(tyro.cli(Args))
