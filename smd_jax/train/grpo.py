"""GRPO and RLOO: advantages from the rewards of a group, and the update.

RLOO is `GRPOConfig(advantages="leave_one_out", scale_rewards="none")`; GSPO, DAPO, Dr. GRPO and CISPO are options of
`LossConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from smd_jax.devices.processes import on_host
from smd_jax.learner.state import Metrics, TrainBatch
from smd_jax.losses.advantages import Scale, check_group_size, group_relative, leave_one_out, turn_relative
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import Params
from smd_jax.train.conversations import tokens_of_turns, turn_rewards
from smd_jax.train.loop import Loop
from smd_jax.train.loop_config import LoopConfig
from smd_jax.train.samples import Samples

Estimator = Literal["group_relative", "leave_one_out"]


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(LoopConfig):
    """Configuration of a GRPO or RLOO run; the other attributes are those of LoopConfig.

    Attributes:
      advantages: "group_relative" (GRPO) or "leave_one_out" (RLOO, with scale_rewards "none").
      scale_rewards: how group-relative advantages are normalised, see `smd_jax.losses.advantages.group_relative`.
      dynamic_sampling: drops groups whose rewards are all equal, which have no gradient, so that they do not count in
        the loss; up to this many further rollouts are sampled to replace them (DAPO, arXiv:2503.14476). 0 only drops
        them; None keeps them, as in TRL. The task's rewards count, before `kl_in_reward`. Prompts of further rollouts
        that a step does not need are skipped.
      rollouts_ahead: 1 samples the next rollout while the learner takes its steps on this one, with the parameters
        before those steps, see `smd_jax.train.async_rollout`; it needs one device, and a second copy of the
        parameters. The clipped ratio of the loss corrects for the age of the rollout; the shadow mask keeps the
        eviction exact. Rewards with their own processes are computed ahead, too; other rewards when the rollout is
        used, in the main thread. 0 samples every rollout with the newest parameters.
    """

    advantages: Estimator = "group_relative"
    scale_rewards: Scale = "group"
    dynamic_sampling: int | None = None
    rollouts_ahead: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_group_size(self.group_size)
        if self.rollouts_ahead not in (0, 1):
            raise ValueError(f"expected rollouts_ahead 0 or 1; got {self.rollouts_ahead}")
        if self.rollouts_ahead:
            if self.update.loss.ratio_level != "token":
                raise ValueError(
                    "expected ratio_level 'token' with rollouts_ahead 1, which takes the ratio to the sampler: in 16 "
                    "bits the rounding of the two differs by more than a response's bounds allow; got "
                    f"{self.update.loss.ratio_level!r}"
                )
            exact = self.update.policy_term.matches_sampler and self.update.correction.traits.needs_old
            if not exact or self.dynamic_sampling is not None or self.update.dense_learner:
                raise ValueError(
                    "expected visibility 'shadow' with the correction Shadow(), no dynamic_sampling and no "
                    f"dense_learner with rollouts_ahead 1, so that the ratio to the sampler measures age only; got "
                    f"{self.update} and dynamic_sampling {self.dynamic_sampling}"
                )
        if self.update.value is not None:
            raise ValueError(
                f"expected update.value None, because advantages from a group need no critic: PPOConfig has one; "
                f"got {self.update.value}"
            )
        if self.update.pairs is not None:
            raise ValueError(f"expected update.pairs None, or OnlineDPOConfig; got {self.update.pairs}")
        if self.advantages == "leave_one_out" and self.scale_rewards != "none":
            raise ValueError(
                f"expected scale_rewards 'none' with advantages 'leave_one_out', because dividing by the deviation "
                f"of the group would bias the gradient; got {self.scale_rewards!r}"
            )
        if self.dynamic_sampling is not None and self.scale_rewards == "batch":
            raise ValueError(
                "expected scale_rewards 'group' or 'none' with dynamic_sampling, which drops a part of the batch; "
                "got 'batch'"
            )
        if self.dynamic_sampling is not None and self.dynamic_sampling < 0:
            raise ValueError(f"expected dynamic_sampling >= 0 further rollouts, or None; got {self.dynamic_sampling}")

    @property
    def extra_rollouts(self) -> int | None:
        return self.dynamic_sampling

    @property
    def samples_ahead(self) -> bool:
        return self.rollouts_ahead == 1


@dataclass(frozen=True)
class GRPOLoop(Loop):
    """The static parts of a GRPO or RLOO run; see Loop.

    Raises:
      ValueError: credit 'turn' with an option that supports only rewards of responses; compaction with
        rows_per_prompt > 1 but without pack_columns; and the errors of Loop.
    """

    config: GRPOConfig

    def check_update(self) -> None:
        config, update = self.config, self.config.update
        if self.credits_turns:
            if update.kl_in_reward or config.advantages != "group_relative":
                raise ValueError(
                    "expected advantages 'group_relative' and no kl_in_reward with credit 'turn', which normalises the "
                    f"rewards of turns; got {config.advantages!r} and kl_in_reward {update.kl_in_reward}"
                )
            if update.loss.ratio_level != "token" or any(each.traits.judges_responses for each in update.corrections):
                raise ValueError(
                    "expected ratio_level 'token' and a correction of tokens with credit 'turn', because those of a "
                    f"whole response have one advantage for all its turns; got {update.loss.ratio_level!r} and "
                    f"{update.corrections}"
                )
            if config.dynamic_sampling is not None:
                raise ValueError(
                    "expected dynamic_sampling None with credit 'turn', because a group with equal sums of rewards may "
                    f"differ in its turns; got {config.dynamic_sampling}"
                )
        compacts = self.environment is not None and self.environment.compaction is not None
        if compacts and update.rows_per_prompt > 1 and update.pack_columns is None:
            raise ValueError(
                "expected pack_columns with rows_per_prompt and compaction, because the contexts of a conversation "
                f"have different prompts, which only packed rows share; got rows_per_prompt {update.rows_per_prompt}"
            )

    def rollout_batch(self, params: Params, samples: Samples, penalty: Array | None) -> tuple[TrainBatch, Metrics]:
        counted_rows, rewarded_rows = jax.tree.map(jnp.asarray, (samples.counted_rows, samples.rewarded_rows))
        config, rewards = self.config, jnp.asarray(samples.rewards)
        if penalty is not None:
            # Before the group mean: a response far from the reference must be worse than the others.
            rewards = rewards - jnp.asarray(on_host(penalty.reshape(len(rewards), -1).sum(axis=1)))
        if self.credits_turns:
            # A token has the advantage of its turn.
            of_turns, answered = map(jnp.asarray, turn_rewards(samples.conversations, samples.trajectory))
            per_turn = turn_relative(of_turns, answered, config.group_size, config.scale_rewards, rewarded_rows)
            row_advantages = tokens_of_turns(per_turn, samples.trajectory)
        else:
            row_advantages = jnp.repeat(advantages(config, rewards, rewarded_rows), samples.contexts)
        return self._batch(params, samples.trajectory, row_advantages, counted_rows), {}

    def learner_batch(self, params: Params, trajectory: Trajectory, rewards: Array, counted_rows: Array) -> TrainBatch:
        row_advantages = jnp.repeat(advantages(self.config, rewards), self.rollouts.contexts)
        if self.credits_turns:
            row_advantages = tokens_of_turns(row_advantages[:, None], trajectory)
        return self._batch(params, trajectory, row_advantages, counted_rows)

    def _batch(self, params: Params, trajectory: Trajectory, advantages: Array, counted_rows: Array) -> TrainBatch:
        has_dense = self.config.update.dense_learner is not None and not self.config.first_pass_sees_all
        dense_old = self.dense_replay(params, trajectory) if has_dense else None
        old = self.old_logprobs(params, trajectory)
        return TrainBatch(trajectory, advantages, old, counted_rows, dense_old_logprobs=dense_old)

    def known_advantages(self, samples: Samples) -> np.ndarray | None:
        if self.config.update.kl_in_reward or self.credits_turns:
            return None
        return np.asarray(advantages(self.config, samples.rewards, jnp.asarray(samples.rewarded_rows)))


def advantages(config: GRPOConfig, rewards: Array | np.ndarray, rewarded_rows: Array | None = None) -> Array:
    """Advantages of the rewards of a rollout, both `[batch]`; `rewarded_rows` as in `smd_jax.losses.advantages`."""
    if config.advantages == "leave_one_out":
        return leave_one_out(jnp.asarray(rewards), config.group_size, rewarded_rows)
    return group_relative(jnp.asarray(rewards), config.group_size, config.scale_rewards, rewarded_rows)
