"""What the compiler says of the engine's decode program, to hold a memory plan against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smd_jax.memory.sampler import tree_bytes
from smd_jax.model.protocol import Params
from smd_jax.sampler.engine import Engine


@dataclass(frozen=True)
class SegmentMemory:
    """Bytes of one segment: `buffer` steps of the decode loop and the compression at its end.

    Attributes:
      state: state of the rows, donated and updated in place: keys, values, their columns, and what the policy watches.
      temporary: what lives beside arguments and results.
      total: all that is alive while it runs, weights included, and a batch of prompts that waits for decode rows.
    """

    state: int
    temporary: int
    total: int


def segment_memory(engine: Engine, params: Params, prompt_width: int) -> SegmentMemory:
    """Compiles a segment for prompts of so many columns, and allocates nothing.

    Args:
      params: arrays or their shapes.
    """
    program = engine.segment_program(params, prompt_width)
    found: Any = program.lowered.compile().memory_analysis()
    donated = found.alias_size_in_bytes
    # What is donated counts as an argument and as a result, but is there once.
    alive = found.argument_size_in_bytes + found.output_size_in_bytes - donated + found.temp_size_in_bytes
    return SegmentMemory(donated, found.temp_size_in_bytes, alive + tree_bytes(program.waiting.cache))
