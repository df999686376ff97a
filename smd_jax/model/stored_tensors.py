"""Reads the safetensors of a checkpoint directory: file names, headers, and shards of single tensors. Never pickles."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import Sharding
from safetensors import SafetensorError, safe_open

from smd_jax.config import FloatName, ModelConfig
from smd_jax.model.hf_fields import shown, some
from smd_jax.model.mxfp4 import MXFP4, Mxfp4Slice, mxfp4_names, mxfp4_shape
from smd_jax.model.tensor_table import EMBEDDING, OUTPUT, Layout, Leaf, StoredTensor, tensor_table

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.pkl")
STORED_DTYPES = ("F32", "BF16", "F16", "F64")
# The index of a model of 400 billion parameters takes 0.1 MB.
MOST_JSON_BYTES = 16 * 2**20
_MOST_NAME_CHARACTERS = 255  # what file systems allow
# A tensor is read in blocks of this size, or of a 32nd of the shard if that is smaller.
BLOCK_BYTES = 8 * 2**20

_LAYER = re.compile(r"model\.layers\.(\d+)\.")

Bounds = tuple[tuple[int, int], ...]  # begin and end along each axis


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, as its header describes it.

    Attributes:
      scales: in MXFP4, the tensor with the scales; `shape` and `dtype` are then those of the weight.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    scales: Stored | None = None


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
      FileNotFoundError: no such file.
      ValueError: not JSON, not an object, or a file of more than 16 MiB.
    """
    if not path.is_file():
        raise FileNotFoundError(f"expected a checkpoint with {path.name} in {path.parent}; there is no such file")
    size = path.stat().st_size
    if size > MOST_JSON_BYTES:
        raise ValueError(f"expected {path} of at most {MOST_JSON_BYTES} bytes; got {size}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error!s:.200}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object; got {type(content).__name__}")
    return content


def tensor_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint directory."""
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE]
    if (directory / INDEX_FILE).is_file():
        return _shards(directory / INDEX_FILE)
    # Listed for the error message, never opened.
    pickles = sorted(file.name for pattern in PICKLES for file in directory.glob(pattern))
    if pickles:
        raise ValueError(
            f"expected {SINGLE_FILE} or {INDEX_FILE} in {directory}; got {', '.join(pickles)}. Pickle files can run "
            "code and are never read: open the checkpoint where you trust it with transformers, and save it again"
        )
    raise FileNotFoundError(f"expected {SINGLE_FILE} or {INDEX_FILE} in {directory}; there is neither")


def _shards(index: Path) -> list[Path]:
    files = [index.parent / name for name in shard_names(index)]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{index} names the shard {file.name}; there is no such file in {index.parent}")
    return files


def shard_names(index: Path) -> list[str]:
    """The files that an index names, sorted.

    Raises:
      ValueError: the index has no weight_map, or names other files than safetensors in its directory.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(
            f"{index} must hold weight_map, an object of tensor name -> file name; got {shown(weight_map)}"
        )
    for name in weight_map.values():
        # The index is downloaded, so it must not reach files outside its directory.
        if not isinstance(name, str) or not _is_shard_name(name):
            raise ValueError(f"{index} must name safetensors files in its own directory; got {shown(name)}")
    return sorted(set(weight_map.values()))


def _is_shard_name(name: str) -> bool:
    plain = name == os.path.basename(name) and name.isprintable() and "\\" not in name
    return plain and name.endswith(".safetensors") and len(name) <= _MOST_NAME_CHARACTERS


def read_headers(files: list[Path]) -> dict[str, Stored]:
    """Names, shapes and dtypes of all tensors, without reading weights."""
    stored: dict[str, Stored] = {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as tensors:
                header = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 (not a mapping)
        except SafetensorError as error:
            raise ValueError(f"{file} is not a readable safetensors file: {error!s:.200}") from error
        for name, tensor in header.items():
            if name in stored:
                raise ValueError(
                    f"expected every tensor once; {some([name])} is in {stored[name].file.name} and {file.name}"
                )
            stored[name] = Stored(file, tuple(tensor.get_shape()), tensor.get_dtype())
    return stored


def match_tensors(
    config: ModelConfig, files: list[Path], where: str, layout: Layout = "split"
) -> dict[str, tuple[StoredTensor, Stored]]:
    """The tensors of `config` and where each is stored, by name; from headers, without reading weights.

    A tied embedding may be stored under either of its two names, or under both with equal values.

    Raises:
      ValueError: missing or unexpected tensors; a wrong shape or dtype; an output projection that differs from its
        tied embedding.
    """
    stored = read_headers(files)
    if layout == "gpt_oss":
        stored = _with_mxfp4(stored)
    # Checked before the table is built, because the table grows with num_hidden_layers of a downloaded file.
    layers = {match[1] for name in stored if (match := _LAYER.match(name))}
    if config.num_layers > max(len(layers), 1):
        raise ValueError(
            f"tensors in {where} do not fit its configuration: expected {config.num_layers} layers, as "
            f"num_hidden_layers says; got tensors of {len(layers)}"
        )
    table = tensor_table(config, layout)
    if config.tie_embeddings and EMBEDDING not in stored and OUTPUT in stored:
        table = {OUTPUT if name == EMBEDDING else name: tensor for name, tensor in table.items()}
    check_names(
        missing=table.keys() - stored.keys(),
        extra={name for name in stored.keys() - table.keys() if not is_redundant(name, config)},
        where=where,
    )
    check_stored(table, stored)
    if config.tie_embeddings and {EMBEDDING, OUTPUT} <= stored.keys():
        _check_tied(stored[EMBEDDING], stored[OUTPUT], where)
    return {name: (tensor, stored[name]) for name, tensor in table.items()}


def _with_mxfp4(stored: dict[str, Stored]) -> dict[str, Stored]:
    """With weights in place of the blocks and scales that hold them."""
    stored = dict(stored)
    for name, (blocks_name, scales_name) in mxfp4_names(stored).items():
        blocks, scales = stored.pop(blocks_name), stored.pop(scales_name)
        shape = mxfp4_shape(blocks.shape, scales.shape)
        if shape is None or {blocks.dtype, scales.dtype} != {"U8"}:
            raise ValueError(
                f"expected {name} in MXFP4 as uint8 _blocks [experts, out, groups, 16] and _scales [experts, out, "
                f"groups]; got {blocks.dtype} {shown(list(blocks.shape))} and {scales.dtype} "
                f"{shown(list(scales.shape))}"
            )
        if name in stored:
            raise ValueError(f"expected every tensor once; {some([name])} is stored plainly and in MXFP4")
        stored[name] = Stored(blocks.file, shape, MXFP4, scales)
    return stored


def open_tensor(files: Mapping[Path, Any], name: str, stored: Stored) -> Any:
    """The content of a tensor, whose parts are read by slices.

    Args:
      files: open files, results of `safe_open`.
    """
    if stored.scales is None:
        return files[stored.file].get_slice(name)
    scales = files[stored.scales.file].get_slice(f"{name}_scales")
    return Mxfp4Slice(files[stored.file].get_slice(f"{name}_blocks"), scales)


def is_redundant(name: str, config: ModelConfig) -> bool:
    """Whether a tensor can be skipped: RoPE buffers of older transformers, or the copy of a tied embedding."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_embeddings and name == OUTPUT)


def _check_tied(embedding: Stored, output: Stored, where: str) -> None:
    """Raises ValueError unless both tensors are equal. Reads blocks of rows."""
    equal = embedding.shape == output.shape
    if equal:
        with (
            safe_open(embedding.file, framework="numpy") as first,
            safe_open(output.file, framework="numpy") as second,
        ):
            one, other = first.get_slice(EMBEDDING), second.get_slice(OUTPUT)
            rows, width = embedding.shape
            step = max(BLOCK_BYTES // (8 * width), 1)
            blocks = (slice(begin, min(begin + step, rows)) for begin in range(0, rows, step))
            equal = all(np.array_equal(_wide(one[block]), _wide(other[block]), equal_nan=True) for block in blocks)
    if not equal:
        raise ValueError(
            f"expected {OUTPUT} in {where} to equal {EMBEDDING}, because config.json says tie_word_embeddings: true; "
            "got another tensor. If it was trained separately, set tie_word_embeddings to false"
        )


def _wide(block: np.ndarray) -> np.ndarray:
    """In a dtype that NumPy can compare and that represents every stored value exactly."""
    return block.astype(np.float64)


def check_stored(table: dict[str, StoredTensor], stored: dict[str, Stored]) -> None:
    """Raises ValueError for tensors of a wrong shape, or whose dtype is not floating."""
    wrong = [
        f"{name}: expected {list(tensor.hf_shape)}, got {shown(list(stored[name].shape))}"
        for name, tensor in table.items()
        if stored[name].shape != tensor.hf_shape
    ]
    if wrong:
        raise ValueError(f"tensors of the wrong shape for config.json: {some(wrong)}")
    odd = [f"{name}: {stored[name].dtype}" for name in table if stored[name].dtype not in (*STORED_DTYPES, MXFP4)]
    if odd:
        raise ValueError(f"expected tensors stored as {', '.join(STORED_DTYPES)}; got {some(odd)}")


# Shards of tensors


class Holder(NamedTuple):
    """An open tensor that holds a parameter or a part of it.

    Attributes:
      content: result of `open_tensor`.
    """

    content: Any
    tensor: StoredTensor


def load_parameter(holders: Sequence[Holder], leaf: Leaf, dtype: FloatName, sharding: Sharding | None) -> jax.Array:
    """A parameter on the devices of this process, read shard by shard.

    Args:
      holders: the tensors that hold it: one, or several for experts.
      sharding: of the parameter; None: unsharded and uncommitted on JAX's default device.
    """
    if sharding is None:
        whole = read_part(holders, leaf, tuple((0, side) for side in leaf.shape), dtype)
        (array,) = _put(whole, [None])
        del whole
        jax.device_put(np.int8(0))  # see below
        return array
    devices_of: dict[Bounds, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        assert index is not None
        ends = [part.indices(side) for part, side in zip(index, leaf.shape, strict=True)]
        devices_of.setdefault(tuple((begin, end) for begin, end, _ in ends), []).append(device)
    arrays: list[jax.Array] = []
    for bounds, devices in devices_of.items():
        arrays += _put(read_part(holders, leaf, bounds, dtype), devices)
        # JAX frees the copied buffer at its next call. This call frees it before the next shard is read.
        jax.device_put(np.int8(0), devices[0])
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, arrays)


def read_part(holders: Sequence[Holder], leaf: Leaf, bounds: Bounds, dtype: FloatName) -> np.ndarray:
    """A shard of a parameter, converted. Besides it, at most one block of the file is in memory.

    Args:
      holders: as for `load_parameter`.
      bounds: of the shard, in the parameter's order of axes.

    Raises:
      ValueError: values that are NaN, infinite or beyond the range of the dtype.
    """
    part = host_array(tuple(end - begin for begin, end in bounds), dtype)
    block = min(BLOCK_BYTES, part.nbytes // 32)
    for holder in holders:
        expert = holder.tensor.expert
        if expert is None:
            _fill(part, holder, leaf, bounds, block)
        elif bounds[0][0] <= expert < bounds[0][1]:
            _fill(part[expert - bounds[0][0]], holder, leaf, bounds[1:], block)
    return part


def _fill(part: np.ndarray, holder: Holder, leaf: Leaf, bounds: Bounds, block: int) -> None:
    """Reads one tensor into a shard, `block` bytes at a time."""
    tensor = holder.tensor
    # A view of the shard in the axis order of the file.
    there = part.T if tensor.transposed else part
    *before, (begin, end) = bounds
    # Parameters are concatenated along the last axis, or interleaved.
    turns = len(tensor.leaves) if tensor.in_turns else 1
    if tensor.in_turns:
        place = tensor.leaves.index(leaf)
        begin, end = place + turns * begin, place + turns * (end - 1) + 1
    else:
        begin, end = begin + tensor.begin(leaf), end + tensor.begin(leaf)
    moved = (*before, (begin, end))
    (first, last), *others = moved[::-1] if tensor.transposed else moved
    rest = tuple(slice(begin, end) for begin, end in others)
    step = max(block * len(there) // max(part.nbytes, 1), 1)
    for begin in range(first, last, step):
        end = min(begin + step, last)
        with np.errstate(over="ignore"):  # check_finite_weights reports it with the tensor's name
            read = holder.content[(slice(begin, end), *rest)]
            there[begin - first : end - first] = read[..., ::turns] if turns > 1 else read
        check_finite_weights(leaf.path, there[begin - first : end - first])


_EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80}  # all these bits are set only in NaN and infinity


def check_finite_weights(name: str, values: np.ndarray) -> None:
    """Raises ValueError if a weight is NaN or infinite."""
    exponent = _EXPONENTS.get(values.dtype.name)
    # NumPy's isfinite is not vectorised for bfloat16; integer operations are.
    bad = ~np.isfinite(values) if exponent is None else (values.view(np.uint16) & exponent) == exponent
    if bad.any():
        raise ValueError(f"expected finite weights; got NaN or infinity in {name}, as {values.dtype.name}")


def host_array(shape: tuple[int, ...], dtype: FloatName) -> np.ndarray:
    """Uninitialised memory for a shard."""
    return np.empty(shape, jnp.dtype(dtype))


def _put(part: np.ndarray, devices: list[Any]) -> list[jax.Array]:
    """Copies `part` to each device; None: to the default device, uncommitted. A CPU array may alias `part`, which the
    caller must not reuse."""
    # Blocking, because shards in transfer would fill the host's memory.
    return jax.block_until_ready([jax.device_put(part, device) for device in devices])


# Messages


def check_names(missing: Iterable[str], extra: Iterable[str], where: str) -> None:
    """Raises ValueError if there are any."""
    problems = [
        f"{word} {some(sorted(names))}" for word, names in (("missing", missing), ("unexpected", extra)) if names
    ]
    if problems:
        raise ValueError(f"tensors in {where} do not fit its configuration: {'; '.join(problems)}")
