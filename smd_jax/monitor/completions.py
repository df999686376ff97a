"""Completions of every n-th rollout: a parquet file, a few rows on the terminal, and their shadow masks.

loop = GRPOLoop(…, watch=CompletionsLog(directory, tokenizer), watch_every=20)

directory/completions/completions_00020.parquet     all completions of rollout 20, by TRL's file name
directory/completions/masks_00020.npz               the shadow masks of the first few with their text, for the page
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import jax
import numpy as np
from jaxtyping import Bool, Integer

from smd_jax.disk import replaced
from smd_jax.message.trajectory import Trajectory
from smd_jax.monitor.progress import TextFile, summary_table
from smd_jax.text.prompts import Tokenizer
from smd_jax.text.visible_text import one_line
from smd_jax.train.samples import Samples

UNFINISHED = "\ufffd"
PENDING = 32  # most tokens that wait for the end of a character: bytes that are no text never reach it


@dataclass(eq=False)
class CompletionsLog:
    """Saves the completions of a rollout; pass it to a loop as `watch`, which calls it for every n-th and the last one.

    Columns: `step`, `prompt` as the model saw it, `completion`, `reward`, `rewards/NAME` of every reward function,
    `advantage` where it follows from the rewards, `length` in tokens, `truncated` by the length limit. Conversations
    also have `turns`, `answers` and `turn_rewards` as lists, `ending`, and all text as their completion. If their
    contexts are compacted, `contexts` has the text of each, from its prompt on. A resumed run overwrites the files of
    repeated steps.

    If a file cannot be written, the run prints a line and continues.

    Args:
      directory: of the run.
      tokenizer: of the loop.
      table_rows: number of completions to print; 0: none.
      masks: number of completions whose shadow mask is saved, with all its contexts; 0: none.
      file: output of the table; None: standard output.

    Raises:
      ImportError: without pyarrow.
      ValueError: a negative number.
    """

    directory: str | Path
    tokenizer: Tokenizer
    _: KW_ONLY
    table_rows: int = 2
    masks: int = 1
    file: TextFile | None = None

    def __post_init__(self) -> None:
        if self.table_rows < 0 or self.masks < 0:
            raise ValueError(f"expected table_rows and masks >= 0; got {self.table_rows} and {self.masks}")
        try:
            import pyarrow.parquet  # noqa: F401 - fails now and not after a rollout
        except ImportError as error:
            raise ImportError("completions as parquet need pyarrow: pip install 'smd_jax[train]'") from error
        self._folder = Path(self.directory) / "completions"
        self._failed = False

    def __call__(self, step: int, samples: Samples) -> None:
        columns = completion_columns(step, samples, self.tokenizer)
        if self.table_rows:
            print_completions(step, columns, self.table_rows, file=self.file)
        if self._failed:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_parquet(self._folder / f"completions_{step:05d}.parquet", columns)
            if self.masks:
                self._keep_masks(step, samples)
        except OSError as error:
            self._failed = True
            print(f"completions are no longer saved: {one_line(str(error))}", file=sys.stderr, flush=True)

    def _keep_masks(self, step: int, samples: Samples) -> None:
        trajectory, contexts = samples.trajectory, samples.contexts
        present = np.asarray(trajectory.lengths()) > 0
        masks = list[SavedMask]()
        for row in range(min(self.masks, len(samples.completions)) * contexts):
            completion, context = divmod(row, contexts)
            if context and not present[row]:
                continue
            mask = extract_mask(trajectory, row, self.tokenizer, step, float(samples.rewards[completion]))
            masks.append(replace(mask, row=completion, context=context + 1 if contexts > 1 else 0))
        save_masks(self._folder / f"masks_{step:05d}.npz", masks)


def completion_columns(step: int, samples: Samples, tokenizer: Tokenizer) -> dict[str, list[Any]]:
    """The columns of `CompletionsLog`, one value per completion."""
    trajectory = samples.trajectory
    host = (trajectory.tokens, trajectory.valid, trajectory.terminated, trajectory.lengths())
    tokens, valid, terminated, lengths = jax.device_get(host)
    lengths = lengths.reshape(-1, samples.contexts).sum(axis=1)
    tokens, valid, terminated = (x[:: samples.contexts] for x in (tokens, valid, terminated))
    width = trajectory.prompt_width
    prompts = [tuple(row[keep].tolist()) for row, keep in zip(tokens[:, :width], valid[:, :width], strict=True)]
    # Decoding is slow, and all completions of a group have the same prompt.
    texts = {ids: decoded(tokenizer, list(ids)) for ids in set(prompts)}
    columns: dict[str, list[Any]] = {
        "step": [step] * len(samples.completions),
        "prompt": [texts[ids] for ids in prompts],
        "completion": list(samples.completions),
        "reward": samples.rewards.tolist(),
    }
    for name, values in samples.reward_parts.items():
        columns[f"rewards/{name}"] = np.asarray(values, np.float64).tolist()
    if samples.advantages is not None:
        columns["advantage"] = samples.advantages.tolist()
    if samples.conversations:
        columns["turns"] = [list(each.turns) for each in samples.conversations]
        columns["answers"] = [list(each.answers) for each in samples.conversations]
        columns["turn_rewards"] = [list(each.rewards) for each in samples.conversations]
        columns["ending"] = [each.ending for each in samples.conversations]
    if any(each.contexts for each in samples.conversations):
        columns["contexts"] = [list(each.contexts) for each in samples.conversations]
    return columns | {"length": lengths.tolist(), "truncated": (~terminated).tolist()}


def write_parquet(path: str | Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Writes a table atomically: a reader finds the complete file or none."""
    import pyarrow
    import pyarrow.parquet

    # Named, because a file may have only empty lists, as of conversations of one turn.
    types = {"answers": pyarrow.list_(pyarrow.string()), "turn_rewards": pyarrow.list_(pyarrow.float64())}
    table = pyarrow.table(
        {name: pyarrow.array(list(map(_whole, values)), types.get(name)) for name, values in columns.items()}
    )
    with replaced(Path(path)) as temporary:
        pyarrow.parquet.write_table(table, temporary)


def print_completions(
    step: int,
    columns: Mapping[str, Sequence[Any]],
    rows: int,
    *,
    file: TextFile | None = None,
) -> None:
    """Prints the first completions, shortened, as plain text without rich's markup and escape sequences."""
    completions = columns["completion"]
    if "turns" in columns:
        completions = [conversation_text(*said) for said in zip(columns["turns"], columns["answers"], strict=True)]
    table = [
        (shortened_text(columns["prompt"][row]), shortened_text(text), columns["reward"][row], columns["length"][row])
        for row, text in enumerate(completions[:rows])
    ]
    names = ("prompt", "completion", "reward", "length")
    summary_table(f"completions of rollout {step}", names, table, texts=2, file=file)


def conversation_text(turns: Sequence[str], answers: Sequence[str]) -> str:
    """A conversation as one text, with answers in brackets after their turns."""
    said = [f"{turn} [{answer.strip()}] " for turn, answer in zip(turns, answers, strict=False)]
    return "".join([*said, *turns[len(answers) :]]).strip()


def shortened_text(text: str, limit: int = 400) -> str:
    """The beginning and the end of a text, in one line."""
    half = limit // 2
    if len(text) > limit:
        text = f"{text[:half]} […] {text[-half:]}"
    return one_line(text, limit=10 * limit)


def _whole(value: Any) -> Any:
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


# --- shadow masks


@dataclass(frozen=True)
class SavedMask:
    """The shadow mask of one completion without its padding, so that tokens are numbered from 0.

    Attributes:
      evicted_at: unsigned `[layers, kv_heads, tokens]`: query t saw token s iff `s <= t < evicted_at[s]`. `tokens` for
        those that were never evicted.
      pieces: text of each token, prompt and completion.
      prompt_length: tokens of the prompt.
      step: number of the rollout.
      row: number of the completion, in the order of the rollout.
      reward: of the completion.
      turns: turn of each token that the policy sampled, from 1; 0 for the prompt and for answers of an environment. A
        single completion is turn 1.
      context: number of the context in its conversation, from 1; 0 for completions of one context.
    """

    evicted_at: Integer[np.ndarray, "layers kv_heads tokens"]
    pieces: list[str]
    prompt_length: int
    step: int
    row: int
    reward: float
    turns: list[int]
    context: int = 0

    def forgotten(self, query: int) -> Bool[np.ndarray, "layers kv_heads tokens"]:
        """The tokens up to the query that the query could not see, in every layer and head."""
        token = np.arange(self.evicted_at.shape[2])
        return (token <= query) & (self.evicted_at <= query)


def extract_mask(trajectory: Trajectory, row: int, tokenizer: Tokenizer, step: int, reward: float) -> SavedMask:
    """The mask of one completion, on the host and without padding."""
    valid = np.flatnonzero(np.asarray(trajectory.valid[row]))
    first, end = int(valid[0]), int(valid[-1]) + 1
    of_all = trajectory.mask.evicted_at
    evicted_at = np.asarray(of_all[min(row, len(of_all) - 1)])  # a mask that all rows share has one row
    tokens = end - first
    # A key that was evicted after the row's last query was visible to all of them.
    local = np.clip(evicted_at[:, :, first:end].astype(np.int64) - first, 0, tokens)
    dtype = np.uint16 if tokens <= np.iinfo(np.uint16).max else np.uint32
    ids = np.asarray(trajectory.tokens[row])[first:end].tolist()
    prompt = trajectory.prompt_width - first
    turns = [0] * prompt + np.asarray(trajectory.turns()[row]).tolist()
    return SavedMask(local.astype(dtype), token_pieces(tokenizer, ids), prompt, step, row, reward, turns[:tokens])


def token_pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The text that each token adds. If several tokens make one character, the last one has it; others are empty."""
    pieces, start, read = list[str](), 0, 0
    for end in range(1, len(ids) + 1):
        # From the token before the unread ones, which determines whether a word begins and which bytes belong together.
        before, after = decoded(tokenizer, ids[start:read]), decoded(tokenizer, ids[start:end])
        is_whole = not after.endswith(UNFINISHED) or end == len(ids) or end - read == PENDING
        pieces.append(after[len(before) :] if is_whole else "")
        if is_whole and len(after) > len(before):
            start, read = read, end
    return pieces


def decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=False) if ids else ""
    assert isinstance(text, str)
    return text


def save_masks(path: str | Path, masks: list[SavedMask]) -> None:
    """Writes all masks of a step into one file, atomically."""
    arrays = {str(number): mask.evicted_at for number, mask in enumerate(masks)}
    others = [{name: value for name, value in vars(mask).items() if name != "evicted_at"} for mask in masks]
    # Given a name without .npz, numpy would add it.
    with replaced(Path(path)) as temporary, open(temporary, "wb") as file:
        np.savez_compressed(file, allow_pickle=False, others=np.array(json.dumps(others)), **arrays)


def load_masks(path: str | Path) -> list[SavedMask]:
    """Reads the masks that `save_masks` wrote.

    Raises:
      FileNotFoundError: no such file.
      ValueError: another kind of file.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            others = json.loads(str(arrays["others"]))
            return [SavedMask(arrays[str(number)], **other) for number, other in enumerate(others)]
    except (KeyError, TypeError, BadZipFile, EOFError) as error:
        raise ValueError(f"expected a file of saved masks; got {path}") from error
