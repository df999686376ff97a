"""Packs sequences into rows on the host: the longest first, each into the first row with room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from flax import struct
from jaxtyping import Int

from smd_jax.learner.config import UpdateConfig
from smd_jax.pytrees import any_leaves

ABSENT = -1


@dataclass(frozen=True)
class PackSizes:
    """One microbatch of packed rows.

    Attributes:
      rows: of a microbatch.
      columns: T, tokens of a row.
      responses: K, tokens of the responses in it.
    """

    rows: int
    columns: int
    responses: int


def rows_at_once(rows: int, config: UpdateConfig) -> int:
    """Rows of a separate forward pass over `rows` with one sequence each: a microbatch, or with packing the most up to
    it that divide `rows`."""
    size = config.microbatch_size or rows
    if config.pack_columns is None:
        return size
    return next(part for part in range(min(size, rows), 0, -1) if rows % part == 0)


@any_leaves
class Packs(struct.PyTreeNode):
    """Place of every token: of all microbatches with a leading axis, or of one.

    Attributes:
      tokens: int32 `[…, rows, T]` place of each token in the flattened `[batch * T_of_rollout]`, or ABSENT.
      positions, ends: `[…, rows, T]` as in `smd_jax.message.packing.Packing`.
      responses: int32 `[…, rows, K]` place of each response token in the flattened `[batch * R]`, or ABSENT.
      columns: `[…, rows, K]` as in Packing.
    """

    tokens: Int[np.ndarray, "*parts rows T"]
    positions: Int[np.ndarray, "*parts rows T"]
    ends: Int[np.ndarray, "*parts rows T"]
    responses: Int[np.ndarray, "*parts rows K"]
    columns: Int[np.ndarray, "*parts rows K"]

    @property
    def padding(self) -> float:
        """Share of the columns without a token."""
        return float((self.tokens == ABSENT).mean())


def first_fit(lengths: Sequence[int], responses: Sequence[int], sizes: PackSizes) -> list[list[int]]:
    """The sequences of every row, longest first.

    Args:
      lengths: tokens of each sequence. responses: those of its response.

    Raises:
      ValueError: a sequence that is longer than a row.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        need, asked = lengths[index], responses[index]
        if need > sizes.columns or asked > sizes.responses:
            raise ValueError(
                f"expected rows of at least {need} columns, {asked} of them for responses, because sequence {index} is "
                f"so long; got {sizes.columns} and {sizes.responses}"
            )
        fits = (row for row, (free, answers) in enumerate(room) if need <= free and asked <= answers)
        row = next(fits, len(rows))
        if row == len(rows):
            rows.append([])
            room.append((sizes.columns, sizes.responses))
        rows[row].append(index)
        room[row] = (room[row][0] - need, room[row][1] - asked)
    return rows


def pack(
    prompts: Int[np.ndarray, " batch"],
    responses: Int[np.ndarray, " batch"],
    prompt_width: int,
    response_width: int,
    sizes: PackSizes,
) -> Packs:
    """Packs of a rollout whose prompts end in column `prompt_width - 1`, where its responses begin.

    Args:
      prompts, responses: tokens of each row.
      prompt_width, response_width: columns of the rollout.
    """
    lengths = (prompts + responses).tolist()
    rows = first_fit(lengths, responses.tolist(), sizes)
    parts = -(-len(rows) // sizes.rows)
    tokens = np.full((parts * sizes.rows, sizes.columns), ABSENT, np.int32)
    positions, ends = np.zeros_like(tokens), np.zeros_like(tokens)
    answers = np.full((parts * sizes.rows, sizes.responses), ABSENT, np.int32)
    columns = np.ones_like(answers)
    width = prompt_width + response_width
    for row, members in enumerate(rows):
        column, answer = 0, 0
        for index in members:
            length, prompt, drawn = lengths[index], int(prompts[index]), int(responses[index])
            place = slice(column, column + length)
            tokens[row, place] = index * width + prompt_width - prompt + np.arange(length)
            positions[row, place] = np.arange(length)
            ends[row, place] = column + length
            where = slice(answer, answer + drawn)
            answers[row, where] = index * response_width + np.arange(drawn)
            columns[row, where] = column + prompt + np.arange(drawn)
            column, answer = column + length, answer + drawn
    everything = Packs(tokens, positions, ends, answers, columns)
    return jax.tree.map(lambda x: x.reshape(parts, sizes.rows, -1), everything)
