"""Tunix' GRPO learner with a rollout of fixed cache size and the shadow masks of that rollout in the learner.

    RLCluster ─► SmdRollout.generate ─► tokens, text        SmdRollout keeps the trajectory
    SmdGRPOLearner ─► TrainExample(…, trajectory) ─► "smd_grpo": Tunix' GRPO loss on log-probabilities of the replay

Importing the package registers the policy loss "smd_grpo". It needs the extra `tunix`.
"""

from smd_jax.integrations.tunix.versions import TESTED_VERSIONS as TESTED_VERSIONS
from smd_jax.integrations.tunix.actor import Actor as Actor
from smd_jax.integrations.tunix.actor import Replay as Replay
from smd_jax.integrations.tunix.rollout import SmdRollout as SmdRollout
from smd_jax.integrations.tunix.learner import SmdGRPOLearner as SmdGRPOLearner
from smd_jax.integrations.tunix.learner import TrainExample as TrainExample
from smd_jax.integrations.tunix.learner import policy_loss as policy_loss
