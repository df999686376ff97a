"""Samples completions: each process samples the rows that it feeds, on its own devices.

parameters ─► sampler_copy ─┐
task rows ─► prompts ───────┴─► rollout ─► trajectory of this process's rows ─► `placement.whole`: the batch on the mesh
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Key

from smd_jax.devices.process_rows import SamplerPlacement, check_prompts_divide, local_key
from smd_jax.devices.processes import all_or_none
from smd_jax.devices.sharding import batch_sharding, check_sampled_rows, row_ways, shard_batch, tree_shardings
from smd_jax.environments.respondent import Conversation
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.sampler.engine import Engine, Progress
from smd_jax.sampler.fixed_batch import RolloutConfig, rollout, rollout_program
from smd_jax.sampler.keys import row_keys
from smd_jax.sampler.static import Sampler, converted
from smd_jax.tasks.task import Row, prompt_text
from smd_jax.text.prompts import PromptBatch, Tokenizer, encode_prompts, repeat_prompts, wants_special_tokens
from smd_jax.text.stop_strings import StopTable


class Sampled(NamedTuple):
    """Completions before they are graded.

    Attributes:
      rows: task rows of all processes, one per prompt.
      trajectory: of this process's rows; with several processes on the host.
      measured: metrics of the sampling, as numbers.
      conversations: one for each completion, of rollouts with an environment; empty elsewhere.
      present: `[rows of the trajectory]`, false for rows without a context of a conversation; None: all have one.
    """

    rows: Sequence[Row]
    trajectory: Trajectory
    measured: dict[str, float]
    conversations: tuple[Conversation, ...] = ()
    present: Bool[np.ndarray, " rows"] | None = None


@dataclass(frozen=True)
class Rollouts:
    """Samples completions of task rows under one way of decoding, for training and for evaluations.

    Attributes:
      placement: where this process samples its rows.
      policy, config: eviction policy; budget, lengths and sampling.
      group_size, prompt_width, decode_rows, prefill_rows: as in LoopConfig.
      stop: the stop strings as a table over the tokenizer's tokens.
      report: called after every segment of a rollout with `decode_rows`.

    Raises:
      ValueError: a policy or lengths that do not fit the model, before anything is compiled.
    """

    model: LanguageModel
    tokenizer: Tokenizer
    placement: SamplerPlacement
    policy: EvictionPolicy
    config: RolloutConfig
    group_size: int
    prompt_width: int
    stop: StopTable | None = None
    decode_rows: int | None = None
    prefill_rows: int = 8
    report: Callable[[Progress], None] | None = None

    def __post_init__(self) -> None:
        Sampler(self.model, self.policy, self.config, self.prompt_width)
        if self.decode_rows is not None:
            _ = self.engine

    @property
    def contexts(self) -> int:
        """Rows of the trajectory for each completion."""
        return 1

    @cached_property
    def engine(self) -> Engine:
        """The engine that decodes this process's share of `decode_rows`."""
        assert self.decode_rows is not None
        mesh, share = self.placement.own_mesh, len(self.placement.data_shards.process_groups)
        # As many prompts as requested, rounded up to a number that divides over this process's devices.
        ways = row_ways(mesh)
        prefill_rows = -(-self.prefill_rows // (share * ways)) * ways
        return Engine(self.model, self.policy, self.config, self.decode_rows // share, prefill_rows, mesh)

    def sample(self, params: Params, key: Key[Array, ""] | Key[Array, " completions"], rows: Sequence[Row]) -> Sampled:
        """Samples a group of completions for each row; all processes must call it with the same rows.

        Args:
          params: a `sampler_copy`.
          key: consumed; one, or one for each completion of all processes.
        """
        began = time.perf_counter()
        own_mesh, part = self.placement.own_mesh, self.placement.data_shards.part
        measured = {}
        with all_or_none():
            prompts = encode_rows(self.model, self.tokenizer, rows[part(len(rows))], self.prompt_width)
            if self.placement.has_own_mesh:
                # A row gets the same random numbers wherever it is sampled.
                total = len(rows) * self.group_size
                key = row_keys(local_key(key), total)[part(total)]
            if self.decode_rows is None:
                # A prompt that is read several times gets a part of its group each time; its responses stay contiguous.
                copies = self._copies(len(prompts.tokens))
                with jax.set_mesh(own_mesh):
                    repeated = shard_batch(repeat_prompts(prompts, copies), own_mesh)
                    trajectory = rollout(self.model, params, repeated, key, **self._options(copies))
            else:
                result = self.engine.run(
                    params, prompts, key, group_size=self.group_size, stop=self.stop, report=self.report
                )
                trajectory = shard_batch(result.trajectory, own_mesh)
                measured["rollout/utilisation"] = result.stats.utilisation
            trajectory = self.placement.own(trajectory)
        # The sampler has read its log-probabilities by now, so the device has finished, too.
        measured["time/rollout"] = time.perf_counter() - began
        return Sampled(rows, trajectory, measured)

    def check_batch(self, prompts: int) -> None:
        """Raises ValueError for a number of prompts that cannot be sampled together."""
        check_prompts_divide(prompts, self.placement.data_shards)
        check_sampled_rows(prompts * self.group_size, self.placement.mesh)

    def lower(
        self, params: Params, key: Key[Array, ""] | Key[Array, " completions"], prompts: int
    ) -> jax.stages.Lowered:
        """The rollout of this process's prompts in one program, without `decode_rows`; computes nothing.

        Args:
          params: a `sampler_copy`, or its shapes with shardings.
          key: as in `sample`, of this process's completions.
          prompts: of all processes.
        """
        mesh, own = self.placement.own_mesh, prompts // len(self.placement.data_shards.process_groups)
        copies = self._copies(own)
        with jax.set_mesh(mesh):
            shapes = rows_on(self._prompt_shapes(own * copies), mesh)
            return rollout_program.lower(self.model, params, shapes, key, **self._options(copies))

    def shapes(self, params: Params, prompts: int) -> Trajectory:
        """The shapes of the whole trajectory for this number of prompts; call it under the mesh."""
        copies = self._copies(prompts // len(self.placement.data_shards.process_groups))
        shapes = rows_on(self._prompt_shapes(prompts * copies), self.placement.mesh)
        return rollout_program.eval_shape(self.model, params, shapes, jax.random.key(0), **self._options(copies))

    def _prompt_shapes(self, prompts: int) -> PromptBatch:
        shape = (prompts, self.prompt_width)
        return jax.eval_shape(lambda: PromptBatch(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool)))

    def _options(self, copies: int) -> dict[str, Any]:
        """The other arguments of a rollout. A call with other keywords would compile another program."""
        return {
            "policy": self.policy,
            "config": self.config,
            "group_size": self.group_size // copies,
            "stop": self.stop,
            "limits": None,
            "prompt_copies": copies,
        }

    def _copies(self, prompts: int) -> int:
        """How often each prompt is read: the smallest number that lets the prompts divide over the mesh."""
        size, ways = self.group_size, row_ways(self.placement.own_mesh)
        fits = (copies for copies in range(1, size + 1) if not (size % copies or prompts * copies % ways))
        # If no number fits, `shard_batch` refuses the prompts with its own message.
        return next(fits, size)


def sampler_copy(model: LanguageModel, placement: SamplerPlacement, params: Params) -> Params:
    """Parameters as the sampler reads them, gathered from fsdp once per rollout; all processes must call it.

    Each device receives (fsdp - 1) / fsdp of its tensor part of the matrices. A sampler on the mesh itself reads the
    parameters where they are.
    """
    if not placement.has_own_mesh:
        return params
    mesh, own_mesh = placement.mesh, placement.own_mesh
    with jax.set_mesh(mesh):
        # Converted first, which may halve the bytes that are sent.
        params = converted(model, params)

    def here(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
        # The same buffers, as an array of this process's devices only.
        parts = [shard.data for shard in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, NamedSharding(own_mesh, sharding.spec), parts)

    shardings = tree_shardings(params, mesh, gathered=True)
    return jax.tree.map(here, jax.device_put(params, shardings), shardings)


def encode_rows(model: LanguageModel, tokenizer: Tokenizer, rows: Sequence[Row], width: int) -> PromptBatch:
    """The prompts of a task's rows, `[rows, width]`.

    Raises:
      ValueError: for a prompt that is longer than `width`.
    """
    return encode_prompts(
        tokenizer,
        [prompt_text(row, tokenizer) for row in rows],
        width=width,
        max_positions=model.shape.max_positions,
        add_special_tokens=wants_special_tokens(tokenizer),
    )


def rows_on(shapes: Any, mesh: Mesh) -> Any:
    """Shapes `[rows, ...]` with the shardings of `shard_batch`: lowering for others would give another program."""
    sharding = batch_sharding(mesh)
    return jax.tree.map(lambda x: x.update(sharding=sharding), shapes)
