"""The compiler's own memory figures of a loop's programs, to compare with a memory plan."""

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
    """Bytes of one segment: `buffer` decode steps and the compression after them.

    Attributes:
      state: cache and statistics of the rows, updated in place.
      temporary: arrays other than arguments and results.
      total: everything while it runs, with weights and a batch of prompts that waits for decode rows.
    """

    state: int
    temporary: int
    total: int


def segment_memory(engine: Engine, params: Params, prompt_width: int) -> SegmentMemory:
    """Compiles a segment for prompts of so many columns, without allocating; `params` are arrays or their shapes."""
    program = engine.segment_program(params, prompt_width)
    found: Any = program.lowered.compile().memory_analysis()
    total = _alive(program.lowered) + tree_bytes(program.waiting.cache)
    return SegmentMemory(found.alias_size_in_bytes, found.temp_size_in_bytes, total)


@dataclass(frozen=True)
class LoopMemory:
    """Bytes on one device, by the compiler.

    Attributes:
      rollout: during the rollout, or during one segment where the loop has `decode_rows`; with the optimizer's state
        and the reference.
      update: during an update of responses of every length.
    """

    rollout: int
    update: int

    @property
    def title(self) -> str:
        """Title of a table of `rows()`."""
        return "memory of a device: the compiler's own figures"

    def rows(self) -> list[tuple[str, str, str]]:
        """(name, in the rollout, in the update), as the last line of `MemoryPlan.rows`."""
        return [("sum", show_bytes(self.rollout), show_bytes(self.update))]


def loop_memory(loop: PolicyLoop, state: TrainState) -> LoopMemory:
    """Compiles the rollout and the update of a loop without running them; `state` as for `loop.step`. Makes the
    sampler's copy of the weights, if it reads one."""
    config = loop.config
    state = shard_tree(state, loop.mesh)
    params = loop.responder.sampler_copy(loop.policy_params(state.params))
    if config.decode_rows is not None:
        engine = loop.responder.engine(config.policy, config.rollout, config.decode_rows)
        sampling = segment_memory(engine, params, config.prompt_width).total
    else:
        sampling = _alive(loop.responder.lower(params))
    # No arguments of the rollout, but allocated while it runs.
    held = tree_bytes((state.opt_state, state.reference), loop.mesh)
    if loop.responder.place.elsewhere:  # the sampler reads a copy
        held += tree_bytes(state.params, loop.mesh)
    # Under the mesh, where steps look for what was compiled.
    with jax.set_mesh(loop.mesh):
        return LoopMemory(sampling + held, _alive(loop.lower_update(state)))


def _alive(lowered: jax.stages.Lowered) -> int:
    """Bytes of arguments, results and temporary arrays of a program."""
    found: Any = lowered.compile().memory_analysis()
    # What is donated counts as an argument and as a result, but is there once.
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return found.argument_size_in_bytes + results + found.temp_size_in_bytes
