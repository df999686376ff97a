"""Shadow Mask Distillation: RL post-training with a KV cache of fixed size, sampler and learner one policy.

The public API in the order you use it: prompts -> rollout (cache + eviction policy) -> Trajectory -> rewards ->
advantages -> update. The rest lives in subpackages: `smd.eviction.H2O`, `smd.corrections.TIS`, …. Four of them must be
imported by name, because they load more packages: `import smd_jax.runs`, `.monitor`, `.certify`, `.integrations`.
"""

# The model, and its weights on disk.
from smd_jax.config import ModelConfig as ModelConfig
from smd_jax.model import Decoder as Decoder
from smd_jax.model import load_checkpoint as load_checkpoint
from smd_jax.model import save_checkpoint as save_checkpoint

# The rollout: prompts through a cache of fixed size.
from smd_jax.text import PromptBatch as PromptBatch
from smd_jax.text import encode_prompts as encode_prompts
from smd_jax.text import decode_completions as decode_completions
from smd_jax.message.sampling import SamplingConfig as SamplingConfig
from smd_jax.message.quantization import QuantConfig as QuantConfig
from smd_jax.sampler import RolloutConfig as RolloutConfig
from smd_jax.sampler import rollout as rollout
from smd_jax.sampler import Engine as Engine
from smd_jax.sampler import converse as converse
from smd_jax.sampler import ConversationConfig as ConversationConfig

# The message from the sampler to the learner.
from smd_jax.message.trajectory import Trajectory as Trajectory
from smd_jax.message.masks import ShadowMask as ShadowMask
from smd_jax.message.masks import KeyInterval as KeyInterval
from smd_jax.message.masks import Segments as Segments
from smd_jax.message.masks import dense_mask as dense_mask
from smd_jax.message import tree as tree
from smd_jax.model import attend as attend

# The learner.
from smd_jax.losses import LossConfig as LossConfig
from smd_jax.losses import DistillConfig as DistillConfig
from smd_jax.losses import group_relative as group_relative
from smd_jax.learner import replay as replay
from smd_jax.learner import UpdateConfig as UpdateConfig
from smd_jax.learner import TrainBatch as TrainBatch
from smd_jax.learner import TrainState as TrainState
from smd_jax.learner import init_state as init_state
from smd_jax.learner import make_update as make_update

# Whole runs.
from smd_jax.devices.sharding import make_mesh as make_mesh
from smd_jax.train import GRPOConfig as GRPOConfig
from smd_jax.train import GRPOLoop as GRPOLoop
from smd_jax.train import PPOConfig as PPOConfig
from smd_jax.train import PPOLoop as PPOLoop
from smd_jax.train import OnlineDPOConfig as OnlineDPOConfig
from smd_jax.train import OnlineDPOLoop as OnlineDPOLoop

# The packages.
from smd_jax import cache as cache
from smd_jax import corrections as corrections
from smd_jax import devices as devices
from smd_jax import environments as environments
from smd_jax import eviction as eviction
from smd_jax import learner as learner
from smd_jax import losses as losses
from smd_jax import memory as memory
from smd_jax import message as message
from smd_jax import model as model
from smd_jax import sampler as sampler
from smd_jax import tasks as tasks
from smd_jax import text as text
from smd_jax import train as train
