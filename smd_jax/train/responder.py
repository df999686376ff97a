"""Completions for the rows of a task, as a process draws and grades those that it feeds.

parameters ─► sampler_copy ─┐
rows ─► prompts ────────────┴─► respond ─► completions ─► rewards        this process's rows, on its own devices
                                                             │
                                   what is told of all rows ─┘           `place.whole` puts the batch on the mesh
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from smd_jax.devices.process_rows import Place, local_key
from smd_jax.devices.sharding import row_ways, shard_batch
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.sampler.engine import Engine, Progress
from smd_jax.sampler.fixed_batch import RolloutConfig, rollout, rollout_program
from smd_jax.sampler.keys import row_keys
from smd_jax.sampler.params import converted
from smd_jax.tasks.rewards import Rewards
from smd_jax.tasks.task import Row
from smd_jax.text.prompts import PromptBatch, Tokenizer, repeat_each, repeat_prompts
from smd_jax.text.stop_strings import StopTable, stop_table
from smd_jax.train.compile_ahead import rows_on
from smd_jax.train.grading import encode_rows, grade_part
from smd_jax.train.loop_config import LoopConfig
from smd_jax.train.multihost import Told, shared


def sampler_copy(model: LanguageModel, params: Params, place: Place) -> Params:
    """The parameters where a sampler reads them, of those that lie on the mesh; all processes must call it."""
    if not place.elsewhere:
        return params
    with jax.set_mesh(place.mesh):
        # Converted first, which may halve what is sent.
        params = converted(model, params)
    return place.params(params)


class Drawn(NamedTuple):
    """A process's responses before they are graded, and numbers about how they were sampled."""

    trajectory: Trajectory
    took: dict[str, float]


@dataclass(frozen=True)
class Responder:
    """What draws completions for a loop. Its attributes are the loop's."""

    model: LanguageModel
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
        """The stop strings, over the tokens of this tokenizer."""
        return stop_table(self.tokenizer, self.config.stop_strings, self.model.shape.vocab_size)

    def engine(self, policy: EvictionPolicy, config: RolloutConfig, decode_rows: int) -> Engine:
        """What decodes this process's share of so many rows."""
        share = len(self.place.feeders.teams)
        # As many prompts as were asked for, or the next number that divides over this process's devices.
        ways = row_ways(self.place.own_mesh)
        prefill_rows = -(-self.config.prefill_rows // (share * ways)) * ways
        return Engine(self.model, policy, config, decode_rows // share, prefill_rows, self.place.own_mesh)

    def sampler_copy(self, params: Params) -> Params:
        """The policy's parameters, where the sampler reads them; all processes must call it."""
        return sampler_copy(self.model, params, self.place)

    def drawn(
        self,
        params: Params,
        rows: Sequence[Row],
        key: jax.Array,
        policy: EvictionPolicy,
        config: RolloutConfig,
        group_size: int,
    ) -> Drawn:
        """This process's part of `group_size` responses to the prompts of all rows.

        Args:
          params: a `sampler_copy`. rows: of all processes. key: consumed.
        """
        began = time.perf_counter()
        # Its log-probabilities were read when `respond` returns: the rollout is over, on the device, too.
        own, took = self.respond(params, rows, key, policy, config, group_size)
        return Drawn(own, {"time/rollout": time.perf_counter() - began} | took)

    def graded(
        self, draw: Callable[[], Drawn], rows: Sequence[Row], rewards: Rewards, group_size: int
    ) -> tuple[Trajectory, Told]:
        """This process's part of the responses, and what is told of all of them; all processes must call it.

        Args:
          draw: gives what `drawn` gave, now or before. rows: of all processes.

        Raises:
          TooManyFailures: more completions of all processes without a reward than `rewards` allows; in all of them.
        """

        def sample() -> tuple[Trajectory, Told]:
            own, took = draw()
            began = time.perf_counter()
            repeated = repeat_each(rows[self.place.feeders.part(len(rows))], group_size)
            completions, graded = grade_part(rewards, self.tokenizer, repeated, own)
            return own, Told(completions, graded, took | {"time/grading": time.perf_counter() - began})

        own, told = shared(self.place.feeders, sample)
        rewards.check_failures(told.graded, lambda completion: rows[completion // group_size]["prompt"])
        return own, told

    def respond(
        self,
        params: Params,
        rows: Sequence[Row],
        key: jax.Array,
        policy: EvictionPolicy,
        config: RolloutConfig,
        group_size: int,
    ) -> tuple[Trajectory, dict[str, float]]:
        """`group_size` responses to the prompts of those rows that this process feeds, in one batch or a few rows at a
        time; and what it took. With several processes the trajectory is on the host.

        Args:
          params: a `sampler_copy`. rows: of all processes.
        """
        mesh = self.place.own_mesh
        own_rows = rows[self.place.feeders.part(len(rows))]
        prompts = encode_rows(self.model, self.tokenizer, own_rows, self.config.prompt_width)
        if self.place.elsewhere:
            # A row draws the same numbers wherever it is sampled.
            total = len(rows) * group_size
            key = row_keys(local_key(key), total)[self.place.feeders.part(total)]
        if self.config.decode_rows is not None:
            done = self.engine(policy, config, self.config.decode_rows).run(
                params, prompts, key, group_size=group_size, stop=self.stop_table, report=self.report
            )
            took = {"rollout/utilisation": done.stats.utilisation}
            return self.place.own(shard_batch(done.trajectory, mesh)), took
        # A prompt that is read several times gets a share of its group each time; its responses still lie side by side.
        copies = self._copies(len(prompts.valid), group_size)
        with jax.set_mesh(mesh):
            repeated = shard_batch(repeat_prompts(prompts, copies), mesh)
            trajectory = self._rollout(rollout, params, repeated, key, policy, config, group_size // copies, copies)
        return self.place.own(trajectory), {}

    def lower(self, params: Params) -> jax.stages.Lowered:
        """The rollout of a step in one program, without `decode_rows`, ready to be compiled; nothing is computed.

        Args:
          params: a `sampler_copy`.
        """
        mesh = self.place.own_mesh
        with jax.set_mesh(mesh):
            return self._of_shapes(rollout_program.lower, params, mesh, len(self.place.feeders.teams))

    def shapes(self, params: Params) -> Trajectory:
        """What that rollout gives, in shapes alone; call it under the mesh."""
        return self._of_shapes(rollout_program.eval_shape, params, self.mesh, 1)

    def _of_shapes(self, run: Callable[..., Any], params: Params, mesh: Mesh, share: int) -> Any:
        """`run` of a step's rollout in one program, with shapes in place of prompts.

        Args:
          mesh: of the prompts. share: of how many parts of the rollout it is one.
        """
        config = self.config
        copies = self._copies(config.prompts_per_step // len(self.place.feeders.teams), config.group_size)
        shape = (config.prompts_per_step // share * copies, config.prompt_width)
        prompts = jax.eval_shape(lambda: PromptBatch(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool)))
        key = jax.random.key(config.seed)
        responses = config.group_size // copies
        on_mesh = rows_on(prompts, mesh)
        return self._rollout(run, params, on_mesh, key, config.policy, config.rollout, responses, copies)

    def _rollout(
        self,
        run: Callable[..., Any],
        params: Params,
        prompts: PromptBatch,
        key: jax.Array,
        policy: EvictionPolicy,
        config: RolloutConfig,
        responses: int,
        copies: int,
    ) -> Any:
        """`run` of what a rollout in one program is called with: by the same names, or it would be another program.

        Args:
          responses: to each row of the prompts. copies: consecutive rows of the prompts that are one prompt.
        """
        return run(
            self.model,
            params,
            prompts,
            key,
            policy=policy,
            config=config,
            group_size=responses,
            stop=self.stop_table,
            prompt_copies=copies,
        )

    def _copies(self, prompts: int, group_size: int) -> int:
        """How often a prompt is read: once, or as often as it takes to divide the prompts over the mesh.

        Args:
          prompts: those that this process feeds.
        """
        ways = row_ways(self.place.own_mesh)
        fits = (
            copies for copies in range(1, group_size + 1) if not group_size % copies and not prompts * copies % ways
        )
        # If nothing fits, `shard_batch` refuses the prompts, and says what it expects.
        return next(fits, group_size)
