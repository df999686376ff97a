"""From rows to tasks: prompts, map functions, prompts that are too long, and the order of rows."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from smd_jax.tasks.dataset_task import DatasetTask, SelectedRows, first_rows, own_reward, select_prompts, usable_lengths
from smd_jax.tasks.row_format import RowFormat
from smd_jax.tasks.sources import DataSource, load_rows
from smd_jax.tasks.task import Row, Task, batch_columns, batch_indices, prompt_text, rows_of_step
from smd_jax.testing import byte_tokenizer
from tests.hub_files import no_hub

__all__ = ["no_hub"]

USER = {"role": "user", "content": "1+1?"}
SYSTEM = {"role": "system", "content": "Add."}
PLAIN, CHAT = byte_tokenizer(chat=False), byte_tokenizer()


def lengths_of_completions(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def new_task(rows: Any, *, prompt_column: str = "prompt", **options: Any) -> DatasetTask:
    return DatasetTask(rows, lengths_of_completions, RowFormat(prompt_column, **options))


# --- the format of rows


def test_the_prompt_column_and_the_others():
    task = new_task([{"q": "1+1?", "answer": "2", "level": 3}], prompt_column="q")
    assert task[0] == {"prompt": "1+1?", "answer": "2", "level": 3}
    assert isinstance(task, Task)
    assert task.reward(["1+1?"], ["abc"], answer=["2"]) == [3.0]


class Shorter(DatasetTask):
    """A task that grades by itself."""

    def reward(self, prompts: Any, completions: Any, **columns: Any) -> list[float]:
        return [value - 0.5 for value in super().reward(prompts, completions, **columns)]


def test_the_reward_method_of_a_subclass_grades():
    rows = [{"prompt": "1+1?", "answer": "2"}] * 2
    asked = {"prompts": ["1+1?"], "completions": ["abc"], "answer": ["2"]}
    assert own_reward(DatasetTask(rows, lengths_of_completions))(**asked) == [3.0]
    assert own_reward(first_rows(Shorter(rows, lengths_of_completions), 1))(**asked) == [2.5]


def test_messages_with_fields_that_other_rows_have():
    message = USER | {"name": None}
    assert new_task([{"prompt": [SYSTEM, message]}])[0]["prompt"] == [SYSTEM, USER]


def test_tool_calls_and_schemas_have_only_their_own_fields(tmp_path: Path):
    """Arrow gives the objects of all rows the same fields; JSON keeps its null."""
    calls = [[{"function": {"name": name, "arguments": {key: 1}}}] for name, key in (("add", "x"), ("cut", "y"))]
    schemas = [[{"name": name, "parameters": {key: {"type": "int"}}}] for name, key in (("add", "x"), ("cut", "y"))]
    rows = list[Row]()
    for call, schema in zip(calls, schemas, strict=True):
        messages = [USER, {"role": "assistant", "content": None, "tool_calls": call}, USER]
        rows.append({"prompt": messages, "chat_template_kwargs": {"tools": schema}})
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    task = new_task(load_rows(DataSource(str(tmp_path / "rows.parquet"))))
    for row, call, schema in zip((task[0], task[1]), calls, schemas, strict=True):
        assert row["prompt"] == [USER, {"role": "assistant", "content": "", "tool_calls": call}, USER]
        assert row["chat_template_kwargs"] == {"tools": schema}
    variables = {"tools": [{"default": None}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1?", "chat_template_kwargs": variables}))
    (row,) = load_rows(DataSource(str(tmp_path / "rows.jsonl")))
    assert new_task([row])[0]["chat_template_kwargs"] == variables


@pytest.mark.parametrize("prompt", ["1+1?", [USER]])
def test_a_system_prompt_is_what_the_model_sees_first(prompt: Any):
    row = new_task([{"prompt": prompt}], system_prompt="Add.")[0]
    assert row["prompt"] == [SYSTEM, USER]
    assert prompt_text(row, CHAT).startswith("<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+1?")


def test_a_row_has_what_its_chat_template_is_told_and_its_own_comes_first():
    rows = [{"prompt": "1?"}, {"prompt": "2?", "chat_template_kwargs": {"tone": "dry", "enable_thinking": None}}]
    told = (("enable_thinking", False), ("tone", "warm"))
    task = new_task(rows, chat_template_kwargs=told)
    assert task[0] == {"prompt": "1?", "chat_template_kwargs": {"enable_thinking": False, "tone": "warm"}}
    assert task[1]["chat_template_kwargs"] == {"enable_thinking": False, "tone": "dry"}
    with pytest.raises(ValueError, match="row 0, .*: expected chat_template_kwargs as a dict, .*; got 'dry'"):
        new_task([{"prompt": "1?", "chat_template_kwargs": "dry"}])


def test_a_map_function_makes_rows():
    def doubled(row: Row) -> Row:
        row["prompt"] = f"{row.pop('number')} * 2?"
        return row

    rows = [{"number": 1}, {"number": 2}]
    task = new_task(rows, map_row=doubled)
    assert [task[0], task[1], task[1]] == [{"prompt": "1 * 2?"}, {"prompt": "2 * 2?"}, {"prompt": "2 * 2?"}]
    assert rows == [{"number": 1}, {"number": 2}]


def test_a_map_function_may_change_what_it_gets():
    def with_system(row: Row) -> Row:
        row["prompt"].insert(0, SYSTEM)
        return row

    task = new_task([{"prompt": [USER]}], map_row=with_system)
    assert [task[0]["prompt"] for _ in range(3)] == [[SYSTEM, USER]] * 3


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (None, {}, "row 0, counted from 0: expected text, or chat messages .*; got None"),
        ([], {}, r"got \[\]"),
        ([{"role": "user", "content": [{"type": "image"}]}], {}, "expected text, or chat messages .* of text"),
        ([USER, {"role": "assistant", "content": "2"}], {}, "expected messages that the model is to answer; .*'2'"),
        ([SYSTEM, USER], {"system_prompt": "Add."}, "expected messages without their own system prompt"),
        ("?", {"map_row": lambda row: {"prompt": row["question"]}}, "raised KeyError: 'question'.*columns .*'prompt'"),
        ("?", {"map_row": lambda row: None}, "expected the map function to give a dict; got None"),
        ("?", {"prompt_column": "q"}, r"expected a column 'q' with the prompt; got the columns \['prompt'\]"),
    ],
)
def test_rows_without_a_prompt(prompt: Any, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        new_task([{"prompt": prompt}], **options)


def test_rows_have_bounds():
    task = new_task([{"prompt": "a"}])
    for index in (-1, 1):
        with pytest.raises(IndexError, match=f"expected a row from 0 to 0; got {index}"):
            task[index]
    with pytest.raises(ValueError, match="expected at least one row"):
        new_task([])


def test_a_column_that_some_rows_lack_is_none():
    assert batch_columns([{"prompt": "a", "x": 1}, {"prompt": "b", "y": 2}]) == {"x": [1, None], "y": [None, 2]}


# --- the length of prompts


SIZES = (3, 9, 0, 5, 6)


def sized_task() -> DatasetTask:
    return new_task([{"prompt": "x" * size, "number": number} for number, size in enumerate(SIZES)])


def test_lengths_are_those_that_the_model_sees():
    assert usable_lengths(sized_task(), PLAIN).tolist() == list(SIZES)
    frame = len(CHAT.encode(prompt_text({"prompt": ""}, CHAT), add_special_tokens=False))
    assert frame > 10
    assert usable_lengths(sized_task(), CHAT).tolist() == [frame + size if size else 0 for size in SIZES]


def test_a_prompt_that_the_template_refuses_is_named(tmp_path: Path):
    rows = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": [USER]}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    of_file = DatasetTask(load_rows(DataSource(str(path))))
    for task, where in ((new_task(rows), "row 2, counted from 0"), (of_file, f"{path.name}, line 3")):
        with pytest.raises(ValueError, match=f"{where}: expected a plain string, because the tokenizer has no chat"):
            usable_lengths(SelectedRows(task, np.array([1, 2])), PLAIN)


def test_prompts_that_say_nothing_are_empty_whatever_the_template_makes_of_them():
    prompts = ["a", "", " \n", [{"role": "user", "content": "b"}], [{"role": "user", "content": ""}]]
    task = new_task([{"prompt": prompt} for prompt in prompts])
    lengths = usable_lengths(task, CHAT)
    assert lengths.tolist() == [lengths[0], 0, 0, lengths[0], 0] and lengths[0] > 10
    _, counts = select_prompts(task, lengths, 100)
    assert (counts.kept, counts.empty) == (2, 3)


def test_prompts_that_are_too_long_or_empty_are_dropped_with_counts():
    task = sized_task()
    left, counts = select_prompts(task, usable_lengths(task, PLAIN), 5)
    assert [left[i]["number"] for i in range(len(left))] == [0, 3]
    assert counts == (2, 2, 1, 9)
    said = "2 prompts kept, 2 dropped as too long and 1 as empty; the longest has 9 tokens"
    assert str(counts) == said
    assert left.reward(["xxx"], ["ab"], number=[0]) == [2.0]
    with pytest.raises(IndexError, match="expected a row from 0 to 1; got 2"):
        left[2]


def test_nothing_to_drop_leaves_the_task_as_it_is():
    task = new_task([{"prompt": "abc"}])
    assert select_prompts(task, usable_lengths(task, PLAIN), 3)[0] is task


def test_a_prompt_must_be_left():
    with pytest.raises(ValueError, match="expected a prompt of 1 to 2 tokens; got none: 0 prompts kept, 4 dropped"):
        select_prompts(sized_task(), usable_lengths(sized_task(), PLAIN), 2)


def test_the_first_rows():
    task = sized_task()
    assert [row["number"] for row in first_rows(task, 2)] == [0, 1]  # pyright: ignore[reportGeneralTypeIssues]
    assert first_rows(task, 5) is task
    with pytest.raises(ValueError, match="got 0"):
        first_rows(task, 0)


# --- the order of rows


def test_rows_by_number_come_in_the_order_of_batch_indices():
    task = new_task([{"prompt": str(number)} for number in range(7)])
    expected = [str(index) for index in batch_indices(7, 4, 3, seed=5)]
    assert [row["prompt"] for row in rows_of_step(task, 4, 3, seed=5)] == expected
