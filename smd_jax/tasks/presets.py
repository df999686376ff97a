"""Ready tasks: the source of the rows, the map function that makes prompts, and the reward.

task = build_task(TaskChoice("gsm8k"))                         rows of the Hub
task = build_task(TaskChoice("gsm8k", source="test.jsonl"))    the same task, rows of a file
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from smd_jax.tasks.countdown import countdown_answer, countdown_row
from smd_jax.tasks.reward_functions import GSM8K_MARKER, gsm8k_gold, last_box, math_answer, rouge_l, token_f1
from smd_jax.tasks.rewards import RewardFunction
from smd_jax.tasks.row_format import RowFunction
from smd_jax.tasks.sources import DataSource
from smd_jax.tasks.task import Row

GSM8K_INSTRUCTION = 'Think step by step, then give the final answer after "####".'
MATH_INSTRUCTION = "Think step by step, then give the final answer in \\boxed{}."
HOTPOTQA_INSTRUCTION = "Answer the question from these paragraphs, in as few words as possible."
GOVREPORT_INSTRUCTION = "Summarise this report of the government."


@dataclass(frozen=True)
class Preset:
    """A ready task.

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
            raise ValueError(f"expected a solution with its answer in \\boxed{{}}; got {row['solution'][-60:]!r}")
    return {**row, "answer": answer, "prompt": f"{row['problem']}\n{MATH_INSTRUCTION}"}


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
