"""What a policy is trained on: a task gives prompts and judges completions by a reward function.

The signature of rewards is TRL's: `reward(prompts, completions, **columns) -> list[float]`.
"""

from smd_jax.tasks.task import Task as Task
from smd_jax.tasks.task import SteppedTask as SteppedTask
from smd_jax.tasks.task import Prompt as Prompt
from smd_jax.tasks.task import Row as Row
from smd_jax.tasks.sources import DataSource as DataSource
from smd_jax.tasks.sources import load_rows as load_rows
from smd_jax.tasks.row_format import RowFormat as RowFormat
from smd_jax.tasks.dataset_task import DatasetTask as DatasetTask
from smd_jax.tasks.dataset_task import StreamTask as StreamTask
from smd_jax.tasks.dataset_task import first_rows as first_rows
from smd_jax.tasks.dataset_task import own_reward as own_reward
from smd_jax.tasks.task import prompt_lengths as prompt_lengths
from smd_jax.tasks.lengths import select_prompts as select_prompts
from smd_jax.tasks.lengths import PromptCounts as PromptCounts
from smd_jax.tasks.lengths import PromptLimit as PromptLimit
from smd_jax.tasks.functions import import_function as import_function
from smd_jax.tasks.reasoning_gym import ReasoningGymTask as ReasoningGymTask
from smd_jax.tasks.gsm8k import Gsm8kTask as Gsm8kTask
from smd_jax.tasks.gsm8k import load_gsm8k as load_gsm8k
from smd_jax.tasks.datasets import load_jsonl as load_jsonl
from smd_jax.tasks.rewards import RewardFunction as RewardFunction
from smd_jax.tasks.rewards import compute_rewards as compute_rewards
