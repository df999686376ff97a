"""Converts a row of a data set to a row of a task: the map function, the prompt column, the system prompt.

{"q": "1 + 1?", "a": "2"}  ──map_row──►  {"question": "1 + 1?", "answer": "2"}
                           ──prompt_column "question"──►  {"prompt": "1 + 1?", "answer": "2"}
                           ──system_prompt "Add."──►      {"prompt": [{"role": "system", …}, {"role": "user", …}], …}
                           ──chat_template_kwargs──►      {"prompt": …, "chat_template_kwargs": {…}, …}
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from smd_jax.tasks.task import TEMPLATE_KWARGS, Prompt, Row, template_kwargs_of
from smd_jax.tasks.text_files import FileRow
from smd_jax.text.visible_text import one_line

RowFunction = Callable[[Row], Row]

# A user's map function raises these on an unexpected row.
_ROW_ERRORS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


@dataclass(frozen=True)
class RowFormat:
    """The steps from a data set's rows to prompts and columns for the reward.

    Attributes:
      prompt_column: the column with the prompt: text, or chat messages `[{"role": ..., "content": ...}]`. The task's
        rows call it "prompt"; all other columns go to the reward.
      system_prompt: added as a first system message, for tokenizers with a chat template.
      map_row: applied to every row first; it must give the same row each time.
      chat_template_kwargs: variables of the chat template, such as ("enable_thinking", False). Those in a row's column
        of this name take precedence, as in TRL.
    """

    prompt_column: str = "prompt"
    system_prompt: str | None = None
    map_row: RowFunction | None = None
    chat_template_kwargs: tuple[tuple[str, object], ...] = ()

    def row(self, raw: Mapping[str, Any], where: str) -> Row:
        """The task's row.

        Args:
          where: names the row in errors.

        Raises:
          ValueError: the map function raises or returns no dict; no such column; a prompt that is neither text nor chat
            messages, or whose last message is the assistant's; chat_template_kwargs that are no dict.
        """
        columns = dict(raw) if self.map_row is None else self._mapped(raw, where)
        if self.prompt_column not in columns:
            raise ValueError(
                f"{where}: expected a column {self.prompt_column!r} with the prompt; got the columns "
                f"{_names(columns)}; prompt_column says which one has the prompt"
            )
        prompt, variables = columns.pop(self.prompt_column), template_kwargs_of(columns, where)
        if not isinstance(raw, FileRow):
            # In Arrow all rows have the same fields, also inside of tool calls and schemas; JSON has those it names.
            prompt, variables = _without_none(prompt), _without_none(variables)
        prompt = self._with_system(_checked_prompt(prompt, where), where)
        values = dict(self.chat_template_kwargs) | variables
        return columns | {"prompt": prompt} | ({TEMPLATE_KWARGS: values} if values else {})

    def _mapped(self, raw: Mapping[str, Any], where: str) -> Row:
        assert self.map_row is not None
        try:
            # A copy: rows of text files stay in memory, and a function may change its argument.
            mapped = self.map_row(copy.deepcopy(dict(raw)))
        except _ROW_ERRORS as error:
            raise ValueError(
                f"{where}: expected the map function to give a row; it raised {type(error).__name__}: "
                f"{one_line(str(error), 200)}. The row has the columns {_names(raw)}"
            ) from error
        if not isinstance(mapped, dict):
            raise ValueError(f"{where}: expected the map function to give a dict; got {mapped!r:.80}")
        return dict(mapped)

    def _with_system(self, prompt: Prompt, where: str) -> Prompt:
        if self.system_prompt is None:
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if messages[0]["role"] == "system":
            raise ValueError(f"{where}: expected messages without their own system prompt; got {prompt[0]!r:.80}")
        return [{"role": "system", "content": self.system_prompt}, *messages]


def _checked_prompt(prompt: Any, where: str) -> Prompt:
    """Checks a prompt, and drops fields that are None, because `datasets` adds missing fields as None."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not prompt or not all(map(_is_message, prompt)):
        raise ValueError(
            f'{where}: expected text, or chat messages [{{"role": ..., "content": ...}}] of text, as prompt; '
            f"got {prompt!r:.80}"
        )
    if prompt[-1]["role"] == "assistant":
        raise ValueError(
            f"{where}: expected messages that the model is to answer; got a last one by the assistant: "
            f"{prompt[-1]['content']!r:.80}"
        )
    messages = [{name: value for name, value in message.items() if value is not None} for message in prompt]
    for message in messages:
        message.setdefault("content", "")  # a message that only calls tools may have none
    return messages


def _without_none(value: Any) -> Any:
    """Drops the fields of objects that are None, at any depth."""
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_none(item) for name, item in value.items() if item is not None}
    return value


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    return isinstance(content, str) or content is None and bool(message.get("tool_calls"))


def _names(row: Mapping[str, Any]) -> str:
    return one_line(repr([*row]), 300)
