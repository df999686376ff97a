"""Online DPO: the best and the worst completion of every group as a pair, and the update.

    loop = OnlineDPOLoop(model, task, tokenizer, optimizer, config)
    state = init_state(params, optimizer, key, reference=params)

The loss has no ratio to the sampler. Several steps per rollout need no clipping, because the reference limits the
policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from smd_jax.devices.processes import on_host
from smd_jax.devices.sharding import check_rows
from smd_jax.learner.accumulation import count_parts
from smd_jax.learner.dpo_update import DPOUpdate, DPOUpdateConfig, PairBatch, check_reference, make_dpo_update
from smd_jax.learner.forward import ReplayFunction, make_replay
from smd_jax.learner.mismatch_guard import DIFFERENCE, is_beyond
from smd_jax.learner.state import Metrics, TrainState
from smd_jax.learner.step import check_sync
from smd_jax.losses.advantages import check_group_size
from smd_jax.losses.dpo import Pairs, best_worst
from smd_jax.message.trajectory import Trajectory
from smd_jax.metrics import sampler_learner_metrics
from smd_jax.model.protocol import Params
from smd_jax.train.loop import Loop
from smd_jax.train.loop_config import LoopConfig
from smd_jax.train.minibatches import minibatches, over_steps
from smd_jax.train.samples import Samples


@dataclass(frozen=True, kw_only=True)
class OnlineDPOConfig(LoopConfig):
    """Configuration of an online DPO run; the other attributes are those of LoopConfig. TRL has group_size 2.

    Attributes:
      update: the learner's configuration.
      missing_eos_penalty: subtracted from the reward of a completion that the length limit truncated, when pairs are
        chosen; the metric `reward` stays the task's. None: no penalty.
    """

    update: DPOUpdateConfig = DPOUpdateConfig()
    missing_eos_penalty: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_group_size(self.group_size)
        if self.missing_eos_penalty is not None and not self.missing_eos_penalty > 0:
            raise ValueError(f"expected missing_eos_penalty > 0, or None; got {self.missing_eos_penalty}")

    @property
    def is_exact(self) -> bool:
        return self.update.visibility == "shadow"


@dataclass(frozen=True)
class OnlineDPOLoop(Loop):
    """The static parts of an online DPO run; see Loop. Its jitted functions are cached.

    With an environment, a pair is the best and the worst conversation of a group, by the sums of their rewards.

    Raises:
      ValueError: an environment with credit "turn" or with compaction; pairs that do not divide into microbatches or
        over the mesh; and the errors of Loop.
    """

    config: OnlineDPOConfig

    def check_update(self) -> None:
        environment, config = self.environment, self.config
        if environment is not None and (environment.credit == "turn" or environment.compaction is not None):
            raise ValueError(
                "expected credit 'trajectory' and compaction None with online DPO, which compares whole conversations "
                f"of one row each; got {environment.credit!r} and {environment.compaction}"
            )
        pairs = config.prompts_per_step // config.minibatches
        count_parts(pairs, config.update.microbatch_size, "pairs")  # raises if they do not divide
        check_rows(pairs, self.mesh, "the pairs of a minibatch (prompts_per_step / minibatches)")
        if config.update.microbatch_size is not None:
            check_rows(config.update.microbatch_size, self.mesh, "the pairs of a microbatch (microbatch_size)")

    @cached_property
    def update(self) -> DPOUpdate:
        return make_dpo_update(self.model, self.optimizer, self.config.update, self.max_difference_of_update)

    @cached_property
    def replay(self) -> ReplayFunction:
        """The learner's log-probabilities, at most as many rows at a time as the update has pairs."""
        config = self.config
        rows = config.update.microbatch_size or config.prompts_per_step // config.minibatches
        return make_replay(self.model, config.update.visibility, rows)

    def check(self, state: TrainState) -> None:
        super().check(state)
        check_reference(state)
        check_sync(state, self.config.update.reference_sync)

    def learn(self, state: TrainState, samples: Samples) -> tuple[TrainState, Metrics]:
        """Takes the optimizer steps of one rollout; none if the mismatch exceeds `max_difference`."""
        pairs = self.pairs(samples)
        with jax.set_mesh(self.mesh):
            batch = pair_batch(samples.trajectory, pairs)
            before: Metrics = {}  # where the only step sees all pairs, it has these metrics itself
            if not self.config.first_pass_sees_all:
                chosen, rejected = (self.replay(state.params, rows) for rows in (batch.chosen, batch.rejected))
                before = compare_pairs(batch, chosen, rejected)
                if is_beyond(float(before[DIFFERENCE]), self.max_difference):
                    return state, before
            steps = []
            for part in minibatches(batch, state, self.config, self.mesh):
                state, metrics = self.update(state, part)
                steps.append(metrics)
        return state, over_steps(steps, before)

    def learner_batch(
        self, params: Params, trajectory: Trajectory, rewards: Array, counted_rows: Array | None
    ) -> PairBatch:
        return pair_batch(trajectory, best_worst(rewards, self.config.group_size))

    def pairs(self, samples: Samples) -> Pairs:
        """One pair of every group."""
        size = self.config.group_size
        rewards = samples.rewards
        if self.config.missing_eos_penalty is not None:
            truncated = ~on_host(samples.trajectory.terminated)
            # A copy: the metrics keep the task's rewards.
            rewards = rewards - np.float32(self.config.missing_eos_penalty) * truncated
        return best_worst(jnp.asarray(rewards), size, jax.tree.map(jnp.asarray, samples.rewarded_rows))


def pair_batch(trajectory: Trajectory, pairs: Pairs) -> PairBatch:
    """The pairs of a rollout as a batch."""
    chosen, rejected = (
        jax.tree.map(lambda x, rows=rows: x[rows], trajectory) for rows in (pairs.chosen, pairs.rejected)
    )
    return PairBatch(chosen, rejected, pairs.signal)


@jax.jit
def compare_pairs(
    batch: PairBatch, chosen_logprobs: Float[Array, "pairs R"], rejected_logprobs: Float[Array, "pairs R"]
) -> Metrics:
    """SAMPLER_LEARNER_METRICS over the tokens of both responses, from the learner's log-probabilities."""
    chosen, rejected = batch.chosen, batch.rejected
    return sampler_learner_metrics(
        jnp.concatenate([chosen.logprobs, rejected.logprobs]),
        jnp.concatenate([chosen_logprobs, rejected_logprobs]),
        jnp.concatenate([chosen.response_mask, rejected.response_mask]),
    )
