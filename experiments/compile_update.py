"""Does the learner's memory stay as small as the sampler's, on a GPU that is not there?

Question   A GRPO update of Qwen2.5-0.5B (24 layers, 151,936 tokens in the vocabulary) on one response of 16,384 tokens
           and on one row of 32,768, bfloat16, budget 512 + 128, gradients rematerialised, on one H100 of 80 GiB: what
           does the compiled program take beside its arguments, and what does the memory plan say?
Command    make compile-kernels, which makes the environment; then
           .venv-compilers/bin/python experiments/compile_update.py [--out FILE]
Cost       some minutes of compilation on two CPU cores; nothing is run
Result     experiments/results/update_compiled_h100.json: rows `{tokens, response, temp_bytes, argument_bytes,
           planned_update, planned_work}`, the last being the plan's share beside weights, optimizer, trajectory.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

# Read when JAX and the compilers are loaded, see compile_kernels.py.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()

import jax
import jax.numpy as jnp
import optax

from compile_kernels import TARGETS
from provenance import provenance
from smd_jax.config import ModelConfig
from smd_jax.eviction.policies import SnapKV
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.state import TrainBatch, init_state
from smd_jax.learner.update import make_update
from smd_jax.memory.plan import Workload, param_shapes, plan_memory, show_bytes
from smd_jax.message.masks import Segments, ShadowMask
from smd_jax.message.trajectory import Trajectory
from smd_jax.model import attention
from smd_jax.model.decoder import Decoder
from smd_jax.sampler.config import RolloutConfig

QWEN = ModelConfig(
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4864,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    max_positions=32_768,
    qkv_bias=True,
    tie_embeddings=True,
    rope_theta=1e6,
    dtype="bfloat16",
)
PROMPT = 256
RESPONSES = (16_384, 32_768 - PROMPT)  # tokens
OPTIMIZER = optax.adamw(1e-6)


def workload(response: int) -> Workload:
    """One row on one device."""
    sizes = RolloutConfig(max_new_tokens=response, budget=512, buffer=128)
    model = Decoder(QWEN, remat=True, impl="mosaic_gpu")
    return Workload(model, SnapKV(), sizes, PROMPT, rows=1, optimizer=OPTIMIZER, platform="gpu")


def compiled(work: Workload, sharding: Any) -> Any:
    """The compiler's account of the update's memory."""
    config = work.config
    columns = work.prompt_width + config.max_new_tokens
    shape = work.model.config

    def array(*sizes: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    segments = Segments(work.prompt_width, config.buffer, config.budget)
    evicted_at = array(1, shape.num_layers, shape.num_kv_heads, columns, dtype=jnp.int32)
    trajectory = Trajectory(
        tokens=array(1, columns, dtype=jnp.int32),
        valid=array(1, columns, dtype=jnp.bool_),
        logprobs=array(1, config.max_new_tokens),
        terminated=array(1, dtype=jnp.bool_),
        mask=ShadowMask(evicted_at, (segments,) * shape.num_layers),
    )
    state = jax.eval_shape(
        lambda params: init_state(params, OPTIMIZER, jax.random.key(0)), param_shapes(Decoder(work.model.config))
    )
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state)
    update = make_update(work.model, OPTIMIZER, UpdateConfig())
    # The device of this machine is not the one that it compiles for.
    with mock.patch.object(attention, "wrong_device", lambda impl: None):
        batch = TrainBatch(trajectory, array(1), array(1, config.max_new_tokens))
        traced = update.trace(state, batch)
    return traced.lower(lowering_platforms=("cuda",)).compile().memory_analysis()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=QWEN.num_layers, help="fewer, to see that it runs")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    args = parser.parse_args()
    rows = []
    sharding = TARGETS["h100"].sharding()
    for response in RESPONSES:
        work = workload(response)
        work = replace(work, model=replace(work.model, config=replace(QWEN, num_layers=args.layers)))
        found = compiled(work, sharding)
        plan = plan_memory(work, param_shapes(Decoder(work.model.config)))
        worked = plan.gradients + plan.activations + plan.logits + plan.sampler_weights
        row = {"tokens": PROMPT + response, "response": response, "layers": args.layers}
        row |= {"temp_bytes": found.temp_size_in_bytes, "argument_bytes": found.argument_size_in_bytes}
        row |= {"planned_update": plan.update, "planned_work": worked}
        rows.append(row)
        print(json.dumps(row), show_bytes(found.temp_size_in_bytes), "planned", show_bytes(worked), flush=True)
    if args.out is not None:
        result = provenance(("jax", "jaxlib")) | {"target": "h100", "rows": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
