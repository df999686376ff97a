"""Training loops for GRPO, PPO and online DPO, and what surrounds a run: checkpoints, resume."""

from smd_jax.train.loop import Loop as Loop
from smd_jax.train.loop import LoopConfig as LoopConfig
from smd_jax.train.grpo import GRPOConfig as GRPOConfig
from smd_jax.train.grpo import GRPOLoop as GRPOLoop
from smd_jax.train.ppo import PPOConfig as PPOConfig
from smd_jax.train.ppo import PPOLoop as PPOLoop
from smd_jax.train.online_dpo import OnlineDPOConfig as OnlineDPOConfig
from smd_jax.train.online_dpo import OnlineDPOLoop as OnlineDPOLoop
