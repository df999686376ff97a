"""Bytes of the engine's compiled decode program: one segment of `buffer` steps and the compression at its end."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import smd_jax as smd
from smd_jax.sampler.keys import row_keys
from smd_jax.sampler.params import sampler_params
from smd_jax.sampler.prefill import prefill
from smd_jax.sampler.seats import empty
from smd_jax.sampler.segment import run_segment
from smd_jax.sampler.static import Sampler


@dataclass(frozen=True)
class SegmentMemory:
    """What the compiler says of the program, in bytes.

    Attributes:
      state: of the rows, donated and updated in place: keys, values, their columns, and what the policy watches.
      temporary: beside arguments and results.
      total: of all that is alive while it runs, weights included, and of a batch of prompts that waits for slots.
    """

    state: int
    temporary: int
    total: int


def segment_memory(engine: smd.Engine, params: Any, width: int) -> SegmentMemory:
    """Compiles a segment for prompts of `width` columns, and allocates nothing.

    Args:
      params: arrays or their shapes.
    """
    sampler = Sampler(engine.model, engine.policy, engine.config, width)
    tokens = jnp.zeros((1, width), jnp.int32)
    prompts = smd.PromptBatch(tokens=tokens, valid=jnp.ones(tokens.shape, bool))
    params = jax.eval_shape(lambda params: sampler_params(engine.model, params), params)
    rng = jax.eval_shape(lambda: row_keys(jax.random.key(0), 1))
    prefilled = jax.eval_shape(partial(prefill, sampler), params, prompts, rng)
    state = jax.eval_shape(lambda: empty(prefilled, engine.slots))
    compiled = jax.jit(partial(run_segment, sampler), donate_argnums=1).lower(params, state, None).compile()
    found: Any = compiled.memory_analysis()
    arguments, results = found.argument_size_in_bytes, found.output_size_in_bytes
    aliased, temporary = found.alias_size_in_bytes, found.temp_size_in_bytes
    waiting = engine.prefill_rows * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(prefilled.cache))
    total = arguments + results - aliased + temporary + waiting
    return SegmentMemory(aliased, temporary, total)
