"""Where a decoding step of smd_jax goes, by what the operations of its compiled program are for. Started by
`bench/rollout.py --parts`.

Command    python experiments/bench/engines/smd_profile.py --policy knorm --new-tokens 512

JAX's profiler times every operation that XLA:CPU runs, and the program's text says where in the model each comes from.
An operation that was made of several counts as what it ends with; one that holds a matrix product as that. Tracing
takes time, too: `ms_per_step_untraced` is that of a turn without it. Both are means over a whole response, with all
that a segment does; prompts are left out.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import common
import generation

common.one_thread()  # before jax is imported

import jax  # noqa: E402
from smd_rollout import POLICIES, Sampling  # noqa: E402
from smd_rollout import name as name_of_engine  # noqa: E402

sys.path.append(str(Path(__file__).resolve().parents[2]))  # of what the studies share

from hlo import Operation, parse  # noqa: E402

# Their time is that of the operations in them.
CONTAINERS = {"while", "conditional", "call"}
SEGMENT = "jit__segment"  # the program, by the name of its function in smd_jax/sampler/engine.py


def part(operation: Operation, products: set[str]) -> str:
    """What an operation of a segment is for.

    Args:
      products: the computations that hold a matrix product.
    """
    where = operation.line.partition('op_name="')[2].partition('"')[0]
    multiplies = operation.kind == "dot" or not products.isdisjoint(operation.calls)
    if "/bhsd,bhgd->bhsg/" in where or "/bhgs,bhsd->bhgd/" in where:
        return "attention: products"
    if multiplies:
        return "products of the weights"
    if "/compress/" in where:
        return "compression"
    if "/draw/" in where:
        return "sampling"
    if "norm/" in where:
        return "norms"
    if "/attention/" in where:
        return "attention: softmax, rotation, writing keys"
    return "nonlinearity of the MLP" if "/mlp/" in where else "rest"


def parts_of(hlo: str) -> dict[str, str]:
    """Operation -> what it is for."""
    computations = parse(hlo)
    products = {name for name, held in computations.items() if any(operation.kind == "dot" for operation in held)}
    leaves = [one for held in computations.values() for one in held if one.kind not in CONTAINERS]
    return {operation.name: part(operation, products) for operation in leaves}


def traced(sampling: Sampling) -> tuple[Counter[str], Counter[str]]:
    """Seconds and number of what the segments of a turn run, by the operation's name."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # events are limited, and those of Python are none of a step's
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            sampling.turn(2)
        [path] = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    seconds: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in events:
        if event.get("ph") == "X" and event.get("args", {}).get("hlo_module") == SEGMENT:
            seconds[event["name"]] += event["dur"] / 1e6
            counts[event["name"]] += 1
    return seconds, counts


def main() -> None:
    parser = generation.parser(__doc__ or "")
    parser.add_argument("--policy", choices=tuple(POLICIES), default="knorm")
    parser.add_argument("--bits", type=int, choices=(8, 4, 2), default=None, help="of a quantised cache")
    args = parser.parse_args()
    args = argparse.Namespace(**vars(args), rows=None, spread="log", fixed=False)
    sampling = Sampling(args)
    sampling.turn(0)
    start = time.perf_counter()
    sampling.turn(1)
    whole = time.perf_counter() - start
    (before, first, _), *_, (after, last, _) = sampling.marks.turns[1]
    untraced = (last - first) / (after - before) * 1e3
    segment = sampling.engine.segment_program(sampling.params, args.prompt).lowered.compile()
    meant = parts_of(segment.as_text() or "")
    seconds, counts = traced(sampling)
    steps = max(counts.values(), default=0)
    if steps < args.new_tokens:  # the profiler keeps a million events
        raise SystemExit(f"expected an operation of the loop in each of {args.new_tokens} steps; got {steps} of one")
    by_part: Counter[str] = Counter()
    number: Counter[str] = Counter()
    for name, spent in seconds.items():
        if name in meant:
            by_part[meant[name]] += spent
            number[meant[name]] += counts[name]
    total = sum(by_part.values())
    for name, spent in by_part.most_common():
        row = {"engine": name_of_engine(args), "device": "cpu", "part": name, "batch": args.batch}
        row |= {"prompt": args.prompt, "new_tokens": args.new_tokens, "budget": args.budget, "buffer": args.buffer}
        row |= {"ms_per_step": spent / args.new_tokens * 1e3, "share": spent / total}
        row |= {"operations_per_step": number[name] / args.new_tokens, "ms_per_step_untraced": untraced}
        row |= {"tokens_per_s": args.batch * args.new_tokens / whole}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
