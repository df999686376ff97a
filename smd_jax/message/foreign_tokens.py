"""Checks and pads tokens and log-probabilities of another engine.

`smd_jax.message.foreign` reads the evictions. `Trajectory.from_records` joins both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, SupportsFloat, SupportsIndex

import numpy as np

Ints = Sequence[SupportsIndex] | np.ndarray
Floats = Sequence[SupportsFloat] | np.ndarray

ROUNDING = 1e-4  # nats above 0 that a log-probability may reach by float32 rounding
MOST_IDS = np.iinfo(np.int32).max


class PaddedRows(NamedTuple):
    """Tokens of a batch in a Trajectory's layout: prompts end at column P - 1, responses begin at P.

    Attributes:
      tokens, valid: `[batch, T]`.
      logprobs: `[batch, R]` float32, 0 after the end of a row.
      start: `[batch]` column of each row's position 0.
      lengths: `[batch]` tokens of each row.
      sampled: `[batch, R]` which response tokens the policy sampled; None: all.
    """

    tokens: np.ndarray
    valid: np.ndarray
    logprobs: np.ndarray
    start: np.ndarray
    lengths: np.ndarray
    sampled: np.ndarray | None


def unpad(padded: np.ndarray, valid: np.ndarray) -> list[np.ndarray]:
    """Removes the padding of rows.

    Args:
      padded: `[batch, width]` tokens or log-probabilities.
      valid: `[batch, width]` booleans, or ones and zeros.

    Raises:
      ValueError: different shapes, or `valid` is not a mask.
    """
    padded, valid = np.asarray(padded), np.asarray(valid)
    if padded.ndim != 2 or padded.shape != valid.shape:
        raise ValueError(f"expected two arrays of one shape [batch, width]; got {padded.shape} and {valid.shape}")
    if not np.isin(valid, (0, 1)).all():
        raise ValueError(f"expected booleans, or ones and zeros, in `valid`; got {np.unique(valid)[:4]}")
    return [row[mask] for row, mask in zip(padded, valid.astype(bool), strict=True)]


def check_terminated(terminated: Sequence[bool] | np.ndarray, rows: int) -> np.ndarray:
    """The booleans as an array. Raises ValueError unless there is one for each row."""
    ended = np.asarray(terminated)
    if ended.shape != (rows,) or ended.dtype != bool:
        raise ValueError(f"expected a boolean for each of {rows} rows in terminated; got {terminated}")
    return ended


def check_sampled(
    sampled: Sequence[Sequence[bool] | np.ndarray] | None, responses: Sequence[Ints]
) -> list[np.ndarray] | None:
    """The booleans as arrays. Raises ValueError unless there is one for each response token."""
    if sampled is None:
        return None
    if len(sampled) != len(responses):
        raise ValueError(f"expected sampled of {len(responses)} rows; got {len(sampled)}")
    found = [np.asarray(row) for row in sampled]
    for index, (row, response) in enumerate(zip(found, responses, strict=True)):
        if row.shape != (len(response),) or row.dtype != bool:
            raise ValueError(
                f"expected a boolean for each of the {len(response)} response tokens of row {index} in sampled; got an "
                f"array of shape {row.shape} and {row.dtype}"
            )
    return found


def check_longest(longest: int | None, lengths: np.ndarray) -> None:
    """Raises ValueError for a row of more than `longest` tokens."""
    if longest is not None and lengths.max() > longest:
        row = int(np.argmax(lengths))
        raise ValueError(f"expected longest of at least {lengths[row]}, the tokens of row {row}; got {longest}")


def pad_tokens(
    prompts: Sequence[Ints],
    responses: Sequence[Ints],
    logprobs: Sequence[Floats],
    sampled: Sequence[Sequence[bool] | np.ndarray] | None,
    vocab_size: int | None,
    widths: tuple[int | None, int | None],
    pad_token_id: int,
) -> PaddedRows:
    """Pads prompts on the left and responses on the right; see `Trajectory.from_records`.

    Args:
      widths: of prompts and responses.
    """
    if not len(prompts) == len(responses) == len(logprobs) or not len(prompts):
        raise ValueError(
            "expected as many prompts, responses and rows of log-probabilities, and at least one; got "
            f"{len(prompts)}, {len(responses)} and {len(logprobs)}"
        )
    most = MOST_IDS if vocab_size is None else vocab_size
    asked = [_tokens(row, index, "prompt", most) for index, row in enumerate(prompts)]
    drawn = [_tokens(row, index, "response", most) for index, row in enumerate(responses)]
    flags = check_sampled(sampled, drawn)
    every = [np.ones(len(response), bool) for response in drawn] if flags is None else flags
    known = [_logprobs(row, index, every[index]) for index, row in enumerate(logprobs)]
    _check_ids(np.array([pad_token_id]), most, "pad_token_id")
    before = _width("prompt_width", widths[0], asked)
    after = _width("response_width", widths[1], drawn)
    tokens = np.full((len(asked), before + after), pad_token_id, np.int32)
    valid = np.zeros(tokens.shape, bool)
    padded = np.zeros((len(asked), after), np.float32)
    counted = np.zeros(padded.shape, bool)
    for row, (prompt, response, of_response) in enumerate(zip(asked, drawn, known, strict=True)):
        columns = slice(before - len(prompt), before + len(response))
        tokens[row, columns] = np.concatenate([prompt, response])
        valid[row, columns] = True
        padded[row, : len(response)] = of_response
        counted[row, : len(response)] = every[row]
    start = before - np.array([len(prompt) for prompt in asked])
    return PaddedRows(tokens, valid, padded, start, valid.sum(axis=1), None if flags is None else counted)


def _tokens(row: Ints, index: int, what: str, most: int) -> np.ndarray:
    tokens = whole_numbers(row, f"{what} of row {index}")
    if not len(tokens):
        raise ValueError(f"expected at least one token in every {what}; got none in row {index}")
    _check_ids(tokens, most, f"{what} of row {index}")
    return tokens


def _check_ids(tokens: np.ndarray, most: int, where: str) -> None:
    """Raises ValueError unless all ids are in the vocabulary."""
    # Loops over `[:1]`, here and below: the first place where something is wrong, if there is one.
    for place in np.flatnonzero((tokens < 0) | (tokens >= most))[:1]:
        raise ValueError(
            f"expected ids from 0 to {most - 1}, the vocabulary; got {tokens[place]} ({where}, token {place})"
        )


def _logprobs(row: Floats, index: int, sampled: np.ndarray) -> np.ndarray:
    found = np.asarray(row, np.float64)
    if found.shape != sampled.shape:
        raise ValueError(
            f"expected one log-probability for each of the {len(sampled)} response tokens of row {index}; got an array "
            f"of shape {found.shape}"
        )
    found = np.where(sampled, found, 0.0)  # an engine may report anything for tokens that it did not sample
    for place in np.flatnonzero(~np.isfinite(found))[:1]:
        raise ValueError(f"expected finite log-probabilities; got {found[place]} (row {index}, response token {place})")
    for place in np.flatnonzero(found > ROUNDING)[:1]:
        raise ValueError(
            "expected log-probabilities, which are at most 0 (probabilities and negative log-probabilities are other "
            f"numbers); got {found[place]} (row {index}, response token {place})"
        )
    return found.astype(np.float32)


def _width(name: str, asked: int | None, rows: list[np.ndarray]) -> int:
    lengths = [len(row) for row in rows]
    if asked is not None and max(lengths) > asked:
        raise ValueError(
            f"expected {name} of at least {max(lengths)}, the tokens of row {int(np.argmax(lengths))}; got {asked}"
        )
    return max(lengths) if asked is None else asked


def whole_numbers(numbers: Ints, where: str) -> np.ndarray:
    """Checks for a one-dimensional array of whole numbers, which may be empty."""
    found = np.asarray(numbers)
    if found.ndim != 1 or (found.size and not np.issubdtype(found.dtype, np.integer)):
        raise ValueError(
            f"expected whole numbers in a list; got an array of shape {found.shape} and {found.dtype} ({where})"
        )
    return found.astype(np.int64)
