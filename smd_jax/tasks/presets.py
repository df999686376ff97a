"""Ready tasks: the source of the rows, the map function that makes prompts, and the reward.

task = build_task(TaskChoice("gsm8k"))                         rows of the Hub
task = build_task(TaskChoice("gsm8k", source="test.jsonl"))    the same task, rows of a file
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from smd_jax.tasks import reward_functions
from smd_jax.tasks.answers import last_boxed
from smd_jax.tasks.gsm8k import gsm8k_row
from smd_jax.tasks.rewards import RewardFunction
from smd_jax.tasks.row_format import RowFunction
from smd_jax.tasks.sources import DataSource
from smd_jax.tasks.task import Row

MATH_INSTRUCTION = "Think step by step, then give the final answer in \\boxed{}."


@dataclass(frozen=True)
class Preset:
    """A ready task.

    Attributes:
      train, held_out: the rows to train on, and the rows to evaluate on.
      columns: columns that a row must have.
      map_row: from a row of the data set to "prompt" and the columns that the reward takes.
      reward: TRL's signature.
    """

    train: DataSource
    held_out: DataSource
    columns: tuple[str, ...]
    map_row: RowFunction
    reward: RewardFunction


def math_row(row: Row) -> Row:
    """MATH (arXiv:2103.03874) and data with its columns: the answer is the column "answer", or else the content of the
    solution's last `\\boxed{}`."""
    answer = row.get("answer")
    if answer is None or answer == "":
        answer = last_boxed(row["solution"])
    return {**row, "answer": answer, "prompt": f"{row['problem']}\n{MATH_INSTRUCTION}"}


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "gsm8k": Preset(
            train=DataSource("openai/gsm8k", "main", "train"),
            held_out=DataSource("openai/gsm8k", "main", "test"),
            columns=("question", "answer"),
            map_row=gsm8k_row,
            reward=reward_functions.math_answer,
        ),
        "math": Preset(
            train=DataSource("DigitalLearningGmbH/MATH-lighteval", "default", "train"),
            held_out=DataSource("HuggingFaceH4/MATH-500", "default", "test"),
            columns=("problem", "solution"),
            map_row=math_row,
            reward=reward_functions.math_answer,
        ),
    }
)
