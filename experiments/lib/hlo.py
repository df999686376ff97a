"""Finds operations in the loops of optimised HLO that write a whole KV cache.

A cache of gigabytes must be updated in place, one slot per token. A compiler that cannot prove that a buffer has no
other reader silently adds a copy of it per decoded token, which costs more than the step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8}
# Kinds that write no buffer, or contain the operations that do. Of an asynchronous copy the `-done` half counts.
NO_WRITE = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "opt-barrier"}
IN_PLACE = {"dynamic-update-slice"}
PREFILL = "/prefill/"  # in the names of operations under `jax.named_scope("prefill")` of smd_jax/sampler/prefill.py


class Operation(NamedTuple):
    """One line of optimised HLO."""

    name: str
    shapes: str  # type of its result
    kind: str
    calls: tuple[str, ...]  # computations that it names
    line: str  # the whole text


def parse(hlo: str) -> dict[str, list[Operation]]:
    """Computation -> operations."""
    found: dict[str, list[Operation]] = {}
    operations: list[Operation] = []
    for line in hlo.splitlines():
        if header := re.match(r"(?:ENTRY )?%?(\S+) .*\{$", line):
            operations = found[header[1]] = []
        elif text := re.match(r"\s+(?:ROOT )?%?(\S+) = (\(.*?\)|\S+) ([\w\-]+)\(", line):
            lists = re.findall(r"\b(?:calls|to_apply|body|branch_computations|called_computations)=\{?([^{}=]+)", line)
            calls = re.findall(r"%([\w.\-]+)", " ".join(lists))
            operations.append(Operation(text[1], text[2], text[3], tuple(calls), line.strip()))
    return found


def cache_writes(hlo: str, cache_bytes: int) -> list[str]:
    """Operations of the innermost loops over a cache that write at least `cache_bytes`, in-place updates aside.

    These loops decode, or compress a cache some rows at a time. Loops of the prefill are skipped: they run once per
    prompt and hold the scores that a policy observes.

    Raises:
      ValueError: if no loop carries a cache.
    """
    computations = parse(hlo)
    return [
        f"{operation.kind} {operation.name}"
        for body in cache_loops(computations, cache_bytes)
        for operation in executed(computations, body)
        if largest(operation.shapes) >= cache_bytes
        and not operation.kind.endswith("-start")
        and not in_place(computations, operation)
    ]


def array_bytes(shapes: str) -> list[int]:
    """Bytes of each array in an HLO type.

    Arrays in a TPU's VMEM (memory space 1) do not count: copying a cache there reads it.
    """
    return [
        ITEM_BYTES.get(dtype, 0) * math.prod(int(d) for d in dims.split(",") if d)
        for dtype, dims, layout in re.findall(r"(\w+)\[([\d,]*)\](\{[^}]*\})?", shapes)
        if "S(1)" not in layout
    ]


def largest(shapes: str) -> int:
    """Bytes of the largest array in an HLO type."""
    return max(array_bytes(shapes), default=0)


def cache_loops(computations: dict[str, list[Operation]], cache_bytes: int) -> list[str]:
    """Bodies of the innermost loops that carry caches."""
    bodies = {
        re.findall(r"\bbody=%?([\w.\-]+)", operation.line)[0]
        for operations in computations.values()
        for operation in operations
        if operation.kind == "while" and largest(operation.shapes) >= cache_bytes and PREFILL not in operation.line
    }
    if not bodies:
        raise ValueError("expected a loop over the cache; got none")
    return sorted(body for body in bodies if not any(set(op.calls) & bodies for op in executed(computations, body)))


def executed(computations: dict[str, list[Operation]], name: str) -> Iterator[Operation]:
    """Operations of a computation and of its callees; a fusion counts as one."""
    for operation in computations[name]:
        yield operation
        if operation.kind in NO_WRITE:
            for callee in operation.calls:
                yield from executed(computations, callee)


def in_place(computations: dict[str, list[Operation]], operation: Operation) -> bool:
    """Whether the operation writes no array, or only a slice of a donated array."""
    if operation.kind == "fusion":
        inside = {op.name: op for op in computations[operation.calls[0]]}
        (root,) = (op for op in inside.values() if op.line.startswith("ROOT"))
        results = re.findall(r"%([\w.\-]+)", root.line.partition(" tuple(")[2]) if root.kind == "tuple" else [root.name]
        return all(inside[name].kind in IN_PLACE for name in results if name in inside)
    return operation.kind in NO_WRITE | IN_PLACE
