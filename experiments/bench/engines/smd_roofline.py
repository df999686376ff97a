"""A decoding step of smd_jax on an accelerator against the bytes that it has to move. Used by `smd_accelerator.py`.

Roofline   A step reads all weights and all live keys and values once. These bytes divided by this device's copy rate
           give the least possible time. The measured time of a step is that of a segment, compression included,
           divided by its steps.
"""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass
from functools import partial
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
PREFILLED = 1  # prompts read at once; their caches need memory, too
# Kernels of decode attention, and how a lowered program names their calls.
DECODE_CALLS = {"mosaic_gpu": "@mosaic_gpu", "mosaic_tpu": "@tpu_custom_call"}
POLICIES = {"ours": smd.eviction.Knorm(), "ours-dense": smd.eviction.Dense()}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of the rollout."""

    model: smd.ModelConfig
    batches: tuple[int, ...]
    budget: int
    buffer: int
    segments: int  # sampled; the first two are not timed
    prompt: int  # tokens of a prompt


TINY = Sizes(tiny_model_config(num_layers=1, dtype="bfloat16"), (2,), budget=16, buffer=8, segments=3, prompt=24)


@partial(jax.jit, static_argnums=0)
def random_weights(config: smd.ModelConfig) -> smd.model.Params:
    """Random weights in the compute dtype, made on the device; `random_params` would need float32 first."""
    shapes, tree = jax.tree_util.tree_flatten_with_path(jax.eval_shape(lambda: random_params(config)))

    def fill(path: Any, x: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
        if path[-1].key == "scale":
            return jnp.ones(x.shape, x.dtype)
        return (0.02 * jax.random.normal(key, x.shape, jnp.float32)).astype(config.dtype)

    keys = jax.random.split(jax.random.key(0), len(shapes))
    return jax.tree.unflatten(tree, [fill(path, x, key) for (path, x), key in zip(shapes, keys, strict=True)])


def slot_bytes(sizes: Sizes) -> int:
    """Bytes of a key and its value, in all layers and heads."""
    c = sizes.model
    return 2 * c.num_layers * c.num_kv_heads * c.head_dim * jnp.dtype(c.dtype).itemsize


def step_bytes(sizes: Sizes, policy: smd.eviction.EvictionPolicy, rows: int, weights: int) -> int:
    """Bytes that a step has to move: weights once, live keys and values once."""
    # Mean over the timed segments: all but the first two.
    live = sizes.budget + sizes.buffer / 2
    if not policy.evicts:
        live = sizes.prompt + (2 + sizes.segments) * sizes.buffer / 2
    return int(weights + rows * live * slot_bytes(sizes))


def decode_impl(engine: smd.Engine, params: smd.model.Params, prompt: int) -> str:
    """The implementation of decode attention in the program of a segment."""
    lowered, _ = engine.segment_program(params, prompt)
    program = lowered.as_text()
    return next((kernel for kernel, call in DECODE_CALLS.items() if call in program), "xla")


def step_row(sizes: Sizes, name: str, rows: int, params: smd.model.Params, bandwidth: float) -> Row:
    """Time of a decoding step of `rows` rows, and its share of the roofline; `bandwidth` in bytes per second."""
    policy = POLICIES[name]
    new_tokens = sizes.segments * sizes.buffer
    config = smd.RolloutConfig(max_new_tokens=new_tokens, budget=sizes.budget, buffer=sizes.buffer)
    engine = smd.Engine(smd.Decoder(sizes.model), policy, config, decode_rows=rows, prefill_rows=PREFILLED)
    marks = [0.0]
    tokens = jnp.asarray(generation.prompts(rows, sizes.prompt, sizes.model.vocab_size), jnp.int32)
    given = smd.PromptBatch(tokens=tokens, valid=jnp.ones(tokens.shape, bool))
    engine.run(params, given, jax.random.key(0), limits=np.full(rows, sizes.buffer, np.int32))  # compiles
    done = engine.run(params, given, jax.random.key(1), report=lambda progress: marks.append(progress.seconds))
    steps = np.diff(marks)[2:] / sizes.buffer
    step = statistics.median(steps)
    least = step_bytes(sizes, policy, rows, sum(x.nbytes for x in jax.tree.leaves(params))) / bandwidth
    row: Row = {"engine": name, "device": jax.devices()[0].platform, "batch": rows, "prompt": sizes.prompt}
    budget, buffer = (sizes.budget, sizes.buffer) if policy.evicts else (None, None)
    row |= {"new_tokens": new_tokens, "budget": budget, "buffer": buffer}
    row["decode_impl"] = decode_impl(engine, params, sizes.prompt)
    row |= {"tokens_per_s": rows / step, "ms_per_step_early": steps[0] * 1e3, "ms_per_step_late": steps[-1] * 1e3}
    memory = smd.memory.segment_memory(engine, params, sizes.prompt)
    slots = sizes.budget + sizes.buffer if policy.evicts else sizes.prompt + new_tokens
    expected = rows * slots * slot_bytes(sizes)
    row |= {"cache_bytes": memory.state, "expected_cache_bytes": expected}
    row["max_abs_dlogp"] = max_difference(engine.model, params, done.trajectory, CHECKED)
    row |= {"ms_per_step": step * 1e3, "ms_of_bytes": least * 1e3, "limit_share": least / step}
    row |= {"temp_bytes": memory.temporary, "total_bytes": memory.total}
    return row
