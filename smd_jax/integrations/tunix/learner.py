"""Tunix' GRPO learner with the record of the rollout in every train example, and the policy loss that replays it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jaxtyping import Array, Float
from tunix.rl import algo_core, common, function_registry, utils
from tunix.rl.grpo import grpo_learner
from tunix.rl.rl_cluster import Mode, RLCluster, Role

from smd_jax.integrations.tunix.actor import Actor, Replay
from smd_jax.integrations.tunix.rollout import SmdRollout
from smd_jax.message.trajectory import Trajectory
from smd_jax.pytrees import any_leaves

# Mismatch of learner and sampler. Tunix' loss computes these metrics, but its learner does not log them.
MISMATCH_METRICS = {"log_ratio/abs_mean": np.mean, "is_ratio/max": np.max, "is_ratio/min": np.min}


@any_leaves
@struct.dataclass(frozen=True, kw_only=True)
class TrainExample(grpo_learner.TrainExample):
    """Tunix' train example with the trajectory. Micro-batches are slices of both."""

    trajectory: Trajectory


@function_registry.register_policy_loss_fn("smd_grpo")
def policy_loss(
    model: Actor,
    train_example: grpo_learner.TrainExample,
    algo_config: grpo_learner.GRPOConfig,
    pad_id: int,
    eos_id: int,
) -> tuple[Float[Array, ""], dict[str, Array | float]]:
    """Tunix' GRPO loss with the log-probabilities of a replay under the rollout's shadow mask."""
    if not isinstance(train_example, TrainExample):
        raise TypeError("train_example: expected one with a trajectory, from SmdGRPOLearner; got one without")
    replayed = Replay(model, train_example.trajectory, algo_config.temperature)
    return algo_core.grpo_loss_fn(replayed, train_example, algo_config, pad_id, eos_id)


class SmdGRPOLearner(grpo_learner.GRPOLearner):
    """GRPOLearner whose train examples carry the trajectory of SmdRollout.

    Old log-probabilities are the sampler's own. With `GRPOConfig(policy_loss_fn="smd_grpo")` the learner is the sampled
    policy, and the ratio of the first step is 1. With "grpo" it is the dense policy, and the ratio shows the mismatch.
    The reference policy of the KL always sees the sampler's keys.
    """

    def __init__(
        self,
        rl_cluster: RLCluster,
        algo_config: grpo_learner.GRPOConfig,
        reward_fns: Callable[..., list[float]] | list[Callable[..., list[float]]],
        metric_fns: Sequence[Callable[..., dict[str, Any]]] | None = None,
        data_shuffle_seed: int | None = None,
    ) -> None:
        """Arguments are those of GRPOLearner.

        Raises:
          TypeError: the cluster's rollout engine is not SmdRollout.
          ValueError: actor and rollout have different meshes, or sequences are packed.
        """
        if not isinstance(rl_cluster.rollout, SmdRollout):
            raise TypeError(f"rollout_engine: expected SmdRollout; got {type(rl_cluster.rollout).__name__}")
        config = rl_cluster.cluster_config
        actor, rollout = config.role_to_mesh[Role.ACTOR], config.role_to_mesh[Role.ROLLOUT]
        if actor != rollout:
            raise ValueError(f"role_to_mesh: expected one mesh for actor and rollout; got {actor} and {rollout}")
        packed = config.training_config.max_seq_token_per_tpu
        if packed is not None:
            raise ValueError(f"max_seq_token_per_tpu: expected None, because each row has its mask; got {packed}")
        super().__init__(rl_cluster, algo_config, reward_fns, metric_fns, data_shuffle_seed)
        trainer = rl_cluster.actor_trainer
        trainer.with_rl_metrics_to_log(trainer.rl_metrics_to_log | MISMATCH_METRICS)

    def _generate_and_compute_advantage(self, training_input: dict[str, Any], mode: Mode = Mode.TRAIN) -> TrainExample:
        rollout = self.rl_cluster.rollout
        assert isinstance(rollout, SmdRollout)
        # By step, so that a resumed run continues with new random numbers; evaluations have separate ones.
        rollout.start_record(2 * self._iter_steps if mode == Mode.TRAIN else 2 * self._eval_iter_steps + 1)
        example: Any = super()._generate_and_compute_advantage(training_input, mode)
        trajectory = rollout.take_record()
        reference = example.ref_per_token_logps
        fields = {field.name: getattr(example, field.name) for field in dataclasses.fields(example)}
        # Tunix' masks leave out every token that equals the padding. These are the sampler's.
        fields["prompt_mask"] = trajectory.valid[:, : trajectory.prompt_width]
        fields["completion_mask"] = trajectory.response_mask
        fields["old_per_token_logps"] = trajectory.logprobs
        fields["ref_per_token_logps"] = None if reference is None else self._reference_logps(trajectory)
        return TrainExample(**fields, trajectory=trajectory)

    def _reference_logps(self, trajectory: Trajectory) -> Float[Array, "rows R"]:
        """Log-probabilities of the reference policy under the trajectory's mask."""
        size = self._compute_logps_micro_batch_size * self.algo_config.num_generations
        slices = utils.chunk_slices_by_size(len(trajectory.tokens), size)
        return jnp.concatenate([self._reference_part(utils.get_batch_slice(trajectory, part)) for part in slices])

    def _reference_part(self, part: Trajectory) -> Float[Array, "rows R"]:
        reference, temperature = self.rl_cluster.inference_worker.get_model("reference"), self.algo_config.temperature
        assert isinstance(reference, Actor)
        return common.compute_per_token_logps(
            *nnx.split(Replay(reference, part, temperature)),
            prompt_tokens=part.tokens[:, : part.prompt_width],
            completion_tokens=part.response,
            pad_id=self.rl_cluster.rollout.pad_id(),
            eos_id=self.rl_cluster.rollout.eos_id(),
            temperature=temperature,
        )
