"""A task: rows with prompts, a reward for completions, and the order in which a run visits the rows.

Rewards have TRL's signature, so a reward function written for TRL works here and vice versa:

    reward(prompts, completions, **columns) -> list[float | None]

The columns are `completion_ids` and the rows' other fields, one list each. The completion of a text prompt is text;
that of chat messages is one assistant message.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from smd_jax.config import check_seed
from smd_jax.text.chat_template import TemplateError, render_messages
from smd_jax.text.prompts import Tokenizer, encode_prompt, wants_special_tokens
from smd_jax.text.visible_text import one_line

Prompt = str | list[dict[str, str]]  # plain text, or chat messages {"role": ..., "content": ...}
Completion = str | list[dict[str, str]]  # text, or [{"role": "assistant", "content": text}] for chat messages
Row = dict[str, Any]  # at least "prompt"

TEMPLATE_KWARGS = "chat_template_kwargs"  # the column with variables for a row's chat template, named as in TRL


@runtime_checkable
class Task(Protocol):
    """Rows and their reward. Rows are dicts with a "prompt"; `reward` gets their other fields as columns."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...

    # Any rather than Completion, so that a task whose prompts are text may declare text.
    def reward(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]) -> Sequence[Any]:
        """One finite number per completion, in their order; None where the reward does not apply."""
        ...


def completion_of(prompt: Prompt, text: str) -> Completion:
    """The completion that a reward function gets for a prompt."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def completion_text(completion: Completion) -> str:
    """The text of a completion of either form."""
    return completion if isinstance(completion, str) else completion[0]["content"]


def question_of(prompt: Prompt) -> str:
    """The text of a prompt, or of its last chat message."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def batch_columns(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """The fields of `rows` other than the prompt, one list each, for a reward's `**columns`.

    A missing field is None, as in `datasets`.
    """
    names = dict.fromkeys(name for row in rows for name in row if name != "prompt")
    return {name: [row.get(name) for row in rows] for name in names}


class MissingExtraError(ImportError):
    """A package of an extra is not installed."""


def missing_extra(package: str) -> MissingExtraError:
    """The error of a task whose package is not installed."""
    return MissingExtraError(f"this task needs {package}, which is not installed: pip install 'smd_jax[train]'")


def template_kwargs_of(row: Row, where: str) -> dict[str, Any]:
    """The variables that a row gives its chat template, such as {"enable_thinking": False}. Raises ValueError, which
    names the row by `where`, unless they are a dict. Variables that are None are left out: `datasets` adds those of
    other rows as None."""
    values = row.get(TEMPLATE_KWARGS)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(
            f'{where}: expected {TEMPLATE_KWARGS} as a dict, such as {{"enable_thinking": False}}; got {values!r:.80}'
        )
    return {name: value for name, value in values.items() if value is not None}


def prompt_text(row: Row, tokenizer: Tokenizer) -> str:
    """The text of a row's prompt, written by the chat template if the tokenizer has one.

    Raises:
      ValueError: a row without a prompt; chat messages for a tokenizer without a chat template; messages that its
        template refuses, as Gemma's refuses a system prompt; a template that fails or exceeds its limits;
        chat_template_kwargs that are no dict.
    """
    if "prompt" not in row:
        raise ValueError(f"expected a row with a prompt; got the fields {', '.join(row)}")
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
        return render_messages(messages, tokenizer, variables)
    except ValueError as error:
        roles = one_line(repr([message.get("role") for message in messages]), 200)
        kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        raise ValueError(
            f"expected messages that the tokenizer's chat template takes; got those of {roles}, and it says: "
            f"{kind}{one_line(str(error), 300)}"
        ) from error


def prompt_length(row: Row, tokenizer: Tokenizer) -> int:
    """Tokens of the row's prompt as the model sees it, including those of the chat template."""
    text = prompt_text(row, tokenizer)
    return len(encode_prompt(tokenizer, text, add_special_tokens=wants_special_tokens(tokenizer)))


def batch_indices(size: int, batch: int, step: int, seed: int) -> Int[np.ndarray, " batch"]:
    """The rows of a training step, a function of the arguments only, so that a run resumes from its step.

    Every epoch visits all rows in another order; a batch may span two epochs.

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
    # NumPy splits a seed into words of 32 bits: 2**32 in epoch 0 would have the order of 0 in epoch 1.
    check_seed("seed", seed)
    # Counted over all epochs, so that no row is left out if the batch does not divide the dataset.
    epochs, places = np.divmod(np.arange(step * batch, (step + 1) * batch), size)
    return np.array([_epoch_order(size, seed, int(e))[p] for e, p in zip(epochs, places, strict=True)])


# Cached, because the rows of a batch are in one epoch or two.
@functools.lru_cache(maxsize=4)
def _epoch_order(size: int, seed: int, epoch: int) -> np.ndarray:
    # Not the sum of both: seed 1 would begin with the second epoch of seed 0.
    return np.random.default_rng([seed, epoch]).permutation(size)


def rows_of_step(task: Task, size: int, step: int, seed: int) -> list[Row]:
    """The rows of a training step; arguments as `batch_indices`."""
    return [task[int(index)] for index in batch_indices(len(task), size, step, seed)]
