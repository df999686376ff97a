"""A task is rows with a prompt, and a reward for completions; here are two, and the order in which rows are visited.

Rewards have TRL's signature, so a reward function written for TRL works here and the other way round:

    reward(prompts, completions, **columns) -> list[float]      columns: the rows' other fields, one list each
"""

from __future__ import annotations

import difflib
import functools
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from smd_jax.text.prompts import Tokenizer, wants_special_tokens

Prompt = str | list[dict[str, str]]  # plain text, or chat messages {"role": ..., "content": ...}
Row = dict[str, Any]  # at least "prompt"

GSM8K_MARKER = "####"  # in GSM8K solutions the final answer follows it
GRADED_CHARACTERS = 2_000  # only the end of a completion is graded: matching all of a long ramble is slow and pointless
GRADING_SECONDS = 2  # for an answer such as 9^9^9^9, which sympy would work on for ever


@runtime_checkable
class Task(Protocol):
    """Rows and their reward. Rows are dicts with a "prompt"; their other fields come back to `reward` as columns."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...

    def reward(self, prompts: Sequence[Prompt], completions: Sequence[str], **columns: Sequence[Any]) -> list[float]:
        """One finite number per completion, in the order of the completions."""
        ...


def batch_columns(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """The fields of `rows` other than the prompt, one list each: what a reward takes as `**columns`."""
    return {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}


@runtime_checkable
class ScoredDataset(Protocol):
    """What we use of reasoning_gym's `ProceduralDataset`, which cannot be named without importing the extra."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Any]: ...

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float: ...


@dataclass(frozen=True)
class ReasoningGymTask:
    """A procedural dataset of reasoning_gym with its own verifier; rows have "prompt", "answer" and "metadata".

    Attributes:
      name: a dataset of reasoning_gym, or our own "distractor_sort".
      seed, size: the rows. Most datasets of reasoning_gym make row i from `seed + i`: seeds closer together than `size`
        share rows, so take the seed of an evaluation far away from that of training.
      parameters: fields of the dataset's configuration as (name, value) pairs, so that the task stays hashable.
    """

    name: str
    seed: int
    size: int
    parameters: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if len(self) < 1:  # makes the dataset, so that a wrong name or parameter fails here
            raise ValueError(f"expected a dataset of at least one row; got size {self.size}")

    @functools.cached_property
    def dataset(self) -> ScoredDataset:
        return _create_dataset(self.name, self.seed, self.size, dict(self.parameters))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"expected a row from 0 to {len(self) - 1}; got {index}")
        item = self.dataset[index]
        return {"prompt": item["question"], "answer": item["answer"], "metadata": item["metadata"]}

    def reward(self, prompts: Sequence[Prompt], completions: Sequence[str], **columns: Sequence[Any]) -> list[float]:
        """The dataset's own score of every completion, white space at its ends removed."""
        answers, metadata = _column(columns, "answer"), _column(columns, "metadata")
        rows = zip(prompts, completions, answers, metadata, strict=True)
        return [self._score(completion, question, answer, extra) for question, completion, answer, extra in rows]

    def _score(self, completion: str, question: Prompt, answer: Any, metadata: Any) -> float:
        entry = {"question": question, "answer": answer, "metadata": metadata}
        return float(self.dataset.score_answer(answer=completion.strip(), entry=entry))


def _create_dataset(name: str, seed: int, size: int, parameters: dict[str, Any]) -> ScoredDataset:
    """Imports reasoning_gym here because it is an extra, and costs about a second."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ModuleNotFoundError as error:
        raise _missing_extra("reasoning_gym") from error
    import smd_jax.tasks.sorting  # noqa: F401  registers "distractor_sort"

    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS)
        raise ValueError(
            f"expected the name of one of reasoning_gym's {len(DATASETS)} datasets; got {name!r} (near: {close})"
        )
    return create_dataset(name, seed=seed, size=size, **parameters)


def _missing_extra(package: str) -> ImportError:
    return ImportError(f"this task needs {package}, which is not installed: pip install smd_jax[experiments]")


def _column(columns: Mapping[str, Sequence[Any]], name: str) -> Sequence[Any]:
    if name not in columns:
        raise ValueError(f"expected a column {name!r} beside the prompts and completions; got {sorted(columns)}")
    return columns[name]


@dataclass(frozen=True, eq=False)
class Gsm8kTask:
    """Grade-school mathematics (arXiv:2110.14168), graded by math-verify; rows have "prompt" and "answer".

    Attributes:
      rows: `{"question": str, "answer": str}`, the answer a solution that ends with "#### <number>".
      instruction: added to every question on a line of its own.
    """

    rows: Sequence[Row]
    instruction: str = 'Think step by step, then give the final answer after "####".'

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError("expected at least one row; got none")
        for index, row in enumerate(self.rows):
            _check_gsm8k(row, f"row {index}")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        row = self.rows[index]
        return {"prompt": f"{row['question']}\n{self.instruction}", "answer": row["answer"]}

    def reward(self, prompts: Sequence[Prompt], completions: Sequence[str], **columns: Sequence[Any]) -> list[float]:
        """1.0 where the completion's final answer equals the number after "####" in the column "answer", else 0.0."""
        pairs = zip(_column(columns, "answer"), completions, strict=True)
        return [float(same_answer(gsm8k_gold(answer), final_answer(completion))) for answer, completion in pairs]


def gsm8k_gold(solution: str) -> str:
    """The number after the last "####" of a reference solution, without thousands separators."""
    return solution.rpartition(GSM8K_MARKER)[2].strip().replace(",", "")


def final_answer(completion: str) -> str:
    r"""The part of a completion to grade: the line after its last "####", or else all of its last 2,000 characters.

    In the second case math-verify looks for the answer: in `\boxed{}` first, then after "answer", then the last number.
    """
    _, marker, after = completion[-GRADED_CHARACTERS:].rpartition(GSM8K_MARKER)
    return after.strip().partition("\n")[0] if marker else completion[-GRADED_CHARACTERS:]


def same_answer(gold: str, answer: str) -> bool:
    """Whether math-verify finds in `answer` an expression equal to `gold`: `$18`, `18.0`, `36/2` equal 18.

    An answer that takes longer than `GRADING_SECONDS` to compare is wrong. The clock is `signal.alarm`, which only the
    main thread may set: in any other thread there is no limit, so grade untrusted completions in the main thread.
    """
    try:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    except ModuleNotFoundError as error:
        raise _missing_extra("math_verify") from error
    seconds = GRADING_SECONDS if threading.current_thread() is threading.main_thread() else 0  # 0 sets no clock
    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    expected, found = (parse(text, targets, parsing_timeout=seconds) for text in (gold, answer))
    return verify(expected, found, timeout_seconds=seconds)


def load_gsm8k(path: str | Path) -> Gsm8kTask:
    """The rows of a GSM8K file, one JSON object a line.

    Raises:
      ValueError: as `load_jsonl`, and for a solution without "#### <number>", naming the file and the line.
    """
    numbered = list(_numbered_rows(Path(path), ("question", "answer")))
    for line, row in numbered:
        _check_gsm8k(row, f"{path}, line {line}")
    return Gsm8kTask([row for _, row in numbered])


def load_jsonl(path: str | Path, required: Sequence[str] = ("question", "answer")) -> list[Row]:
    """Reads one JSON object per line; blank lines are skipped.

    The standard library in place of `datasets`: errors can name the line, and nothing is copied into a cache.

    Args:
      path: a UTF-8 file.
      required: fields that every row must have, as strings.

    Raises:
      ValueError: a malformed row (file and line number, what was expected, what came), or a file without rows.
    """
    return [row for _, row in _numbered_rows(Path(path), required)]


def _numbered_rows(path: Path, required: Sequence[str]) -> Iterator[tuple[int, Row]]:
    empty = True
    with path.open("rb") as file:  # bytes: only \n ends a line here, and U+2028 inside a string does not
        for number, line in enumerate(file, start=1):
            if line.strip():
                empty = False
                yield number, _parse_row(line, required, f"{path}, line {number}")
    if empty:
        raise ValueError(f"{path}: expected at least one JSON object; got an empty file")


def _parse_row(line: bytes, required: Sequence[str], where: str) -> Row:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: expected a JSON object; got {_excerpt(line)} ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object; got {type(row).__name__} {_excerpt(line)}")
    for name in required:
        if name not in row:
            raise ValueError(f"{where}: expected the fields {list(required)}; got {sorted(row)}, without {name!r}")
        if not isinstance(row[name], str):
            raise ValueError(f"{where}: expected a string in {name!r}; got {type(row[name]).__name__} {row[name]!r}")
    return row


def _excerpt(line: bytes) -> str:
    return repr(line.strip()[:60].decode("utf-8", errors="replace"))


def _check_gsm8k(row: Row, where: str) -> None:
    if GSM8K_MARKER not in row["answer"] or not gsm8k_gold(row["answer"]):
        raise ValueError(f"{where}: expected an answer that ends with '#### <number>'; got {row['answer'][-60:]!r}")


def prompt_text(row: Row, tokenizer: Tokenizer) -> str:
    """The text that a prompt becomes: through the chat template if the tokenizer has one, else as it is.

    Raises:
      ValueError: chat messages for a tokenizer that has no chat template.
    """
    prompt: Prompt = row["prompt"]
    if tokenizer.chat_template is not None:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    if not isinstance(prompt, str):
        raise ValueError(
            f"expected a plain string, because the tokenizer has no chat template; got messages {prompt!r}"
        )
    return prompt


def longest_prompt(tokenizer: Tokenizer, task: Task) -> int:
    """Tokens of the task's longest prompt: the width that refuses none of them."""
    texts = (prompt_text(task[index], tokenizer) for index in range(len(task)))
    special = wants_special_tokens(tokenizer)
    return max(len(tokenizer.encode(text, add_special_tokens=special)) for text in texts)


def batch_indices(size: int, batch: int, step: int, seed: int) -> Int[np.ndarray, " batch"]:
    """The rows of a training step, as a function of the step alone: to resume, nothing but the step must be known.

    Rows are visited epoch by epoch, every epoch in an order of its own; a batch may run over from one into the next.

    Args:
      size: rows of the dataset. batch: rows of a step.
      step: counted from 0.
      seed: at least 0; with the epoch it seeds that epoch's permutation.

    Returns:
      int64 `[batch]`, values from 0 to size - 1.
    """
    if size < 1 or batch < 1 or step < 0 or seed < 0:
        raise ValueError(
            f"expected size >= 1, batch >= 1, step >= 0 and seed >= 0; got {size}, {batch}, {step} and {seed}"
        )
    epochs, places = np.divmod(np.arange(step * batch, (step + 1) * batch), size)
    return np.array([_epoch_order(size, seed, int(e))[p] for e, p in zip(epochs, places, strict=True)])


@functools.lru_cache(maxsize=4)
def _epoch_order(size: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(size)
