"""Tasks: prompts, and reward functions that grade completions.

Reward functions have TRL's signature: `reward(prompts, completions, **columns) -> list[float | None]`.
"""

from smd_jax.tasks.task import Task as Task
from smd_jax.tasks.task import Prompt as Prompt
from smd_jax.tasks.task import Completion as Completion
from smd_jax.tasks.task import Row as Row
from smd_jax.tasks.build import TaskChoice as TaskChoice
from smd_jax.tasks.build import build_task as build_task
from smd_jax.tasks.build import PRESETS as PRESETS
from smd_jax.tasks.build import Preset as Preset
from smd_jax.tasks.sources import DataSource as DataSource
from smd_jax.tasks.sources import load_rows as load_rows
from smd_jax.tasks.row_format import RowFormat as RowFormat
from smd_jax.tasks.dataset_task import DatasetTask as DatasetTask
from smd_jax.tasks.dataset_task import first_rows as first_rows
from smd_jax.tasks.dataset_task import own_reward as own_reward
from smd_jax.tasks.dataset_task import select_prompts as select_prompts
from smd_jax.tasks.dataset_task import PromptCounts as PromptCounts
from smd_jax.tasks.dataset_task import usable_lengths as usable_lengths
from smd_jax.tasks.functions import import_function as import_function
from smd_jax.tasks.task import completion_text as completion_text
from smd_jax.tasks.reasoning_gym import ReasoningGymTask as ReasoningGymTask
from smd_jax.tasks.rewards import RewardFunction as RewardFunction
from smd_jax.tasks.rewards import Rewards as Rewards
from smd_jax.tasks.rewards import Graded as Graded
from smd_jax.tasks.rewards import Failure as Failure
from smd_jax.tasks.rewards import RewardWarning as RewardWarning
from smd_jax.tasks.rewards import TooManyFailures as TooManyFailures
from smd_jax.tasks.reward_functions import math_answer as math_answer
from smd_jax.tasks.reward_functions import exact_match as exact_match
from smd_jax.tasks.reward_functions import token_f1 as token_f1
from smd_jax.tasks.reward_functions import RougeL as RougeL
from smd_jax.tasks.reward_functions import rouge_l as rouge_l
from smd_jax.tasks.reward_functions import FormatReward as FormatReward
from smd_jax.tasks.reward_functions import format_reward as format_reward
from smd_jax.tasks.reward_functions import Overlong as Overlong
