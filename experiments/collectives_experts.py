"""What do the devices of a mesh send for a mixture of experts in one step?

Question   Which collectives do the compiled update and rollout of a mixture have on meshes of 8 to 4,096 TPUs, and how
           many bytes does each device send for them?
Command    make compile-kernels, which makes the environment; then
           .venv-compilers/bin/python experiments/collectives_experts.py --out FILE
Cost       some minutes of compilation on two CPU cores; nothing is run, and no TPU is needed
Result     rows `{program, mesh, devices, topology, kind, axis, where, count, payload_bytes, sent_bytes}`, bytes of one
           device: `payload_bytes` is the whole array that a collective works on, `sent_bytes` what a device of a ring
           of n sends for it, see `lib.collectives`. `where`: "once" a step, or "loop" for the decode loop's rounds

The model is 1,024 wide and has 2 layers of 16 experts, two for each token; float32 parameters, bfloat16 compute,
`remat="full"`, 2 rows of 256 columns per device, SnapKV with 64 keys. `matrices` in the result counts the numbers in
the layers, `embedding` those in the embedding.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Read when JAX and libtpu are loaded: there is no TPU, no metadata server to ask, and no lock.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

sys.path.append(str(Path(__file__).resolve().parent))  # of what the studies share

from lib.collectives import collectives
from lib.files import write_text
from lib.provenance import provenance
from smd_jax.config import Experts, ModelConfig
from smd_jax.devices.sharding import AXES, batch_sharding, make_mesh, row_ways, tree_shardings
from smd_jax.eviction.policies import SnapKV
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.state import TrainBatch, init_state
from smd_jax.learner.update import make_update
from smd_jax.memory.compiled import param_shapes
from smd_jax.message.masks import Segments, ShadowMask
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.decoder import Decoder
from smd_jax.sampler.config import RolloutConfig
from smd_jax.sampler.fixed_batch import rollout_program
from smd_jax.text.prompts import PromptBatch

MODEL = Decoder(
    ModelConfig(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=1408,
        num_layers=2,
        num_heads=8,
        num_kv_heads=8,
        head_dim=128,
        max_positions=4096,
        qkv_bias=False,
        tie_embeddings=True,
        rope_theta=1e4,
        dtype="bfloat16",
        experts=Experts(count=16, per_token=2, intermediate_size=1408),
    ),
    remat="full",
    impl="xla",
)
PROMPT, RESPONSE = 128, 128
ROWS = 2  # of each device that has rows of its own
SIZES = RolloutConfig(max_new_tokens=RESPONSE, budget=64, buffer=32)
OPTIMIZER = optax.adamw(1e-6)
# Topology, and the sizes of data, fsdp and tensor axis.
LAYOUTS = (
    ("v5p:2x2x2", 1, 1, 8),
    ("v5p:2x2x2", 2, 2, 2),
    ("v5p:16x16x16", 32, 32, 4),
    ("v5p:2x2x2", 1, 8, 1),
    ("v5p:4x4x4", 4, 4, 4),
    ("v5p:16x16x16", 16, 256, 1),
)


@dataclass(frozen=True)
class Args:
    """Counts collectives of a mixture of experts in compiled programs.

    Attributes:
      devices: meshes of at most so many devices.
      out: JSON file for the rows.
    """

    devices: int = 4096
    out: Path | None = None


def on_mesh(mesh: Mesh, shapes: Any) -> Any:
    shardings = tree_shardings(shapes, mesh)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def compiled_update(mesh: Mesh) -> str:
    rows, columns, shape = ROWS * row_ways(mesh), PROMPT + RESPONSE, MODEL.shape
    assert shape.routing is not None

    def array(*sizes: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=batch_sharding(mesh))

    segments = (Segments(PROMPT, SIZES.buffer, SIZES.budget),) * shape.num_layers
    trajectory = Trajectory(
        tokens=array(rows, columns, dtype=jnp.int32),
        valid=array(rows, columns, dtype=jnp.bool_),
        logprobs=array(rows, RESPONSE),
        terminated=array(rows, dtype=jnp.bool_),
        mask=ShadowMask(array(rows, shape.num_layers, shape.num_kv_heads, columns, dtype=jnp.int32), segments),
        entropy=array(rows, RESPONSE),
        routing=array(rows, columns, shape.num_layers, shape.routing.per_token, dtype=jnp.int8),
    )
    state = jax.eval_shape(lambda params: init_state(params, OPTIMIZER, jax.random.key(0)), param_shapes(MODEL))
    update: Any = make_update(MODEL, OPTIMIZER, UpdateConfig())
    with jax.set_mesh(mesh):
        traced = update.trace(on_mesh(mesh, state), TrainBatch(trajectory, array(rows), None))
        return traced.lower(lowering_platforms=("tpu",)).compile().as_text() or ""


def compiled_rollout(mesh: Mesh) -> str:
    rows = ROWS * row_ways(mesh)
    shapes = jax.eval_shape(lambda: PromptBatch(jnp.zeros((rows, PROMPT), jnp.int32), jnp.zeros((rows, PROMPT), bool)))
    prompts = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch_sharding(mesh)), shapes)
    key = jax.eval_shape(lambda: jax.random.key(0))
    key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    with jax.set_mesh(mesh):
        program: Any = rollout_program
        params = on_mesh(mesh, param_shapes(MODEL))
        traced = program.trace(MODEL, params, prompts, key, policy=SnapKV(), config=SIZES)
        return traced.lower(lowering_platforms=("tpu",)).compile().as_text() or ""


def axes_of(groups: tuple[tuple[int, ...], ...], sizes: tuple[int, ...]) -> str:
    """The mesh axes along which members of a group differ, such as "fsdp" or "data+fsdp"."""
    places = np.stack(np.unravel_index(np.asarray(groups), sizes), -1)  # [groups, members, axes]
    differ = (places != places[:, :1]).any((0, 1))
    return "+".join(axis for axis, differs in zip(AXES, differ, strict=True) if differs) or "none"


def rows_of(program: str, topology: str, mesh: Mesh) -> list[dict[str, Any]]:
    """A row for every kind and axis of one compiled program."""
    began = time.perf_counter()
    sizes = tuple(mesh.shape[axis] for axis in AXES)
    text = compiled_update(mesh) if program == "update" else compiled_rollout(mesh)
    count, payload, sent = Counter[Any](), Counter[Any](), Counter[Any]()
    for found in collectives(text, mesh.size):
        key = found.kind, axes_of(found.groups, sizes), "loop" if found.loop else "once"
        count[key] += found.rounds
        payload[key] += found.payload * found.rounds
        sent[key] += round(found.sent * found.rounds)
    name = ", ".join(f"{axis} {mesh.shape[axis]}" for axis in ("data", "fsdp", "tensor"))
    print(f"{program} {name}: compiled in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    head = {"program": program, "mesh": name, "devices": mesh.size, "topology": topology}
    return [
        head
        | dict(zip(("kind", "axis", "where"), key, strict=True))
        | {"count": count[key], "payload_bytes": payload[key], "sent_bytes": sent[key]}
        for key in sorted(count)
    ]


def main(args: Args) -> None:
    c, experts = MODEL.config, MODEL.config.experts
    assert experts is not None
    heads = 2 * c.head_dim * (c.num_heads + c.num_kv_heads)
    matrices = c.num_layers * c.hidden_size * (heads + 3 * experts.count * experts.intermediate_size + experts.count)
    facts = provenance(("jax", "jaxlib", "libtpu")) | {"matrices": matrices, "embedding": c.vocab_size * c.hidden_size}
    rows: list[dict[str, Any]] = []
    for topology, data, fsdp, tensor in LAYOUTS:
        if data * fsdp * tensor > args.devices:
            continue
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
        mesh = make_mesh(data, fsdp, tensor, devices=devices)
        for program in ("update", "rollout"):
            rows += rows_of(program, topology, mesh)
            if args.out is not None:
                write_text(args.out, json.dumps(facts | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
