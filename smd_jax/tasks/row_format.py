"""Makes a row of a data set into a row of a task: the map function, the prompt column, the system prompt.

{"q": "1 + 1?", "a": "2"}  ──map_row──►  {"question": "1 + 1?", "answer": "2"}
                           ──prompt_column "question"──►  {"prompt": "1 + 1?", "answer": "2"}
                           ──system_prompt "Add."──►      {"prompt": [{"role": "system", …}, {"role": "user", …}], …}
                           ──chat_template_kwargs──►      {"prompt": …, "chat_template_kwargs": {…}, …}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from smd_jax.tasks.task import TEMPLATE_KWARGS, Prompt, Row, template_kwargs_of
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
      map_row: applied to every row first; must be a pure function.
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
            messages; chat_template_kwargs that are no dict.
        """
        mapped = self._mapped(dict(raw), where)
        if self.prompt_column not in mapped:
            raise ValueError(
                f"{where}: expected a column {self.prompt_column!r} with the prompt; got the columns {_names(mapped)}; "
                "prompt_column says which one has the prompt"
            )
        columns = {name: value for name, value in mapped.items() if name != self.prompt_column}
        prompt = checked_prompt(mapped[self.prompt_column], where)
        row = columns | {"prompt": self._with_system(prompt, where)}
        values = dict(self.chat_template_kwargs) | template_kwargs_of(columns, where)
        return row | {TEMPLATE_KWARGS: values} if values else row

    def _mapped(self, raw: Row, where: str) -> Row:
        if self.map_row is None:
            return raw
        columns = _names(raw)
        try:
            mapped = self.map_row(raw)
        except _ROW_ERRORS as error:
            raise ValueError(
                f"{where}: expected the map function to give a row; it raised {type(error).__name__}: "
                f"{one_line(str(error), 200)}. The row has the columns {columns}"
            ) from error
        if not isinstance(mapped, dict):
            raise ValueError(f"{where}: expected the map function to give a dict; got {mapped!r:.80}")
        return mapped

    def _with_system(self, prompt: Prompt, where: str) -> Prompt:
        if self.system_prompt is None:
            return prompt
        system = {"role": "system", "content": self.system_prompt}
        if isinstance(prompt, str):
            return [system, {"role": "user", "content": prompt}]
        if prompt[0]["role"] == "system":
            raise ValueError(f"{where}: expected messages without a system prompt of their own; got {prompt[0]!r:.80}")
        return [system, *prompt]


def checked_prompt(prompt: Any, where: str) -> Prompt:
    """Checks a prompt and drops fields of messages that are None, which `datasets` fills in for fields of other rows.

    Raises:
      ValueError: neither text nor chat messages; a last message of the assistant; text that cannot be encoded.
    """
    if isinstance(prompt, str):
        _check_text(prompt, where)
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
    for message in prompt:
        for text in filter(lambda value: isinstance(value, str), message.values()):
            _check_text(text, where)
    return [{name: value for name, value in message.items() if value is not None} for message in prompt]


def _names(row: Mapping[str, Any]) -> str:
    return one_line(repr([*row]), 300)


def _check_text(text: str, where: str) -> None:
    """Raises ValueError for halves of characters, which JSON can write as `\\ud83d` and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: expected a prompt of whole characters; got {text!r:.80} ({error.reason})"
        ) from error


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))
