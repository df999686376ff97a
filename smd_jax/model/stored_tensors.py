"""Reads the safetensors of a checkpoint: file names, headers, shards of single tensors, MXFP4. Never pickles."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import Sharding
from jaxtyping import Float, UInt8
from safetensors import SafetensorError, safe_open

from smd_jax.config import FloatName, ModelConfig
from smd_jax.model.tensor_table import EMBEDDING, OUTPUT, Layout, Leaf, StoredTensor, tensor_table

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.pkl")
MOST_JSON_BYTES = 2**24  # an index of 100,000 tensors has 10 MB
STORED_DTYPES = ("F32", "BF16", "F16", "F64")

Bounds = tuple[tuple[int, int], ...]  # begin and end along each axis


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, as its header describes it.

    Attributes:
      name: in the file.
      scales: in MXFP4, the tensor with the scales; `shape` and `dtype` are then those of the weight.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    scales: Stored | None = None

    def read(self, places: tuple[slice, ...]) -> np.ndarray:
        """A part of the tensor, dequantised."""
        with safe_open(self.file, framework="numpy") as file:
            content = file.get_slice(self.name)
            if self.scales is None:
                return content[places]
            experts, columns, out = places
            groups = slice(columns.start // _GROUP, -(-columns.stop // _GROUP))
            values = dequantised(content[experts, out, groups], self.scales.read((experts, out, groups)))
        skipped = groups.start * _GROUP
        return values[..., columns.start - skipped : columns.stop - skipped].swapaxes(1, 2)


Part = tuple[StoredTensor, Stored]


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
      FileNotFoundError: no such file.
      ValueError: not JSON, not an object, nested too deep to be read, or more than 16 MiB.
    """
    if not path.is_file():
        raise FileNotFoundError(f"expected a checkpoint with {path.name} in {path.parent}; there is no such file")
    size = path.stat().st_size
    if size > MOST_JSON_BYTES:
        raise ValueError(f"expected {path} of at most {MOST_JSON_BYTES:,} bytes; got {size:,}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error!s:.200}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object; got {type(content).__name__}")
    return content


def tensor_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint directory."""
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE]
    if (directory / INDEX_FILE).is_file():
        files = [directory / name for name in shard_names(directory / INDEX_FILE)]
        if missing := [file.name for file in files if not file.is_file()]:
            raise FileNotFoundError(
                f"{directory / INDEX_FILE} names shards that are not in {directory}: {some(missing)}"
            )
        return files
    # Listed for the error message, never opened.
    pickles = sorted(file.name for pattern in PICKLES for file in directory.glob(pattern))
    if pickles:
        raise ValueError(
            f"expected {SINGLE_FILE} or {INDEX_FILE} in {directory}; got {', '.join(pickles)}. Pickle files can run "
            "code and are never read: open the checkpoint where you trust it with transformers, and save it again"
        )
    raise FileNotFoundError(f"expected {SINGLE_FILE} or {INDEX_FILE} in {directory}; there is neither")


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
        is_name = isinstance(name, str) and len(name) <= 255 and Path(name).name == name
        if not is_name or not name.endswith(".safetensors"):
            raise ValueError(f"{index} must name safetensors files in its own directory; got {shown(name)}")
    return sorted(set(weight_map.values()))


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
            stored[name] = Stored(file, name, tuple(tensor.get_shape()), tensor.get_dtype())
    return stored


def match_tensors(config: ModelConfig, directory: Path, layout: Layout) -> dict[str, Part]:
    """The tensors of `config` and where each is stored, by name; from headers, without reading weights.

    A tied embedding may be stored under either of its two names, or under both with equal values.

    Raises:
      FileNotFoundError: no safetensors, or a shard of the index is missing.
      ValueError: missing or unexpected tensors; a wrong shape or dtype; an output projection that differs from its
        tied embedding.
    """
    stored = read_headers(tensor_files(directory))
    if layout == "gpt_oss":
        stored = _with_mxfp4(stored)
    table = tensor_table(config, layout)
    tied, both = config.tie_embeddings, stored.keys() & {EMBEDDING, OUTPUT}
    if tied and both == {OUTPUT}:
        table = {OUTPUT if name == EMBEDDING else name: tensor for name, tensor in table.items()}
    # RoPE buffers of older transformers are skipped.
    skipped = {name for name in stored if name.endswith("rotary_emb.inv_freq")} | ({OUTPUT} if tied else set())
    read = {name: stored[name].shape for name in stored if name in table or name not in skipped}
    check_tensors({name: tensor.hf_shape for name, tensor in table.items()}, read, str(directory))
    odd = [f"{name}: {stored[name].dtype}" for name in table if stored[name].dtype not in (*STORED_DTYPES, MXFP4)]
    if odd:
        raise ValueError(f"expected tensors stored as {', '.join(STORED_DTYPES)}; got {some(odd)}")
    if tied and len(both) == 2:
        everything = (slice(None), slice(None))
        if not np.array_equal(stored[EMBEDDING].read(everything), stored[OUTPUT].read(everything)):
            raise ValueError(
                f"expected {OUTPUT} in {directory} to equal {EMBEDDING}, because config.json says tie_word_embeddings: "
                "true; got another tensor. If it was trained separately, set tie_word_embeddings to false"
            )
    return {name: (tensor, stored[name]) for name, tensor in table.items()}


# Shards of parameters


def load_parameter(parts: Sequence[Part], leaf: Leaf, dtype: FloatName, sharding: Sharding | None) -> jax.Array:
    """A parameter on the devices of this process; reads only their shards.

    Args:
      parts: the tensors that hold it: one, or one for each expert.
      sharding: of the parameter; None: unsharded and uncommitted on JAX's default device.
    """
    if sharding is None:
        return jnp.asarray(_read_shard(parts, leaf, tuple((0, side) for side in leaf.shape), dtype))
    shards: dict[Bounds, np.ndarray] = {}  # read once for devices with the same shard

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        bounds = tuple(place.indices(side)[:2] for place, side in zip(index, leaf.shape, strict=True))
        if bounds not in shards:
            shards[bounds] = _read_shard(parts, leaf, bounds, dtype)
        return shards[bounds]

    return jax.make_array_from_callback(leaf.shape, sharding, shard)


def _read_shard(parts: Sequence[Part], leaf: Leaf, bounds: Bounds, dtype: FloatName) -> np.ndarray:
    """A shard of a parameter, converted. `bounds` are in the parameter's order of axes."""
    if parts[0][0].expert is None:
        return _read_tensor(*parts[0], leaf, bounds, dtype)
    return np.stack([_read_tensor(*parts[expert], leaf, bounds[1:], dtype) for expert in range(*bounds[0])])


def _read_tensor(tensor: StoredTensor, stored: Stored, leaf: Leaf, bounds: Bounds, dtype: FloatName) -> np.ndarray:
    """The part of one tensor that belongs to a parameter."""
    *before, (begin, end) = bounds
    # Parameters are concatenated along the last axis, or interleaved.
    turns = len(tensor.leaves) if tensor.interleaved else 1
    if tensor.interleaved:
        place = tensor.leaves.index(leaf)
        begin, end = place + turns * begin, place + turns * (end - 1) + 1
    else:
        begin, end = begin + tensor.begin(leaf), end + tensor.begin(leaf)
    places = tuple(slice(*ends) for ends in (*before, (begin, end)))
    with np.errstate(over="ignore"):  # reported below with the tensor's name
        read = stored.read(places[::-1] if tensor.transposed else places)
        values = read[..., ::turns].astype(jnp.dtype(dtype))
    check_finite_weights(leaf.path, values)
    return values.T if tensor.transposed else values


_EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80}  # all these bits are set only in NaN and infinity


def check_finite_weights(name: str, values: np.ndarray) -> None:
    """Raises ValueError if a weight is NaN or infinite."""
    exponent = _EXPONENTS.get(values.dtype.name)
    # NumPy's isfinite is not vectorised for bfloat16; integer operations are.
    bad = ~np.isfinite(values) if exponent is None else (values.view(np.uint16) & exponent) == exponent
    if bad.any():
        raise ValueError(f"expected finite weights; got NaN or infinity in {name}, as {values.dtype.name}")


# MXFP4, in which gpt-oss stores its experts: 4-bit floats in blocks of 32 with a common power of two.
#
#     NAME_blocks    uint8 [experts, out, groups, 16]     two values a byte, the lower half first
#     NAME_scales    uint8 [experts, out, groups]         exponent + 127
#     NAME           [experts, 32 * groups, out]          value * 2 ** (scale - 127)
#
# A value is a sign, two bits of exponent and one of mantissa (E2M1): 0, 0.5, 1, 1.5, 2, 3, 4, 6. Source: OCP
# Microscaling Formats, v1.0, sections 5.3.3 and 5.4.1 (a scale of 255 is NaN); the layout is that of
# `convert_moe_packed_tensors` in transformers' `integrations/mxfp4.py`. bfloat16 and wider hold every value exactly.

MXFP4 = "MXFP4"
_GROUP = 32  # values with a common scale
_VALUES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
# Both values of every byte.
_PAIRS = np.array(
    [[(-1.0) ** (half >> 3) * _VALUES[half & 7] for half in (byte & 15, byte >> 4)] for byte in range(256)], np.float32
)
_GROUPS_AT_ONCE = 2**13  # which take 1 MiB in float32


def dequantised(
    blocks: UInt8[np.ndarray, "*rows groups 16"], scales: UInt8[np.ndarray, "*rows groups"]
) -> Float[np.ndarray, "*rows columns"]:
    """The values as bfloat16, 32 columns a group; NaN where a scale is 255, infinite beyond bfloat16's range."""
    out = np.empty((scales.size, _GROUP), jnp.dtype("bfloat16"))
    pairs, exponents = blocks.reshape(-1, 16), scales.reshape(-1, 1)
    for begin in range(0, len(out), _GROUPS_AT_ONCE):
        part = slice(begin, begin + _GROUPS_AT_ONCE)
        values = _PAIRS[pairs[part]].reshape(-1, _GROUP)
        with np.errstate(over="ignore"):  # the caller reports it with the tensor's name
            scaled = np.ldexp(values, exponents[part].astype(np.int32) - 127)
        out[part] = np.where(exponents[part] == 255, np.nan, scaled)
    return out.reshape(*scales.shape[:-1], -1)


def _with_mxfp4(stored: dict[str, Stored]) -> dict[str, Stored]:
    """The tensors with MXFP4 weights of experts in place of their blocks and scales."""
    found = dict(stored)
    for blocks_name, blocks in stored.items():
        name = blocks_name.removesuffix("_blocks")
        scales = stored.get(f"{name}_scales")
        if name == blocks_name or ".mlp.experts." not in name or scales is None:
            continue
        if len(scales.shape) != 3 or blocks.shape != (*scales.shape, 16) or {blocks.dtype, scales.dtype} != {"U8"}:
            raise ValueError(
                f"expected {name} in MXFP4 as uint8 _blocks [experts, out, groups, 16] and _scales [experts, out, "
                f"groups]; got {blocks.dtype} {shown(list(blocks.shape))} and {scales.dtype} "
                f"{shown(list(scales.shape))}"
            )
        del found[blocks_name], found[scales.name]
        experts, out, groups = scales.shape
        found[name] = Stored(blocks.file, blocks_name, (experts, _GROUP * groups, out), MXFP4, scales)
    return found


# Messages

_SHOWN = 80
_WORDS = 8


def shown(value: object) -> str:
    """The representation of a value, cut after 80 characters: a downloaded file may hold texts of any length."""
    # A text is cut before it is quoted, so that a text of any length costs nothing.
    text = repr(value[: _SHOWN + 1]) if isinstance(value, str | bytes) else repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def some(words: list[str]) -> str:
    """The first words of a list, each cut after 80 characters, and the number of the others."""
    cut = [word if len(word) <= _SHOWN else word[: _SHOWN - 1] + "…" for word in words[:_WORDS]]
    more = f", and {len(words) - _WORDS} more" if len(words) > _WORDS else ""
    return ", ".join(cut) + more


def check_tensors(expected: Mapping[str, tuple[int, ...]], got: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raises ValueError for missing and extra tensors, and for shapes other than expected."""
    wrong = {
        f"{name}: expected {list(shape)}, got {shown(list(got[name]))}"
        for name, shape in expected.items()
        if name in got and got[name] != shape
    }
    groups = {
        "missing": expected.keys() - got.keys(),
        "unexpected": got.keys() - expected.keys(),
        "of the wrong shape": wrong,
    }
    problems = [f"{word} {some(sorted(names))}" for word, names in groups.items() if names]
    if problems:
        raise ValueError(f"tensors in {where} do not fit its configuration: {'; '.join(problems)}")
