"""Tools: Python functions that the policy calls, described to it by the chat template."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat

from smd_jax.environments.protocol import Message, Opening
from smd_jax.tasks.reward_calls import Caught, when_ready
from smd_jax.tasks.task import Row

# As Hermes, Qwen2.5 and Qwen3 write calls: {"name": …, "arguments": {…}}.
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
LONGEST_RESULT = 2**16  # characters of a tool's result
LONGEST_RESULTS = 2**17  # of all results of a turn, shared equally; JSON writes one as six, and an answer has 2^20
Step = tuple[str | list[Message], float, bool | str]  # result of Environment.step


class ToolCallError(ValueError):
    """An invalid tool call by the policy."""


def schemas(tools: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
    """JSON schemas of functions with type hints and a docstring that describes their arguments, as TRL's tools.

    Raises:
      ValueError: a function without them; two of the same name; an object that is no function, such as a partial; one
        function in place of a list.
    """
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    if callable(tools):
        raise ValueError(f"expected a list of tools; got one, {getattr(tools, '__name__', tools)}")
    nameless = [tool for tool in tools if not hasattr(tool, "__name__")]
    if nameless:
        raise ValueError(f"expected functions as tools; got {str(nameless[0])[:100]}: write a function that calls it")
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
    for written in map(str.strip, CALL.findall(text)):
        try:
            call = json.loads(written)
        except (ValueError, RecursionError) as error:
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
      tools: functions as `schemas` takes them; they may be async.
      reward: `(answer, row) -> number`, for the text of the turn without a call; it may be async.
    """

    tools: Sequence[Callable[..., Any]]
    reward: Callable[[str, Row], float | Awaitable[float]]

    def prepare(self) -> None:
        """Imports the packages that describe the tools; raises ValueError for tools that cannot be described."""
        schemas(self.tools)

    def reset(self, row: Row) -> Opening:
        """The row's prompt, with the schemas of the tools."""
        self._row = row
        prompt = row["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return {"messages": messages, "tools": schemas(self.tools)}

    def step(self, text: str) -> Any:
        """The results of the calls, or the reward of the answer; to be awaited if a tool or the reward is async."""
        try:
            calls = [(self._tool(name, arguments), arguments) for name, arguments in tool_calls(text)]
        except ToolCallError as error:
            return "", 0.0, str(error)
        if not calls:
            return when_ready(self.reward(text, self._row), _graded)
        longest = min(LONGEST_RESULT, LONGEST_RESULTS // len(calls))
        results = [_called(tool, arguments, longest) for tool, arguments in calls]
        messages = [result for result in results if not inspect.isawaitable(result)]
        return (messages, 0.0, False) if len(messages) == len(results) else _finished(results)

    def _tool(self, name: str, arguments: Mapping[str, Any]) -> Callable[..., Any]:
        """The tool of a call. Raises ToolCallError for another name or arguments that do not fit."""
        named = {tool.__name__: tool for tool in self.tools}
        if name not in named:
            raise ToolCallError(f"expected a call of {', '.join(named)}; got {name[:60]!r}")
        try:
            inspect.signature(named[name]).bind(**arguments)
        except TypeError as error:
            raise ToolCallError(f"expected arguments of {name}; got {str(error)[:100]}") from error
        return named[name]


def _graded(reward: Any) -> Step:
    if not isinstance(reward, SupportsFloat):
        raise TypeError(f"expected reward(answer, row) to return a number; got {str(reward)[:100]}")
    return "", float(reward), True


def _called(tool: Callable[..., Any], arguments: Mapping[str, Any], longest: int) -> Message | Awaitable[Message]:
    """Calls a tool; an exception becomes its result, also one of `str`. `longest`: characters of the result."""
    result = ""
    with Caught() as caught:
        returned = tool(**arguments)
        if inspect.isawaitable(returned):
            return _awaited(tool, returned, longest)
        result = str(returned)
    return _message(tool, result, caught.error, longest)


async def _awaited(tool: Callable[..., Any], running: Awaitable[Any], longest: int) -> Message:
    result = ""
    with Caught() as caught:
        result = str(await running)
    return _message(tool, result, caught.error, longest)


async def _finished(results: Sequence[Message | Awaitable[Message]]) -> Step:
    return [await result if inspect.isawaitable(result) else result for result in results], 0.0, False


def _message(tool: Callable[..., Any], result: str, error: BaseException | None, longest: int) -> Message:
    if error is not None:
        said = ""
        with Caught():
            said = str(error)[:200]
        result = f"{type(error).__name__}: {said}"
    # Python writes bytes that are not UTF-8 as lone surrogates, which no tokenizer accepts.
    return {"role": "tool", "name": tool.__name__, "content": result[:longest].encode(errors="replace").decode()}
