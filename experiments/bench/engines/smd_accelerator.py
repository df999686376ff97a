"""Runs one stage of `bench/accelerator.py`: its jobs in sequence, one JSON object per line.

A line `{"begin": name}` precedes each job. A failing job ends the process, because an error of the device loses its
context; the parent then starts a new process at the next job. A stage imports only what it needs.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import partial
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for the packages bench and lib

from bench.engines import kernel_checks
from bench.engines.kernel_checks import CacheShape

Row = dict[str, Any]
Job = tuple[str, Callable[[], Iterable[Row]]]
CACHE_LIMIT = 2**28  # bytes beyond any GPU's cache (50 MB on Hopper), so that data is read from memory


def seconds(f: Callable[..., Any], *args: Any, repeats: int = 10) -> dict[str, float]:
    """Median and minimum of a call with all results ready; the first call compiles and does not count."""
    jax.block_until_ready(f(*args))
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        found.append(time.perf_counter() - start)
    return {"seconds": statistics.median(found), "least_seconds": min(found)}


def copy_rate(rehearse: bool) -> float:
    """Bytes per second, read and written."""
    x = jnp.zeros((2**20 if rehearse else 2**30) // 4, jnp.float32)
    return 2 * x.nbytes / seconds(jax.jit(lambda x: x + 1), x)["least_seconds"]


def product_rate(rehearse: bool) -> float:
    """FLOP per second of a bfloat16 product of square random matrices."""
    n = 256 if rehearse else 8192
    left, right = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in range(2))
    return 2 * n**3 / seconds(jax.jit(jnp.matmul), left, right)["seconds"]


def machine(rehearse: bool) -> Iterator[Job]:
    def describe() -> Iterator[Row]:
        device = jax.devices()[0]
        names = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "optax", "numpy")
        installed = {d.metadata["Name"].lower() for d in metadata.distributions() if d.metadata["Name"]}
        versions = {"python": platform.python_version()} | {n: metadata.version(n) for n in names if n in installed}
        stats = device.memory_stats() or {}
        yield {
            "device": device.device_kind,
            "backend": jax.default_backend(),
            "runtime": device.client.platform_version,  # of a GPU, CUDA's version
            "memory_bytes": stats.get("bytes_limit"),
            "versions": versions,
        }

    yield "versions", describe
    yield "copy", lambda: [{"copy_bytes_per_second": copy_rate(rehearse)}]
    yield "product", lambda: [{"product_flops_per_second": product_rate(rehearse)}]


def correctness(rehearse: bool) -> Iterator[Job]:
    if rehearse:
        import interpreted

        interpreted.patch_kernels()
    for case in kernel_checks.rehearsed() if rehearse else kernel_checks.cases():
        yield case.name, lambda case=case: [case.row(1 if rehearse else 20)]


def attention(rehearse: bool) -> Iterator[Job]:
    from bench import attention as bench

    if rehearse:
        impls = ("segments", "stock mask")
        args = bench.Args("cpu", buffer=32, heads=2, kv_heads=1, head_dim=64, dtype="bfloat16", impls=impls, rounds=1)
        sizes = ((256, 32),)
    else:
        # XLA's T x T mask, once, at a length at which it fits.
        impls = ("mosaic_gpu", "segments", "cudnn causal", "stock mask")
        args = bench.with_defaults(bench.Args("gpu", impls=impls, longest_mask=4096, rounds=10))
        sizes = ((4096, 1024), (8192, 1024), (32768, 1024))

    def measure(tokens: int, budget: int) -> Iterator[Row]:
        rate = product_rate(rehearse)
        for row in bench.time_size(args, tokens, budget, bench.IMPLEMENTATIONS):
            yield bench.with_shares(row, rate)

    for tokens, budget in sizes:
        yield f"attention, {tokens} tokens, budget {budget}", partial(measure, tokens, budget)


# Qwen2.5-1.5B's heads, an 8B model's; the last has fewer blocks than a GPU has multiprocessors.
CACHES = (
    CacheShape(64, 12, 2, 640, 128),
    CacheShape(64, 12, 2, 1152, 128),
    CacheShape(256, 12, 2, 1152, 128),
    CacheShape(64, 32, 8, 640, 128),
    CacheShape(64, 32, 8, 1152, 128),
    CacheShape(256, 32, 8, 1152, 128),
    CacheShape(8, 32, 8, 4096, 128),
)
TINY_CACHE = CacheShape(2, 3, 1, 72, 64)


def decode(rehearse: bool) -> Iterator[Job]:
    from smd_kernels import decode_gpu
    from smd_kernels.decode import decode_attention

    kernels: dict[str, Callable[..., Any]] = {"mosaic_gpu": decode_gpu.decode_attention, "xla": decode_attention}
    if rehearse:
        import interpreted

        interpreted.patch_kernels()
        parameters = interpreted.decode_parameters(TINY_CACHE.slots)
        kernels["mosaic_gpu"] = partial(decode_gpu.decode_attention, interpret=parameters)
    for cache in (TINY_CACHE,) if rehearse else CACHES:
        for name, kernel in kernels.items():
            yield f"decode {cache}, {name}", partial(decode_row, name, kernel, cache, rehearse)


def bytes_of_step(cache: CacheShape) -> int:
    """Keys and values, queries and output; a boolean read and a float32 written per slot."""
    kv = cache.batch * cache.kv_heads * cache.slots
    return 4 * kv * cache.head_dim + 5 * kv + 4 * cache.batch * cache.heads * cache.head_dim


def decode_row(name: str, kernel: Callable[..., Any], cache: CacheShape, rehearse: bool) -> Iterator[Row]:
    """A step of several layers with one cache each, repeated in one program.

    A single call would mostly measure the launch. All layers together exceed the device's cache, and every call needs
    the output of the one before.
    """
    needed = bytes_of_step(cache)
    layers = 1 if rehearse else max(2, -(-CACHE_LIMIT // needed))
    rounds = 1 if rehearse else max(1, round(2**33 / (layers * needed)))
    keys = jax.random.split(jax.random.key(0), 2 * layers + 1)
    shape = (cache.batch, cache.kv_heads, cache.slots, cache.head_dim)
    held = [[jax.random.normal(key, shape, jnp.bfloat16) for key in keys[2 * i : 2 * i + 2]] for i in range(layers)]
    x = jax.random.normal(keys[-1], (cache.batch, cache.heads, 1, cache.head_dim), jnp.bfloat16)
    valid = jnp.ones(shape[:3], bool)

    @jax.jit
    def steps(x: Any, held: Any, valid: Any) -> Any:
        def step(_: Any, carry: Any) -> Any:
            x, received = carry
            # Keeps XLA from hoisting work on the constants out of the loop.
            here, filled = jax.lax.optimization_barrier((held, valid))
            for k, v in here:
                x, seen = kernel(x, k, v, filled)
                received += seen
            return x, received

        return jax.lax.fori_loop(0, rounds, step, (x, jnp.zeros(valid.shape, jnp.float32)))

    took = {name: t / (layers * rounds) for name, t in seconds(steps, x, held, valid).items()}
    rate = copy_rate(rehearse)
    row: Row = {"impl": name, **cache._asdict(), "layers": layers, "rounds": rounds, "bytes": needed}
    yield row | took | {"copy_bytes_per_second": rate, "limit_share": needed / took["seconds"] / rate}


SEQUENCES = 4
TOKENS = 8192
PROMPT = 512
BUDGET = 1024
BUFFER = 128
# Of the rollouts: a dense cache of 3,072 + 6 * 128 slots just fits the decode kernel's shared memory, so that both
# policies decode with it.
ROLLOUT_PROMPT = 3072
ROLLOUT_SEGMENTS = 6


def whole(rehearse: bool) -> Iterator[Job]:
    import smd_roofline

    from smd_jax.config import ModelConfig

    model = ModelConfig(
        vocab_size=151_936,
        hidden_size=1536,
        intermediate_size=8960,
        num_layers=28,
        num_heads=12,
        num_kv_heads=2,
        head_dim=128,
        max_positions=32_768,
        rope_theta=1e6,
        qkv_bias=True,
        tie_embeddings=True,
        dtype="bfloat16",
    )
    whole = smd_roofline.Sizes(model, (64, 256), BUDGET, BUFFER, ROLLOUT_SEGMENTS, ROLLOUT_PROMPT)
    sizes = smd_roofline.TINY if rehearse else whole
    batch = (2, 64, 16, 16, 8) if rehearse else (SEQUENCES, TOKENS, PROMPT, BUDGET, BUFFER)
    few = sizes.batches[0]
    # Short jobs first: the stage may end at its limit.
    for name, rows in (("ours", few), ("ours-dense", few)):
        yield f"rollout, {name}, {rows} rows", partial(rollout_row, sizes, name, rows, rehearse)
    for visibility in ("shadow", "dense"):
        yield f"update, {visibility}", partial(update_row, sizes.model, visibility, *batch, rehearse)
    for rows in sizes.batches[1:]:
        yield f"rollout, ours, {rows} rows", partial(rollout_row, sizes, "ours", rows, rehearse)


def rollout_row(sizes: Any, name: str, rows: int, rehearse: bool) -> Iterator[Row]:
    import smd_roofline

    bandwidth = copy_rate(rehearse)
    params = smd_roofline.random_weights(sizes.model)
    yield smd_roofline.step_row(sizes, name, rows, params, bandwidth) | {"copy_bytes_per_second": bandwidth}


def update_row(
    config: Any, visibility: Any, sequences: int, tokens: int, prompt: int, budget: int, buffer: int, rehearse: bool
) -> Iterator[Row]:
    """Updates with one row per microbatch; `limit_share` is relative to the rate of a square product."""
    import optax
    import smd_roofline
    from smd_common import random_batch

    from bench.engines.common import Sizes
    from bench.limits import update_flops
    from smd_jax.corrections.base import Naive, Shadow
    from smd_jax.learner.config import UpdateConfig
    from smd_jax.learner.state import init_state
    from smd_jax.learner.update import make_update
    from smd_jax.memory.compiled import program_bytes
    from smd_jax.model.decoder import Decoder

    drawn = np.random.default_rng(0).integers(1, config.vocab_size, (sequences, tokens))
    batch = random_batch(config, drawn, prompt, budget, buffer)
    correction = Shadow() if visibility == "shadow" else Naive()
    optimizer = optax.adamw(1e-6)
    state = init_state(smd_roofline.random_weights(config), optimizer, jax.random.key(0))
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    update = make_update(
        Decoder(config), optimizer, UpdateConfig(visibility=visibility, correction=correction, microbatch_size=1)
    )
    times = []
    for _ in range(2 + 3):
        start = time.perf_counter()
        state, metrics = update(state, batch)
        jax.block_until_ready((state.params, metrics))
        times.append(time.perf_counter() - start)
    row: Row = {"update": visibility, "sequences": sequences, "tokens": tokens, "prompt": prompt, "microbatch": 1}
    row |= {"budget": budget, "buffer": buffer} if visibility == "shadow" else {"budget": None, "buffer": None}
    row |= {"parameters": parameters, "first_seconds": times[0], "loss_finite": bool(np.isfinite(metrics["loss"]))}
    row |= {"ok": row["loss_finite"], "seconds": statistics.median(times[2:]), "least_seconds": min(times[2:])}
    flops = update_flops(row, Sizes(**{field.name: getattr(config, field.name) for field in fields(Sizes)}))
    rate = product_rate(rehearse)
    row |= {"flops": flops, "product_flops_per_second": rate, "limit_share": flops / row["seconds"] / rate}
    # The memory that the compiler plans: the peak of the process would be that of the largest program so far.
    yield row | {"planned_bytes": program_bytes(update.lower(state, batch))}


STAGES = {stage.__name__: stage for stage in (machine, correctness, attention, decode, whole)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", choices=tuple(STAGES), required=True)
    parser.add_argument("--rehearse", action="store_true", help="toy sizes, on a CPU")
    parser.add_argument("--only", default="", help="jobs whose names contain this")
    parser.add_argument("--skip", type=int, default=0, help="number of jobs to skip")
    args = parser.parse_args()
    if jax.default_backend() != ("cpu" if args.rehearse else "gpu"):
        raise SystemExit(f"expected a GPU, or --rehearse on a CPU; got {jax.default_backend()!r}")
    jobs = (job for job in STAGES[args.stage](args.rehearse) if args.only in job[0])
    for name, job in islice(jobs, args.skip, None):
        print(json.dumps({"begin": name}), flush=True)
        for row in job():
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
