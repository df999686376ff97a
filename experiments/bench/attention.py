"""Cost of attention under a shadow mask, forward and backward, compared with a T × T mask.

Question   How much time and memory does the learner save when it gathers only the kept keys (`segments`, the Pallas
           kernels) instead of using a boolean mask (`mask`)? Where is the break-even?
Command    python experiments/bench/attention.py                       on a CPU
           python experiments/bench/attention.py --device gpu --check --out runs/attention_gpu.json
           python experiments/bench/attention.py --device gpu --tune    block sizes, instead of lengths
Cost       five minutes on two CPU cores; on a GPU: not measured
Result     see experiments/results/attention_cpu.json; on GPU and TPU: not measured.

Every round times every implementation once; the medians are reported. The baseline is the faster of two T × T masks:
ours (`mask`) and `jax.nn.dot_product_attention` (`stock mask`). Above `--longest-mask` they need too much
memory. On a GPU a second baseline is cuDNN's dense causal attention (`cudnn causal`), which sees every key.

`limit_share` and `backward_limit_share`: the arithmetic of the visible pairs (two products forward, five backward) per
second, over the rate of a plain product, measured in the same rounds: on a CPU of a segment's queries and keys, else of
large square matrices (`yardstick`).
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for the packages bench and lib

from bench.engines.kernel_checks import Case, with_gradients
from bench.limits import visible_keys
from bench.turns import Row, write
from lib.provenance import provenance
from smd_jax.message.masks import KeyInterval, Segments
from smd_jax.model.attention import attend, why_not
from smd_jax.testing import random_evictions
from smd_kernels import reference
from smd_kernels.blocks import BlockSizes
from smd_kernels.hardware import GPU_SIZES, TPU_SIZES
from smd_kernels.xla import CPU_SIZES

Attention = Callable[[Array, Array, Array, KeyInterval], Array]


@dataclass(frozen=True)
class Args:
    """Times attention under the mask of a sampler that keeps `budget` random keys after every `buffer` queries."""

    device: Literal["cpu", "gpu", "tpu"] = "cpu"  # the backend of JAX
    lengths: tuple[int, ...] = ()  # T; default 2048 4096 8192 16384 (gpu, tpu: 8192 16384 32768)
    budgets: tuple[int, ...] = ()  # keys kept; default 256 (gpu, tpu: 256 512 1024 2048 4096)
    buffer: int = 128  # queries of a segment
    heads: int | None = None  # query heads; default 2 (gpu, tpu: 64)
    kv_heads: int | None = None  # default 2 (gpu, tpu: 8)
    head_dim: int | None = None  # default 64 (gpu, tpu: 128)
    dtype: Literal["float32", "bfloat16"] | None = None  # default float32 (gpu, tpu: bfloat16)
    impls: tuple[str, ...] = ()  # names; default: all that can run
    longest_mask: int = 8192  # T × T masks are not timed above this length
    rounds: int = 5  # timed calls of each implementation
    check: bool = False  # compare with the float32 reference first, at 1,024 tokens
    tune: bool = False  # time block sizes at the first length and budget
    out: Path | None = None  # write the rows, with date and command, to this file


def with_defaults(args: Args) -> Args:
    if jax.default_backend() != args.device:
        raise SystemExit(f"expected JAX to run on {args.device!r} (JAX_PLATFORMS); got {jax.default_backend()!r}")
    small = args.device == "cpu"
    return replace(
        args,
        lengths=args.lengths or ((2048, 4096, 8192, 16384) if small else (8192, 16384, 32768)),
        budgets=args.budgets or ((256,) if small else (256, 512, 1024, 2048, 4096)),
        heads=args.heads or (2 if small else 64),
        kv_heads=args.kv_heads or (2 if small else 8),
        head_dim=args.head_dim or (64 if small else 128),
        dtype=args.dtype or ("float32" if small else "bfloat16"),
    )


def stock_mask(q: Array, k: Array, v: Array, mask: KeyInterval) -> Array:
    """`jax.nn.dot_product_attention` with a T × T mask per KV head, repeated for the heads of its group."""
    visible = jnp.repeat(mask.to_boolean(), q.shape[1] // k.shape[1], axis=1)
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, mask=visible, implementation="xla").swapaxes(1, 2)


def cudnn_causal(q: Array, k: Array, v: Array, mask: KeyInterval) -> Array:
    """Dense causal attention: the cost of a dense learner."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn").swapaxes(1, 2)


def named(impl: Any, sizes: BlockSizes | None = None) -> Attention:
    return lambda q, k, v, mask: attend(q, k, v, mask, impl, sizes)


IMPLEMENTATIONS: dict[str, Attention] = {
    "mask": lambda q, k, v, mask: attend(q, k, v, mask.to_boolean(), "xla"),
    "stock mask": stock_mask,
    **{name: named(name) for name in ("interval", "segments", "mosaic_gpu", "mosaic_tpu")},
    "cudnn causal": cudnn_causal,
}
MASKS = ("mask", "stock mask")  # the baseline is the faster of them
CAUSAL = "cudnn causal"
SQUARE = 8192  # rows and columns of the yardstick's matrices, except on a CPU


def can_run(name: str, args: Args, tokens: int, q: Array, k: Array, mask: KeyInterval) -> bool:
    if name in MASKS:
        return tokens <= args.longest_mask
    if name == CAUSAL:
        return args.device == "gpu"
    impl = name if name.startswith("mosaic") or name == "interval" else "segments"
    return why_not(impl, q, k, mask) is None


# A compiler or device rejects a program with these; the other programs are still measured.
FAILURES = (jax.errors.JaxRuntimeError, ValueError, NotImplementedError)


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200]


def inputs(args: Args, tokens: int, budget: int) -> tuple[Array, Array, Array, Array, KeyInterval]:
    """q, k, v, the gradient of the output, and the mask."""
    assert args.heads and args.kv_heads and args.head_dim and args.dtype
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (args.heads, args.kv_heads, args.kv_heads, args.heads)
    shapes = [(1, n, tokens, args.head_dim) for n in heads]
    q, k, v, weights = (jax.random.normal(*pair, args.dtype) for pair in zip(keys, shapes, strict=True))
    mask = random_evictions(tokens, Segments(0, args.buffer, budget), kv_heads=args.kv_heads).layer(0)
    return q, k, v, weights, mask


def milliseconds(f: Callable[..., Any], *args: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(f(*args))
    return (time.perf_counter() - start) * 1e3


def time_size(args: Args, tokens: int, budget: int, table: dict[str, Attention]) -> list[Row]:
    """Compiles every implementation that can run, then times them in rounds."""
    given = q, k, v, _, mask = inputs(args, tokens, budget)
    names = [n for n in table if (not args.impls or n in args.impls) and can_run(n, args, tokens, q, k, mask)]
    forward = {}
    both = {}
    for n in list(names):
        try:
            forward[n] = jax.jit(table[n]).lower(q, k, v, mask).compile()
            both[n] = jax.jit(partial(with_gradients, table[n])).lower(*given).compile()
            jax.block_until_ready(both[n](*given))
        except FAILURES as error:
            names.remove(n)
            print(json.dumps({"failed": n, "T": tokens, "budget": budget, "reason": first_line(error)}), flush=True)
    times: dict[str, tuple[list[float], list[float]]] = {n: ([], []) for n in names}
    rates = []
    product, operands, product_flops = yardstick(args, tokens, budget)
    for turn in range(args.rounds + 1):
        took = milliseconds(product, *operands)
        if turn:
            rates.append(product_flops / took * 1e3)
        for n in names:
            pair = milliseconds(forward[n], q, k, v, mask), milliseconds(both[n], *given)
            if turn:  # the first round warms up
                times[n][0].append(pair[0])
                times[n][1].append(pair[1])
    rate = statistics.median(rates)
    sizes = {"device": args.device, "T": tokens, "budget": budget, "buffer": args.buffer, "heads": args.heads}
    sizes |= {"kv_heads": args.kv_heads, "head_dim": args.head_dim, "dtype": args.dtype}
    return compared([with_shares(sizes | measured(n, both[n], *times[n]), rate) for n in names])


def yardstick(args: Args, tokens: int, budget: int) -> tuple[Callable[..., Any], tuple[Array, Array], float]:
    """Plain products, their operands, and their FLOP.

    On a CPU of the queries and keys of a few segments: those of all segments would leave its caches and measure its
    memory. On a GPU or TPU even a few would, so there it is one product of two square matrices.
    """
    assert args.heads and args.kv_heads and args.head_dim and args.dtype
    if args.device == "cpu":
        count = args.kv_heads * min(-(-tokens // args.buffer), 8)
        rows = args.buffer * args.heads // args.kv_heads  # all queries that share a key
        inner, columns = args.head_dim, budget + args.buffer
    else:
        count = 1
        rows = inner = columns = SQUARE
    keys = jax.random.split(jax.random.key(1))
    left = jax.random.normal(keys[0], (count, rows, inner), args.dtype)
    right = jax.random.normal(keys[1], (count, inner, columns), args.dtype)
    flops = 2.0 * left.size * right.shape[-1]
    product = jax.jit(jnp.matmul).lower(left, right).compile()
    times = max(round(1e9 / flops), 1)  # long enough for a clock

    def again(left: Array, right: Array) -> list[Array]:
        return [product(left, right) for _ in range(times)]

    return again, (left, right), times * flops


def measured(name: str, compiled: Any, forward: list[float], both: list[float]) -> Row:
    """Medians and minima of the milliseconds, and temporary memory in bytes."""
    fwd, fwd_bwd = statistics.median(forward), statistics.median(both)
    row: Row = {"impl": name, "fwd_ms": round(fwd, 3), "fwd_bwd_ms": round(fwd_bwd, 3)}
    row |= {"bwd_ms": round(fwd_bwd - fwd, 3), "temp_bytes": compiled.memory_analysis().temp_size_in_bytes}
    return row | {"least_fwd_ms": round(min(forward), 3), "least_fwd_bwd_ms": round(min(both), 3)}


def with_shares(row: Row, rate: float) -> Row:
    """Adds the shares of `rate`, in FLOP per second, that forward and backward reach."""
    sparse = row["impl"] != CAUSAL
    pairs = visible_keys(0, row["T"], row["budget"] if sparse else None, row["buffer"] if sparse else None)
    flops = 4.0 * pairs * row["heads"] * row["head_dim"]
    # Backward has five products where forward has two.
    shares = (flops / max(row["fwd_ms"], 1e-9), 2.5 * flops / max(row["bwd_ms"], 1e-9))
    forward, backward = (round(share * 1e3 / rate, 4) for share in shares)
    return row | {"limit_share": forward, "backward_limit_share": backward}


def compared(rows: list[Row]) -> list[Row]:
    """Adds the ratios to the baselines of the same rounds."""
    masks = [row for row in rows if row["impl"] in MASKS]
    if masks:
        base = min(masks, key=lambda row: row["fwd_bwd_ms"])
        for row in rows:
            row["speedup_vs_mask"] = round(base["fwd_bwd_ms"] / row["fwd_bwd_ms"], 2)
            row["temp_vs_mask"] = round(row["temp_bytes"] / base["temp_bytes"], 4)
    for causal in [row for row in rows if row["impl"] == CAUSAL]:
        for row in rows:
            row["fwd_speedup_vs_causal"] = round(causal["fwd_ms"] / row["fwd_ms"], 2)
            row["bwd_speedup_vs_causal"] = round(causal["bwd_ms"] / row["bwd_ms"], 2)
    return rows


def check(args: Args) -> None:
    """Prints each implementation's error against the float32 reference. Raises SystemExit at the end if one failed."""
    given = inputs(args, 1024, min(256, args.budgets[0]))
    q, k, _, _, mask = given
    tolerance = 2e-5 if args.dtype == "float32" else 2e-2
    limits: dict[str, float] = dict.fromkeys(("out", "dq", "dk", "dv"), tolerance)
    expected = partial(with_gradients, lambda q, k, v, mask: reference.attention(q, k, v, mask.to_boolean()))
    failed = []
    for name, f in IMPLEMENTATIONS.items():
        if name == CAUSAL or not can_run(name, args, 1024, q, k, mask):
            continue
        try:
            case = Case(name, name, str(q.dtype), limits, lambda: given, partial(with_gradients, f), expected)
            row = case.row(repeats=2)
        except FAILURES as error:
            row = {"check": name, "ok": False, "reason": first_line(error)}
        print(json.dumps(row), flush=True)
        if not row["ok"]:
            failed.append(name)
    if failed:
        raise SystemExit(f"expected every implementation within {tolerance} of the float32 reference; not {failed}")


def tuning_table(args: Args) -> dict[str, Attention]:
    """The platform's kernel with several block sizes."""
    if args.device == "cpu":
        tiles = [replace(CPU_SIZES, rows=r, keys=k) for r in (192, 384, 768) for k in (64, 96, 192)]
        groups = [replace(CPU_SIZES, scores=s, blocks=b) for s in (2**17, 2**19, 2**21) for b in (4, 16, 64)]
        tables = {f"interval {s}": named("interval", s) for s in tiles}
        return tables | {f"segments {s}": named("segments", s) for s in groups}
    default, lengths = (GPU_SIZES, (64, 128)) if args.device == "gpu" else (TPU_SIZES, (256, 512, 1024))
    impl = "mosaic_gpu" if args.device == "gpu" else "mosaic_tpu"
    tiles = [replace(default, rows=r, keys=k, rows_dq=r, keys_dq=k, keys_dkv=k) for r in lengths for k in lengths]
    groups = [replace(default, stages=s, blocks=b) for s in (1, 2, 3) for b in (64, 256, 1024)]
    return {str(s): named(impl, s) for s in (default, *tiles, *groups) if impl == "mosaic_gpu" or s.stages < 3}


def rows(args: Args) -> Iterator[Row]:
    if args.tune:
        tuned = time_size(args, args.lengths[0], args.budgets[0], tuning_table(args))
        yield from sorted(tuned, key=lambda row: row["fwd_bwd_ms"])
        return
    for tokens in args.lengths:
        for budget in args.budgets:
            yield from time_size(args, tokens, budget, IMPLEMENTATIONS)


def exponents(found: list[Row]) -> dict[str, float]:
    """Exponent of each implementation's time in T, between its shortest and longest sequence at the smallest budget."""
    least = min((row["budget"] for row in found), default=None)
    exponents = {}
    for impl in IMPLEMENTATIONS:
        timed = [row for row in found if row["impl"] == impl and row["budget"] == least]
        if len({row["T"] for row in timed}) > 1:
            short, *_, long = sorted(timed, key=lambda row: row["T"])
            times = long["fwd_bwd_ms"] / short["fwd_bwd_ms"]
            exponents[impl] = math.log(times) / math.log(long["T"] / short["T"])
    return exponents


def main(args: Args) -> None:
    args = with_defaults(args)
    if args.check:
        check(args)
    found: list[Row] = []
    for row in rows(args):
        print(json.dumps(row), flush=True)
        found.append(row)
    if args.out is not None:
        more: Row = {"device": jax.devices()[0].device_kind, "exponent_in_T": exponents(found)}
        write(args.out, found, provenance() | more)


if __name__ == "__main__":
    import tyro  # here, because bench/accelerator.py imports this module on machines without tyro

    main(tyro.cli(Args))
