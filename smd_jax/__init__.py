"""Shadow Mask Distillation: RL post-training with a KV cache of fixed size, sampler and learner exactly one policy.

The way of the data: prompts -> rollout (cache + eviction policy) -> Trajectory -> rewards -> advantages -> update.
"""

from smd_jax.advantages import group_relative as group_relative
from smd_jax.attention import BlockSizes as BlockSizes
from smd_jax.attention import attend as attend
from smd_jax.config import ModelConfig as ModelConfig
from smd_jax.distillation import DistillConfig as DistillConfig
from smd_jax.eviction import H2O as H2O
from smd_jax.eviction import RKV as RKV
from smd_jax.eviction import TOVA as TOVA
from smd_jax.eviction import CacheView as CacheView
from smd_jax.eviction import Dense as Dense
from smd_jax.eviction import EvictionPolicy as EvictionPolicy
from smd_jax.eviction import KeyDiff as KeyDiff
from smd_jax.eviction import Knorm as Knorm
from smd_jax.eviction import Protect as Protect
from smd_jax.eviction import Pyramid as Pyramid
from smd_jax.eviction import Random as Random
from smd_jax.eviction import Recent as Recent
from smd_jax.eviction import SnapKV as SnapKV
from smd_jax.eviction import StreamingLLM as StreamingLLM
from smd_jax.grpo import GRPOConfig as GRPOConfig
from smd_jax.grpo import GRPOLoop as GRPOLoop
from smd_jax.learner import score as score
from smd_jax.losses import LossConfig as LossConfig
from smd_jax.losses import policy_loss as policy_loss
from smd_jax.masks import Segments as Segments
from smd_jax.masks import ShadowMask as ShadowMask
from smd_jax.model import Decoder as Decoder
from smd_jax.model import Params as Params
from smd_jax.prompts import PromptBatch as PromptBatch
from smd_jax.prompts import encode_prompts as encode_prompts
from smd_jax.quantization import QuantConfig as QuantConfig
from smd_jax.rollout import RolloutConfig as RolloutConfig
from smd_jax.rollout import rollout as rollout
from smd_jax.sampling import SamplingConfig as SamplingConfig
from smd_jax.trajectory import Trajectory as Trajectory
from smd_jax.update import TrainBatch as TrainBatch
from smd_jax.update import TrainState as TrainState
from smd_jax.update import UpdateConfig as UpdateConfig
from smd_jax.update import init_state as init_state
from smd_jax.update import make_update as make_update
from smd_jax.weights import load_checkpoint as load_checkpoint
from smd_jax.weights import save_checkpoint as save_checkpoint
