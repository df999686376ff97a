"""Tools: Python functions that the policy calls, described to it by the chat template."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smd_jax.environments.protocol import Message, Opening
from smd_jax.tasks.reward_calls import Caught
from smd_jax.tasks.task import Row

# As Hermes, Qwen2.5 and Qwen3 write calls: {"name": …, "arguments": {…}}.
CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
LONGEST_RESULT = 2**16  # characters of a tool's result


class ToolCallError(ValueError):
    """An invalid tool call by the policy."""


def schemas(tools: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
    """JSON schemas of functions with type hints and a docstring that describes their arguments, as TRL's tools.

    Raises:
      ValueError: a function without them; two of the same name.
    """
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    names = [tool.__name__ for tool in tools]
    if len(set(names)) < len(names) or not names:
        raise ValueError(f"expected tools with different names, at least one; got {names}")
    found = []
    for tool in tools:
        try:
            found.append(get_json_schema(tool))
        except (DocstringParsingException, TypeHintParsingException, ValueError) as error:
            raise ValueError(
                f"expected a tool {tool.__name__!r} with type hints and a docstring that describes its arguments; got "
                f"{str(error)[:200]}"
            ) from error
    return found


def tool_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The calls in a turn, `(name, arguments)`.

    Raises:
      ToolCallError: a call that is not JSON, or has no name or arguments.
    """
    calls = []
    for written in CALL.findall(text):
        try:
            call = json.loads(written)
        except ValueError as error:
            raise ToolCallError(f"expected a tool call in JSON; got {written[:100]!r}") from error
        match call:
            case {"name": str(name), "arguments": dict(arguments)}:
                calls.append((name, arguments))
            case _:
                raise ToolCallError(f"expected a tool call with name and arguments; got {written[:100]!r}")
    if "<tool_call>" in CALL.sub("", text):
        raise ToolCallError(f"expected a tool call that ends with </tool_call>; got {text[-100:]!r}")
    return calls


@dataclass
class ToolEnvironment:
    """Runs the tools that a turn calls; a turn without a call is the answer, and is graded.

        factory = functools.partial(ToolEnvironment, tools=(calculate,), reward=grade)

    The turn that calls a tool has reward 0. A call that is not JSON, of no tool, or with other arguments than the
    tool's ends the conversation, with reward 0. A tool that raises tells the policy so.

    Attributes:
      tools: functions as `schemas` takes them.
      reward: `(answer, row) -> number`, for the text of the turn without a call.
    """

    tools: Sequence[Callable[..., Any]]
    reward: Callable[[str, Row], float]

    def reset(self, row: Row) -> Opening:
        """The row's prompt, with the schemas of the tools."""
        self._row = row
        prompt = row["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return {"messages": messages, "tools": schemas(self.tools)}

    def step(self, text: str) -> tuple[str | list[Message], float, bool | str]:
        """The results of the calls, or the reward of the answer."""
        try:
            calls = tool_calls(text)
            if not calls:
                return "", float(self.reward(text, self._row)), True
            return [self._result(*call) for call in calls], 0.0, False
        except ToolCallError as error:
            return "", 0.0, str(error)

    def _result(self, name: str, arguments: Mapping[str, Any]) -> Message:
        named = {tool.__name__: tool for tool in self.tools}
        if name not in named:
            raise ToolCallError(f"expected a call of {', '.join(named)}; got {name[:60]!r}")
        try:
            inspect.signature(named[name]).bind(**arguments)
        except TypeError as error:
            raise ToolCallError(f"expected arguments of {name}; got {str(error)[:100]}") from error
        with Caught() as caught:
            result = str(named[name](**arguments))[:LONGEST_RESULT]
        if caught.error is not None:
            result = f"{type(caught.error).__name__}: {str(caught.error)[:200]}"
        return {"role": "tool", "name": name, "content": result}
