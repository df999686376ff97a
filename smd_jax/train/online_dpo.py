"""Online DPO: a pair from every group, by reward or by a judge, and the update.

    loop = OnlineDPOLoop(model, task, tokenizer, optimizer, config)                  the task's rewards choose
    loop = OnlineDPOLoop(model, task, tokenizer, optimizer, config, judge=my_judge)  a judge does
    state = init_state(params, optimizer, key, reference=params)

The loss takes no ratio to the sampler: several steps per rollout need no clipping, the reference holds the policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from smd_jax.devices.processes import all_or_none, gather_json, on_host
from smd_jax.devices.sharding import check_rows, shard_batch
from smd_jax.learner.accumulation import count_parts
from smd_jax.learner.dpo_update import DPOUpdate, DPOUpdateConfig, PairBatch, check_reference, make_dpo_update
from smd_jax.learner.forward import ReplayFunction, make_replay
from smd_jax.learner.mismatch_guard import DIFFERENCE
from smd_jax.learner.state import Metrics, TrainState
from smd_jax.learner.step import check_sync
from smd_jax.losses.pairs import Judge, Pairs, best_worst, check_group_size, judged_ranks, pairs_of_ranks
from smd_jax.message.trajectory import Trajectory
from smd_jax.metrics import sampler_learner_metrics
from smd_jax.model.protocol import Params
from smd_jax.train.loop import Loop
from smd_jax.train.loop_config import LoopConfig
from smd_jax.train.minibatches import over_steps
from smd_jax.train.samples import Samples


@dataclass(frozen=True)
class OnlineDPOConfig(LoopConfig):
    """One run of online DPO; the other attributes are those of LoopConfig. TRL has group_size 2.

    Attributes:
      update: the learner.
      missing_eos_penalty: taken off the reward of a completion that the length limit cut off, when a pair is chosen;
        the metric `reward` stays the task's. None: nothing. Not with a judge, which gives no rewards.
    """

    update: DPOUpdateConfig = DPOUpdateConfig()
    missing_eos_penalty: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_group_size(self.group_size)
        if self.missing_eos_penalty is not None and not self.missing_eos_penalty > 0:
            raise ValueError(f"expected missing_eos_penalty > 0, or None; got {self.missing_eos_penalty}")


@dataclass(frozen=True)
class OnlineDPOLoop(Loop):
    """Everything of a run of online DPO that does not change; the jitted functions are made once.

    Attributes:
      judge: orders the completions of every prompt, see `smd_jax.losses.pairs.judged_ranks`; None: the task's
        rewards do.
    """

    config: OnlineDPOConfig
    judge: Judge | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        config = self.config
        minibatch = config.prompts_per_step // config.minibatches
        # Called for its error, here before anything is sampled.
        count_parts(minibatch, config.update.microbatch_size, "pairs")
        check_rows(minibatch, self.mesh, "the pairs of a minibatch (prompts_per_step / minibatches)")
        if config.update.microbatch_size is not None:
            check_rows(config.update.microbatch_size, self.mesh, "the pairs of a microbatch (microbatch_size)")
        if self.judge is not None and config.missing_eos_penalty is not None:
            raise ValueError(
                f"expected missing_eos_penalty None with a judge, which gives no rewards; "
                f"got {config.missing_eos_penalty}"
            )

    @cached_property
    def update(self) -> DPOUpdate:
        # In later steps the learner has moved on from the sampler, as it should.
        bound = self.max_difference if self.config.steps_per_rollout == 1 else None
        return make_dpo_update(self.model, self.optimizer, self.config.update, bound)

    @property
    def is_exact(self) -> bool:
        """Whether sampler and learner promise to be one policy."""
        return self.config.update.visibility == "shadow"

    @cached_property
    def replay(self) -> ReplayFunction:
        """The learner's log-probabilities, with no more rows at a time than the update has pairs."""
        config = self.config
        rows = config.update.microbatch_size or config.prompts_per_step // config.minibatches
        return make_replay(self.model, config.update.visibility, rows)

    def check(self, state: TrainState) -> None:
        super().check(state)
        check_reference(state)
        check_sync(state, self.config.update.reference_sync)

    def learn(self, state: TrainState, samples: Samples) -> tuple[TrainState, Metrics]:
        """The optimizer steps of one rollout."""
        pairs = self.pairs(samples)
        with jax.set_mesh(self.mesh):
            batch = self.batch(state.params, samples.trajectory, pairs)
            before = self.before_any_step(state.params, batch)
            if before and self.max_difference is not None and float(before[DIFFERENCE]) > self.max_difference:
                return state, before  # `step` refuses it
            steps = []
            for part in self.minibatches(batch, state):
                state, metrics = self.update(state, part)
                steps.append(metrics)
        return state, over_steps(steps, before)

    def learner_batch(
        self, params: Params, trajectory: Trajectory, rewards: Array, counted_rows: Array | None
    ) -> PairBatch:
        """The pairs of a rollout by its rewards alone, in the shapes that every judge's have; arguments as
        `Loop.learner_batch`."""
        return self.batch(params, trajectory, best_worst(rewards, self.config.group_size))

    def pairs(self, samples: Samples) -> Pairs:
        """One pair of every group, as the judge or the rewards have it."""
        config = self.config
        size = self.config.group_size
        if self.judge is not None:
            groups = [
                samples.completions[first : first + size] for first in range(0, config.completions_per_step, size)
            ]
            # All rows of a group have one prompt, so every `size`-th row stands for its group.
            prompts = [row["prompt"] for row in samples.task_rows[::size]]
            # Every process asks about its own groups: a judge may be slow, and need not answer the same twice.
            own = self.responder.place.feeders.part(len(groups))
            with all_or_none():
                ranks = judged_ranks(self.judge, prompts[own], groups[own])
            of_all = self.responder.place.feeders.of_teams(gather_json(np.asarray(ranks).tolist()))
            return pairs_of_ranks(np.concatenate([np.array(part, np.int32) for part in of_all]))
        rewards = samples.rewards
        if config.missing_eos_penalty is not None:
            cut_off = ~on_host(samples.trajectory.terminated)
            # A copy of the task's rewards: the metrics keep those.
            rewards = rewards - np.float32(config.missing_eos_penalty) * cut_off
        rewarded_rows = samples.rewarded_rows
        return best_worst(jnp.asarray(rewards), size, None if rewarded_rows is None else jnp.asarray(rewarded_rows))

    def batch(self, params: Params, trajectory: Trajectory, pairs: Pairs) -> PairBatch:
        """The pairs of a rollout, with the log-probabilities of the learner before the update if a correction looks at
        them and more than one step is taken; a single step makes them itself."""
        chosen, rejected = (
            jax.tree.map(lambda x, rows=rows: x[rows], trajectory) for rows in (pairs.chosen, pairs.rejected)
        )
        batch = PairBatch(chosen, rejected, pairs.signal)
        if self.config.steps_per_rollout == 1 or not self.config.update.correction.traits.uses_mismatch:
            return batch
        chosen, rejected = shard_batch((chosen, rejected), self.mesh)
        return batch.replace(
            old_chosen_logprobs=self.replay(params, chosen), old_rejected_logprobs=self.replay(params, rejected)
        )

    def before_any_step(self, params: Params, batch: PairBatch) -> Metrics:
        """SAMPLER_LEARNER_METRICS of all pairs; {} where the first step sees all of them and has them itself."""
        if self.config.minibatches == 1:
            return {}
        chosen = batch.old_chosen_logprobs
        rejected = batch.old_rejected_logprobs
        if chosen is None or rejected is None:
            chosen = self.replay(params, batch.chosen)
            rejected = self.replay(params, batch.rejected)
        return compare_pairs(batch, chosen, rejected)


@jax.jit
def compare_pairs(
    batch: PairBatch, chosen_logprobs: Float[Array, "pairs R"], rejected_logprobs: Float[Array, "pairs R"]
) -> Metrics:
    """SAMPLER_LEARNER_METRICS over the tokens of both responses, from the learner's log-probabilities."""
    chosen = batch.chosen
    rejected = batch.rejected
    return sampler_learner_metrics(
        jnp.concatenate([chosen.logprobs, rejected.logprobs]),
        jnp.concatenate([chosen_logprobs, rejected_logprobs]),
        jnp.concatenate([chosen.response_mask, rejected.response_mask]),
    )
