"""Samples the completions of a step: each process samples the rows that it feeds, on its own devices.

parameters ─► sampler_copy ─┐
task rows ─► prompts ───────┴─► rollout ─► trajectory of this process's rows ─► `place.whole`: the batch on the mesh
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from smd_jax.devices.process_rows import Place, local_key
from smd_jax.devices.processes import all_or_none
from smd_jax.devices.sharding import row_ways, shard_batch
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.sampler.engine import Engine, Progress
from smd_jax.sampler.fixed_batch import RolloutConfig, rollout, rollout_program
from smd_jax.sampler.keys import row_keys
from smd_jax.sampler.params import converted
from smd_jax.tasks.task import Row, Task, rows_of_step
from smd_jax.text.prompts import PromptBatch, Tokenizer, repeat_prompts
from smd_jax.text.stop_strings import StopTable, stop_table
from smd_jax.train.compile_ahead import rows_on
from smd_jax.train.grading import encode_rows
from smd_jax.train.loop_config import LoopConfig


def sampler_copy(model: LanguageModel, params: Params, place: Place) -> Params:
    """Copies parameters from the mesh to where the sampler reads them; all processes must call it."""
    if not place.elsewhere:
        return params
    with jax.set_mesh(place.mesh):
        # Converted first, which may halve the bytes that are sent.
        params = converted(model, params)
    return place.params(params)


class Sampled(NamedTuple):
    """Completions before they are graded.

    Attributes:
      rows: task rows of all processes, one per prompt.
      trajectory: of this process's rows; with several processes on the host.
      measured: numbers about the sampling.
    """

    rows: list[Row]
    trajectory: Trajectory
    measured: dict[str, float]


@dataclass(frozen=True)
class Responder:
    """Samples completions. Its attributes are those of the loop."""

    model: LanguageModel
    task: Task
    tokenizer: Tokenizer
    config: LoopConfig
    mesh: Mesh
    report: Callable[[Progress], None] | None

    @cached_property
    def place(self) -> Place:
        """Where this process samples its rows."""
        return Place(self.mesh)

    @cached_property
    def stop_table(self) -> StopTable | None:
        """The stop strings as a table over the tokenizer's tokens."""
        return stop_table(self.tokenizer, self.config.stop_strings, self.model.shape.vocab_size)

    def engine(self, policy: EvictionPolicy, config: RolloutConfig, decode_rows: int) -> Engine:
        """The engine that decodes this process's share of `decode_rows`."""
        share = len(self.place.feeders.teams)
        # As many prompts as requested, rounded up to a number that divides over this process's devices.
        ways = row_ways(self.place.own_mesh)
        prefill_rows = -(-self.config.prefill_rows // (share * ways)) * ways
        return Engine(self.model, policy, config, decode_rows // share, prefill_rows, self.place.own_mesh)

    def sampler_copy(self, params: Params) -> Params:
        """The policy's parameters where the sampler reads them; all processes must call it."""
        return sampler_copy(self.model, params, self.place)

    def respond(self, params: Params, key: jax.Array, batch: int) -> Sampled:
        """Samples a group of completions for each prompt of a task batch; all processes must call it.

        Args:
          params: those of the policy, on the mesh. key: consumed. batch: number of the task batch.
        """
        config = self.config
        with all_or_none():  # rows may be read from a network
            rows = rows_of_step(self.task, config.prompts_per_step, batch, config.seed)
        params = self.sampler_copy(params)
        began = time.perf_counter()
        with all_or_none():
            own_rows = rows[self.place.feeders.part(len(rows))]
            prompts = encode_rows(self.model, self.tokenizer, own_rows, config.prompt_width)
            if self.place.elsewhere:
                # A row gets the same random numbers wherever it is sampled.
                total = len(rows) * config.group_size
                key = row_keys(local_key(key), total)[self.place.feeders.part(total)]
            if config.decode_rows is None:
                # A prompt that is read several times gets a part of its group each time; its responses stay contiguous.
                copies = self._copies(len(own_rows))
                with jax.set_mesh(self.place.own_mesh):
                    repeated = shard_batch(repeat_prompts(prompts, copies), self.place.own_mesh)
                    trajectory = rollout(self.model, params, repeated, key, **self._rollout_options(copies))
                measured = {}
            else:
                engine = self.engine(config.policy, config.rollout, config.decode_rows)
                result = engine.run(
                    params, prompts, key, group_size=config.group_size, stop=self.stop_table, report=self.report
                )
                trajectory = shard_batch(result.trajectory, self.place.own_mesh)
                measured = {"rollout/utilisation": result.stats.utilisation}
            trajectory = self.place.own(trajectory)
        # The sampler has read its log-probabilities by now, so the device has finished, too.
        return Sampled(rows, trajectory, measured | {"time/rollout": time.perf_counter() - began})

    def lower(self, params: Params) -> jax.stages.Lowered:
        """The rollout of a step as one program, without `decode_rows`, ready to be compiled; computes nothing.

        Args:
          params: a `sampler_copy`.
        """
        mesh = self.place.own_mesh
        with jax.set_mesh(mesh):
            return self._with_shapes(rollout_program.lower, params, mesh, len(self.place.feeders.teams))

    def shapes(self, params: Params) -> Trajectory:
        """The shapes of that rollout's trajectory; call it under the mesh."""
        return self._with_shapes(rollout_program.eval_shape, params, self.mesh, 1)

    def _with_shapes(self, run: Callable[..., Any], params: Params, mesh: Mesh, share: int) -> Any:
        """Calls `run` with the arguments of a rollout in one program, with shapes in place of prompts.

        Args:
          mesh: of the prompts. share: number of parts of the rollout of which this is one.
        """
        config = self.config
        copies = self._copies(config.prompts_per_step // len(self.place.feeders.teams))
        shape = (config.prompts_per_step // share * copies, config.prompt_width)
        prompts = jax.eval_shape(lambda: PromptBatch(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool)))
        key = jax.random.key(config.seed)
        return run(self.model, params, rows_on(prompts, mesh), key, **self._rollout_options(copies))

    def _rollout_options(self, copies: int) -> dict[str, Any]:
        """The static arguments of a rollout. A call with other keywords would compile another program.

        Args:
          copies: consecutive rows of the prompts that hold one prompt.
        """
        config = self.config
        return {
            "policy": config.policy,
            "config": config.rollout,
            "group_size": config.group_size // copies,
            "stop": self.stop_table,
            "prompt_copies": copies,
        }

    def _copies(self, prompts: int) -> int:
        """How often each prompt is read: the smallest number that lets the prompts divide over the mesh.

        Args:
          prompts: those that this process feeds.
        """
        group_size, ways = self.config.group_size, row_ways(self.place.own_mesh)
        fits = (
            copies for copies in range(1, group_size + 1) if not group_size % copies and not prompts * copies % ways
        )
        # If no number fits, `shard_batch` refuses the prompts with its own message.
        return next(fits, group_size)
