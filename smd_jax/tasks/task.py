"""A task is rows with a prompt, and a reward for completions; and the order in which a run visits the rows.

Rewards have TRL's signature, so a reward function written for TRL works here and the other way round:

    reward(prompts, completions, **columns) -> list[float | None]

The columns are `completion_ids` and the rows' other fields, one list each. A completion is text where its prompt is
text, and one message of the assistant where that is chat messages.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from smd_jax.config import check_seed
from smd_jax.text.chat_template import RESERVED_VARIABLES, TemplateError, render_messages
from smd_jax.text.prompts import Tokenizer, encode_prompt, wants_special_tokens
from smd_jax.text.visible_text import one_line

Prompt = str | list[dict[str, str]]  # plain text, or chat messages {"role": ..., "content": ...}
Completion = str | list[dict[str, str]]  # as its prompt: text, or [{"role": "assistant", "content": text}]
Row = dict[str, Any]  # at least "prompt"

TEMPLATE_KWARGS = "chat_template_kwargs"  # the column with variables for a row's chat template, named as in TRL


@runtime_checkable
class Task(Protocol):
    """Rows and their reward. Rows are dicts with a "prompt"; their other fields come back to `reward` as columns."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...

    # Any rather than Completion: a task whose prompts are all text may say that its completions are.
    def reward(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]) -> Sequence[Any]:
        """One finite number per completion, in the order of the completions; None where there is no opinion."""
        ...


def completion_of(prompt: Prompt, text: str) -> Completion:
    """What a reward function gets as the completion of a prompt."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def completion_text(completion: Completion) -> str:
    """The text of a completion, whatever its prompt was."""
    return completion if isinstance(completion, str) else completion[0]["content"]


def question_of(prompt: Prompt) -> str:
    """The text of a prompt, and of chat messages the last one: without the system's."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def says_nothing(prompt: Prompt) -> bool:
    """Whether a prompt has no text, or white space alone; a chat template makes tokens of it all the same."""
    return not question_of(prompt).strip()


def batch_columns(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """The fields of `rows` other than the prompt, one list each: what a reward takes as `**columns`.

    A field that a row does not have is None, as `datasets` has it.
    """
    names = dict.fromkeys(name for row in rows for name in row if name != "prompt")
    return {name: [row.get(name) for row in rows] for name in names}


def column_of(columns: Mapping[str, Sequence[Any]], name: str) -> Sequence[Any]:
    """One of the columns that a reward was given.

    Raises:
      ValueError: if the rows have no such field.
    """
    if name not in columns:
        raise ValueError(f"expected a column {name!r} beside the prompts and completions; got {sorted(columns)}")
    return columns[name]


class MissingExtraError(ImportError):
    """A package is not installed that only a part of the library needs."""


def missing_extra(package: str) -> MissingExtraError:
    """The error of a task whose package is an extra."""
    return MissingExtraError(f"this task needs {package}, which is not installed: pip install -e '.[train]'")


def template_kwargs_of(row: Row, where: str) -> dict[str, Any]:
    """The variables that a row gives its chat template, such as {"enable_thinking": False}.

    Those that are None are left out: `datasets` fills in None for variables of other rows.

    Args:
      where: names the row in errors.

    Raises:
      ValueError: no dict, or a reserved name.
    """
    values = row.get(TEMPLATE_KWARGS)
    if values is None:
        return {}
    if not isinstance(values, dict) or any(name in values for name in RESERVED_VARIABLES):
        raise ValueError(
            f'{where}: expected {TEMPLATE_KWARGS} as a dict, such as {{"enable_thinking": False}}, without '
            f"{list(RESERVED_VARIABLES)}; got {values!r:.80}"
        )
    return {name: value for name, value in values.items() if value is not None}


def prompt_text(row: Row, tokenizer: Tokenizer) -> str:
    """The text of a row's prompt, written by the chat template if the tokenizer has one.

    Raises:
      ValueError: chat messages for a tokenizer without a chat template; messages that its template refuses, as Gemma's
        refuses a system prompt; a template that fails or exceeds its limits; chat_template_kwargs that are no dict.
    """
    prompt: Prompt = row["prompt"]
    variables = template_kwargs_of(row, "a row")
    if tokenizer.chat_template is None:
        if not isinstance(prompt, str):
            raise ValueError(
                f"expected a plain string, because the tokenizer has no chat template; got messages {prompt!r:.80}"
            )
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        text = render_messages(messages, tokenizer, variables)
        text.encode()
        return text
    except ValueError as error:
        roles = one_line(repr([message["role"] for message in messages]), 200)
        kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        raise ValueError(
            f"expected messages that the tokenizer's chat template takes; got those of {roles}, and it says: "
            f"{kind}{one_line(str(error), 300)}"
        ) from error


def prompt_length(row: Row, tokenizer: Tokenizer) -> int:
    """Tokens of the row's prompt as the model sees it, those of the chat template included."""
    text = prompt_text(row, tokenizer)
    return len(encode_prompt(tokenizer, text, add_special_tokens=wants_special_tokens(tokenizer)))


def prompt_lengths(task: Task, tokenizer: Tokenizer) -> Int[np.ndarray, " rows"]:
    """Tokens of all prompts, int64 `[rows]`."""
    return np.array([prompt_length(task[index], tokenizer) for index in range(len(task))])


def longest_prompt(tokenizer: Tokenizer, task: Task) -> int:
    """Tokens of the task's longest prompt: the width that refuses none of them."""
    return int(prompt_lengths(task, tokenizer).max())


def batch_indices(size: int, batch: int, step: int, seed: int) -> Int[np.ndarray, " batch"]:
    """The rows of a training step, as a function of the step alone: to resume, nothing but the step must be known.

    Rows are visited epoch by epoch, every epoch in an order of its own; a batch may run over from one into the next.

    Args:
      size: rows of the dataset.
      batch: rows of a step.
      step: counted from 0.
      seed: from 0 to 2**32 - 1; with the epoch it seeds that epoch's permutation.

    Returns:
      int64 `[batch]`, values from 0 to size - 1.
    """
    if size < 1 or batch < 1 or step < 0:
        raise ValueError(f"expected size >= 1, batch >= 1 and step >= 0; got {size}, {batch} and {step}")
    # NumPy takes a seed apart into words of 32 bits: 2**32 in epoch 0 would have the order of 0 in epoch 1.
    check_seed("seed", seed)
    # Counted through all epochs, so that no row is left out where the batch does not divide the dataset.
    epochs, places = np.divmod(np.arange(step * batch, (step + 1) * batch), size)
    return np.array([_epoch_order(size, seed, int(e))[p] for e, p in zip(epochs, places, strict=True)])


# Asked for every row of a batch, which mostly lies in one epoch or two: the permutation is made once for all of them.
@functools.lru_cache(maxsize=4)
def _epoch_order(size: int, seed: int, epoch: int) -> np.ndarray:
    # Both numbers and not their sum, or seed 1 would begin where seed 0 is in its second epoch.
    return np.random.default_rng([seed, epoch]).permutation(size)


@runtime_checkable
class SteppedTask(Protocol):
    """A task whose rows have no numbers, such as a stream: it gives the rows of a step."""

    def batch(self, size: int, step: int, seed: int) -> list[Row]:
        """The `size` rows of a step, as a function of these arguments alone."""
        ...

    def reward(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]) -> Sequence[Any]:
        """As `Task.reward`."""
        ...


def rows_of_step(task: Task | SteppedTask, size: int, step: int, seed: int) -> list[Row]:
    """The rows of a training step; arguments as `batch_indices`."""
    if isinstance(task, SteppedTask):
        return task.batch(size, step, seed)
    return [task[int(index)] for index in batch_indices(len(task), size, step, seed)]
