"""The learner: replays a trajectory under its mask or any other, and takes optimizer steps.

It sees trajectories and advantages, never the eviction policy that made them.
"""

from smd_jax.learner.forward import ResponseScores as ResponseScores
from smd_jax.learner.forward import score as score
from smd_jax.learner.update import TrainBatch as TrainBatch
from smd_jax.learner.update import TrainState as TrainState
from smd_jax.learner.update import UpdateConfig as UpdateConfig
from smd_jax.learner.update import init_state as init_state
from smd_jax.learner.update import make_score as make_score
from smd_jax.learner.update import make_update as make_update
from smd_jax.learner.dpo_update import DPOUpdateConfig as DPOUpdateConfig
from smd_jax.learner.dpo_update import PairBatch as PairBatch
from smd_jax.learner.dpo_update import make_dpo_update as make_dpo_update
