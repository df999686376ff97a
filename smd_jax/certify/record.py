"""A rollout on disk in a form that any sampler can write: tokens, log-probabilities, and the conditions of sampling.

One `.npz` file. Rows are padded on the right; column t has the t-th token. docs/certify.md lists the arrays.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from smd_jax.message.foreign_routing import ExpertSizes
from smd_jax.message.masks import NEVER
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import RoutingShape

REQUIRED = ("tokens", "prompt_lengths", "lengths", "logprobs")
FLOATS = ("logprobs", "temperature")
# The axes of every array.
AXES = {
    **{"tokens": 2, "prompt_lengths": 1, "lengths": 1, "logprobs": 2, "temperature": 0, "pad_token_id": 0},
    **{"evicted_at": 4, "support_ids": 1, "support_offsets": 1, "routing": 4},
}


def load_record(
    path: Path,
    *,
    layers: int,
    kv_heads: int,
    vocab_size: int,
    experts: RoutingShape | None = None,
    rows: int | None = None,
) -> Trajectory:
    """Reads and checks a record.

    Args:
      layers, kv_heads, vocab_size: of the model. experts: of the model; None: it has none.
      rows: number of rows that are read, from the first on; None: all.

    Raises:
      ValueError: a file that cannot be read, a missing or unknown array, a wrong shape or dtype, or what
        `Trajectory.from_records` refuses.
    """
    arrays = _read(path)
    tokens, lengths, prompts = arrays["tokens"], arrays["lengths"], arrays["prompt_lengths"]
    count = len(tokens) if rows is None else min(rows, len(tokens))
    for row in range(count):
        if not 1 <= prompts[row] < lengths[row] <= tokens.shape[1]:
            raise ValueError(
                f"expected 1 <= prompt_lengths < lengths <= {tokens.shape[1]} columns; got {prompts[row]} and "
                f"{lengths[row]} in row {row}"
            )
    of_prompt = [slice(prompts[row]) for row in range(count)]
    of_response = [slice(prompts[row], lengths[row]) for row in range(count)]
    evicted_at = arrays.get("evicted_at", np.full((count, 1, 1, tokens.shape[1]), NEVER))
    routing = arrays.get("routing")
    sizes = None if experts is None else ExpertSizes(len(experts.layers), experts.count, experts.per_token)
    return Trajectory.from_records(
        [tokens[row, part] for row, part in enumerate(of_prompt)],
        [tokens[row, part] for row, part in enumerate(of_response)],
        [arrays["logprobs"][row, part] for row, part in enumerate(of_response)],
        terminated=[True] * count,
        layers=layers,
        kv_heads=kv_heads,
        evicted_at=[evicted_at[row, :, :, : lengths[row]] for row in range(count)],
        support=_support(arrays, (lengths - prompts)[:count]),
        routed_experts=None if routing is None else [routing[row, : lengths[row]] for row in range(count)],
        experts=None if routing is None else sizes,
        temperature=float(arrays.get("temperature", 1.0)),
        vocab_size=vocab_size,
        pad_token_id=int(arrays.get("pad_token_id", 0)),
    )


def _read(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file, of the right kinds and numbers of axes."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (zipfile.BadZipFile, OSError, ValueError, EOFError, AttributeError) as error:
        raise ValueError(f"expected a readable record, an .npz file; got {path}: {str(error)[:200]}") from error
    if missing := [name for name in REQUIRED if name not in arrays]:
        raise ValueError(f"expected the arrays {', '.join(REQUIRED)}; {', '.join(missing)} missing")
    if unknown := sorted(set(arrays) - set(AXES)):
        raise ValueError(f"expected the arrays {', '.join(AXES)}; got {', '.join(unknown)[:200]}")
    if ("support_ids" in arrays) != ("support_offsets" in arrays):
        raise ValueError("expected support_ids and support_offsets together; got one of them")
    rows = len(np.atleast_1d(arrays["tokens"]))
    for name, array in arrays.items():
        kind = np.floating if name in FLOATS else np.integer
        if array.ndim != AXES[name] or not np.issubdtype(array.dtype, kind):
            numbers = "floats" if kind is np.floating else "integers"
            raise ValueError(f"{name}: expected {numbers} with {AXES[name]} axes; got {array.dtype} {array.shape}")
        if array.ndim and not name.startswith("support") and len(array) != rows:
            raise ValueError(f"{name}: expected {rows} rows; got {len(array)}")
    return arrays


def _support(arrays: dict[str, np.ndarray], responses: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]] | None:
    """Ids and offsets of every row, as `Trajectory.from_records` takes them."""
    if "support_ids" not in arrays:
        return None
    ids, offsets = arrays["support_ids"], arrays["support_offsets"]
    ends = np.cumsum(responses)
    if len(offsets) <= ends[-1]:
        raise ValueError(f"support_offsets: expected one more than {ends[-1]} response tokens; got {len(offsets)}")
    found = []
    for end, tokens in zip(ends, responses, strict=True):
        of_row = offsets[end - tokens : end + 1]
        found.append((ids[of_row[0] : of_row[-1]], of_row - of_row[0]))
    return found


def save_record(path: Path, trajectory: Trajectory) -> None:
    """Writes a trajectory without its padding. An existing file is not replaced.

    Raises:
      FileExistsError: `path` exists.
      ValueError: tokens of a response that were not sampled, such as a tool's answer, for which a record has no place.
    """
    if (np.asarray(trajectory.columns_after_prompt()) != np.asarray(trajectory.lengths())).any():
        raise ValueError("expected responses of sampled tokens alone; got a conversation, with tokens that were read")
    valid, width = np.asarray(trajectory.valid), trajectory.prompt_width
    prompts, lengths = valid[:, :width].sum(axis=1), valid.sum(axis=1)
    starts, columns = width - prompts, int(lengths.max())
    places = np.minimum(starts[:, None] + np.arange(columns), valid.shape[1] - 1)
    logprobs = np.pad(np.asarray(trajectory.logprobs, np.float32), [(0, 0), (width, 0)])
    evicted_at = np.take_along_axis(np.asarray(trajectory.mask.evicted_at, np.int64), places[:, None, None], axis=3)
    arrays = {
        "tokens": np.take_along_axis(np.asarray(trajectory.tokens), places, axis=1),
        "prompt_lengths": prompts,
        "lengths": lengths,
        "logprobs": np.take_along_axis(logprobs, places, axis=1),
        "evicted_at": np.clip(evicted_at - starts[:, None, None, None], 0, columns + 1),
        "temperature": np.float32(trajectory.temperature),
    }
    if trajectory.routing is not None:
        arrays["routing"] = np.take_along_axis(np.asarray(trajectory.routing), places[..., None, None], axis=1)
    if trajectory.drawable is not None and trajectory.drawable.sets is not None:
        arrays |= _compressed_rows(np.asarray(trajectory.drawable.sets)[np.asarray(trajectory.response_mask)])
    with open(path, "xb") as file:
        np.savez_compressed(file, **dict[str, Any](arrays))


def _compressed_rows(sets: np.ndarray) -> dict[str, np.ndarray]:
    """Sets of drawable tokens, bits or ids, as ids and offsets."""
    if sets.dtype == np.uint8:
        found = [np.flatnonzero(np.unpackbits(bits, bitorder="little")) for bits in sets]
    else:
        found = [ids[ids >= 0] for ids in sets]
    offsets = np.cumsum([0, *map(len, found)])
    return {"support_ids": np.concatenate(found).astype(np.int32), "support_offsets": offsets}
