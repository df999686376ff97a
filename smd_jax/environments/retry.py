"""Several attempts at a task's row, graded by the task's own reward: reasoning-gym and every other dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smd_jax.tasks.dataset_task import own_reward
from smd_jax.tasks.reward_calls import when_ready
from smd_jax.tasks.reward_functions import math_answer, same_answer
from smd_jax.tasks.task import Prompt, Row, Task, batch_columns, completion_of


@dataclass
class RetryEnvironment:
    """Grades each turn as an answer to the row, and lets the policy try again until the answer is right.

        factory = functools.partial(RetryEnvironment, ReasoningGymTask("chain_sum", seed=0, size=100))

    Attributes:
      task: gives the rows and the reward.
      attempts: maximum turns. right: reward from which an answer is right.
      hint: text that the policy reads after a wrong answer.
    """

    task: Task
    attempts: int = 3
    right: float = 1.0
    hint: str = "That is not right. Try again."

    def prepare(self) -> None:
        """Makes the dataset and imports the packages of `math_answer` once for all conversations: it takes seconds."""
        self.task[0]
        if own_reward(self.task) is math_answer:
            same_answer("1", "1")

    def reset(self, row: Row) -> Prompt:
        """The row's prompt."""
        self._row, self._left = row, self.attempts
        return row["prompt"]

    def step(self, text: str) -> Any:
        """The reward of the answer that ends the conversation; 0 before. Awaitable if the task grades so."""
        self._left -= 1
        prompt = self._row["prompt"]
        graded = self.task.reward([prompt], [completion_of(prompt, text)], **batch_columns([self._row]))
        return when_ready(graded, self._graded)

    def _graded(self, graded: Sequence[float | None]) -> tuple[str, float, bool]:
        if graded[0] is None:
            raise ValueError("expected a reward; got None: it does not apply to this row")
        reward = float(graded[0])
        done = reward >= self.right or not self._left
        return self.hint, reward if done else 0.0, done
