"""What is sent between the devices of a mesh in one step, by kind and axis?

Question   Which collectives do the compiled update and rollout have on meshes of 8 to 4,096 TPUs, how many bytes does
           each device send for them, and which formula do they follow?
Command    make compile-kernels, which makes the environment; then
           .venv-compilers/bin/python experiments/collectives.py --out experiments/results/collectives.json
           … --sequence --out experiments/results/collectives_sequence.json     columns of a row on several devices
Cost       some minutes of compilation on two CPU cores; nothing is run, and no TPU is needed
Result     experiments/results/collectives.json and collectives_sequence.json: rows `{program, mesh, devices, topology,
           kind, axis, where, count, payload_bytes, sent_bytes}`, and formulas `{program, mesh, devices, what, axis,
           payload_bytes, formula_bytes}`. Bytes are those of one device. `payload_bytes` is the whole array that a
           collective works on; `sent_bytes` what a device of a ring of n sends for it:

               all-gather, reduce-scatter, all-to-all    payload (n - 1) / n
               all-reduce                                payload 2 (n - 1) / n
               collective-permute                        payload

           `where`: "once" a step, or "loop" for what a loop of unknown length does in every round: a rollout's decode
           loop does so once a token. Loops of known length are counted with their rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

# Read when JAX and libtpu are loaded: there is no TPU, no metadata server to be asked about it, and no lock.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hlo import ITEM_BYTES
from provenance import provenance
from smd_jax.config import ModelConfig
from smd_jax.devices.sharding import AXES, batch_sharding, make_mesh, row_ways, tree_shardings
from smd_jax.eviction.policies import SnapKV
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.state import TrainBatch, init_state
from smd_jax.learner.update import make_update
from smd_jax.memory.plan import param_shapes
from smd_jax.message.masks import Segments, ShadowMask
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.decoder import Decoder
from smd_jax.sampler.config import RolloutConfig
from smd_jax.sampler.fixed_batch import rollout_program
from smd_jax.text.prompts import PromptBatch

KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast"
COLLECTIVE = re.compile(rf" = (.*?) ({KINDS})(-start)?\(")
ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


@dataclass(frozen=True)
class Layout:
    """A mesh over a slice of TPUs."""

    topology: str
    data: int
    fsdp: int
    tensor: int
    sequence: int = 1

    @property
    def devices(self) -> int:
        return self.data * self.fsdp * self.tensor * self.sequence

    @property
    def name(self) -> str:
        sequence = f", sequence {self.sequence}" if self.sequence > 1 else ""
        return f"data {self.data}, fsdp {self.fsdp}, tensor {self.tensor}{sequence}"

    def mesh(self) -> Mesh:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=self.topology).devices
        return make_mesh(self.data, self.fsdp, self.tensor, self.sequence, devices=devices)


LAYOUTS = (
    Layout("v5p:2x2x2", 8, 1, 1),
    Layout("v5p:2x2x2", 1, 8, 1),
    Layout("v5p:2x2x2", 1, 1, 8),
    Layout("v5p:2x2x2", 2, 2, 2),
    Layout("v5p:4x4x4", 1, 64, 1),
    Layout("v5p:4x4x4", 4, 4, 4),
    Layout("v5p:8x8x8", 2, 256, 1),
    Layout("v5p:8x8x8", 8, 16, 4),
    Layout("v5p:16x16x16", 16, 256, 1),
    Layout("v5p:16x16x16", 32, 32, 4),
)
# Columns of a row on several devices, in the update: a loop samples on a mesh without that axis.
SEQUENCE_LAYOUTS = (
    Layout("v5p:2x2x2", 1, 1, 1, 8),
    Layout("v5p:2x2x2", 1, 4, 1, 2),
    Layout("v5p:2x2x2", 2, 1, 2, 2),
    Layout("v5p:4x4x4", 1, 16, 1, 4),
)
MODEL = ModelConfig(
    vocab_size=8192,
    hidden_size=1024,
    intermediate_size=2816,
    num_layers=2,
    num_heads=8,
    num_kv_heads=8,
    head_dim=128,
    max_positions=4096,
    qkv_bias=False,
    tie_embeddings=True,
    rope_theta=1e4,
    dtype="bfloat16",
)
PROMPT, RESPONSE = 128, 128
ROWS = 2  # of each device that has rows of its own
SIZES = RolloutConfig(max_new_tokens=RESPONSE, budget=64, buffer=32)
OPTIMIZER = optax.adamw(1e-6)


class Collective(NamedTuple):
    """One collective of a compiled program.

    Attributes:
      groups: devices that take part together, by their place in the mesh.
      payload: bytes of the whole array on one device: gathered, or not yet scattered.
      rounds: how often a step does it. loop: it stands in a loop whose length nobody knows.
    """

    kind: str
    groups: tuple[tuple[int, ...], ...]
    payload: int
    rounds: int
    loop: bool

    @property
    def sent(self) -> float:
        """Bytes that a device sends, on a ring."""
        n = max(len(self.groups[0]), 1)
        if self.kind.startswith("collective-"):
            return self.payload
        return self.payload * (2 if self.kind == "all-reduce" else 1) * (n - 1) / n


# ---------------------------------------------------------------- reading a program


def collectives(hlo: str, devices: int) -> Iterator[Collective]:
    """Those that an optimised program of so many devices runs, in the order in which it is read."""
    bodies = computations(hlo)
    entry = re.search(r"^ENTRY %?(\S+)", hlo, re.MULTILINE)
    assert entry is not None, "a program has an entry"
    yield from _of(bodies, entry[1], devices, 1, False)


def computations(hlo: str) -> dict[str, list[str]]:
    """Computation -> its lines."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in hlo.splitlines():
        if header := re.match(r"(?:ENTRY )?%?(\S+) .*\{$", line):
            lines = found[header[1]] = []
        elif " = " in line:
            lines.append(line)
    return found


def _of(bodies: dict[str, list[str]], name: str, devices: int, rounds: int, loop: bool) -> Iterator[Collective]:
    for line in bodies[name]:
        if match := COLLECTIVE.search(line):
            yield _read(match[1], match[2], line, name, devices, rounds, loop)
        calls = re.findall(r"\b(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)", line)
        calls += re.findall(r"%([\w.\-]+)", " ".join(re.findall(r"branch_computations=\{([^}]*)\}", line)))
        trips = re.search(r'known_trip_count"?:\{"n":"(\d+)"', line)
        is_loop = " while(" in line
        for callee in calls:
            # Reductions and comparisons have computations of their own, which send nothing.
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
        # Operands and results stand side by side, with counters behind them.
        payload = max(arrays) if kind == "collective-permute" else payload - _operands(arrays, len(groups[0]))
    if kind == "reduce-scatter":
        payload *= len(groups[0])
    # On TPUs a reduce-scatter is a fusion of an all-reduce and a slice.
    if kind == "all-reduce" and "all-reduce-scatter" in computation:
        kind = "reduce-scatter"
    return Collective(kind, groups, payload, rounds, loop)


def _operands(arrays: Sequence[int], ways: int) -> int:
    """Bytes of the operands among operands and results of an all-gather: a share of the whole."""
    return sum(arrays) // (ways + 1)


def device_groups(line: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """Who takes part with whom; of a permutation, whoever is reached from each other."""
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
    """Devices in the order that `[4,2]T(1,0)` says: 0 to 7 in four rows, read by columns."""
    match = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if match is None:
        raise ValueError(f"expected an order of devices as [4,2]T(1,0); got {text}")
    dims = [int(d) for d in match[1].split(",")]
    ids = np.arange(math.prod(dims)).reshape(dims)
    return (ids.transpose([int(d) for d in match[2].split(",")]) if match[2] else ids).reshape(-1)


def axes_of(groups: Sequence[Sequence[int]], sizes: Sequence[int]) -> str:
    """The mesh axes along which members of a group differ, such as "fsdp" or "data+fsdp"."""
    places = np.stack(np.unravel_index(np.asarray(groups), sizes), -1)  # [groups, members, axes]
    differ = (places != places[:, :1]).any((0, 1))
    return "+".join(axis for axis, differs in zip(AXES, differ, strict=True) if differs) or "none"


# ---------------------------------------------------------------- programs


def on(mesh: Mesh, shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def compiled_update(model: Decoder, mesh: Mesh) -> str:
    rows, columns = ROWS * row_ways(mesh), PROMPT + RESPONSE
    shape = model.config

    def array(*sizes: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=batch_sharding(mesh))

    segments = Segments(PROMPT, SIZES.buffer, SIZES.budget)
    trajectory = Trajectory(
        tokens=array(rows, columns, dtype=jnp.int32),
        valid=array(rows, columns, dtype=jnp.bool_),
        logprobs=array(rows, RESPONSE),
        terminated=array(rows, dtype=jnp.bool_),
        mask=ShadowMask(
            array(rows, shape.num_layers, shape.num_kv_heads, columns, dtype=jnp.int32),
            (segments,) * shape.num_layers,
        ),
        entropy=array(rows, RESPONSE),
    )
    state = jax.eval_shape(lambda params: init_state(params, OPTIMIZER, jax.random.key(0)), param_shapes(model))
    state = on(mesh, state, tree_shardings(state, mesh))
    update = make_update(model, OPTIMIZER, UpdateConfig())
    with jax.set_mesh(mesh):
        traced = update.trace(state, TrainBatch(trajectory, array(rows), None))
        return traced.lower(lowering_platforms=("tpu",)).compile().as_text() or ""


def compiled_rollout(model: Decoder, mesh: Mesh) -> str:
    rows = ROWS * row_ways(mesh)
    shapes = jax.eval_shape(lambda: PromptBatch(jnp.zeros((rows, PROMPT), jnp.int32), jnp.zeros((rows, PROMPT), bool)))
    prompts = on(mesh, shapes, jax.tree.map(lambda _: batch_sharding(mesh), shapes))
    params = param_shapes(model)
    params = on(mesh, params, tree_shardings(params, mesh))
    key = jax.eval_shape(lambda: jax.random.key(0))
    key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    with jax.set_mesh(mesh):
        traced = rollout_program.trace(model, params, prompts, key, policy=SnapKV(), config=SIZES)
        return traced.lower(lowering_platforms=("tpu",)).compile().as_text() or ""


PROGRAMS = {"update": compiled_update, "rollout": compiled_rollout}


def rows_of(program: str, layout: Layout, model: Decoder) -> list[dict[str, Any]]:
    """A row for every kind and axis of one compiled program."""
    began = time.perf_counter()
    mesh = layout.mesh()
    sizes = tuple(mesh.shape[axis] for axis in AXES)
    count, payload, sent = Counter(), Counter(), Counter()
    for found in collectives(PROGRAMS[program](model, mesh), mesh.size):
        key = found.kind, axes_of(found.groups, sizes), "loop" if found.loop else "once"
        count[key] += found.rounds
        payload[key] += found.payload * found.rounds
        sent[key] += round(found.sent * found.rounds)
    print(f"{program} {layout.name}: compiled in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    head = {"program": program, "mesh": layout.name, "devices": mesh.size, "topology": layout.topology}
    return [
        head
        | dict(zip(("kind", "axis", "where"), key, strict=True))
        | {"count": count[key], "payload_bytes": payload[key], "sent_bytes": sent[key]}
        for key in sorted(count)
    ]


# ---------------------------------------------------------------- the formula


def kinds_of(what: str, axis: str) -> set[str]:
    """The collectives that send it."""
    if what == "weights":
        return {"all-gather"}
    if what == "tokens against heads":
        return {"all-to-all"}
    if "sequence" in axis:
        return {"all-reduce", "reduce-scatter"}  # a permutation there has columns at the ends of a device's share
    return {"all-reduce", "reduce-scatter", "collective-permute", "all-to-all"}


def formulas(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the rows of each program add up to by axis, beside what follows from the sizes of the model.

    With M numbers in the matrices of the layers, E in the embedding, L layers, h the width, and a mesh of fsdp f,
    tensor t and sequence s, in bytes of payload:

        rollout   weights over fsdp, once                      2 (M + E) / t
        update    weights over fsdp, at most                   2 (3 M + e E) / t     e = 1 where t = 1, else 2
                  gradients over fsdp                          (2 M + 4 E) / t
                  gradients over data, what fsdp has scattered 2 (M + E) / (f t)     f > 1
                  gradients over sequence, or data + sequence  (2 M + 4 E) / t         f = 1
                  activations over tensor                      2 rows T h (5 L + 1.5) / s
                  tokens against heads over sequence           14 rows T L d (heads + kv_heads) / (s t)

    Tokens against heads: q, k, v and the output in 16 bits, as often again where layers are recomputed; and their
    gradients, of which those of q and k are in 32 bits, because the compiler rotates them first.
    """
    c = MODEL
    heads = 2 * c.num_heads * c.head_dim + 2 * c.num_kv_heads * c.head_dim
    matrices = c.num_layers * c.hidden_size * (heads + 3 * c.intermediate_size)
    embedding = c.vocab_size * c.hidden_size
    both = c.head_dim * (c.num_heads + c.num_kv_heads)
    found = []
    for layout in (*LAYOUTS, *SEQUENCE_LAYOUTS):
        ways = layout.tensor
        tokens = ROWS * (PROMPT + RESPONSE) / layout.sequence
        seen = 1 if ways == 1 else 2
        expected = {
            ("rollout", "weights", "fsdp"): 2 * (matrices + embedding) / ways,
            ("update", "weights", "fsdp"): 2 * (3 * matrices + seen * embedding) / ways,
            ("update", "gradients", "fsdp"): (2 * matrices + 4 * embedding) / ways,
            ("update", "gradients", "data"): 2 * (matrices + embedding) / (layout.fsdp * ways),
            ("update", "activations", "tensor"): 2 * tokens * c.hidden_size * (5 * c.num_layers + 1.5),
            ("update", "tokens against heads", "sequence"): 14 * tokens * c.num_layers * both / ways,
        }
        if layout.fsdp == 1:  # nothing is scattered
            expected["update", "gradients", "data"] = expected["update", "gradients", "fsdp"]
            axis = "sequence" if layout.data == 1 else "data+sequence"
            expected["update", "gradients", axis] = expected["update", "gradients", "fsdp"]
        for (program, what, axis), formula in expected.items():
            payload = sum(
                row["payload_bytes"]
                for row in rows
                if (row["program"], row["mesh"], row["axis"], row["where"]) == (program, layout.name, axis, "once")
                and row["kind"] in kinds_of(what, axis)
            )
            if payload > 2**16:  # and no scalars of a norm or a count
                head = {"program": program, "mesh": layout.name, "devices": layout.devices}
                found.append(
                    head | {"what": what, "axis": axis, "payload_bytes": payload, "formula_bytes": round(formula)}
                )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=MODEL.num_layers)
    parser.add_argument("--devices", type=int, help="meshes of so many devices alone")
    parser.add_argument("--sequence", action="store_true", help="meshes with a sequence axis alone, and the update")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    args = parser.parse_args()
    layouts, impl = (SEQUENCE_LAYOUTS, "portable") if args.sequence else (LAYOUTS, "xla")
    model = Decoder(replace(MODEL, num_layers=args.layers), remat="full", impl=impl)
    rows = []
    for layout in layouts:
        if args.devices not in (None, layout.devices):
            continue
        for program in ("update",) if args.sequence else PROGRAMS:
            for row in rows_of(program, layout, model):
                rows.append(row)
                print(json.dumps(row), flush=True)
    if args.out is not None:
        result = provenance(("jax", "jaxlib", "libtpu")) | {"rows": rows, "formulas": formulas(rows)}
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
