"""The loops with a policy loss, whose config is a PolicyConfig."""

from __future__ import annotations

from smd_jax.train.grpo import GRPOLoop
from smd_jax.train.ppo import PPOLoop

PolicyLoop = GRPOLoop | PPOLoop
