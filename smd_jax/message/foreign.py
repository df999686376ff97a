"""Checks the records of another engine, and converts them to the arrays of a trajectory.

One layer and KV head of a row with a prompt of 4 and a response of 5, by position:

    position          0 1 2 3 | 4 5 6 7 8
    after query 5     1 1 . 1   1 .            kept: (5, [0, 1, 3, 4])   or dropped: (5, [2, 5])
    query 6 sees      1 1 . 1   1 . 1          evicted_at of keys 2 and 5 is 6: query 5 still saw them
    after query 7     . 1 . 1   . . 1 1        kept: (7, [1, 3, 6, 7])   or dropped: (7, [0, 4])
    query 8 sees      . 1 . 1   . . 1 1 1

Token 8 was sampled from the output of query 7. Whether its key entered the cache does not matter: no query follows.

Expert routing is `[n or n - 1, layers, k]`, or these numbers flat: prompt and response, the last token often left out.
After the row's last token there may be padding of -1. Layers are those with experts; vLLM and SGLang report all layers.

`Trajectory.from_records` documents the accepted records.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, SupportsFloat, SupportsIndex

import numpy as np

from smd_jax.message.masks import NEVER
from smd_kernels.blocks import to_int32

Ints = Sequence[SupportsIndex] | np.ndarray
Floats = Sequence[SupportsFloat] | np.ndarray

# The position of the last query that saw the dropped keys, and positions of keys, `[layer][kv_head][…]`.
Compression = tuple[SupportsIndex, Sequence[Sequence[Ints]] | np.ndarray]

ROUNDING = 1e-4  # nats above 0 that a log-probability may reach by float32 rounding
MOST_IDS = np.iinfo(np.int32).max
NO_EXPERT = -1


# --- tokens and log-probabilities


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


def check_sampled(sampled: Sequence[Sequence[bool] | np.ndarray] | None, responses: Sequence[Ints]) -> list[np.ndarray]:
    """The booleans as arrays, all true for None. Raises ValueError unless there is one for each response token."""
    if sampled is None:
        return [np.ones(len(response), bool) for response in responses]
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


def check_width(name: str, width: int | None, lengths: Sequence[int] | np.ndarray) -> int:
    """The width, by default that of the longest row. Raises ValueError if a row is longer."""
    longest = int(max(lengths))
    if width is not None and width < longest:
        raise ValueError(
            f"expected {name} of at least {longest}, the tokens of row {int(np.argmax(lengths))}; got {width}"
        )
    return longest if width is None else width


def pad_tokens(
    prompts: Sequence[Ints],
    responses: Sequence[Ints],
    logprobs: Sequence[Floats],
    sampled: Sequence[Sequence[bool] | np.ndarray] | None,
    vocab_size: int | None,
    widths: tuple[int | None, int | None],
    pad_token_id: int,
) -> PaddedRows:
    """Pads prompts on the left and responses on the right; `widths`: of both. See `Trajectory.from_records`."""
    if not len(prompts) == len(responses) == len(logprobs) or not len(prompts):
        raise ValueError(
            "expected as many prompts, responses and rows of log-probabilities, and at least one; got "
            f"{len(prompts)}, {len(responses)} and {len(logprobs)}"
        )
    most = MOST_IDS if vocab_size is None else vocab_size
    asked = [_tokens(row, index, "prompt", most) for index, row in enumerate(prompts)]
    drawn = [_tokens(row, index, "response", most) for index, row in enumerate(responses)]
    flags = check_sampled(sampled, drawn)
    known = [_logprobs(row, index, flags[index]) for index, row in enumerate(logprobs)]
    _check_ids(np.array([pad_token_id]), most, "pad_token_id")
    before = check_width("prompt_width", widths[0], [len(row) for row in asked])
    after = check_width("response_width", widths[1], [len(row) for row in drawn])
    tokens = np.full((len(asked), before + after), pad_token_id, np.int32)
    valid = np.zeros(tokens.shape, bool)
    padded = np.zeros((len(asked), after), np.float32)
    counted = np.zeros(padded.shape, bool)
    for row, (prompt, response, of_response) in enumerate(zip(asked, drawn, known, strict=True)):
        columns = slice(before - len(prompt), before + len(response))
        tokens[row, columns] = np.concatenate([prompt, response])
        valid[row, columns] = True
        padded[row, : len(response)] = of_response
        counted[row, : len(response)] = flags[row]
    start = before - np.array([len(prompt) for prompt in asked])
    return PaddedRows(tokens, valid, padded, start, valid.sum(axis=1), None if sampled is None else counted)


def _tokens(row: Ints, index: int, what: str, most: int) -> np.ndarray:
    tokens = whole_numbers(row, f"{what} of row {index}")
    if not len(tokens):
        raise ValueError(f"expected at least one token in every {what}; got none in row {index}")
    _check_ids(tokens, most, f"{what} of row {index}")
    return tokens


def _check_ids(tokens: np.ndarray, most: int, where: str) -> None:
    # Loops over `[:1]`, here and below: the first place where something is wrong, if there is one.
    for place in np.flatnonzero((tokens < 0) | (tokens >= most))[:1]:
        raise ValueError(
            f"expected ids from 0 to {most - 1}, the vocabulary; got {tokens[place]} ({where}, token {place}). Was "
            "another tokenizer used?"
        )


def _logprobs(row: Floats, index: int, sampled: np.ndarray) -> np.ndarray:
    form = _engine_form(row)
    if form is not None:
        raise ValueError(f"expected numbers as log-probabilities of row {index}; got {form}")
    try:
        found = np.asarray(row, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"expected numbers as log-probabilities of row {index}; got {error}") from error
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


def _engine_form(row: Any) -> str | None:
    """The name of the form of log-probabilities in which an engine returns them; None for numbers."""
    # An array has numbers only.
    first = next((entry for entry in row if entry is not None), 0.0) if isinstance(row, Sequence) else 0.0
    if isinstance(first, Mapping):
        return "vLLM's dicts of tokens: take entry[token].logprob of each response token"
    if isinstance(first, tuple | list):
        return "tuples such as SGLang's (logprob, token, text): take the first number of each"
    if not isinstance(first, SupportsFloat):
        return f"objects of {type(first).__name__}"
    return None


def whole_numbers(numbers: Ints, where: str) -> np.ndarray:
    """Checks for a one-dimensional array of whole numbers, which may be empty."""
    found = np.asarray(numbers)
    if found.ndim != 1 or (found.size and not np.issubdtype(found.dtype, np.integer)):
        raise ValueError(
            f"expected whole numbers in a list; got an array of shape {found.shape} and {found.dtype} ({where})"
        )
    return as_int64(found, where)


def as_int64(numbers: np.ndarray, where: str) -> np.ndarray:
    """The numbers as int64. Raises ValueError for those of uint64 that would become negative."""
    for number in numbers[numbers > np.iinfo(np.int64).max][:1]:
        raise ValueError(f"expected whole numbers below 2^63; got {number} ({where})")
    return numbers.astype(np.int64)


# --- evictions: `evicted_at [layers, kv_heads, tokens]` of each row, by positions


def evicted_by_row(
    lengths: np.ndarray,
    layers: int,
    kv_heads: int,
    *,
    kept: Sequence[Sequence[Compression]] | None = None,
    dropped: Sequence[Sequence[Compression]] | None = None,
    evicted_at: Sequence[np.ndarray] | None = None,
) -> list[np.ndarray]:
    """`evicted_at [layers, kv_heads, tokens]` of every row, in positions, from the given record. The first two axes are
    1 if they are 1 in the record of every row. `lengths`: tokens of each row; others: see `Trajectory.from_records`."""
    if layers < 1 or kv_heads < 1:
        raise ValueError(f"expected layers >= 1 and kv_heads >= 1; got {layers} and {kv_heads}")
    records: dict[str, Any] = {"kept": kept, "dropped": dropped, "evicted_at": evicted_at}
    given = [name for name, record in records.items() if record is not None]
    if len(given) != 1:
        hint = "" if given else ". For an engine without evictions give dropped=[[]] * rows"
        raise ValueError(f"expected exactly one of {', '.join(records)}; got {' and '.join(given) or 'none'}{hint}")
    (name,) = given
    if len(records[name]) != len(lengths):
        raise ValueError(f"expected {name} of {len(lengths)} rows; got {len(records[name])}")
    rows = [(row, of_row, (layers, kv_heads, int(lengths[row]))) for row, of_row in enumerate(records[name])]
    if name != "evicted_at":
        return [_from_compressions(of_row, name, row, shape) for row, of_row, shape in rows]
    checked = [_check_evicted_at(np.asarray(of_row), row, shape) for row, of_row, shape in rows]
    # An axis that all rows share stays 1, because all layers and heads of a long batch take gigabytes.
    shared = np.max([of_row.shape[:2] for of_row in checked], axis=0).tolist()
    return [np.broadcast_to(of_row, (*shared, of_row.shape[2])) for of_row in checked]


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


def _from_compressions(
    compressions: Sequence[Compression], kind: str, row: int, shape: tuple[int, int, int]
) -> np.ndarray:
    """Reads "kept" or "dropped" compressions of one row in time order; two may follow the same query."""
    layers, kv_heads, tokens = shape
    evicted_at = np.full(shape, NEVER, np.int32)
    by_head = evicted_at.reshape(layers * kv_heads, tokens)  # a view: writes below change `evicted_at`
    before = 0
    if not isinstance(compressions, Sequence | np.ndarray):
        raise TypeError(f"expected a list of compressions of row {row}; got {type(compressions).__name__}")
    for number, compression in enumerate(compressions):
        where = f"row {row}, compression {number}"
        try:
            after, keys = compression
            last = operator.index(after)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"expected a compression as (last query, keys); got {compression!r:.80} ({where})"
            ) from error
        if not before <= last < tokens:
            raise ValueError(
                f"expected compressions in order, each after one of the queries {before} to {tokens - 1}; got one "
                f"after query {last} ({where})"
            )
        before = last
        if len(keys) != layers:
            raise ValueError(f"expected keys of {layers} layers; got {len(keys)} ({where})")
        for layer, of_layer in enumerate(keys):
            if len(of_layer) != kv_heads:
                raise ValueError(f"expected keys of {kv_heads} KV heads; got {len(of_layer)} ({where}, layer {layer})")
        lists = [
            whole_numbers(keys[layer][head], f"{where}, {_place(layer, head)}")
            for layer, head in np.ndindex(layers, kv_heads)
        ]
        # Heads are numbered through all layers.
        heads, named = np.repeat(np.arange(len(lists)), [len(x) for x in lists]), np.concatenate(lists)
        seen = by_head[:, : last + 1]
        _check_named(heads, named, seen, kind, kv_heads, f"{where} after query {last}")
        if kind == "dropped":
            # Only the named keys: an engine that evicts at every step has as many compressions as tokens.
            by_head[heads, named] = last + 1
        else:
            goes = seen == NEVER
            goes[heads, named] = False
            seen[goes] = last + 1
    return evicted_at


def _check_named(
    heads: np.ndarray, keys: np.ndarray, evicted_at: np.ndarray, kind: str, kv_heads: int, where: str
) -> None:
    """Raises ValueError unless every named key is in the cache and is named once."""
    count = evicted_at.shape[1]
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


def _check_evicted_at(found: np.ndarray, row: int, shape: tuple[int, int, int]) -> np.ndarray:
    """`[layers or 1, kv_heads or 1, tokens]`, checked."""
    fits = found.ndim == 3 and all(got in (1, want) for got, want in zip(found.shape[:2], shape, strict=False))
    if not fits or found.shape[2] != shape[2]:
        raise ValueError(
            f"expected evicted_at of row {row} to be {shape} (layers, KV heads, tokens of prompt and response); got "
            f"{found.shape}"
        )
    if not np.issubdtype(found.dtype, np.integer):
        raise ValueError(f"expected whole numbers in evicted_at; got {found.dtype} (row {row})")
    for layer, head, key in np.argwhere(found <= np.arange(shape[2]))[:1]:
        raise ValueError(
            f"expected evicted_at of at least {key + 1}, because a query sees its own key; got "
            f"{found[layer, head, key]} (row {row}, {_place(layer, head)}, key {key})"
        )
    return to_int32(found)


def _place(layer: SupportsIndex, head: SupportsIndex) -> str:
    return f"layer {layer}, kv head {head}"


# --- expert routing


class ExpertSizes(NamedTuple):
    """A model's number of layers with experts, of experts per layer, and of experts per token."""

    layers: int
    count: int
    per_token: int


def routing_by_column(
    routed: Sequence[np.ndarray] | None, rows: PaddedRows, sizes: ExpertSizes | None
) -> np.ndarray | None:
    """`[batch, T, layers, per_token]` in the smallest integers, -1 where nothing was reported; None without routing.

    Raises:
      ValueError: one of the two arguments without the other; routing of another number of rows, tokens, layers or
        experts; an expert that the model does not have, or twice for a token; only some of a token's experts. The
        message names row, token and layer.
    """
    if routed is None and sizes is None:
        return None
    if routed is None or sizes is None:
        given = "None" if routed is None else f"of {len(routed)} rows"
        raise ValueError(f"expected experts and routed_experts together; got experts={sizes} and {given}")
    if len(routed) != len(rows.lengths):
        raise ValueError(f"expected routed_experts of {len(rows.lengths)} rows; got {len(routed)}")
    kind = np.int8 if sizes.count <= 2**7 else np.int16
    found = np.full((*rows.tokens.shape, sizes.layers, sizes.per_token), NO_EXPERT, kind)
    for row, given in enumerate(routed):
        experts = check_experts(np.asarray(given), row, int(rows.lengths[row]), sizes)
        start = int(rows.start[row])
        found[row, start : start + len(experts)] = experts
    return found


def check_experts(given: np.ndarray, row: int, tokens: int, sizes: ExpertSizes) -> np.ndarray:
    """The experts of one row, `[tokens or one less, layers, per_token]`. Errors as `routing_by_column`."""
    if given.dtype.kind not in "iu":
        raise ValueError(f"expected routed_experts as integers; got {given.dtype} in row {row}")
    each = (sizes.layers, sizes.per_token)
    if given.ndim == 1 and given.size % (sizes.layers * sizes.per_token) == 0:
        given = given.reshape(-1, *each)
    if given.ndim != 3 or given.shape[1:] != each:
        raise ValueError(
            f"expected routed_experts [tokens, layers, experts of a token] of {each[0]} layers and {each[1]} experts; "
            f"got {given.shape} in row {row}"
        )
    given = as_int64(given, f"routed_experts of row {row}")
    if len(given) > tokens and (given[0] == NO_EXPERT).all():
        raise ValueError(f"expected routed_experts of row {row} from its first token on; got padding before it")
    # An engine's padding after the row's last token.
    if (given[tokens:] != NO_EXPERT).any() or len(given) < tokens - 1:
        raise ValueError(
            f"expected routed_experts of {tokens} tokens, or of {tokens - 1} without the last; got {len(given)} in row "
            f"{row}"
        )
    given = given[:tokens]
    for token, layer, place in np.argwhere((given < NO_EXPERT) | (given >= sizes.count))[:1]:
        raise ValueError(
            f"expected experts from 0 to {sizes.count - 1}, or {NO_EXPERT}; got {given[token, layer, place]} in row "
            f"{row}, token {token}, layer {layer}"
        )
    ordered = np.sort(given, axis=-1)
    twice = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != NO_EXPERT)).any(-1)
    some = (given == NO_EXPERT).any(-1) & (given != NO_EXPERT).any(-1)
    for token, layer in np.argwhere(twice | some)[:1]:
        raise ValueError(
            f"expected {sizes.per_token} different experts of a token, or none; got {given[token, layer].tolist()} in "
            f"row {row}, token {token}, layer {layer}"
        )
    return given
