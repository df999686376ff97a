"""Training loops for GRPO, PPO and online DPO."""

from smd_jax.train.loop import Loop as Loop
from smd_jax.train.loop_config import LoopConfig as LoopConfig
from smd_jax.train.conversations import EnvironmentConfig as EnvironmentConfig
from smd_jax.train.conversations import TextCompaction as TextCompaction
from smd_jax.train.evaluation import Decode as Decode
from smd_jax.train.evaluation import EvaluationConfig as EvaluationConfig
from smd_jax.train.evaluation import Evaluator as Evaluator
from smd_jax.train.grpo import GRPOConfig as GRPOConfig
from smd_jax.train.grpo import GRPOLoop as GRPOLoop
from smd_jax.train.ppo import PPOConfig as PPOConfig
from smd_jax.train.ppo import PPOLoop as PPOLoop
from smd_jax.train.online_dpo import OnlineDPOConfig as OnlineDPOConfig
from smd_jax.train.online_dpo import OnlineDPOLoop as OnlineDPOLoop
from smd_jax.train.optimizers import OptimizerConfig as OptimizerConfig
from smd_jax.train.optimizers import make_optimizer as make_optimizer
from smd_jax.train.optimizers import learning_rate_schedule as learning_rate_schedule
from smd_jax.train.supervised import encode_examples as encode_examples
from smd_jax.train.supervised import make_supervised_update as make_supervised_update
