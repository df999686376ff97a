"""Does a step give the same on every mesh, and in several processes? Every factorisation of 1, 2, 4 and 8 fake devices.

    python experiments/sharding.py --out experiments/results/sharding.json

Takes a quarter of an hour on two cores; what the file has already is not done again. A step of GRPO with a bonus for
entropy, so that the loss is no sum of advantages that cancel out: 16 completions of a decoder with one layer, 8
heads and 2 KV heads, under H2O. Every mesh samples, grades and updates by itself; tokens, loss and gradients are
compared with those of one device:

    max_rel_dloss   |loss - loss of one device| / |loss of one device|
    max_rel_dgrad   the largest over all parameters of ‖g - g of one device‖ / ‖g of one device‖
    tokens_equal    every token of every row, padding included

Biases of keys are left out: their gradients are zero but for rounding, because softmax does not see what all keys
share. With several processes these are real ones, joined by gloo.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

AXES = ("data", "fsdp", "tensor", "sequence")  # as make_mesh takes their sizes
Sizes = tuple[int, ...]  # of these axes

# Programs that run once: they are compiled without LLVM's optimizations, which takes a fifth of the time.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# Per processes and devices of each. A tensor axis over both of two processes makes them sample together.
JOINED: dict[tuple[int, int], list[Sizes]] = {
    (2, 1): [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)],
    (2, 2): [(4, 1, 1, 1), (2, 2, 1, 1), (1, 2, 2, 1), (1, 2, 1, 2)],
    (4, 1): [(4, 1, 1, 1), (2, 2, 1, 1), (1, 4, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2)],
}
LIMIT = 900  # seconds for a set of processes


def factorisations(devices: int) -> list[Sizes]:
    """All (data, fsdp, tensor, sequence) whose product is `devices`."""
    ways = [n for n in range(1, devices + 1) if devices % n == 0]
    return [sizes for sizes in itertools.product(ways, repeat=len(AXES)) if math.prod(sizes) == devices]


def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [(sum(ids) % 11) / 10 for ids in completion_ids]


class Letters:
    """Prompts of several lengths."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"prompt": "abcdefgh"[: 1 + index % 8]}

    def reward(self, prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        return reward(completion_ids)


def step(sizes: Sizes) -> dict[str, Any]:
    """Tokens, loss and gradients of one step on a mesh, as NumPy arrays."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from smd_jax.devices.processes import on_host
    from smd_jax.devices.sharding import make_mesh, shard_tree
    from smd_jax.eviction.policies import H2O
    from smd_jax.learner.config import UpdateConfig
    from smd_jax.learner.state import init_state
    from smd_jax.model.decoder import Decoder
    from smd_jax.sampler.fixed_batch import RolloutConfig
    from smd_jax.testing import byte_tokenizer, random_params, tiny_model_config
    from smd_jax.train.grpo import GRPOConfig, GRPOLoop

    # Moves nothing, and keeps the gradients as its state.
    record = optax.GradientTransformation(
        init=lambda params: jax.tree.map(jnp.zeros_like, params),
        update=lambda updates, state, params=None: (jax.tree.map(jnp.zeros_like, updates), updates),
    )
    found: dict[str, Any] = {}
    # Eight heads, which tensor * sequence must divide; two KV heads, so that most meshes repeat them.
    model = Decoder(tiny_model_config(max_positions=32, num_layers=1, num_heads=8))
    rollout = RolloutConfig(max_new_tokens=8, budget=5, buffer=2, eos_token_id=258, pad_token_id=256)
    config = GRPOConfig(8, 2, 8, H2O(), rollout, update=UpdateConfig(entropy_coef=0.1))
    loop = GRPOLoop(
        model,
        Letters(),
        byte_tokenizer(chat=False),
        record,
        config,
        make_mesh(**dict(zip(AXES, sizes, strict=True))),
        watch=lambda index, samples: found.update(tokens=np.asarray(samples.trajectory.tokens)),
    )
    params = shard_tree(random_params(model.config), loop.mesh)
    state, metrics = loop.step(init_state(params, record, jax.random.key(2)))
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state):
        found[f"grad {jax.tree_util.keystr(path)}"] = on_host(leaf)
    return found | {"loss": np.float64(metrics["loss"])}


def compared(sizes: Sizes, processes: int, found: dict[str, Any], one: dict[str, Any]) -> dict[str, Any]:
    """One row of the results."""
    import numpy as np

    def distance(name: str) -> float:
        left, right = np.float64(found[name]), np.float64(one[name])
        return float(np.linalg.norm(left - right) / np.linalg.norm(right))

    grads = [name for name in one if name.startswith("grad") and not ("k_proj" in name and "bias" in name)]
    return {
        "mesh": dict(zip(AXES, sizes, strict=True)),
        "devices": int(np.prod(sizes)),
        "processes": processes,
        "max_rel_dloss": float(abs(found["loss"] - one["loss"]) / abs(one["loss"])),
        "max_rel_dgrad": max(map(distance, grads)),
        "tokens_equal": bool(np.array_equal(found["tokens"], one["tokens"])),
    }


def joined(count: int, devices: int, folder: Path) -> None:
    """Runs the meshes of so many processes; process 0 leaves a file of each in the folder."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    environment = os.environ | {"XLA_FLAGS": f"{QUICK} --xla_force_host_platform_device_count={devices}"}
    command = [sys.executable, __file__, "--out", str(folder), "--join", coordinator, str(count), str(devices)]
    running = [subprocess.Popen([*command, str(index)], env=environment) for index in range(count)]
    try:
        codes = [process.wait(LIMIT) for process in running]
    finally:
        for process in running:
            process.kill()
    if any(codes):
        raise RuntimeError(f"expected {count} processes to end well; got {codes}")


def take_part(folder: Path, coordinator: str, count: int, devices: int, index: int) -> None:
    """One of several processes."""
    from smd_jax.devices import processes

    processes.join(coordinator, count, index)
    import numpy as np

    for sizes in JOINED[count, devices]:
        found = step(sizes)
        if processes.is_first():
            np.savez(folder / f"{sizes}.npz", **found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--join", nargs=4, metavar=("COORDINATOR", "COUNT", "DEVICES", "INDEX"), help="for itself")
    args = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    if args.join:
        coordinator, *numbers = args.join
        take_part(args.out, coordinator, *map(int, numbers))
        return
    os.environ["XLA_FLAGS"] = f"{QUICK} --xla_force_host_platform_device_count=8"
    import numpy as np

    from provenance import provenance

    said = provenance()
    rows: list[dict[str, Any]] = json.loads(args.out.read_text()) if args.out.exists() else []
    # Rows from before there was a sequence axis say nothing of it.
    there = {(row["processes"], *(row["mesh"].get(axis, 1) for axis in AXES)) for row in rows}
    one = step((1, 1, 1, 1))

    def keep(sizes: Sizes, processes: int, found: dict[str, Any]) -> None:
        rows.append(compared(sizes, processes, found, one) | said)
        args.out.write_text(json.dumps(rows, indent=1) + "\n")
        print(rows[-1], flush=True)

    for sizes in (sizes for devices in (1, 2, 4, 8) for sizes in factorisations(devices)):
        if (1, *sizes) not in there:
            keep(sizes, 1, step(sizes))
    for (count, devices), meshes in JOINED.items():
        if all((count, *sizes) in there for sizes in meshes):
            continue
        with tempfile.TemporaryDirectory() as folder:
            joined(count, devices, Path(folder))
            for sizes in meshes:
                with np.load(Path(folder) / f"{sizes}.npz") as found:
                    keep(sizes, count, dict(found))


if __name__ == "__main__":
    main()
