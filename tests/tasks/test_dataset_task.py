"""From rows to tasks: prompts, map functions, prompts that are too long, streams and their order."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from smd_jax.tasks.dataset_task import DatasetTask, StreamTask, first_rows
from smd_jax.tasks.lengths import PromptCounts, PromptLimit, select_prompts, usable_lengths
from smd_jax.tasks.row_format import RowFormat
from smd_jax.tasks.sources import DataSource, RowStream, load_rows
from smd_jax.tasks.task import (
    Row,
    SteppedTask,
    Task,
    batch_columns,
    batch_indices,
    prompt_text,
    rows_of_step,
)
from smd_jax.testing import byte_tokenizer
from tests.bitwise import assert_bitwise_equal
from tests.hub_files import no_hub, write_parquet
from tests.toy_loop import CONFIG, new_loop, new_state, run, share_programs

__all__ = ["no_hub"]

USER = {"role": "user", "content": "1+1?"}
SYSTEM = {"role": "system", "content": "Add."}
PLAIN, CHAT = byte_tokenizer(chat=False), byte_tokenizer()


def lengths_of_completions(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def new_task(rows: list[Row], *, prompt_column: str = "prompt", **options: Any) -> DatasetTask:
    return DatasetTask(rows, lengths_of_completions, RowFormat(prompt_column, **options))


# --- the format of rows


def test_the_prompt_column_and_the_others():
    task = new_task([{"q": "1+1?", "answer": "2", "level": 3}], prompt_column="q")
    assert task[0] == {"prompt": "1+1?", "answer": "2", "level": 3}
    assert isinstance(task, Task) and not isinstance(task, SteppedTask)
    assert task.reward(["1+1?"], ["abc"], answer=["2"]) == [3.0]


def test_messages_with_fields_that_other_rows_have():
    message = USER | {"name": None}
    assert new_task([{"prompt": [SYSTEM, message]}])[0]["prompt"] == [SYSTEM, USER]


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
    with pytest.raises(ValueError, match="row 0: expected chat_template_kwargs as a dict, .*; got 'dry'"):
        new_task([{"prompt": "1?", "chat_template_kwargs": "dry"}])


def test_a_map_function_makes_rows():
    def doubled(row: Row) -> Row:
        row["prompt"] = f"{row.pop('number')} * 2?"
        return row

    rows = [{"number": 1}, {"number": 2}]
    task = new_task(rows, map_row=doubled)
    assert [task[0], task[1], task[1]] == [{"prompt": "1 * 2?"}, {"prompt": "2 * 2?"}, {"prompt": "2 * 2?"}]
    assert rows == [{"number": 1}, {"number": 2}]


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (None, {}, "row 0: expected text, or chat messages .*; got None"),
        ([], {}, r"got \[\]"),
        ([{"role": "user", "content": [{"type": "image"}]}], {}, "expected text, or chat messages .* of text"),
        ([USER, {"role": "assistant", "content": "2"}], {}, "expected messages that the model is to answer; .*'2'"),
        ([SYSTEM, USER], {"system_prompt": "Add."}, "expected messages without a system prompt of their own"),
        (
            "?",
            {"map_row": lambda row: {"prompt": row["question"]}},
            "it raised KeyError: 'question'.*columns .*'prompt'",
        ),
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


def test_prompts_that_say_nothing_are_empty_whatever_the_template_makes_of_them():
    prompts = ["a", "", " \n", [{"role": "user", "content": "b"}], [{"role": "user", "content": ""}]]
    task = new_task([{"prompt": prompt} for prompt in prompts])
    lengths = usable_lengths(task, CHAT)
    assert lengths.tolist() == [lengths[0], 0, 0, lengths[0], 0] and lengths[0] > 10
    _, counts = select_prompts(task, lengths, 100)
    assert (counts.kept, counts.empty) == (2, 3)
    limit, seen = PromptLimit(CHAT, 100), PromptCounts()
    assert [limit.takes(task[i], seen, "") for i in range(5)] == [True, False, False, True, False] and seen.empty == 3


@pytest.mark.parametrize("prompt", ["\ud83d", [{"role": "user", "content": "\udc00"}]])
def test_half_a_character(prompt):
    with pytest.raises(ValueError, match="row 0: expected a prompt of whole characters; got"):
        new_task([{"prompt": prompt}])


def test_prompts_that_are_too_long_or_empty_are_dropped_with_counts():
    task = sized_task()
    left, counts = select_prompts(task, usable_lengths(task, PLAIN), 5)
    assert [left[i]["number"] for i in range(len(left))] == [0, 3]
    assert (counts.kept, counts.too_long, counts.empty, counts.dropped, counts.longest) == (2, 2, 1, 3, 9)
    said = "2 prompts kept, 2 dropped as too long and 1 as empty; the longest has 9 tokens, the median 5"
    assert str(counts) == said
    assert left.reward(["xxx"], ["ab"], number=[0]) == [2.0]
    with pytest.raises(IndexError, match="expected a row from 0 to 1; got 2"):
        left[2]


def test_nothing_to_drop_leaves_the_task_as_it_is():
    task = new_task([{"prompt": "abc"}])
    assert select_prompts(task, usable_lengths(task, PLAIN), 3)[0] is task


def test_prompts_that_are_too_long_are_refused():
    lengths = usable_lengths(sized_task(), PLAIN)
    message = "at most 5 tokens; got 2 of 5 that are longer: the first is row 1 with 9 tokens, the longest has 9"
    with pytest.raises(ValueError, match=message):
        select_prompts(sized_task(), lengths, 5, refuse=True)
    assert select_prompts(sized_task(), lengths, 9, refuse=True)[1].empty == 1
    with pytest.raises(ValueError, match="expected a prompt of 1 to 2 tokens; got none: 0 prompts kept, 4 dropped"):
        select_prompts(sized_task(), lengths, 2)
    with pytest.raises(ValueError, match="at least one token; got 0"):
        select_prompts(sized_task(), lengths, 0)


def test_the_first_rows():
    task = sized_task()
    assert [row["number"] for row in first_rows(task, 2)] == [0, 1]  # pyright: ignore[reportGeneralTypeIssues]
    assert first_rows(task, 5) is task
    with pytest.raises(ValueError, match="got 0"):
        first_rows(task, 0)


# --- streams


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty rows, numbered by the prompt, in four files."""
    folder = tmp_path_factory.mktemp("stream")
    for file in range(4):
        rows = [{"prompt": f"{number}=", "answer": str(number % 10)} for number in range(10 * file, 10 * file + 10)]
        write_parquet(folder / f"train-0000{file}-of-00004.parquet", rows)
    return folder


def new_stream(files: Path, **options: Any) -> StreamTask:
    stream = load_rows(DataSource(str(files), streaming=True))
    assert isinstance(stream, RowStream)
    return StreamTask(stream, lengths_of_completions, **{"buffer": 8, **options})


def numbers(rows: list[Row]) -> list[int]:
    return [int(row["prompt"][:-1]) for row in rows]


pytest_no_hub = pytest.mark.usefixtures("no_hub")


@pytest_no_hub
def test_every_epoch_of_a_stream_visits_every_row_once_in_an_order_of_its_own(files: Path):
    task = new_stream(files)
    assert isinstance(task, SteppedTask) and not isinstance(task, Task)
    visited = numbers([row for step in range(20) for row in rows_of_step(task, 6, step, seed=3)])
    epochs = [visited[start : start + 40] for start in (0, 40, 80)]
    assert all(Counter(epoch) == Counter(range(40)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != sorted(epochs[0])
    # Files come in another order in every epoch, and rows in another order within them.
    assert len({number // 10 for epoch in epochs for number in epoch[:4]}) > 1
    assert all(epoch[:10] != sorted(epoch[:10]) for epoch in epochs)


@pytest_no_hub
def test_a_step_of_a_stream_depends_on_seed_and_step_alone(files: Path):
    whole = new_stream(files)
    steps = [numbers(whole.batch(6, step, seed=3)) for step in range(20)]
    for start in (0, 1, 6, 7, 13, 19):
        resumed = new_stream(files)
        assert numbers(resumed.batch(6, start, seed=3)) == steps[start]
        assert numbers(resumed.batch(6, (start + 4) % 20, seed=3)) == steps[(start + 4) % 20]
    # Backwards, to another seed and back, with an epoch's length known.
    assert [numbers(whole.batch(6, step, seed=3)) for step in (19, 3, 8)] == [steps[19], steps[3], steps[8]]
    assert numbers(whole.batch(6, 3, seed=4)) != steps[3]
    assert numbers(whole.batch(6, 3, seed=3)) == steps[3]


@pytest_no_hub
def test_a_stream_without_its_long_prompts(files: Path):
    short = new_stream(files, limit=PromptLimit(PLAIN, 2))
    rows = [row for step in range(4) for row in short.batch(5, step, seed=0)]
    assert Counter(numbers(rows)) == Counter([*range(10), *range(10)])
    fresh = new_stream(files, limit=PromptLimit(PLAIN, 2))
    fresh.batch(10, 0, seed=0)
    assert fresh.counts.kept == 10 and 0 <= fresh.counts.too_long <= 30
    with pytest.raises(ValueError, match="of the stream: expected a prompt of at most 2 tokens; got 3"):
        new_stream(files, limit=PromptLimit(PLAIN, 2, refuse=True)).batch(40, 0, seed=0)
    with pytest.raises(
        ValueError, match="expected at least one prompt in the stream; got none .*40 dropped as too long"
    ):
        new_stream(files, limit=PromptLimit(PLAIN, 1)).batch(1, 0, seed=0)


@pytest_no_hub
def test_the_first_rows_of_a_stream_lie_as_in_the_file(files: Path):
    first = first_rows(new_stream(files), 3)
    assert isinstance(first, Task) and numbers([first[i] for i in range(3)]) == [0, 1, 2]
    assert len(first_rows(new_stream(files), 100)) == 40
    short = first_rows(new_stream(files, limit=PromptLimit(PLAIN, 2)), 100)
    assert len(short) == 10 and short.reward(["0="], ["abc"]) == [3.0]


def test_streams_refuse_bad_arguments(files: Path):
    for arguments, said in (((0, 0, 0), "size >= 1"), ((1, -1, 0), "step >= 0"), ((1, 0, -1), "seed >= 0")):
        with pytest.raises(ValueError, match=f"expected .*{said}.*; got"):
            new_stream(files).batch(*arguments)
    with pytest.raises(ValueError, match="expected buffer >= 1 rows; got 0"):
        new_stream(files, buffer=0)


def test_rows_by_number_come_in_the_order_of_batch_indices():
    task = new_task([{"prompt": str(number)} for number in range(7)])
    expected = [str(index) for index in batch_indices(7, 4, 3, seed=5)]
    assert [row["prompt"] for row in rows_of_step(task, 4, 3, seed=5)] == expected


# --- training


@pytest_no_hub
def test_a_run_on_a_stream_resumes_bitwise(files: Path):
    def loop() -> Any:
        made = dataclasses.replace(new_loop(CONFIG), task=new_stream(files))
        share_programs(made)
        return made

    whole, whole_rows = run(loop(), new_state(), 4)
    half, first_rows = run(loop(), new_state(), 2)
    resumed, last_rows = run(loop(), half, 2)
    assert first_rows + last_rows == whole_rows
    assert_bitwise_equal(resumed, whole)
