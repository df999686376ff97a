"""Converts the eviction records of another engine to a shadow mask.

Rows have no padding, and tokens are numbered by their position in their own row: prompt 0 … p-1, response p … n-1. One
layer and KV head of a row with a prompt of 4 and a response of 5:

    position          0 1 2 3 | 4 5 6 7 8
    after query 5     1 1 . 1   1 .            kept: (5, [0, 1, 3, 4])   or dropped: (5, [2, 5])
    query 6 sees      1 1 . 1   1 . 1          evicted_at of keys 2 and 5 is 6: query 5 still saw them
    after query 7     . 1 . 1   . . 1 1        kept: (7, [1, 3, 6, 7])   or dropped: (7, [0, 4])
    query 8 sees      . 1 . 1   . . 1 1 1

Token 8 was sampled from the output of query 7. Whether its key entered the cache does not matter: no query follows.

NumPy only. `Trajectory.from_records` documents the accepted records.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, SupportsIndex

import numpy as np

from smd_jax.message.foreign_tokens import Ints, PaddedRows, whole_numbers
from smd_jax.message.masks import NEVER

# The position of the last query that saw the dropped keys, and positions of keys, `[layer][kv_head][…]`.
Compression = tuple[SupportsIndex, Sequence[Sequence[Ints]] | np.ndarray]


def evicted_by_row(
    lengths: np.ndarray,
    layers: int,
    kv_heads: int,
    *,
    kept: Sequence[Sequence[Compression]] | None,
    dropped: Sequence[Sequence[Compression]] | None,
    evicted_at: Sequence[np.ndarray] | None,
) -> list[np.ndarray]:
    """`evicted_at [layers, kv_heads, tokens]` of every row, in positions, from the given record. The first two axes are
    1 if they are 1 in the record of every row.

    Args:
      lengths: `[batch]` tokens of each row. For the others see `Trajectory.from_records`.
    """
    if layers < 1 or kv_heads < 1:
        raise ValueError(f"expected layers >= 1 and kv_heads >= 1; got {layers} and {kv_heads}")
    records = {"kept": kept, "dropped": dropped, "evicted_at": evicted_at}
    given = [name for name, record in records.items() if record is not None]
    if len(given) != 1:
        raise ValueError(f"expected exactly one of {', '.join(records)}; got {' and '.join(given) or 'none'}")
    for name, record in records.items():
        if record is not None and len(record) != len(lengths):
            raise ValueError(f"expected {name} of {len(lengths)} rows; got {len(record)}")
    all_sizes = [_Sizes(row, tokens, layers, kv_heads) for row, tokens in enumerate(lengths.tolist())]
    if evicted_at is not None:
        checked = [_check_evicted_at(of_row, sizes) for of_row, sizes in zip(evicted_at, all_sizes, strict=True)]
        # An axis that all rows share stays 1, because all layers and heads of a long batch take gigabytes.
        shared = np.max([of_row.shape[:2] for of_row in checked], axis=0).tolist()
        return [np.broadcast_to(of_row, (*shared, of_row.shape[2])) for of_row in checked]
    kind, compressions = ("dropped", dropped) if kept is None else ("kept", kept)
    assert compressions is not None, "checked above"
    return [_from_compressions(of_row, kind, sizes) for of_row, sizes in zip(compressions, all_sizes, strict=True)]


def to_columns(by_row: Sequence[np.ndarray], rows: PaddedRows) -> np.ndarray:
    """`evicted_at [batch, layers or 1, kv_heads or 1, T]` by columns, from those of `evicted_by_row` by positions.

    A row has no query after its last token. If padding follows, all remaining keys are evicted there, so that padding
    sees nothing and a row that ended early respects its segments.
    """
    columns = rows.tokens.shape[1]
    found = np.zeros((len(by_row), *by_row[0].shape[:2], columns), np.int32)  # padding: never seen
    for row, evicted_at in enumerate(by_row):
        start, length = int(rows.start[row]), int(rows.lengths[row])
        end = start + length
        stayed = end if end < columns else NEVER
        found[row, :, :, start:end] = np.where(evicted_at < length, np.minimum(evicted_at, length) + start, stayed)
    return found


# --- one row: `evicted_at [layers, kv_heads, tokens]`, by positions


class _Sizes(NamedTuple):
    """A row's number in the batch, for messages, its tokens, and the model's layers and KV heads."""

    row: int
    tokens: int
    layers: int
    kv_heads: int


def _from_compressions(
    compressions: Sequence[Compression], kind: Literal["kept", "dropped"], sizes: _Sizes
) -> np.ndarray:
    """Reads compressions in time order; two may follow the same query."""
    row, tokens, layers, kv_heads = sizes
    evicted_at = np.full((layers, kv_heads, tokens), NEVER, np.int32)
    by_head = evicted_at.reshape(layers * kv_heads, tokens)  # a view: writes below change `evicted_at`
    before = 0
    for number, (after, keys) in enumerate(compressions):
        last = int(after)
        where = f"row {row}, compression {number}"
        if not before <= last < tokens:
            raise ValueError(
                f"expected compressions in order, each after one of the queries {before} to {tokens - 1}; got one "
                f"after query {last} ({where})"
            )
        before = last
        heads, named = _named_keys(keys, layers, kv_heads, where)
        _check_named(heads, named, by_head[:, : last + 1], kind, kv_heads, f"{where} after query {last}")
        if kind == "dropped":
            # Only the named keys: an engine that evicts at every step has as many compressions as tokens.
            by_head[heads, named] = last + 1
        else:
            goes = by_head[:, : last + 1] == NEVER
            goes[heads, named] = False
            by_head[:, : last + 1][goes] = last + 1
    return evicted_at


def _named_keys(
    keys: Sequence[Sequence[Ints]] | np.ndarray, layers: int, kv_heads: int, where: str
) -> tuple[np.ndarray, np.ndarray]:
    """`[named]` heads, numbered through all layers, and positions of the named keys."""
    if len(keys) != layers:
        raise ValueError(f"expected keys of {layers} layers; got {len(keys)} ({where})")
    for layer, heads in enumerate(keys):
        if len(heads) != kv_heads:
            raise ValueError(f"expected keys of {kv_heads} KV heads; got {len(heads)} ({where}, layer {layer})")
    lists = [
        whole_numbers(keys[layer][head], f"{where}, {_place(layer, head)}")
        for layer, head in np.ndindex(layers, kv_heads)
    ]
    return np.repeat(np.arange(len(lists)), [len(x) for x in lists]), np.concatenate(lists)


def _check_named(
    heads: np.ndarray,
    keys: np.ndarray,
    evicted_at: np.ndarray,
    kind: Literal["kept", "dropped"],
    kv_heads: int,
    where: str,
) -> None:
    """Raises ValueError unless every named key is in the cache and is named once.

    Args:
      heads, keys: from `_named_keys`.
      evicted_at: `[layers * kv_heads, keys]` of the keys so far.
    """
    count = evicted_at.shape[1]
    # Loops over `[:1]`, here and below, report the first error.
    for place in np.flatnonzero((keys < 0) | (keys >= count))[:1]:
        raise ValueError(
            f"expected {kind} keys from 0 to {count - 1}, those that the query could see; got {keys[place]} "
            f"({where}, {_place(*divmod(heads[place], kv_heads))})"
        )
    named, times = np.unique(heads * count + keys, return_counts=True)
    heads, keys = np.divmod(named, count)
    gone_at = evicted_at[heads, keys]
    for place in np.flatnonzero(gone_at != NEVER)[:1]:
        raise ValueError(
            f"expected {kind} keys that were in the cache, because an evicted key never comes back; got key "
            f"{keys[place]}, which was dropped after query {gone_at[place] - 1} "
            f"({where}, {_place(*divmod(heads[place], kv_heads))})"
        )
    for place in np.flatnonzero(times > 1)[:1]:
        raise ValueError(
            f"expected every {kind} key once; got key {keys[place]} {times[place]} times "
            f"({where}, {_place(*divmod(heads[place], kv_heads))})"
        )


def _check_evicted_at(evicted_at: np.ndarray, sizes: _Sizes) -> np.ndarray:
    """`[layers or 1, kv_heads or 1, tokens]`, checked."""
    row, tokens, layers, kv_heads = sizes
    found, expected = np.asarray(evicted_at), (layers, kv_heads, tokens)
    fits = found.ndim == 3 and all(got in (1, want) for got, want in zip(found.shape[:2], expected, strict=False))
    if not fits or found.shape[2] != tokens:
        raise ValueError(
            f"expected evicted_at of row {row} to be {expected} (layers, KV heads, tokens of prompt and response); got "
            f"{found.shape}"
        )
    if not np.issubdtype(found.dtype, np.integer):
        raise ValueError(f"expected whole numbers in evicted_at; got {found.dtype} (row {row})")
    for layer, head, key in np.argwhere(found <= np.arange(tokens))[:1]:
        raise ValueError(
            f"expected evicted_at of at least {key + 1}, because a query sees its own key; got "
            f"{found[layer, head, key]} (row {row}, {_place(layer, head)}, key {key})"
        )
    return np.minimum(found, NEVER).astype(np.int32)


def _place(layer: SupportsIndex, head: SupportsIndex) -> str:
    return f"layer {layer}, kv head {head}"
