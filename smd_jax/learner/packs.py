"""Packs sequences into rows on the host: the longest first, each into the first row with room.

Sequences with equal beginnings can share them. They are then branches of a tree (`smd_jax.message.tree`), packed as
chains in depth-first order:

    sequences        [p p p a a]  [p p p b]  [q q c c c]
    chains           [p p p a a | b]         [q q c c c]        the second sequence adds the tokens after the beginning
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

from smd_jax.message.packing import shared_beginning
from smd_jax.pytrees import PyTreeNode

ABSENT = -1


@dataclass(frozen=True)
class PackSizes:
    """Sizes of a microbatch of packed rows.

    Attributes:
      rows: rows of a microbatch.
      columns: T, columns of a row.
      responses: K, response tokens of a row.
    """

    rows: int
    columns: int
    responses: int


class Packs(PyTreeNode):
    """Index of every token, for one microbatch or for all with a leading axis. The last ones may be empty.

    Attributes:
      tokens: int32 `[…, rows, T]` index of each token in the flattened `[batch * T_of_rollout]`, or ABSENT.
      positions, ends: `[…, rows, T]` as in `smd_jax.message.packing.Packing`.
      stops: int32 `[…, rows, T]` first column after the tokens that each token's sequence added to the row; `ends` for
        unshared tokens.
      responses: int32 `[…, rows, K]` index of each response token in the flattened `[batch * R]`, or ABSENT.
      columns, sources: `[…, rows, K]` as in Packing.
      distinct, same: `[…, rows, U]` and `[…, rows, K]` as in Packing, or None.
    """

    tokens: Int[np.ndarray, "*parts rows T"]
    positions: Int[np.ndarray, "*parts rows T"]
    ends: Int[np.ndarray, "*parts rows T"]
    stops: Int[np.ndarray, "*parts rows T"]
    responses: Int[np.ndarray, "*parts rows K"]
    columns: Int[np.ndarray, "*parts rows K"]
    sources: Int[np.ndarray, "*parts rows K"]
    distinct: Int[np.ndarray, "*parts rows U"] | None = None
    same: Int[np.ndarray, "*parts rows K"] | None = None


def first_fit(lengths: Sequence[int], responses: Sequence[int], sizes: PackSizes) -> list[list[int]]:
    """The sequences of every row, longest first.

    Raises:
      ValueError: a sequence is longer than a row.
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


def with_distinct(packs: Packs) -> Packs:
    """Adds `distinct` and `same` if several entries have the same token and it saves work."""
    width = packs.responses.shape[-1]
    columns = np.where(packs.responses == ABSENT, ABSENT, packs.columns).reshape(-1, width)
    found = [np.unique(row, return_index=True, return_inverse=True) for row in columns]
    # Entries without a token are also one of the distinct ones, which is not used.
    most = few_widths(max(len(first) for _, first, _ in found), width)
    if most == width:
        return packs
    distinct = np.zeros((len(found), most), np.int32)
    for row, (_, first, _) in enumerate(found):
        distinct[row, : len(first)] = first
    same = np.stack([inverse.reshape(-1) for _, _, inverse in found]).astype(np.int32)
    shape = packs.responses.shape[:-1]
    return packs.replace(distinct=distinct.reshape(*shape, most), same=same.reshape(*shape, width))


def few_widths(needed: int, most: int) -> int:
    """Rounds `needed` up to one of four widths per octave, at most `most`, because every width is compiled."""
    step = 2 ** max(needed.bit_length() - 3, 0)
    return min(-(-max(needed, 1) // step) * step, most)


class Member(NamedTuple):
    """A sequence of a chain.

    Attributes:
      index: index of the sequence.
      shared: tokens at its beginning that the previous member already has in the row.
    """

    index: int
    shared: int = 0


@dataclass(frozen=True)
class Sequences:
    """The sequences of a rollout. Prompts end at column `prompt_width - 1`, responses begin at `prompt_width`.

    Attributes:
      prompts: `[batch]` tokens of each prompt.
      valid: `[batch, R]` columns of each response with a token; the first ones.
      counted: `[batch, R]` response tokens that the policy sampled.
      prompt_width: P.
    """

    prompts: Int[np.ndarray, " batch"]
    valid: Bool[np.ndarray, "batch R"]
    counted: Bool[np.ndarray, "batch R"]
    prompt_width: int

    @property
    def lengths(self) -> Int[np.ndarray, " batch"]:
        return self.prompts + self.valid.sum(1)

    @property
    def responses(self) -> Int[np.ndarray, " batch"]:
        return self.counted.sum(1)

    def columns(self, index: int) -> slice:
        """The columns of a sequence's tokens."""
        start = self.prompt_width - int(self.prompts[index])
        return slice(start, start + int(self.lengths[index]))


def chains(
    sequences: Sequences,
    tokens: Int[np.ndarray, "batch T"],
    evicted_at: Int[np.ndarray, "batch layers kv_heads T"],
    sizes: PackSizes,
    routing: Int[np.ndarray, "batch T mixtures per_token"] | None = None,
) -> list[list[Member]]:
    """Chains of sequences that share their beginnings, each at most as long as a row.

    Args:
      tokens, evicted_at, routing: the rollout's, by column. Tokens that went to other experts are not shared.
    """
    lengths, responses = sequences.lengths.tolist(), sequences.responses.tolist()
    where = [sequences.columns(index) for index in range(len(lengths))]
    ids = [tokens[index, columns] for index, columns in enumerate(where)]
    intervals = [evicted_at[index, ..., columns] - columns.start for index, columns in enumerate(where)]
    experts = None if routing is None else [routing[index, columns] for index, columns in enumerate(where)]
    found: list[list[Member]] = []
    free = answers = 0
    # Sorted by tokens, sequences with the longest common beginning are adjacent.
    for index in sorted(range(len(ids)), key=lambda index: (ids[index].astype(">i4").tobytes(), index)):
        shared = 0
        if found:
            last = found[-1][-1].index
            went = None if experts is None else (experts[last], experts[index])
            shared = shared_beginning(ids[last], ids[index], (intervals[last], intervals[index]), went)
        if not shared or lengths[index] - shared > free or responses[index] > answers:
            shared, free, answers = 0, sizes.columns, sizes.responses
            found.append([])
        found[-1].append(Member(index, shared))
        free, answers = free - lengths[index] + shared, answers - responses[index]
    return found


def pack(sequences: Sequences, sizes: PackSizes, together: Sequence[Sequence[Member]] | None = None) -> Packs:
    """Packs a rollout.

    Args:
      together: chains to keep together, see `chains`, with as many columns for response tokens as they need; None: no
        chains, and `sizes.responses` columns.
    """
    lengths, responses = sequences.lengths.tolist(), sequences.responses.tolist()
    all_chains = [[Member(index)] for index in range(len(lengths))] if together is None else together
    needs = [sum(lengths[one.index] - one.shared for one in chain) for chain in all_chains]
    drawn_of = [sum(responses[one.index] for one in chain) for chain in all_chains]
    rows = first_fit(needs, drawn_of, sizes)
    width_of_answers = sizes.responses
    if together is not None:
        width_of_answers = few_widths(max(sum(drawn_of[chain] for chain in row) for row in rows), sizes.responses)
    # As many as one sequence a row would need, because every number of microbatches would be compiled.
    parts = -(-len(lengths) // sizes.rows)
    tokens = np.full((parts * sizes.rows, sizes.columns), ABSENT, np.int32)
    positions, ends, stops = (np.zeros_like(tokens) for _ in range(3))
    answers = np.full((parts * sizes.rows, width_of_answers), ABSENT, np.int32)
    columns, sources = np.ones_like(answers), np.zeros_like(answers)
    width, response_width = sequences.prompt_width + sequences.valid.shape[1], sequences.valid.shape[1]
    for row, members in enumerate(rows):
        column, answer = 0, 0
        for chain in members:
            path = np.zeros(0, np.int64)  # columns of the tokens of the sequence before
            for index, shared in all_chains[chain]:
                prompt, length = int(sequences.prompts[index]), lengths[index]
                stop = column + length - shared
                path = np.concatenate([path[:shared], np.arange(column, stop)])
                first = index * width + sequences.prompt_width - prompt
                tokens[row, column:stop] = first + np.arange(shared, length)
                positions[row, column:stop] = np.arange(shared, length)
                stops[row, column:stop] = stop
                ends[row, path] = stop
                drawn = np.flatnonzero(sequences.counted[index])
                where = slice(answer, answer + len(drawn))
                answers[row, where] = index * response_width + drawn
                columns[row, where] = path[prompt + drawn]
                sources[row, where] = path[prompt + drawn - 1]
                column, answer = stop, answer + len(drawn)
    everything = Packs(tokens, positions, ends, stops, answers, columns, sources)
    return jax.tree.map(lambda x: x.reshape(parts, sizes.rows, -1), everything)
