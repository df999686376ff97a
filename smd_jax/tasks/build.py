"""Builds a task from a name: of a preset, a procedural data set, a data set of the Hub, a file, or a folder.

build_task(TaskChoice("gsm8k"))                                     a preset, with its own reward
build_task(TaskChoice("gsm8k", source="my_gsm8k.parquet"))          a preset on rows from elsewhere
build_task(TaskChoice("reasoning_gym:chain_sum"))                   a data set of reasoning-gym, with its own verifier
build_task(TaskChoice("owner/name", prompt_column="question", reward=my_reward))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType

from smd_jax.config import check_seed
from smd_jax.tasks.countdown import countdown_answer, countdown_row
from smd_jax.tasks.dataset_task import DatasetTask
from smd_jax.tasks.reasoning_gym import ReasoningGymTask
from smd_jax.tasks.reward_functions import GSM8K_MARKER, gsm8k_gold, last_box, math_answer, rouge_l, token_f1
from smd_jax.tasks.rewards import RewardFunction
from smd_jax.tasks.row_format import RowFormat, RowFunction
from smd_jax.tasks.sources import DataSource, load_rows
from smd_jax.tasks.task import Row, Task

PROCEDURAL = "reasoning_gym:"

# Most procedural data sets make row i from seed + i, so held-out rows need a seed far from that of any run.
HELD_OUT_SEED = 1_000_000_007

GSM8K_INSTRUCTION = 'Think step by step, then give the final answer after "####".'
MATH_INSTRUCTION = "Think step by step, then give the final answer in \\boxed{}."
HOTPOTQA_INSTRUCTION = "Answer the question from these paragraphs, in as few words as possible."
GOVREPORT_INSTRUCTION = "Summarise this report of the government."


@dataclass(frozen=True)
class Preset:
    """A predefined task.

    Attributes:
      train, held_out: the rows to train on, and the rows to evaluate on.
      columns: columns that a row must have.
      map_row: from a row of the data set to "prompt" and the columns that the reward takes.
      reward: TRL's signature.
    """

    train: DataSource
    held_out: DataSource
    columns: tuple[str, ...]
    map_row: RowFunction
    reward: RewardFunction


def gsm8k_row(row: Row) -> Row:
    """Grade-school mathematics (arXiv:2110.14168). Raises ValueError for a solution without "#### <number>"."""
    answer = row["answer"]
    if not isinstance(answer, str) or GSM8K_MARKER not in answer or not gsm8k_gold(answer):
        got = repr(answer[-60:]) if isinstance(answer, str) else f"{type(answer).__name__} {answer!r:.60}"
        raise ValueError(f"expected an answer that ends with '#### <number>'; got {got}")
    return {**row, "prompt": f"{row['question']}\n{GSM8K_INSTRUCTION}"}


def math_row(row: Row) -> Row:
    """MATH (arXiv:2103.03874) and data with its columns: the answer is the column "answer", or else the content of the
    solution's last `\\boxed{}`."""
    answer = row.get("answer")
    if answer is None or answer == "":
        answer = last_box(row["solution"])
        if answer is None:
            answer = _unbraced_box(row["solution"])
        if answer is None:
            raise ValueError(f"expected a solution with its answer in \\boxed{{}}; got {row['solution'][-60:]!r}")
    return {**row, "answer": answer, "prompt": f"{row['problem']}\n{MATH_INSTRUCTION}"}


def _unbraced_box(solution: str) -> str | None:
    r"""The content of `\boxed 2$`, as MATH's authors read it (`last_boxed_only_string`): two rows have no braces."""
    _, found, after = solution.rpartition("\\boxed ")
    return after.partition("$")[0].strip() if found else None


def tldr_row(row: Row) -> Row:
    """Reddit's TL;DR (arXiv:2009.01325): the prompt is a post that ends with "TL;DR:", the completion its summary."""
    columns = {name: value for name, value in row.items() if name != "completion"}
    return {**columns, "summary": row["completion"].strip()}


def govreport_row(row: Row) -> Row:
    """GovReport (arXiv:2104.02112): long reports with their summaries."""
    columns = {name: value for name, value in row.items() if name != "report"}
    return {**columns, "prompt": f"{row['report']}\n\n{GOVREPORT_INSTRUCTION}"}


def hotpotqa_row(row: Row) -> Row:
    """HotpotQA (arXiv:1809.09600): two needed paragraphs among eight distractors."""
    context = row["context"]
    paragraphs = [
        f"{title}\n{''.join(sentences).strip()}"
        for title, sentences in zip(context["title"], context["sentences"], strict=True)
    ]
    columns = {name: value for name, value in row.items() if name != "context"}
    prompt = "\n\n".join([*paragraphs, f"{HOTPOTQA_INSTRUCTION}\nQuestion: {row['question']}"])
    return {**columns, "prompt": prompt}


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "gsm8k": Preset(
            train=DataSource("openai/gsm8k", "main", "train"),
            held_out=DataSource("openai/gsm8k", "main", "test"),
            columns=("question", "answer"),
            map_row=gsm8k_row,
            reward=math_answer,
        ),
        "math": Preset(
            train=DataSource("DigitalLearningGmbH/MATH-lighteval", "default", "train"),
            held_out=DataSource("HuggingFaceH4/MATH-500", "default", "test"),
            columns=("problem", "solution"),
            map_row=math_row,
            reward=math_answer,
        ),
        "tldr": Preset(
            train=DataSource("trl-lib/tldr", None, "train"),
            held_out=DataSource("trl-lib/tldr", None, "validation"),
            columns=("prompt", "completion"),
            map_row=tldr_row,
            reward=rouge_l,
        ),
        "govreport": Preset(
            train=DataSource("ccdv/govreport-summarization", "document", "train"),
            held_out=DataSource("ccdv/govreport-summarization", "document", "validation"),
            columns=("report", "summary"),
            map_row=govreport_row,
            reward=rouge_l,
        ),
        "hotpotqa": Preset(
            train=DataSource("hotpotqa/hotpot_qa", "distractor", "train"),
            held_out=DataSource("hotpotqa/hotpot_qa", "distractor", "validation"),
            columns=("context", "question", "answer"),
            map_row=hotpotqa_row,
            reward=token_f1,
        ),
        # The data set has one split; its last rows are held out.
        "countdown": Preset(
            train=DataSource("Jiayi-Pan/Countdown-Tasks-3to4", None, "train[:-1024]"),
            held_out=DataSource("Jiayi-Pan/Countdown-Tasks-3to4", None, "train[-1024:]"),
            columns=("nums", "target"),
            map_row=countdown_row,
            reward=countdown_answer,
        ),
    }
)


@dataclass(frozen=True)
class TaskChoice:
    """Data and reward to train or evaluate on.

    Attributes:
      name: a preset of `PRESETS`; "reasoning_gym:NAME"; or a `DataSource.name`.
      source: replaces the rows of a preset by others in its layout; same values as `DataSource.name`.
      config, split: see DataSource. None: the preset's own, or the only one.
      held_out: take the evaluation rows of a preset or a procedural data set.
      prompt_column, system_prompt, map_row, chat_template_kwargs: see RowFormat. A preset brings its own prompt column
        and map function.
      reward: TRL's signature; None: that of the preset or the procedural data set. Other data has none, see
        `own_reward`.
      seed, size, parameters: of a procedural data set, see ReasoningGymTask.
    """

    name: str
    _: KW_ONLY
    source: str | None = None
    config: str | None = None
    split: str | None = None
    held_out: bool = False
    prompt_column: str | None = None
    system_prompt: str | None = None
    map_row: RowFunction | None = None
    chat_template_kwargs: tuple[tuple[str, object], ...] = ()
    reward: RewardFunction | None = None
    seed: int = 0
    size: int = 10_000
    parameters: tuple[tuple[str, object], ...] = ()

    def __post_init__(self) -> None:
        check_seed("seed", self.seed)


def build_task(choice: TaskChoice) -> Task:
    """Builds the task.

    Raises:
      ValueError: options that exclude each other. For other errors see `load_rows`.
    """
    if choice.name.startswith(PROCEDURAL):
        _refuse(choice, ("source", "config", "split", "prompt_column", "map_row"), "a procedural data set")
        seed = choice.seed + HELD_OUT_SEED if choice.held_out else choice.seed
        task = ReasoningGymTask(choice.name.removeprefix(PROCEDURAL), seed, choice.size, choice.parameters)
        row_format = RowFormat("prompt", choice.system_prompt, chat_template_kwargs=choice.chat_template_kwargs)
        if choice.reward is None and row_format == RowFormat():
            return task
        return DatasetTask(task, choice.reward or task.reward, row_format)
    _refuse(choice, ("parameters",), f"anything but {PROCEDURAL}NAME")
    if choice.name not in PRESETS:
        _refuse(choice, ("source",), f"anything but the presets {[*PRESETS]}")
        column = choice.prompt_column or "prompt"
        row_format = RowFormat(column, choice.system_prompt, choice.map_row, choice.chat_template_kwargs)
        return DatasetTask(load_rows(DataSource(choice.name, choice.config, choice.split)), choice.reward, row_format)
    _refuse(choice, ("prompt_column", "map_row"), "a preset")
    preset = PRESETS[choice.name]
    # The preset's configuration and split do not apply to other data.
    own = preset.held_out if choice.held_out else preset.train
    own = own if choice.source is None else DataSource(choice.source)
    source = DataSource(own.name, choice.config or own.config, choice.split or own.split)
    row_format = RowFormat("prompt", choice.system_prompt, preset.map_row, choice.chat_template_kwargs)
    return DatasetTask(load_rows(source, preset.columns), choice.reward or preset.reward, row_format)


def _refuse(choice: TaskChoice, names: Sequence[str], what: str) -> None:
    for name in names:
        if getattr(choice, name) != getattr(TaskChoice, name):
            raise ValueError(f"expected no {name} with {what}; got {getattr(choice, name)!r} with {choice.name!r}")
