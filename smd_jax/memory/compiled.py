"""Memory of compiled programs on one device, from XLA's `memory_analysis`; nothing is run or allocated.

found = loop_memory(loop, state)          the state, or its shapes
found.rollout, found.update               bytes of a device
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from smd_jax.byte_sizes import show_bytes
from smd_jax.devices.sharding import row_ways, tree_shardings
from smd_jax.learner.state import TrainState
from smd_jax.message.masks import dense_mask
from smd_jax.model.decoder import Decoder
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.model.value_head import drop_value_head
from smd_jax.sampler.engine import Engine
from smd_jax.train.evaluation import Decode, Evaluator
from smd_jax.train.loop import Loop


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


@dataclass(frozen=True)
class RolloutMemory:
    """Bytes on one device in the phases of a rollout.

    Attributes:
      decoding: during one segment with `decode_rows`, otherwise during the whole rollout.
      reading: while `prefill_rows` prompts are read, with the cache of the decode rows; 0 without `decode_rows`.
    """

    decoding: int
    reading: int = 0

    @property
    def most(self) -> int:
        return max(self.decoding, self.reading)


@dataclass(frozen=True)
class LoopMemory:
    """Bytes on one device.

    Attributes:
      held: weights, optimizer state and reference, which exist during the whole run.
      rollout: during the rollout, with `decode_rows` during one segment or prefill, including `held`.
      update: during an update with the longest responses, including `held`.
    """

    title: ClassVar[str] = "memory of a device, as compiled"  # of a table of `rows()`

    held: int
    rollout: int
    update: int

    @classmethod
    def of(cls, loop: Loop, held: int, rollout: int, update: int) -> LoopMemory:
        """The memory of a loop, from the memory of each phase."""
        # With rollouts ahead both run at the same time, and share the held memory.
        together = rollout + update - held
        return cls(held, together, together) if loop.config.samples_ahead else cls(held, rollout, update)

    def rows(self) -> list[tuple[str, str, str]]:
        """(part, in the rollout, in the update), for `smd_jax.monitor.progress.summary_table`."""
        held = show_bytes(self.held)
        return [
            ("weights, optimizer, reference", held, held),
            ("everything else", show_bytes(self.rollout - self.held), show_bytes(self.update - self.held)),
            ("sum", show_bytes(self.rollout), show_bytes(self.update)),
        ]


def loop_memory(loop: Loop, state: TrainState) -> LoopMemory:
    """Compiles the rollout and the update of a loop without running them.

    Args:
      state: as for `loop.step`, or its shapes.

    Raises:
      ValueError: an update of packed rows, a loop with an environment.
    """
    held, rollout = tree_bytes(state, loop.mesh), rollout_memory(loop, state).most
    return LoopMemory.of(loop, held, rollout, update_memory(loop, state))


def update_memory(loop: Loop, state: TrainState) -> int:
    """Bytes of a device during the update, including the whole rollout.

    Raises:
      ValueError: an update of packed rows.
    """
    if loop.config.update.pack_columns is not None:
        raise ValueError(
            "expected pack_columns None, because packed rows are not measured; got "
            f"{loop.config.update.pack_columns}: set the sizes"
        )
    # Under the mesh, where a step looks for the compiled program.
    with jax.set_mesh(loop.mesh):
        lowered = loop.lower_update(state)
        needed = program_bytes(lowered)
    # The program takes a copy of one minibatch, while the whole batch is kept; with pairs, which are copies, also the
    # rollout.
    count, update = loop.config.minibatches, loop.config.update
    batch = count * tree_bytes(lowered.args_info[0][1]) // row_ways(loop.mesh)
    rollout = 0 if update.pairs is None else batch * loop.config.group_size // 2
    return needed + (batch if count > 1 else 0) + rollout


def rollout_memory(loop: Loop, state: TrainState) -> RolloutMemory:
    """Bytes of a device during the rollout, with the state that waits for the update; with dynamic sampling during the
    last rollout of a step.

    Raises:
      ValueError: a loop with an environment, whose programs are not measured.
    """
    if loop.environment is not None:
        raise ValueError("expected single completions, whose programs are measured; got an environment")
    config, placement = loop.config, loop.placement
    params = loop.policy_params(state.params)
    read = _sampler_shapes(loop.model, params, loop.mesh, placement.own_mesh)
    if config.decode_rows is None:
        key = jax.random.key(config.seed)
        sampling = RolloutMemory(program_bytes(loop.rollouts.lower(read, key, config.prompts_per_step)))
    else:
        sampling = _engine_memory(loop, read)
    # The program's arguments include the weights that it reads. A rollout ahead reads those of the next step, which are
    # no part of this state.
    shared = 0 if placement.has_own_mesh or config.samples_ahead else tree_bytes(params, loop.mesh)
    beside = tree_bytes(state, loop.mesh) - shared
    if config.samples_ahead and placement.has_own_mesh:
        beside += tree_bytes(params, loop.mesh)
    if config.extra_rollouts:
        # Dynamic sampling keeps the earlier trajectories while it samples the last rollout.
        with jax.set_mesh(loop.mesh):
            trajectory = loop.rollouts.shapes(params, config.prompts_per_step)
        beside += config.extra_rollouts * tree_bytes(trajectory) // row_ways(loop.mesh)
    reading = sampling.reading + beside if sampling.reading else 0
    return RolloutMemory(sampling.decoding + beside, reading)


def _engine_memory(loop: Loop, params: Params) -> RolloutMemory:
    """The memory of a loop's engine, with the weights.

    Args:
      params: shapes, as the sampler reads them.
    """
    engine, width = loop.rollouts.engine, loop.config.prompt_width
    prompts = loop.config.prompts_per_step // len(loop.placement.data_shards.process_groups)
    engine = replace(engine, prefill_rows=engine.prefill_rows_of(prompts))
    segment = segment_memory(engine, params, width)
    # The engine decodes with a copy of the weights, see `converted`, while those that it was given stay.
    given = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(params))
    # Free decode rows wait with the others' cache until the next prompts are read.
    reading = program_bytes(engine.prefill_program(params, width)) + segment.state
    return RolloutMemory(segment.total + given, reading + given)


def evaluation_memory(evaluator: Evaluator, params: Params, decode: Decode) -> int:
    """Bytes of a device while a batch of prompts is decoded, with the weights."""
    own_mesh = evaluator.placement.own_mesh
    read = _sampler_shapes(evaluator.model, drop_value_head(params), evaluator.mesh, own_mesh)
    return program_bytes(evaluator.lower(read, decode))


def segment_memory(engine: Engine, params: Params, prompt_width: int) -> SegmentMemory:
    """Compiles a segment for prompts of `prompt_width` columns; `params` are arrays or their shapes."""
    lowered, waiting = engine.segment_program(params, prompt_width)
    found: Any = lowered.compile().memory_analysis()
    total = program_bytes(lowered) + tree_bytes(waiting.cache) // row_ways(engine.mesh)
    return SegmentMemory(found.alias_size_in_bytes, found.temp_size_in_bytes, total)


def tree_bytes(tree: Any, mesh: Mesh | None = None) -> int:
    """Bytes of a pytree of arrays or shapes; with a mesh, of its part on each device."""
    leaves = jax.tree.leaves(tree)
    if mesh is None:
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
    shardings = jax.tree.leaves(tree_shardings(tree, mesh))
    return sum(math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize for x, s in zip(leaves, shardings, strict=True))


def param_shapes(model: Decoder) -> Params:
    """Shapes of fresh parameters, in float32; nothing is computed."""

    def init() -> Params:
        one = jnp.zeros((1, 1), jnp.int32)
        return model.init(jax.random.key(0), one, one, dense_mask(jnp.ones((1, 1), bool)))["params"]

    return jax.eval_shape(init)


def _sampler_shapes(model: LanguageModel, params: Params, mesh: Mesh, own_mesh: Mesh) -> Params:
    """Shapes of the parameters where the sampler reads them; a copy on another mesh is in the compute dtype."""
    if own_mesh is mesh:
        shardings = tree_shardings(params, mesh)
    else:
        params = jax.eval_shape(model.compute_params, params)
        shardings = tree_shardings(params, own_mesh, gathered=True)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, shardings)


def program_bytes(lowered: jax.stages.Lowered) -> int:
    """Compiles a program: bytes of its arguments, results and temporary arrays on a device, as XLA plans them."""
    found: Any = lowered.compile().memory_analysis()
    # A donated array counts as an argument and as a result, but exists once.
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return found.argument_size_in_bytes + results + found.temp_size_in_bytes
