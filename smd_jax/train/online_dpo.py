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
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from smd_jax.devices.processes import on_host
from smd_jax.devices.sharding import check_rows, sequence_ways
from smd_jax.learner.accumulation import count_parts
from smd_jax.learner.dpo_update import DPOUpdate, DPOUpdateConfig, PairBatch, check_reference, make_dpo_update
from smd_jax.learner.forward import ReplayFunction, make_replay
from smd_jax.learner.mismatch_guard import DIFFERENCE, is_beyond
from smd_jax.learner.state import Metrics, TrainState
from smd_jax.learner.step import check_sync
from smd_jax.losses.advantages import check_group_size
from smd_jax.losses.pairs import Pairs, best_worst
from smd_jax.message.trajectory import Trajectory
from smd_jax.metrics import sampler_learner_metrics
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.train.loop import Loop
from smd_jax.train.loop_config import LoopConfig
from smd_jax.train.minibatches import minibatches, over_steps, response_widths
from smd_jax.train.samples import Samples


@dataclass(frozen=True, kw_only=True)
class OnlineDPOConfig(LoopConfig):
    """Configuration of an online DPO run; the other attributes are those of LoopConfig. TRL has group_size 2.

    Attributes:
      update: the learner.
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
class PairLearner:
    """Compiled programs of online DPO; each is made once. Attributes as in `smd_jax.train.policy_learner`."""

    model: LanguageModel
    optimizer: optax.GradientTransformation
    config: OnlineDPOConfig
    mesh: Mesh
    max_difference: float | None

    def __post_init__(self) -> None:
        config = self.config
        pairs = config.prompts_per_step // config.minibatches
        count_parts(pairs, config.update.microbatch_size, "pairs")  # raises if they do not divide
        check_rows(pairs, self.mesh, "the pairs of a minibatch (prompts_per_step / minibatches)")
        if config.update.microbatch_size is not None:
            check_rows(config.update.microbatch_size, self.mesh, "the pairs of a microbatch (microbatch_size)")

    @cached_property
    def update(self) -> DPOUpdate:
        # Later steps may differ: the learner has moved on from the sampler.
        bound = self.max_difference if self.config.steps_per_rollout == 1 else None
        return make_dpo_update(self.model, self.optimizer, self.config.update, bound)

    @cached_property
    def replay(self) -> ReplayFunction:
        """The learner's log-probabilities, at most as many rows at a time as the update has pairs."""
        config = self.config
        rows = config.update.microbatch_size or config.prompts_per_step // config.minibatches
        return make_replay(self.model, config.update.visibility, rows)

    @property
    def response_widths(self) -> tuple[int, ...]:
        config = self.config
        return response_widths(config.rollout.max_new_tokens, config.update_widths, sequence_ways(self.mesh))

    @property
    def compiles_ahead(self) -> bool:
        return True

    def check(self, state: TrainState) -> None:
        check_reference(state)
        check_sync(state, self.config.update.reference_sync)

    def batch(self, trajectory: Trajectory, pairs: Pairs) -> PairBatch:
        """The pairs of a rollout as a batch."""
        chosen, rejected = (
            jax.tree.map(lambda x, rows=rows: x[rows], trajectory) for rows in (pairs.chosen, pairs.rejected)
        )
        return PairBatch(chosen, rejected, pairs.signal)

    def take_steps(self, state: TrainState, batch: PairBatch) -> tuple[TrainState, Metrics]:
        """Takes the optimizer steps of one rollout; none beyond `max_difference`, which `Loop.step` refuses."""
        before = self.before_any_step(state.params, batch)
        if before and is_beyond(float(before[DIFFERENCE]), self.max_difference):
            return state, before
        steps = []
        for part in minibatches(batch, state, self.config, self.mesh):
            state, metrics = self.update(state, part)
            steps.append(metrics)
        return state, over_steps(steps, before)

    def before_any_step(self, params: Params, batch: PairBatch) -> Metrics:
        """SAMPLER_LEARNER_METRICS of all pairs; {} where the only step sees all of them and has them itself."""
        if self.config.steps_per_rollout == 1:
            return {}
        return compare_pairs(batch, self.replay(params, batch.chosen), self.replay(params, batch.rejected))


@dataclass(frozen=True)
class OnlineDPOLoop(Loop):
    """The static parts of an online DPO run; see Loop.

    With an environment, a pair is the best and the worst conversation of a group, by the sums of their rewards.

    Raises:
      ValueError: an environment with credit "turn" or with compaction; and what Loop raises.
    """

    config: OnlineDPOConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        environment = self.environment
        if environment is not None and (environment.credit == "turn" or environment.compaction is not None):
            raise ValueError(
                "expected credit 'trajectory' and compaction None with online DPO, which compares whole conversations "
                f"of one row each; got {environment.credit!r} and {environment.compaction}"
            )

    @cached_property
    def learner(self) -> PairLearner:
        return PairLearner(self.model, self.optimizer, self.config, self.mesh, self.max_difference)

    def learn(self, state: TrainState, samples: Samples) -> tuple[TrainState, Metrics]:
        pairs = self.pairs(samples)
        with jax.set_mesh(self.mesh):
            return self.learner.take_steps(state, self.learner.batch(samples.trajectory, pairs))

    def learner_batch(
        self, params: Params, trajectory: Trajectory, rewards: Array, counted_rows: Array | None
    ) -> PairBatch:
        return self.learner.batch(trajectory, best_worst(rewards, self.config.group_size))

    def pairs(self, samples: Samples) -> Pairs:
        """One pair of every group."""
        size = self.config.group_size
        rewards = samples.rewards
        if self.config.missing_eos_penalty is not None:
            truncated = ~on_host(samples.trajectory.terminated)
            # A copy: the metrics keep the task's rewards.
            rewards = rewards - np.float32(self.config.missing_eos_penalty) * truncated
        return best_worst(jnp.asarray(rewards), size, jax.tree.map(jnp.asarray, samples.rewarded_rows))


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
