"""What the compiler says of a loop's programs, to hold a memory plan against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from smd_jax.byte_sizes import show_bytes
from smd_jax.devices.sharding import shard_tree
from smd_jax.learner.state import TrainState
from smd_jax.memory.sampler import tree_bytes
from smd_jax.model.protocol import Params
from smd_jax.sampler.engine import Engine
from smd_jax.train.policy_loop import PolicyLoop


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
    total = _alive(program.lowered) + tree_bytes(program.waiting.cache)
    return SegmentMemory(found.alias_size_in_bytes, found.temp_size_in_bytes, total)


@dataclass(frozen=True)
class LoopMemory:
    """What the compiler says of a loop's programs, in bytes on one device, to hold a MemoryPlan against.

    Attributes:
      rollout: all that is alive while the rollout runs, the optimizer's state and the reference included: of the whole
        rollout, or of one segment where the loop has `decode_rows`.
      update: all that is alive while an update runs on responses of every length.
    """

    rollout: int
    update: int

    @property
    def title(self) -> str:
        """Of a table of `rows()`."""
        return "memory of a device: the compiler's own figures"

    def rows(self) -> list[tuple[str, str, str]]:
        """(name, in the rollout, in the update), as the last line of `MemoryPlan.rows`."""
        return [("sum", show_bytes(self.rollout), show_bytes(self.update))]


def loop_memory(loop: PolicyLoop, state: TrainState) -> LoopMemory:
    """Compiles the rollout and the update of a loop, and runs neither. Where the sampler reads a copy of the
    weights, it is made.

    Args:
      state: as `loop.step` takes it.
    """
    config = loop.config
    state = shard_tree(state, loop.mesh)
    params = loop.responder.sampler_copy(loop.policy_params(state.params))
    if config.decode_rows is not None:
        engine = loop.responder.engine(config.policy, config.rollout, config.decode_rows)
        sampling = segment_memory(engine, params, config.prompt_width).total
    else:
        sampling = _alive(loop.responder.lower(params))
    # They are no arguments of the rollout, and lie beside it all the same.
    beside = tree_bytes((state.opt_state, state.reference), loop.mesh)
    if loop.responder.place.elsewhere:  # the sampler reads a copy
        beside += tree_bytes(state.params, loop.mesh)
    # Under the mesh, where steps look for what was compiled.
    with jax.set_mesh(loop.mesh):
        return LoopMemory(sampling + beside, _alive(loop.lower_update(state)))


def _alive(lowered: jax.stages.Lowered) -> int:
    """Bytes of arguments, results and temporary arrays of a program."""
    found: Any = lowered.compile().memory_analysis()
    # What is donated counts as an argument and as a result, but is there once.
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return found.argument_size_in_bytes + results + found.temp_size_in_bytes
