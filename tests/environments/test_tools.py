"""ToolEnvironment and RetryEnvironment: tool calls, rewards, attempts."""

import asyncio
import functools
import inspect
import json
import os
from typing import Any

import pytest

from smd_jax.environments.processes import UnloadableEnvironmentError, open_environments
from smd_jax.environments.retry import RetryEnvironment
from smd_jax.environments.tools import ToolEnvironment, schemas
from smd_jax.tasks.dataset_task import DatasetTask
from smd_jax.tasks.reasoning_gym import ReasoningGymTask


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def fail() -> str:
    """Always fails."""
    raise OSError("no network")


def name_of_file() -> str:
    """A name that is not UTF-8."""
    return os.fsdecode(b"a\x80")


class Adder:
    __call__ = staticmethod(add)


def undescribed(a):
    return a


def exact_match(answer: str, row: dict[str, Any]) -> float:
    return float(answer.strip() == row["answer"])


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def environment() -> ToolEnvironment:
    adder = ToolEnvironment((add, fail), exact_match)
    adder.reset({"prompt": "2 + 2?", "answer": "4"})
    return adder


def test_opening_describes_the_tools(environment: ToolEnvironment):
    opening = environment.reset({"prompt": "2 + 2?", "answer": "4"})
    assert opening["messages"] == [{"role": "user", "content": "2 + 2?"}]
    assert [tool["function"]["name"] for tool in opening["tools"]] == ["add", "fail"]
    assert opening["tools"][0]["function"]["parameters"]["properties"]["a"]["type"] == "integer"


def test_calls_and_answer(environment: ToolEnvironment):
    results, reward, done = environment.step(f"Let me see. {call('add', a=2, b=2)}{call('fail')}")
    assert (reward, done) == (0.0, False)
    assert results == [
        {"role": "tool", "name": "add", "content": "4"},
        {"role": "tool", "name": "fail", "content": "OSError: no network"},
    ]
    assert environment.step(" 4 ") == ("", 1.0, True)
    assert environment.step("5") == ("", 0.0, True)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<tool_call>add(2, 2)</tool_call>", r"expected a tool call in JSON; got 'add\(2, 2\)'"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", r"expected a tool call in JSON; got '\[\[\["),
        ("<tool_call>" + '{"a":' * 100_000 + "</tool_call>", 'expected a tool call in JSON; got \'{"a":'),
        ("<tool_call>[1]</tool_call>", "expected a tool call with name and arguments"),
        ("<tool_call>{", "expected a tool call that ends with </tool_call>"),
        ("<tool_call>" + "\n" * 20_000, "expected a tool call that ends with </tool_call>"),  # must not take cubic time
        (call("multiply", a=1), "expected a call of add, fail; got 'multiply'|got multiply"),
        (call("add", a=1), "expected arguments of add; got missing a required argument: 'b'"),
    ],
)
def test_a_bad_call_ends_the_conversation(environment: ToolEnvironment, text: str, reason: str):
    message, reward, done = environment.step(text)
    assert (message, reward) == ("", 0.0) and isinstance(done, str)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(done)


def fail_by_name() -> str:
    """Fails with a name that is not UTF-8."""
    raise OSError(os.fsdecode(b"a\x80"))


def test_results_that_utf8_cannot_encode_are_written_with_question_marks():
    environment = ToolEnvironment((name_of_file, fail_by_name), exact_match)
    environment.reset({"prompt": "?"})
    results, _, done = environment.step(call("name_of_file") + call("fail_by_name"))
    assert [each["content"] for each in results] == ["a?", "OSError: a?"] and done is False


def page(text: str) -> str:
    """Writes a long page.

    Args:
        text: its only character
    """
    return text * 10**6


def test_the_results_of_many_calls_fit_into_one_answer():
    environments = open_environments(functools.partial(ToolEnvironment, (page,), exact_match), seconds=None)
    environments.reset([{"prompt": "?", "answer": "4"}])
    lengths = []
    for text, calls in (("a", 2), ("\1", 17), ("字", 17)):
        environments.step(0, calls * call("page", text=text))
        ((_, answer),) = environments.receive(wait=True)
        assert answer.failure is None
        lengths.append({len(message["content"]) for message in answer.content})
    environments.close()
    assert lengths == [{2**16}, {2**17 // 17}, {2**17 // 17}]


class NoText:
    def __str__(self) -> str:
        raise ValueError("no text")


def without_text() -> Any:
    """Returns an object that str() refuses."""
    return NoText()


async def later_without_text() -> Any:
    """Returns an object that str() refuses."""
    return NoText()


def test_a_result_that_str_refuses_is_an_error_of_its_tool():
    environment = ToolEnvironment((without_text, later_without_text), exact_match)
    environment.reset({"prompt": "?"})
    results, _, done = asyncio.run(environment.step(call("without_text") + call("later_without_text")))
    assert [each["content"] for each in results] == 2 * ["ValueError: no text"] and done is False


async def fetch(page: int) -> str:
    """Reads a page.

    Args:
        page: its number
    """
    await asyncio.sleep(0)
    if page < 0:
        raise OSError("no such page")
    return f"page {page}"


async def async_exact_match(answer: str, row: dict[str, Any]) -> float:
    await asyncio.sleep(0)
    return exact_match(answer, row)


def test_async_tools_and_rewards_are_awaited():
    factory = functools.partial(ToolEnvironment, (add, fetch), async_exact_match)
    environments = open_environments(factory, seconds=None)
    environments.reset([{"prompt": "?", "answer": "4"}])
    answers = []
    for turn in (f"{call('fetch', page=3)}{call('add', a=1, b=1)}{call('fetch', page=-1)}", "4"):
        environments.step(0, turn)
        answers += [answer for _, answer in environments.receive(wait=True)]
    environments.close()
    assert [message["content"] for message in answers[0].content] == ["page 3", "2", "OSError: no such page"]
    assert (answers[1].reward, answers[1].done) == (1.0, True)


def test_retry_awaits_the_reward_of_a_task():
    async def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        await asyncio.sleep(0)
        return [float(text == "4") for text in completions]

    task = DatasetTask([{"prompt": "2 + 2?"}], reward)
    environments = open_environments(functools.partial(RetryEnvironment, task), seconds=None)
    environments.reset([task[0]])
    results = []
    for turn in ("5", "4"):
        environments.step(0, turn)
        results += [(answer.reward, answer.done) for _, answer in environments.receive(wait=True)]
    environments.close()
    assert results == [(0.0, False), (1.0, True)]


class PopsCard:
    """Changes its row in `reset`, and is cancelled in `step`."""

    def reset(self, row: dict[str, Any]) -> str:
        row["cards"].pop()
        return str(row["cards"])

    async def step(self, text: str) -> Any:
        raise asyncio.CancelledError


def test_conversations_copy_their_row_and_a_cancelled_step_is_a_failure():
    environments, row = open_environments(PopsCard, seconds=None), {"prompt": "?", "cards": [1, 2]}
    assert [answer.content for answer in environments.reset([row, row])] == ["[1]", "[1]"] and row["cards"] == [1, 2]
    environments.step(0, "4")
    ((_, answer),) = environments.receive(wait=True)
    environments.close()
    assert answer.failure is not None and answer.failure.kind == "CancelledError"


def test_a_reward_that_is_no_number_is_refused():
    environment = ToolEnvironment((add,), lambda answer, row: [1.0])  # pyright: ignore[reportArgumentType]
    environment.reset({"prompt": "?"})
    with pytest.raises(TypeError, match=r"expected reward\(answer, row\) to return a number; got \[1.0\]"):
        environment.step("4")


def test_invalid_tools_are_refused():
    with pytest.raises(ValueError, match="expected a list of tools; got one, add"):
        inspect.unwrap(schemas)(add)  # without the tests' type checks
    with pytest.raises(ValueError, match="expected a tool 'undescribed' with type hints and a docstring"):
        schemas([undescribed])
    with pytest.raises(ValueError, match="expected tools with different names"):
        schemas([add, add])
    for tool in (functools.partial(add, 1), Adder(), {"name": "add"}):
        with pytest.raises(ValueError, match="expected functions as tools; got .*(partial|Adder|{'name': 'add'})"):
            inspect.unwrap(schemas)([add, tool])


def test_invalid_tools_fail_before_the_rollout():
    environments = open_environments(functools.partial(ToolEnvironment, (undescribed,), exact_match), seconds=20.0)
    with pytest.raises(UnloadableEnvironmentError, match="expected a tool 'undescribed' with type hints"):
        environments.reset([{"prompt": "?"}])


def test_retry_uses_the_reward_of_the_task():
    task = ReasoningGymTask("chain_sum", seed=0, size=5)
    environment = RetryEnvironment(task, attempts=2)
    assert environment.reset(task[1]) == task[1]["prompt"]
    assert environment.step("no idea") == (environment.hint, 0.0, False)
    assert environment.step(task[1]["answer"]) == (environment.hint, 1.0, True)
    messages = [{"role": "system", "content": "A number only."}, {"role": "user", "content": task[1]["prompt"]}]
    assert environment.reset({**task[1], "prompt": messages}) == messages, "the policy reads all of them"
    environment.step("no")
    text, reward, done = environment.step("no")
    assert done and reward < 1
    with pytest.raises(ValueError, match="expected a reward; got None: it does not apply to this row"):
        environment._graded([None])
