"""A rollout on disk in a form that any sampler can write: tokens, log-probabilities, and the conditions of sampling.

One file, `.npz` or `.safetensors`, with the arrays of `REQUIRED` and any of `OPTIONAL`. Rows are padded on the right;
column t has the t-th token. docs/certify.md lists shapes, dtypes and meanings. Numpy only.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.format import MAGIC_PREFIX
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from smd_jax.message.drawable_tokens import checked_support
from smd_jax.message.foreign import MOST_IDS, ROUNDING, evicted_by_row
from smd_jax.message.masks import NEVER
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import RoutingShape
from smd_jax.model.routing import NOT_RECORDED

REQUIRED = ("tokens", "prompt_lengths", "lengths", "logprobs")
OPTIONAL = (
    *("temperature", "positions", "evicted_at", "kept_after", "kept"),
    *("support_ids", "support_offsets", "top_ids", "top_logprobs", "routing", "pad_token_id"),
)
FLOATS = ("logprobs", "temperature", "top_logprobs")


class Top(NamedTuple):
    """A sampler's likeliest tokens, `[rows, columns, k]`: int32 ids, -1 for none, and float32 log-probabilities."""

    ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True)
class Record:
    """A checked record.

    Attributes:
      tokens, positions: int32 `[rows, columns]`. lengths, prompt_lengths: int32 `[rows]`.
      logprobs: float32 `[rows, columns]`.
      evicted_at: int32 `[rows, layers or 1, kv_heads or 1, columns]`; NEVER for keys that stayed, and without a record.
      temperature: of the sampler.
      support: ids of the tokens that could be drawn, for every response token in row order; None: all tokens.
      pad_token_id: of the sampler's batch.
      top: the likeliest tokens at every column of a response; None: not recorded.
      routing: int32 `[rows, columns, layers with experts, experts of a token]`, -1 for a token that was never read;
        None: not recorded.
    """

    tokens: np.ndarray
    positions: np.ndarray
    prompt_lengths: np.ndarray
    lengths: np.ndarray
    logprobs: np.ndarray
    evicted_at: np.ndarray
    temperature: float = 1.0
    support: tuple[np.ndarray, ...] | None = None
    pad_token_id: int = 0
    top: Top | None = None
    routing: np.ndarray | None = None

    @property
    def response_lengths(self) -> np.ndarray:
        return self.lengths - self.prompt_lengths

    @property
    def response_columns(self) -> tuple[np.ndarray, np.ndarray]:
        """Columns of the response tokens, `[rows, tokens of the longest response]`, and which of them a row has."""
        columns = self.prompt_lengths[:, None] + np.arange(self.response_lengths.max())
        return np.minimum(columns, self.tokens.shape[1] - 1), columns < self.lengths[:, None]

    @property
    def has_evictions(self) -> bool:
        """Whether a key of any row was evicted. Padding, which has evicted_at 0, does not count."""
        inside = np.arange(self.tokens.shape[1]) < self.lengths[:, None]
        return bool((inside[:, None, None] & (self.evicted_at < self.lengths[:, None, None, None])).any())

    def first_rows(self, count: int) -> Record:
        """The record of the first rows only."""
        support = self.support
        if support is not None:
            support = support[: int(self.response_lengths[:count].sum())]
        names = ("tokens", "positions", "prompt_lengths", "lengths", "logprobs", "evicted_at")
        arrays = {name: getattr(self, name)[:count] for name in names}
        top = None if self.top is None else Top(self.top.ids[:count], self.top.logprobs[:count])
        routing = None if self.routing is None else self.routing[:count]
        return replace(self, **arrays, support=support, top=top, routing=routing)


def load_record(
    path: str | Path, layers: int, kv_heads: int, vocab_size: int, experts: RoutingShape | None = None
) -> Record:
    """Reads and checks a record of a model of these sizes; `experts`: None for a model without any.

    Raises:
      ValueError: a file that cannot be read, a missing or unknown array, a wrong shape, dtype or value. The message
        names the array.
    """
    return check_record(_read(Path(path)), layers, kv_heads, vocab_size, experts)


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        if path.suffix == ".npz":
            with path.open("rb") as file:
                first = file.read(len(MAGIC_PREFIX))
            if not zipfile.is_zipfile(path):  # np.load would suggest to read it as a pickle
                single = "one array, as np.save writes it"
                raise ValueError(single if first == MAGIC_PREFIX else "no archive, as np.savez writes it")
            with np.load(path, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files}
    # A damaged archive may also name a compression or encryption that zipfile does not have: RuntimeError.
    except (SafetensorError, zipfile.BadZipFile, zlib.error, OSError, ValueError, EOFError, RuntimeError) as error:
        # np.load's own message tells the reader to allow pickles.
        reason = "an array of Python objects" if str(error).startswith("Object arrays") else str(error)[:200]
        raise ValueError(f"expected a readable record; got {path}: {reason}") from error
    raise ValueError(f"expected a record with the suffix .npz or .safetensors; got {path}")


def save_record(path: str | Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Checks arrays under the names of `REQUIRED` and `OPTIONAL`, and writes them. An existing file is not replaced.

    Raises:
      FileExistsError: `path` exists. ValueError: another suffix than .npz and .safetensors; a missing or unknown
        array, a wrong shape, dtype or value, as far as they do not depend on the model.
    """
    path, arrays = Path(path), {name: np.asarray(array) for name, array in arrays.items()}
    if path.exists():
        raise FileExistsError(f"expected no file at {path}; found one")
    if path.suffix not in (".npz", ".safetensors"):
        raise ValueError(f"expected a path with the suffix .npz or .safetensors; got {path}")
    _check_without_model(arrays)
    if path.suffix == ".npz":
        np.savez_compressed(path, **dict[str, Any](arrays))
    else:
        save_file({name: np.array(array, order="C") for name, array in arrays.items()}, path)


def _check_without_model(arrays: Mapping[str, np.ndarray]) -> None:
    """Checks a record against the sizes that its own arrays have. Errors as `load_record`."""
    given = (arrays[name].shape[-3:-1] for name in ("evicted_at", "kept") if name in arrays)
    layers, kv_heads = next((sizes for sizes in given if len(sizes) == 2), (1, 1))
    experts = None
    if "routing" in arrays:
        routed = arrays["routing"].shape
        mixtures, per_token = routed[2:] if len(routed) == 4 else (1, 1)
        experts = RoutingShape(layers=tuple(range(mixtures)), count=MOST_IDS, per_token=per_token)
    check_record(arrays, layers, kv_heads, MOST_IDS, experts)


def arrays_of(trajectory: Trajectory) -> dict[str, np.ndarray]:
    """The arrays of a trajectory of this library, without its padding.

    Raises:
      ValueError: a trajectory that a record cannot hold: with tokens that were not sampled, such as a tool's answer; a
        quantised cache; a minimum length; packed rows.
    """
    if trajectory.packing is not None:
        raise ValueError("expected one sequence in a row; got packed rows")
    if trajectory.mask.quantized is not None:
        raise ValueError("expected a cache in full precision; got a quantised one, which a record cannot hold")
    valid = np.asarray(trajectory.valid)
    if (np.asarray(trajectory.columns_after_prompt()) != np.asarray(trajectory.lengths())).any():
        raise ValueError("expected responses of sampled tokens only; got a conversation, with tokens that were read")
    response_lengths = np.asarray(trajectory.response_mask).sum(axis=1)
    prompt_lengths = valid[:, : trajectory.prompt_width].sum(axis=1)
    starts = trajectory.prompt_width - prompt_lengths
    lengths = prompt_lengths + response_lengths
    columns = int(lengths.max())
    places = np.minimum(starts[:, None] + np.arange(columns), valid.shape[1] - 1)
    inside = np.arange(columns) < lengths[:, None]
    logprobs = np.zeros(valid.shape, np.float32)
    logprobs[:, trajectory.prompt_width :] = np.asarray(trajectory.logprobs)
    evicted_at = np.asarray(trajectory.mask.evicted_at).astype(np.int64) - starts[:, None, None, None]
    evicted_at = np.take_along_axis(evicted_at, places[:, None, None], axis=3)
    arrays = {
        "tokens": np.where(inside, np.take_along_axis(np.asarray(trajectory.tokens), places, axis=1), 0),
        "prompt_lengths": prompt_lengths,
        "lengths": lengths,
        "logprobs": np.where(inside, np.take_along_axis(logprobs, places, axis=1), 0),
        "evicted_at": np.clip(evicted_at, 0, columns + 1),
        "temperature": np.float32(trajectory.temperature),
    }
    if trajectory.routing is not None:
        routing = np.take_along_axis(np.asarray(trajectory.routing), places[:, :, None, None], axis=1)
        arrays["routing"] = np.where(inside[:, :, None, None], routing, NOT_RECORDED)
    return {name: np.asarray(array) for name, array in arrays.items()} | _support_of(trajectory)


def _support_of(trajectory: Trajectory) -> dict[str, np.ndarray]:
    if trajectory.drawable is None:
        return {}
    if trajectory.drawable.min_new_tokens and trajectory.drawable.eos_token_id is not None:
        raise ValueError(
            f"expected min_new_tokens 0; got {trajectory.drawable.min_new_tokens}, which a record cannot hold"
        )
    if trajectory.drawable.sets is None:
        return {}
    inside = np.asarray(trajectory.response_mask)
    sets = np.asarray(trajectory.drawable.sets)
    if sets.dtype == np.uint8:
        found = [np.flatnonzero(np.unpackbits(row, bitorder="little")) for row in sets[inside]]
    else:
        found = [row[row >= 0] for row in sets[inside]]
    offsets = np.cumsum([0, *(len(ids) for ids in found)])
    return {"support_ids": np.concatenate(found).astype(np.int32), "support_offsets": offsets}


def check_record(
    arrays: Mapping[str, np.ndarray], layers: int, kv_heads: int, vocab_size: int, experts: RoutingShape | None = None
) -> Record:
    """The record of these arrays; arguments and errors as `load_record`."""
    missing = [name for name in REQUIRED if name not in arrays]
    if missing:
        raise ValueError(f"expected the arrays {', '.join(REQUIRED)}; {', '.join(missing)} missing")
    unknown = sorted(set(arrays) - set(REQUIRED) - set(OPTIONAL))
    if unknown:
        raise ValueError(f"expected the arrays {', '.join((*REQUIRED, *OPTIONAL))}; got {', '.join(unknown)[:200]}")
    for name, array in arrays.items():
        if name in FLOATS and array.dtype not in (np.float32, np.float64):
            # The errors of 16 bits, about 1e-3 nats, would be taken for those of other weights.
            raise ValueError(f"{name}: expected float32 or float64, which hold 1e-4 nats; got {array.dtype}")
        if name not in FLOATS and not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"{name}: expected integers; got {array.dtype}")
    tokens = arrays["tokens"]
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise ValueError(f"tokens: expected [rows, columns]; got the shape {tokens.shape}")
    rows, columns = tokens.shape
    shapes = {"prompt_lengths": (rows,), "lengths": (rows,), "logprobs": (rows, columns), "positions": (rows, columns)}
    shapes |= {"temperature": (), "pad_token_id": ()}
    for name, shape in shapes.items():
        if name in arrays and arrays[name].shape != shape:
            raise ValueError(f"{name}: expected the shape {shape}; got {arrays[name].shape}")
    lengths, prompts = arrays["lengths"].astype(np.int32), arrays["prompt_lengths"].astype(np.int32)
    for row in range(rows):
        if not 1 <= prompts[row] < lengths[row] <= columns:
            raise ValueError(
                f"expected 1 <= prompt_lengths < lengths <= {columns} columns; got {prompts[row]} and {lengths[row]} "
                f"in row {row}"
            )
    inside = np.arange(columns) < lengths[:, None]
    _refuse(
        inside & ((tokens < 0) | (tokens >= vocab_size)),
        tokens,
        f"tokens: expected ids below {vocab_size}, the model's vocabulary; got {{}} in {{}}. Was the record made with "
        "another tokenizer?",
    )
    response = inside & (np.arange(columns) >= prompts[:, None])
    logprobs = arrays["logprobs"].astype(np.float32)
    _refuse(response & ~_is_logprob(logprobs), logprobs, "logprobs: expected finite numbers <= 0; got {} in {}")
    temperature = float(arrays.get("temperature", np.float32(1.0)))
    if not 0 < temperature < np.inf:
        raise ValueError(f"temperature: expected a number > 0; got {temperature}")
    positions = arrays.get("positions", np.broadcast_to(np.arange(columns), tokens.shape))
    wrong = inside & ((positions < 0) | (positions >= MOST_IDS))
    _refuse(wrong, positions, f"positions: expected numbers from 0 to {MOST_IDS - 1}; got {{}} in {{}}")
    return Record(
        tokens=np.where(inside, tokens, 0).astype(np.int32),
        positions=np.where(inside, positions, np.arange(columns)).astype(np.int32),
        prompt_lengths=prompts,
        lengths=lengths,
        logprobs=np.where(response, logprobs, 0).astype(np.float32),
        evicted_at=_evicted_at(arrays, lengths, columns, layers, kv_heads),
        temperature=temperature,
        support=_support(arrays, response, tokens, vocab_size),
        pad_token_id=int(arrays.get("pad_token_id", np.int32(0))),
        top=_top(arrays, response, vocab_size),
        routing=_routing(arrays, inside, experts),
    )


def _evicted_at(
    arrays: Mapping[str, np.ndarray], lengths: np.ndarray, columns: int, layers: int, kv_heads: int
) -> np.ndarray:
    """`evicted_at` of the record, checked, with NEVER from the row's length on; padding is never seen."""
    if _both(arrays, "kept", "kept_after") and "evicted_at" in arrays:
        raise ValueError("expected evicted_at or kept; got both")
    rows = len(lengths)
    by_row = [np.full((1, 1, length), NEVER) for length in lengths]
    if "evicted_at" in arrays:
        given = arrays["evicted_at"]
        fits = given.ndim == 4 and given.shape[::3] == (rows, columns)
        if not fits or given.shape[1] not in (1, layers) or given.shape[2] not in (1, kv_heads):
            raise ValueError(
                f"evicted_at: expected the shape {(rows, layers, kv_heads, columns)}, with 1 for layers or KV heads "
                f"that share it; got {given.shape}"
            )
        trimmed = [given[row, :, :, : lengths[row]] for row in range(rows)]
        by_row = evicted_by_row(lengths, layers, kv_heads, evicted_at=trimmed)
    elif "kept" in arrays:
        kept, after = arrays["kept"], arrays["kept_after"]
        if kept.ndim != 5 or after.shape != kept.shape[:2] or kept.shape[0] != rows:
            raise ValueError(
                f"kept: expected [rows, compressions, layers, kv_heads, keys] with kept_after [rows, compressions], "
                f"{rows} rows; got {kept.shape} and {after.shape}"
            )
        compressions = [
            [
                (int(at), [[keys[keys >= 0] for keys in heads] for heads in kept[row, number]])
                for number, at in enumerate(after[row])
                if at >= 0
            ]
            for row in range(rows)
        ]
        by_row = evicted_by_row(lengths, layers, kv_heads, kept=compressions)
    found = np.zeros((rows, *by_row[0].shape[:2], columns), np.int32)
    for row, (of_row, length) in enumerate(zip(by_row, lengths, strict=True)):
        found[row, :, :, :length] = np.where(of_row < length, of_row, NEVER)
    return found


def _support(
    arrays: Mapping[str, np.ndarray], response: np.ndarray, tokens: np.ndarray, vocab_size: int
) -> tuple[np.ndarray, ...] | None:
    if not _both(arrays, "support_ids", "support_offsets"):
        return None
    ids, offsets, drawn = arrays["support_ids"], arrays["support_offsets"], tokens[response]
    where = " (support_ids, support_offsets)"
    ids, sizes = checked_support(ids, offsets, drawn, vocab_size, where, np.ones(len(drawn), bool))
    return tuple(np.split(ids, np.cumsum(sizes)[:-1]))


def _top(arrays: Mapping[str, np.ndarray], response: np.ndarray, vocab_size: int) -> Top | None:
    """The likeliest tokens of the sampler, checked."""
    if not _both(arrays, "top_ids", "top_logprobs"):
        return None
    ids, logprobs = arrays["top_ids"], arrays["top_logprobs"].astype(np.float32)
    if ids.ndim != 3 or ids.shape[:2] != response.shape or ids.shape != logprobs.shape:
        raise ValueError(
            f"top_ids, top_logprobs: expected two arrays {(*response.shape, 'k')}; got {ids.shape} and {logprobs.shape}"
        )
    ids = np.where(response[..., None], ids.astype(np.int64), -1)
    there = ids != -1
    _refuse(
        there & ((ids < 0) | (ids >= vocab_size)),
        ids,
        f"top_ids: expected ids below {vocab_size}, or -1 for none; got {{}} in {{}}",
    )
    twice, again = _repeated(ids)
    _refuse(twice & (again != -1), again, "top_ids: expected every id once for a token; got {} twice in {}")
    _refuse(there & ~_is_logprob(logprobs), logprobs, "top_logprobs: expected finite numbers <= 0; got {} in {}")
    mass = np.where(there, np.exp(np.where(there, logprobs, 0)), 0).sum(axis=-1)
    _refuse(mass > 1.01, mass, "top_logprobs: expected probabilities with a sum of at most 1; got {:.3g} in {}")
    return Top(ids.astype(np.int32), np.where(there, logprobs, 0))


def _routing(arrays: Mapping[str, np.ndarray], inside: np.ndarray, experts: RoutingShape | None) -> np.ndarray | None:
    """The experts of every token, checked."""
    if "routing" not in arrays:
        return None
    if experts is None:
        raise ValueError("routing: expected no expert routing, because the model has no experts; got it")
    given = arrays["routing"]
    shape = (*inside.shape, len(experts.layers), experts.per_token)
    if given.shape != shape:
        raise ValueError(
            f"routing: expected {shape}, rows, columns, layers with experts and experts of a token; got {given.shape}"
        )
    wrong = (given < 0) | (given >= experts.count)
    # The last token was never read, so an engine has no routing for it; nor for tokens of a prefix cache.
    read = (inside & np.pad(inside[:, 1:], [(0, 0), (0, 1)]))[..., None, None]
    read = read & ~(given == -1).all(axis=-1, keepdims=True)
    _refuse(wrong & read, given, f"routing: expected experts from 0 to {experts.count - 1}; got {{}} in {{}}")
    twice, again = _repeated(given)
    _refuse(twice & read, again, "routing: expected different experts for a token; got {} twice in {}")
    return np.where(wrong, -1, given.astype(np.int32))


def _both(arrays: Mapping[str, np.ndarray], one: str, other: str) -> bool:
    """Whether the record has both arrays; one of them raises ValueError."""
    if (one in arrays) != (other in arrays):
        raise ValueError(f"expected {one} and {other} together; got one of them")
    return one in arrays


def _is_logprob(numbers: np.ndarray) -> np.ndarray:
    return np.isfinite(numbers) & (numbers <= ROUNDING)


def _repeated(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which of a token's sorted ids equal the one before, and these ids."""
    ordered = np.sort(ids, axis=-1)
    return ordered[..., 1:] == ordered[..., :-1], ordered[..., 1:]


def _refuse(wrong: np.ndarray, numbers: np.ndarray, message: str) -> None:
    """Raises ValueError for the first of the wrong numbers. The message gets it and its row, column and layer."""
    for place in np.argwhere(wrong)[:1]:
        names = ("row", "column", "layer")[: max(wrong.ndim - 1, 2)]
        where = ", ".join(f"{name} {index}" for name, index in zip(names, place, strict=False))
        raise ValueError(message.format(numbers[tuple(place)], where))
