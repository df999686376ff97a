"""Online DPO: the best and the worst completion of every group as a pair.

    loop = OnlineDPOLoop(model, task, tokenizer, optimizer, config)
    state = init_state(params, optimizer, key, reference=params)

The loss has no ratio to the sampler. Several steps per rollout need no clipping, because the reference limits the
policy.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from smd_jax.devices.processes import on_host
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.state import Metrics, TrainBatch
from smd_jax.losses.advantages import check_group_size
from smd_jax.losses.dpo import DPOConfig, Pairs, best_worst
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import Params
from smd_jax.train.loop import Loop
from smd_jax.train.loop_config import LoopConfig
from smd_jax.train.samples import Samples


@dataclass(frozen=True, kw_only=True)
class OnlineDPOConfig(LoopConfig):
    """Configuration of an online DPO run; the other attributes are those of LoopConfig. TRL has group_size 2.

    Attributes:
      update: the learner's configuration, with a preference loss (`UpdateConfig.pairs`).
      missing_eos_penalty: subtracted from the reward of a completion that the length limit truncated, when pairs are
        chosen; the metric `reward` stays the task's. None: no penalty.
    """

    update: UpdateConfig = UpdateConfig(pairs=DPOConfig())
    missing_eos_penalty: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_group_size(self.group_size)
        if self.update.pairs is None:
            raise ValueError("expected a preference loss, UpdateConfig(pairs=DPOConfig(...)); got pairs None")
        if self.missing_eos_penalty is not None and not self.missing_eos_penalty > 0:
            raise ValueError(f"expected missing_eos_penalty > 0, or None; got {self.missing_eos_penalty}")

    @property
    def learner_rows(self) -> int:
        return self.update.rows_together * self.prompts_per_step

    @property
    def rows_of_a_pass(self) -> int:
        # As many as an update has pairs: this number also divides a rollout of an odd group size.
        return super().rows_of_a_pass // self.update.rows_together


@dataclass(frozen=True)
class OnlineDPOLoop(Loop):
    """The static parts of an online DPO run; see Loop.

    With an environment, a pair is the best and the worst conversation of a group, by the sums of their rewards.

    Raises:
      ValueError: an environment with credit "turn" or with compaction; and the errors of Loop.
    """

    config: OnlineDPOConfig

    def check_update(self) -> None:
        environment = self.environment
        if environment is not None and (environment.credit == "turn" or environment.compaction is not None):
            raise ValueError(
                "expected credit 'trajectory' and compaction None with online DPO, which compares whole conversations "
                f"of one row each; got {environment.credit!r} and {environment.compaction}"
            )

    def rollout_batch(self, params: Params, samples: Samples, penalty: Array | None) -> tuple[TrainBatch, Metrics]:
        return pair_batch(samples.trajectory, self.pairs(samples)), {}

    def learner_batch(self, params: Params, trajectory: Trajectory, rewards: Array, counted_rows: Array) -> TrainBatch:
        return pair_batch(trajectory, best_worst(rewards, self.config.group_size))

    def pairs(self, samples: Samples) -> Pairs:
        """One pair of every group."""
        size = self.config.group_size
        rewards = samples.rewards
        if self.config.missing_eos_penalty is not None:
            truncated = ~on_host(samples.trajectory.terminated)
            # A copy: the metrics keep the task's rewards.
            rewards = rewards - np.float32(self.config.missing_eos_penalty) * truncated
        return best_worst(jnp.asarray(rewards), size, jnp.asarray(samples.rewarded_rows))


def pair_batch(trajectory: Trajectory, pairs: Pairs) -> TrainBatch:
    """The pairs of a rollout as a batch of PairTerm; pairs without signal have advantage 0."""
    rows = jnp.stack([pairs.chosen, pairs.rejected], axis=1).reshape(-1)
    signal = pairs.signal.astype(jnp.float32)
    advantages = jnp.stack([signal, -signal], axis=1).reshape(-1)
    return TrainBatch(jax.tree.map(lambda x: x[rows], trajectory), advantages, None)
