"""Saves the shadow masks of single completions with their text, for the page, in .npz files without pickles.

Padding is removed, so that tokens are numbered from 0.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from jaxtyping import Bool, Integer

from smd_jax.disk import replaced
from smd_jax.message.trajectory import Trajectory
from smd_jax.text.prompts import Tokenizer

CONTEXT = 8  # tokens; a character has at most four bytes
UNFINISHED = "\ufffd"


@dataclass(frozen=True)
class SavedMask:
    """The shadow mask of one completion.

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
    ids = np.asarray(trajectory.tokens[row, first:end]).tolist()
    prompt = trajectory.prompt_width - first
    turns = [0] * prompt + np.asarray(trajectory.turns()[row]).tolist()
    return SavedMask(local.astype(dtype), token_pieces(tokenizer, ids), prompt, step, row, reward, turns[:tokens])


def token_pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The text that each token adds. If several tokens make one character, the last one has it; others are empty."""
    pieces = []
    # A few preceding tokens determine where a word begins and which bytes belong together.
    for index in range(len(ids)):
        before = decoded(tokenizer, ids[max(index - CONTEXT, 0) : index])
        after = decoded(tokenizer, ids[max(index - CONTEXT, 0) : index + 1])
        shared = len(os.path.commonprefix([before, after]))
        pieces.append("" if after.endswith(UNFINISHED) else after[shared:])
    return pieces


def decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=False) if ids else ""
    assert isinstance(text, str)
    return text


def save_masks(path: str | Path, masks: list[SavedMask]) -> None:
    """Writes all masks of a step into one file, atomically."""
    arrays: dict[str, np.ndarray] = {"count": np.array(len(masks))}
    for number, mask in enumerate(masks):
        arrays |= {
            f"{number}/evicted_at": mask.evicted_at,
            # An array of texts strips trailing zeros; joined bytes with lengths keep everything.
            f"{number}/text": np.frombuffer("".join(mask.pieces).encode("utf-8", "surrogatepass"), np.uint8),
            f"{number}/lengths": np.array([len(piece) for piece in mask.pieces], np.int32),
            f"{number}/numbers": np.array([mask.prompt_length, mask.step, mask.row, mask.context], np.int64),
            f"{number}/reward": np.array(mask.reward, np.float64),
            f"{number}/turns": np.array(mask.turns, np.int32),
        }
    # Given a name without .npz, numpy would add it.
    with replaced(Path(path)) as temporary, open(temporary, "wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def load_masks(path: str | Path) -> list[SavedMask]:
    """Reads the masks that `save_masks` wrote.

    Raises:
      FileNotFoundError: no such file.
      ValueError: another kind of file.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return [_load(arrays, number) for number in range(int(arrays["count"]))]
    except (KeyError, BadZipFile, EOFError) as error:
        raise ValueError(f"expected a file of saved masks; got {path}") from error


def _load(arrays: np.lib.npyio.NpzFile, number: int) -> SavedMask:
    text = arrays[f"{number}/text"].tobytes().decode("utf-8", "surrogatepass")
    ends = np.cumsum(arrays[f"{number}/lengths"]).tolist()
    prompt_length, step, row, context = arrays[f"{number}/numbers"].tolist()
    return SavedMask(
        arrays[f"{number}/evicted_at"],
        [text[first:end] for first, end in zip([0, *ends[:-1]], ends, strict=True)],
        prompt_length,
        step,
        row,
        float(arrays[f"{number}/reward"]),
        arrays[f"{number}/turns"].tolist(),
        context,
    )
