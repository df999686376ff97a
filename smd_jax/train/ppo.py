"""PPO: a critic on the policy's own hidden states, an advantage for every token, and the update.

    params = add_value_head(params, model.config)
    loop = PPOLoop(model, task, tokenizer, optimizer, PPOConfig(...))

One forward pass at the rollout's parameters, under the learner's mask, gives the critic's values. GAE turns them into
advantages and returns. Then the optimizer steps follow. With shadow masks the critic sees the same keys as the sampler.
A KL to a reference is a term of the loss, or with `UpdateConfig.kl_in_reward` a part of every token's reward, as in
TRL's PPO (to 1.12).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from smd_jax.learner.accumulation import count_parts, in_parts
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.forward import check_replayable, learner_mask, replay_hidden, response_hidden
from smd_jax.learner.objective import counted_tokens
from smd_jax.learner.state import Metrics, TrainBatch, TrainState
from smd_jax.losses.value import ValueConfig, explained_variance, gae, terminal_rewards, whiten
from smd_jax.message.trajectory import Trajectory
from smd_jax.metrics import token_mean
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.model.value_head import check_value_head, drop_value_head, values
from smd_jax.train.conversations import last_tokens, tokens_of_turns, turn_rewards
from smd_jax.train.loop import Loop
from smd_jax.train.loop_config import LoopConfig
from smd_jax.train.samples import Samples

MakeTrainBatch = Callable[..., tuple[TrainBatch, Metrics]]


@dataclass(frozen=True, kw_only=True)
class PPOConfig(LoopConfig):
    """Configuration of a PPO run; the other attributes are those of LoopConfig.

    `num_iterations` is TRL's num_ppo_epochs (4 there).

    Attributes:
      update: the learner's configuration, with a critic (`UpdateConfig.value`).
      gamma, lam: discount and decay, see `smd_jax.losses.value.gae`.
      whiten_advantages: shift and scale them to mean 0 and variance 1 over the tokens of a rollout, as in TRL.
    """

    update: UpdateConfig = UpdateConfig(value=ValueConfig())
    gamma: float = 1.0
    lam: float = 0.95
    whiten_advantages: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, number in (("gamma", self.gamma), ("lam", self.lam)):
            if not 0 <= number <= 1:
                raise ValueError(f"expected 0 <= {name} <= 1; got {number}")
        if self.update.value is None:
            raise ValueError(
                "expected a critic, UpdateConfig(value=ValueConfig(...)), because PPO's advantages come from its "
                "values; got None. Without one there is GRPOConfig"
            )
        if self.update.correction.traits.judges_responses:
            raise ValueError(
                f"expected a correction that takes an advantage for every token, as PPO has them; "
                f"got {self.update.correction}"
            )
        if self.update.needs.evictions:
            raise ValueError(
                "expected eviction_coef 0 with PPO, because an eviction is trained by the advantage of its response, "
                f"and PPO's advantages belong to tokens; got {self.update.eviction_coef} and {self.update.terms}. "
                "GRPO and RLOO train a gate"
            )
        if self.update.loss.ratio_level != "token":
            raise ValueError(
                "expected ratio_level 'token' with PPO, because under the ratio of a response all its tokens share one "
                f"gradient and lose their own advantages; got {self.update.loss.ratio_level!r}"
            )


def make_train_batch(model: LanguageModel, config: PPOConfig) -> MakeTrainBatch:
    """The jitted `(params, trajectory, rewards, counted_rows, penalty) -> (batch, metrics)` of a whole rollout.

    Rewards are `[batch]`, given to the last token of each response, or `[batch, R]`, one for each token.
    The penalty is subtracted from the rewards of the tokens, see `smd_jax.losses.kl.kl_penalty`; None: no penalty.

    The returned function raises ValueError for parameters without a value head, for a trajectory whose probabilities no
    learner can reproduce, and for rows that do not divide into microbatches.
    """
    update = config.update

    def evaluate(params: Params, trajectory: Trajectory) -> tuple[Array, Array | None]:
        """Values and log-probabilities `[batch, R]` of the response tokens, from one forward pass under the learner's
        mask.

        With shadow masks the log-probabilities are those that the sampler recorded, unless a correction has to measure
        the difference; None if neither loss nor correction reads them.
        """
        hidden = response_hidden(model, params, trajectory, learner_mask(trajectory, update.learner_visibility))
        critic_values = values(params, hidden)
        if not update.correction.traits.needs_old:
            return critic_values, None
        if update.policy_term.uses_sampler_logprobs_as_old:
            return critic_values, trajectory.logprobs
        return critic_values, replay_hidden(model, params, hidden, trajectory).logprobs

    def train_batch(
        params: Params,
        trajectory: Trajectory,
        rewards: Array,
        counted_rows: Array | None,
        penalty: Array | None = None,
    ) -> tuple[TrainBatch, Metrics]:
        check_replayable(trajectory)
        parts = count_parts(rewards.shape[0], update.microbatch_size)
        critic_values, logprobs = in_parts(partial(evaluate, params), trajectory, parts)
        mask = trajectory.response_mask
        token_rewards = terminal_rewards(rewards, mask) if rewards.ndim == 1 else rewards
        if penalty is not None:
            token_rewards = token_rewards - penalty
        advantages, returns = gae(token_rewards, critic_values, mask, config.gamma, config.lam)
        # Advantages use all tokens of a response; their mean and variance only the tokens that count.
        counted = counted_tokens(update, trajectory, counted_rows)
        if config.whiten_advantages:
            advantages = whiten(advantages, counted)
        batch = TrainBatch(trajectory, advantages, logprobs, counted_rows, critic_values, returns)
        return batch, {
            "critic/values/mean": token_mean(critic_values, counted),
            "critic/returns/mean": token_mean(returns, counted),
            "critic/vf_explained_var": explained_variance(critic_values, returns, counted),
        }

    return jax.jit(train_batch)


@dataclass(frozen=True)
class PPOLoop(Loop):
    """The static parts of a PPO run; see Loop.

    With an environment, credit "trajectory" gives the last token of a conversation the sum of its rewards, and "turn"
    gives the last token of each turn its own. GAE skips tokens that were read.

    Raises:
      ValueError: an environment with compaction; and the errors of Loop.
    """

    config: PPOConfig

    def check_update(self) -> None:
        if self.environment is not None and self.environment.compaction is not None:
            raise ValueError(
                "expected compaction None with PPO, whose returns end with a row, where a conversation would continue "
                f"in the next; got {self.environment.compaction}"
            )

    @cached_property
    def train_batch(self) -> MakeTrainBatch:
        """The jitted function of `make_train_batch`."""
        # The critic sees whole rows, even if the update packs them.
        return make_train_batch(self.model, replace(self.config, update=self.config.unpacked_update))

    def check(self, state: TrainState) -> None:
        check_value_head(state.params)
        super().check(state)

    def policy_params(self, params: Params) -> Params:
        """The parameters without the critic's head, which is not part of the model."""
        return drop_value_head(params)

    def learner_batch(self, params: Params, trajectory: Trajectory, rewards: Array, counted_rows: Array) -> TrainBatch:
        return self.train_batch(params, trajectory, rewards, counted_rows)[0]

    def rollout_batch(self, params: Params, samples: Samples, penalty: Array | None) -> tuple[TrainBatch, Metrics]:
        trajectory, rewards = samples.trajectory, samples.rewards
        if self.credits_turns:
            of_turns = jnp.asarray(turn_rewards(samples.conversations, trajectory)[0])
            rewards = np.asarray(jnp.where(last_tokens(trajectory), tokens_of_turns(of_turns, trajectory), 0.0))
        # A completion without a reward does not count, but NaN times 0 would still be NaN.
        rewards, counted_rows = jax.tree.map(jnp.asarray, (np.nan_to_num(rewards), samples.counted_rows))
        return self.train_batch(params, trajectory, rewards, counted_rows, penalty)
