"""Collectives of a compiled program: how many bytes each device of a mesh sends in one step."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lib.hlo import ITEM_BYTES, parse

KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast"
COLLECTIVE = re.compile(rf" = (.*?) ({KINDS})(-start)?\(")
ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


class Collective(NamedTuple):
    """One collective of a compiled program.

    Attributes:
      groups: devices that communicate with each other, by their index in the mesh.
      payload: bytes of the whole array on one device, after a gather or before a scatter.
      rounds: executions per step.
      loop: whether it runs in a loop of unknown length.
    """

    kind: str
    groups: tuple[tuple[int, ...], ...]
    payload: int
    rounds: int
    loop: bool

    @property
    def sent(self) -> float:
        """Bytes that one device sends on a ring."""
        n = max(len(self.groups[0]), 1)
        if self.kind.startswith("collective-"):
            return self.payload
        return self.payload * (2 if self.kind == "all-reduce" else 1) * (n - 1) / n


def collectives(hlo: str, devices: int) -> Iterator[Collective]:
    """The collectives of an optimised program, in program order."""
    bodies = {name: [operation.line for operation in body] for name, body in parse(hlo).items()}
    entry = re.search(r"^ENTRY %?(\S+)", hlo, re.MULTILINE)
    assert entry is not None, "a program has an entry"
    yield from _of(bodies, entry[1], devices, 1, False)


def _of(bodies: dict[str, list[str]], name: str, devices: int, rounds: int, loop: bool) -> Iterator[Collective]:
    for line in bodies[name]:
        if match := COLLECTIVE.search(line):
            yield _read(match[1], match[2], line, name, devices, rounds, loop)
        calls = re.findall(r"\b(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)", line)
        calls += re.findall(r"%([\w.\-]+)", " ".join(re.findall(r"branch_computations=\{([^}]*)\}", line)))
        trips = re.search(r'known_trip_count"?:\{"n":"(\d+)"', line)
        is_loop = " while(" in line
        for callee in calls:
            # A reduction calls a computation that sends nothing and is not in `bodies`.
            if callee in bodies:
                more = int(trips[1]) if is_loop and trips else 1
                yield from _of(bodies, callee, devices, rounds * more, loop or (is_loop and not trips))


def _read(shapes: str, kind: str, line: str, computation: str, devices: int, rounds: int, loop: bool) -> Collective:
    arrays = [
        ITEM_BYTES.get(dtype, 0) * math.prod(int(d) for d in dims.split(",") if d)
        for dtype, dims in ARRAY.findall(shapes)
    ]
    groups = device_groups(line, devices)
    payload = sum(arrays)
    if f"{kind}-start(" in line and kind in ("all-gather", "collective-permute"):
        # The type lists operands, then results, then counters.
        payload = max(arrays) if kind == "collective-permute" else payload - _operands(arrays, len(groups[0]))
    if kind == "reduce-scatter":
        payload *= len(groups[0])
    # On TPUs a reduce-scatter is a fusion of an all-reduce and a slice.
    if kind == "all-reduce" and "all-reduce-scatter" in computation:
        kind = "reduce-scatter"
    return Collective(kind, groups, payload, rounds, loop)


def _operands(arrays: Sequence[int], ways: int) -> int:
    """Bytes of the operands of an all-gather, given operands and results together."""
    return sum(arrays) // (ways + 1)


def device_groups(line: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """Groups of devices that communicate; for a permutation, its pairs."""
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", line):
        return tuple(map(tuple, _iota(match[3]).reshape(int(match[1]), int(match[2])).tolist()))
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((\S*)\))? \{([^}]*)\}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
        named = re.findall(r"'(\w+)'", match[3])
        ids = (_iota(match[2]) if match[2] else np.arange(devices)).reshape(tuple(sizes.values()))
        order = [name for name in sizes if name not in named] + named
        members = math.prod(sizes[name] for name in named)
        ids = ids.transpose([list(sizes).index(name) for name in order]).reshape(-1, members)
        return tuple(map(tuple, ids.tolist()))
    if match := re.search(r"replica_groups=\{(\{.*?\})\}", line):
        return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", match[1]))
    if match := re.search(r"source_target_pairs=\{(.*?\})\}", line):
        pairs = [tuple(map(int, pair.split(","))) for pair in re.findall(r"\{([\d,]+)\}", match[1])]
        return tuple(pair for pair in pairs if pair[0] != pair[1]) or ((0,),)
    if "replica_groups={}" in line:
        return (tuple(range(devices)),)
    raise ValueError(f"expected replica_groups or source_target_pairs; got {line.strip()[:300]}")


def _iota(text: str) -> np.ndarray:
    """Device order of `[4,2]T(1,0)`: 0 to 7 in four rows, read by columns."""
    match = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if match is None:
        raise ValueError(f"expected an order of devices as [4,2]T(1,0); got {text}")
    dims = [int(d) for d in match[1].split(",")]
    ids = np.arange(math.prod(dims)).reshape(dims)
    return (ids.transpose([int(d) for d in match[2].split(",")]) if match[2] else ids).reshape(-1)
