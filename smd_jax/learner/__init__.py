"""The learner: replays a trajectory under its mask or another one, and takes optimizer steps.

It sees trajectories and advantages, never the eviction policy that made them.
"""

from smd_jax.learner.forward import Replay as Replay
from smd_jax.learner.forward import replay as replay
from smd_jax.learner.state import TrainBatch as TrainBatch
from smd_jax.learner.state import TrainState as TrainState
from smd_jax.learner.config import UpdateConfig as UpdateConfig
from smd_jax.learner.terms import Term as Term
from smd_jax.learner.terms import Needs as Needs
from smd_jax.learner.terms import Minibatch as Minibatch
from smd_jax.learner.terms import TermInputs as TermInputs
from smd_jax.learner.terms import TermOutputs as TermOutputs
from smd_jax.learner.terms import TermResults as TermResults
from smd_jax.learner.terms import LearnerSetup as LearnerSetup
from smd_jax.learner.policy_term import PolicyTerm as PolicyTerm
from smd_jax.learner.policy_term import DensePolicyTerm as DensePolicyTerm
from smd_jax.learner.pair_term import PairTerm as PairTerm
from smd_jax.learner.auxiliary_terms import EntropyTerm as EntropyTerm
from smd_jax.learner.auxiliary_terms import BalanceTerm as BalanceTerm
from smd_jax.learner.evictions import EvictionTerm as EvictionTerm
from smd_jax.learner.distill import DistillTerm as DistillTerm
from smd_jax.learner.auxiliary_terms import ValueTerm as ValueTerm
from smd_jax.learner.policy_term import DenseLearner as DenseLearner
from smd_jax.learner.evictions import replay_evictions as replay_evictions
from smd_jax.learner.step import ReferenceSync as ReferenceSync
from smd_jax.learner.state import init_state as init_state
from smd_jax.learner.storage import stored as stored
from smd_jax.learner.forward import make_replay as make_replay
from smd_jax.learner.update import make_update as make_update
