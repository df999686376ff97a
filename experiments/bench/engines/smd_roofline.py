"""Ours on an accelerator: a step against the bytes that it has to move, and how many rows fit. By `bench/rollout.py`.

Command    python experiments/bench/engines/smd_roofline.py --device gpu --check          (one JSON object a line)
Cost       ten minutes on a GPU

Model      Like Qwen3-1.7B, random weights in bfloat16. Prompts of `budget` tokens, so that the cache is full at once.
Roofline   A step reads every weight once (the embeddings are the output projection) and the live keys and values of
           all rows once, which are on average budget + buffer / 2, and reads and writes the statistic of a policy that
           watches attention. That many bytes at the rate at which this device copies is the time to be compared with;
           the time of a step is that of a segment, its compression included, over its steps.
Batch      The largest number of rows whose program of a segment fits, by the compiler's own account: with a cache of
           budget + buffer, and with a dense one of 32,768 tokens. `--confirm` runs a segment of each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")  # of a GPU; before jax is imported

import generation
import jax
import jax.numpy as jnp
import numpy as np
from smd_common import max_difference

import smd_jax as smd
from smd_jax.testing import random_params, tiny_model_config

Row = dict[str, Any]
CHECKED = 2  # rows whose log-probabilities the learner computes again
PREFILLED = 1  # prompts read at once: their caches are alive beside those of the rows
POLICIES = {
    "ours": smd.eviction.Knorm(),
    "ours-snapkv": smd.eviction.SnapKV(),
    "ours-h2o": smd.eviction.H2O(),
    "ours-dense": smd.eviction.Dense(),
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of what is sampled."""

    model: smd.ModelConfig
    batches: tuple[int, ...]
    budget: int
    buffer: int
    segments: int  # sampled; the first two are not timed
    context: int  # tokens of a row in the dense cache
    copied: int  # bytes of the array that is copied to measure the rate
    prompt: int | None = None  # tokens of a prompt; none: as many as the budget

    @property
    def width(self) -> int:
        return self.prompt or self.budget


FULL = Sizes(
    tiny_model_config(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        max_positions=40_960,
        rope_theta=1e6,
        qkv_bias=False,
        qk_norm=True,
        dtype="bfloat16",
    ),
    batches=(64, 256),
    budget=1024,
    buffer=128,
    segments=6,
    context=32_768,
    copied=2**32,
)
TINY = Sizes(
    tiny_model_config(num_layers=1, dtype="bfloat16"), (2,), budget=64, buffer=8, segments=4, context=1024, copied=2**22
)


def copy_bandwidth(size: int, repeats: int = 10) -> float:
    """Bytes a second, read and written, of a copy that is large enough to leave every cache."""
    x = jnp.zeros(size // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    jax.block_until_ready(copy(x))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(copy(x))
        seconds.append(time.perf_counter() - start)
    return 2 * x.nbytes / min(seconds)


def random_weights(config: smd.ModelConfig) -> smd.model.Params:
    """In the compute dtype, made on the device: those of `random_params` would be there in float32 first."""
    shapes = jax.eval_shape(lambda: random_params(config))

    def fill(path: Any, x: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
        if path[-1].key == "scale":
            return jnp.ones(x.shape, x.dtype)
        return (0.02 * jax.random.normal(key, x.shape, jnp.float32)).astype(config.dtype)

    @jax.jit
    def make() -> smd.model.Params:
        leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
        keys = jax.random.split(jax.random.key(0), len(leaves))
        return jax.tree.unflatten(tree, [fill(path, x, key) for (path, x), key in zip(leaves, keys, strict=True)])

    return make()


def nbytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def prompts(rows: int, width: int, vocabulary: int) -> smd.PromptBatch:
    tokens = jnp.asarray(np.asarray(generation.prompts(rows, width, vocabulary), np.int32))
    return smd.PromptBatch(tokens=tokens, valid=jnp.ones(tokens.shape, bool))


def make_engine(sizes: Sizes, policy: smd.eviction.EvictionPolicy, decode_rows: int, new_tokens: int) -> smd.Engine:
    config = smd.RolloutConfig(new_tokens, sizes.budget, sizes.buffer)
    return smd.Engine(
        smd.Decoder(sizes.model), policy, config, decode_rows=decode_rows, prefill_rows=min(decode_rows, PREFILLED)
    )


def slot_bytes(sizes: Sizes) -> int:
    """Bytes of a key and its value, in all layers and heads."""
    c = sizes.model
    return 2 * c.num_layers * c.num_kv_heads * c.head_dim * jnp.dtype(c.dtype).itemsize


def step_bytes(sizes: Sizes, policy: smd.eviction.EvictionPolicy, rows: int, weights: int) -> int:
    """What a step has to move: weights once, live keys and values once, the statistic in and out."""
    # On average over the segments that are timed; the first two are not.
    live = sizes.budget + sizes.buffer / 2
    if not policy.evicts:
        live = sizes.width + (2 + sizes.segments) * sizes.buffer / 2
    watched = (
        8 * sizes.model.num_layers * sizes.model.num_kv_heads
        if smd.eviction.ReceivedAttention() in policy.statistics
        else 0
    )
    return int(weights + rows * live * (slot_bytes(sizes) + watched))


# ---------------------------------------------------------------- rows


def header() -> Row:
    versions = {"jax": jax.__version__, "jaxlib": metadata.version("jaxlib"), "flax": metadata.version("flax")}
    return {"device": jax.devices()[0].device_kind, "versions": versions}


def check(sizes: Sizes) -> Iterator[Row]:
    """Identity of a small model in float32, or SystemExit."""
    jax.config.update("jax_default_matmul_precision", "highest")  # of a GPU: no TensorFloat-32
    small = replace(TINY, model=replace(sizes.model, **SMALL, dtype="float32"))
    params = random_params(small.model)
    for name, policy in POLICIES.items():
        if not policy.evicts:
            continue
        engine = make_engine(small, policy, 4, 100)
        done = engine.run(params, prompts(6, small.budget, small.model.vocab_size), jax.random.key(1))
        off = max_difference(engine.model, params, done.trajectory, CHECKED)
        yield {"check": f"{name}, sampler against learner", "max_abs_dlogp": off}
        if not off <= 1e-4:
            raise SystemExit(f"expected {name} within 1e-4 nats of the learner; got {off}")
    jax.config.update("jax_default_matmul_precision", None)


SMALL = {"num_layers": 2, "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512}


def step_row(sizes: Sizes, name: str, rows: int, params: smd.model.Params, bandwidth: float) -> Row:
    """Time of a step of `rows` rows, and the share of the roofline."""
    policy = POLICIES[name]
    new_tokens = sizes.segments * sizes.buffer
    engine = make_engine(sizes, policy, rows, new_tokens)
    marks = [0.0]

    def report(progress: smd.sampler.Progress) -> None:
        marks.append(progress.seconds)

    given = prompts(rows, sizes.width, sizes.model.vocab_size)
    engine.run(params, given, jax.random.key(0), limits=np.full(rows, sizes.buffer, np.int32))  # compiles
    done = engine.run(params, given, jax.random.key(1), report=report)
    steps = np.diff(marks)[2:] / sizes.buffer
    step = statistics.median(steps)
    least = step_bytes(sizes, policy, rows, nbytes(params)) / bandwidth
    row: Row = {"engine": name, "device": jax.devices()[0].platform, "batch": rows, "prompt": sizes.width}
    budget, buffer = (sizes.budget, sizes.buffer) if policy.evicts else (None, None)
    row |= {"new_tokens": new_tokens, "budget": budget, "buffer": buffer}
    row |= {"tokens_per_s": rows / step, "ms_per_step_early": steps[0] * 1e3, "ms_per_step_late": steps[-1] * 1e3}
    memory = smd.memory.segment_memory(engine, params, sizes.width)
    slots = sizes.budget + sizes.buffer if policy.evicts else sizes.width + new_tokens
    expected = rows * slots * slot_bytes(sizes)
    row |= {"cache_bytes": memory.state, "expected_cache_bytes": expected}
    row["max_abs_dlogp"] = max_difference(engine.model, params, done.trajectory, CHECKED)
    row |= {
        "ms_per_step": step * 1e3,
        "ms_of_bytes": least * 1e3,
        "limit_share": None,
        "share_of_roofline": least / step,
    }
    row |= {"temp_bytes": memory.temporary, "total_bytes": memory.total}
    return row


def device_bytes(given: float | None) -> int:
    """What a program may allocate: by --memory, or what JAX says of the device."""
    if given is not None:
        return int(given * 2**30)
    stats = jax.devices()[0].memory_stats()
    if stats is None:
        raise SystemExit("expected --memory GIB on a device that does not say how much it has; got none")
    return int(stats["bytes_limit"])


def largest_batch(sizes: Sizes, policy: smd.eviction.EvictionPolicy, context: int, limit: int) -> tuple[int, int]:
    """Rows whose segment program fits into `limit` bytes, and what it needs, by the compiler's account.

    A guess is compiled, then the place where a line through what two programs need reaches the limit, until that fits.
    Even numbers only: of odd ones some compilers copy more.
    """
    params = jax.eval_shape(lambda: random_weights(sizes.model))
    width = min(sizes.budget, context // 2)

    @cache
    def total(rows: int) -> int:
        engine = make_engine(sizes, policy, rows, context - width)
        return smd.memory.segment_memory(engine, params, width).total

    few = 8
    slots = sizes.budget + sizes.buffer if policy.evicts else context
    rows = max(int((limit - nbytes(params)) / (slots * slot_bytes(sizes))), few + 1)
    each = (total(rows) - total(few)) / (rows - few)
    rows = even(rows + (limit - total(rows)) / each)
    while (needed := total(rows)) > limit:
        rows = even(rows - max(2, (needed - limit) / each))
    return rows, needed


def even(x: float) -> int:
    return int(x) // 2 * 2


def confirm(sizes: Sizes, policy: smd.eviction.EvictionPolicy, context: int, rows: int) -> float:
    """Runs one segment of so many rows; its seconds."""
    width = min(sizes.budget, context // 2)
    params = random_weights(sizes.model)
    engine = make_engine(sizes, policy, rows, context - width)
    limits = np.full(rows, sizes.buffer, np.int32)
    given = prompts(rows, width, sizes.model.vocab_size)
    return engine.run(params, given, jax.random.key(0), limits=limits).stats.seconds


def batch_rows(sizes: Sizes, limit: int, confirmed: bool) -> Iterator[Row]:
    """The largest batch of a fixed budget and of a dense cache, for a context of so many tokens."""
    found = []
    for policy in (POLICIES["ours"], smd.eviction.Dense()):
        rows, needed = largest_batch(sizes, policy, sizes.context, limit)
        found.append(rows)
        row: Row = {"largest_batch": rows, "policy": type(policy).__name__, "context": sizes.context}
        row |= {"budget": sizes.budget if policy.evicts else None, "total_bytes": needed, "device_bytes": limit}
        if confirmed:
            row["confirmed_seconds"] = confirm(sizes, policy, sizes.context, rows)
        yield row
    yield {"largest_batch_ratio": found[0] / found[1], "context": sizes.context, "budget": sizes.budget}


def rows(args: argparse.Namespace, sizes: Sizes) -> Iterator[Row]:
    """All of it, the surest first."""
    yield header()
    if args.check:
        yield from check(sizes)
    bandwidth = copy_bandwidth(sizes.copied)
    yield {"copy_bytes_per_second": bandwidth}
    params = random_weights(sizes.model)
    for batch in sizes.batches:
        for name in args.engine:
            yield step_row(sizes, name, batch, params, bandwidth)
    del params
    yield from batch_rows(sizes, device_bytes(args.memory), args.confirm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "gpu", "tpu"), default="gpu", help="must be what JAX runs on")
    parser.add_argument("--engine", nargs="+", choices=tuple(POLICIES), default=["ours"])
    parser.add_argument("--check", action="store_true", help="first compare a small model with the learner")
    parser.add_argument("--confirm", action="store_true", help="run a segment of the largest batches")
    parser.add_argument("--memory", type=float, default=None, help="GiB, where the device does not say")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    args = parser.parse_args()
    if jax.default_backend() != args.device:
        raise SystemExit(f"expected JAX to run on {args.device!r} (JAX_PLATFORMS); got {jax.default_backend()!r}")
    for row in rows(args, TINY if args.quick else FULL):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
