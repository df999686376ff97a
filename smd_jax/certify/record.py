"""A rollout on disk in a form that any sampler can write: tokens, log-probabilities, and the conditions of sampling.

One file, `.npz` or `.safetensors`, with the arrays of `REQUIRED` and any others of `SHAPES`. Rows are padded on the
right; column t has the t-th token. docs/certify.md lists shapes, dtypes and meanings.
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
from smd_jax.message.foreign import MOST_IDS, ROUNDING, ExpertSizes, as_int64, check_experts, evicted_by_row, pad_tokens
from smd_jax.message.masks import NEVER
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import RoutingShape
from smd_jax.model.routing import NOT_RECORDED

REQUIRED = ("tokens", "prompt_lengths", "lengths", "logprobs")
# The axes of every array. An axis has one size in all arrays.
SHAPES = {
    **dict.fromkeys(("tokens", "logprobs", "positions"), ("rows", "columns")),
    **dict.fromkeys(("prompt_lengths", "lengths"), ("rows",)),
    **dict.fromkeys(("temperature", "pad_token_id"), ()),
    "evicted_at": ("rows", "layers", "kv_heads", "columns"),
    "kept_after": ("rows", "compressions"),
    "kept": ("rows", "compressions", "layers", "kv_heads", "keys"),
    "support_ids": ("entries",),
    "support_offsets": ("response_tokens + 1",),
    **dict.fromkeys(("top_ids", "top_logprobs"), ("rows", "columns", "k")),
    "routing": ("rows", "columns", "expert_layers", "experts"),
}
PAIRS = (("kept", "kept_after"), ("support_ids", "support_offsets"), ("top_ids", "top_logprobs"))
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
        names the array, or the row and the token.
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
    """Checks arrays under the names of `SHAPES`, and writes them. An existing file is not replaced.

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
    _check_arrays(arrays, experts)
    tokens, logprobs = arrays["tokens"], arrays["logprobs"].astype(np.float32)
    lengths, prompts = arrays["lengths"], arrays["prompt_lengths"]
    columns = tokens.shape[1]
    for row in np.flatnonzero((prompts < 1) | (prompts >= lengths) | (lengths > columns))[:1]:
        raise ValueError(
            f"expected 1 <= prompt_lengths < lengths <= {columns} columns; got {prompts[row]} and {lengths[row]} "
            f"in row {row}"
        )
    lengths, prompts = lengths.astype(np.int32), prompts.astype(np.int32)
    by_row = list(zip(tokens, logprobs, prompts, lengths, strict=True))
    asked = [ids[:start] for ids, _, start, _ in by_row]
    drawn = [ids[start:end] for ids, _, start, end in by_row]
    known = [numbers[start:end] for _, numbers, start, end in by_row]
    # Checks ids and log-probabilities.
    pad_tokens(asked, drawn, known, sampled=None, vocab_size=vocab_size, widths=(None, None), pad_token_id=0)
    temperature = float(arrays.get("temperature", np.float32(1.0)))
    if not 0 < temperature < np.inf:
        raise ValueError(f"temperature: expected a number > 0; got {temperature}")
    inside = np.arange(columns) < lengths[:, None]
    response = inside & (np.arange(columns) >= prompts[:, None])
    positions = arrays.get("positions", np.broadcast_to(np.arange(columns), tokens.shape))
    wrong = inside & ((positions < 0) | (positions >= MOST_IDS))
    _refuse(wrong, positions, f"positions: expected numbers from 0 to {MOST_IDS - 1}; got {{}} in {{}}")
    return Record(
        tokens=np.where(inside, tokens, 0).astype(np.int32),
        positions=np.where(inside, positions, np.arange(columns)).astype(np.int32),
        prompt_lengths=prompts,
        lengths=lengths,
        logprobs=np.where(response, logprobs, 0).astype(np.float32),
        evicted_at=_evicted_at(arrays, lengths, layers, kv_heads),
        temperature=temperature,
        support=_support(arrays, response, vocab_size),
        pad_token_id=int(arrays.get("pad_token_id", np.int32(0))),
        top=_top(arrays, response, vocab_size),
        routing=_routing(arrays, lengths, experts),
    )


def _check_arrays(arrays: Mapping[str, np.ndarray], experts: RoutingShape | None) -> None:
    """Checks which arrays there are, their dtypes and their shapes."""
    missing = [name for name in REQUIRED if name not in arrays]
    if missing:
        raise ValueError(f"expected the arrays {', '.join(REQUIRED)}; {', '.join(missing)} missing")
    unknown = sorted(set(arrays) - set(SHAPES))
    if unknown:
        raise ValueError(f"expected the arrays {', '.join(SHAPES)}; got {', '.join(unknown)[:200]}")
    for one, other in PAIRS:
        if (one in arrays) != (other in arrays):
            raise ValueError(f"expected {one} and {other} together; got one of them")
    if "evicted_at" in arrays and "kept" in arrays:
        raise ValueError("expected evicted_at or kept; got both")
    if "routing" in arrays and experts is None:
        raise ValueError("routing: expected no expert routing, because the model has no experts; got it")
    sizes = {} if experts is None else {"expert_layers": len(experts.layers), "experts": experts.per_token}
    for name in (name for name in SHAPES if name in arrays):
        array, axes = arrays[name], SHAPES[name]
        if name in FLOATS and array.dtype not in (np.float32, np.float64):
            # The errors of 16 bits, about 1e-3 nats, would be taken for those of other weights.
            raise ValueError(f"{name}: expected float32 or float64, which hold 1e-4 nats; got {array.dtype}")
        if name not in FLOATS and not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"{name}: expected integers; got {array.dtype}")
        expected = tuple(sizes.get(axis, axis) for axis in axes)  # a name where no earlier array has the size
        sizes = dict(zip(axes, array.shape, strict=False)) | sizes
        if array.shape != tuple(sizes.get(axis) for axis in axes):
            raise ValueError(f"{name}: expected the shape {expected}; got {array.shape}")


def _evicted_at(arrays: Mapping[str, np.ndarray], lengths: np.ndarray, layers: int, kv_heads: int) -> np.ndarray:
    """`evicted_at` of the record, checked, with NEVER from the row's length on; padding is never seen."""
    by_row = [np.full((1, 1, length), NEVER) for length in lengths]
    if "evicted_at" in arrays:
        given = [of_row[..., :length] for of_row, length in zip(arrays["evicted_at"], lengths, strict=True)]
        by_row = evicted_by_row(lengths, layers, kv_heads, evicted_at=given)
    elif "kept" in arrays:
        compressions = [
            [
                (int(at), [[keys[keys >= 0] for keys in heads] for heads in kept])
                for at, kept in zip(*of_row, strict=True)
                if at >= 0
            ]
            for of_row in zip(arrays["kept_after"], arrays["kept"], strict=True)
        ]
        by_row = evicted_by_row(lengths, layers, kv_heads, kept=compressions)
    found = np.zeros((len(lengths), *by_row[0].shape[:2], arrays["tokens"].shape[1]), np.int32)
    for row, (of_row, length) in enumerate(zip(by_row, lengths, strict=True)):
        found[row, :, :, :length] = np.where(of_row < length, of_row, NEVER)
    return found


def _support(arrays: Mapping[str, np.ndarray], response: np.ndarray, vocab_size: int) -> tuple[np.ndarray, ...] | None:
    if "support_ids" not in arrays:
        return None
    ids, offsets, drawn = arrays["support_ids"], arrays["support_offsets"], arrays["tokens"][response]
    where = " (support_ids, support_offsets)"
    ids, sizes = checked_support(ids, offsets, drawn, vocab_size, where, np.ones(len(drawn), bool))
    return tuple(np.split(ids, np.cumsum(sizes)[:-1]))


def _top(arrays: Mapping[str, np.ndarray], response: np.ndarray, vocab_size: int) -> Top | None:
    """The likeliest tokens of the sampler, checked."""
    if "top_ids" not in arrays:
        return None
    ids = np.where(response[..., None], as_int64(arrays["top_ids"], "top_ids"), -1)
    logprobs, there = arrays["top_logprobs"].astype(np.float32), ids != -1
    wrong = there & ((ids < 0) | (ids >= vocab_size))
    _refuse(wrong, ids, f"top_ids: expected ids below {vocab_size}, or -1 for none; got {{}} in {{}}")
    ordered = np.sort(ids, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != -1)
    _refuse(twice, ordered[..., 1:], "top_ids: expected every id once for a token; got {} twice in {}")
    wrong = there & ~(np.isfinite(logprobs) & (logprobs <= ROUNDING))
    _refuse(wrong, logprobs, "top_logprobs: expected finite numbers <= 0; got {} in {}")
    mass = np.where(there, np.exp(np.where(there, logprobs, 0)), 0).sum(axis=-1)
    _refuse(mass > 1.01, mass, "top_logprobs: expected probabilities with a sum of at most 1; got {:.3g} in {}")
    return Top(ids.astype(np.int32), np.where(there, logprobs, 0))


def _routing(arrays: Mapping[str, np.ndarray], lengths: np.ndarray, experts: RoutingShape | None) -> np.ndarray | None:
    """The experts of every token, checked; none of a row's last token, which the sampler never read."""
    if "routing" not in arrays or experts is None:
        return None
    sizes = ExpertSizes(len(experts.layers), experts.count, experts.per_token)
    found = np.full(arrays["routing"].shape, NOT_RECORDED, np.int32)
    for row, length in enumerate(lengths.tolist()):
        found[row, : length - 1] = check_experts(arrays["routing"][row, : length - 1], row, length, sizes)
    return found


def _refuse(wrong: np.ndarray, numbers: np.ndarray, message: str) -> None:
    """Raises ValueError for the first of the wrong numbers. The message gets it and its row and column."""
    for place in np.argwhere(wrong)[:1]:
        raise ValueError(message.format(numbers[tuple(place)], f"row {place[0]}, column {place[1]}"))
