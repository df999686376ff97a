"""What a policy is trained on: a task gives prompts and judges completions by a reward function.

The signature of rewards is TRL's: `reward(prompts, completions, **columns) -> list[float]`.
"""

from smd_jax.tasks.task import Task as Task
from smd_jax.tasks.task import Prompt as Prompt
from smd_jax.tasks.task import Row as Row
from smd_jax.tasks.reasoning_gym import ReasoningGymTask as ReasoningGymTask
from smd_jax.tasks.gsm8k import Gsm8kTask as Gsm8kTask
from smd_jax.tasks.gsm8k import load_gsm8k as load_gsm8k
from smd_jax.tasks.datasets import load_jsonl as load_jsonl
from smd_jax.tasks.rewards import RewardFunction as RewardFunction
from smd_jax.tasks.rewards import compute_rewards as compute_rewards
