"""Hugging Face checkpoint directories <-> the parameters of the decoder.

`tensor_table` is the whole correspondence, and both directions read it. A `kernel` here is [in, out] where a Linear's
weight there is [out, in], so kernels are transposed and everything else is taken as it is; rope uses transformers'
half-and-half convention, so no head is permuted. Only safetensors files are read, never pickles.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import numpy as jnp
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from smd_jax.config import FloatName, ModelConfig
from smd_jax.model.hf_config import float_name, hf_config_from_model, model_config_from_hf
from smd_jax.model.value_head import VALUE_HEAD

__all__ = ["load_checkpoint", "model_config_from_hf", "save_checkpoint", "tensor_table"]

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_STORED_DTYPES = ("F32", "BF16", "F16", "F64")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


@dataclass(frozen=True)
class Leaf:
    """A parameter: its path in the tree (`layers_0/mlp/up_proj/kernel`) and its shape there."""

    path: str
    shape: tuple[int, ...]

    @property
    def is_transposed(self) -> bool:
        return self.path.endswith("/kernel")

    @property
    def hf_shape(self) -> tuple[int, ...]:
        return self.shape[::-1] if self.is_transposed else self.shape


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file, as its header describes it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def tensor_table(config: ModelConfig) -> dict[str, Leaf]:
    """Hugging Face tensor name -> parameter, for every parameter of a decoder of shape `config`."""
    hidden = config.hidden_size
    ffn = config.intermediate_size
    vocab = config.vocab_size
    q = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    layer = {
        "input_layernorm.weight": Leaf("attention_norm/scale", (hidden,)),
        "self_attn.q_proj.weight": Leaf("attention/q_proj/kernel", (hidden, q)),
        "self_attn.k_proj.weight": Leaf("attention/k_proj/kernel", (hidden, kv)),
        "self_attn.v_proj.weight": Leaf("attention/v_proj/kernel", (hidden, kv)),
        "self_attn.o_proj.weight": Leaf("attention/o_proj/kernel", (q, hidden)),
        "post_attention_layernorm.weight": Leaf("mlp_norm/scale", (hidden,)),
        "mlp.gate_proj.weight": Leaf("mlp/gate_proj/kernel", (hidden, ffn)),
        "mlp.up_proj.weight": Leaf("mlp/up_proj/kernel", (hidden, ffn)),
        "mlp.down_proj.weight": Leaf("mlp/down_proj/kernel", (ffn, hidden)),
    }
    if config.qkv_bias:
        layer["self_attn.q_proj.bias"] = Leaf("attention/q_proj/bias", (q,))
        layer["self_attn.k_proj.bias"] = Leaf("attention/k_proj/bias", (kv,))
        layer["self_attn.v_proj.bias"] = Leaf("attention/v_proj/bias", (kv,))
    if config.qk_norm:
        layer["self_attn.q_norm.weight"] = Leaf("attention/q_norm/scale", (config.head_dim,))
        layer["self_attn.k_norm.weight"] = Leaf("attention/k_norm/scale", (config.head_dim,))
    blocks = [(f"model.layers.{n}", f"layers_{n}") for n in range(config.num_layers)]
    table = {"model.embed_tokens.weight": Leaf("embed/embedding", (vocab, hidden))}
    for there, here in blocks:
        table |= {f"{there}.{name}": Leaf(f"{here}/{leaf.path}", leaf.shape) for name, leaf in layer.items()}
    table["model.norm.weight"] = Leaf("norm/scale", (hidden,))
    if not config.tie_embeddings:
        table["lm_head.weight"] = Leaf("lm_head/kernel", (hidden, vocab))
    return table


def load_checkpoint(directory: str | Path, *, dtype: DTypeLike = jnp.float32) -> tuple[ModelConfig, dict[str, Any]]:
    """Reads config.json and model.safetensors, or the shards of model.safetensors.index.json.

    Names, shapes and dtypes are checked from the headers before any tensor is read; then one tensor at a time is in
    memory besides the result. The arrays lie on JAX's default device: to keep a big model on the host until it is
    sharded, call this under `jax.default_device(jax.local_devices(backend="cpu")[0])`.

    Args:
      directory: a checkpoint directory in Hugging Face's format, of family Llama 2/3, Qwen2/2.5 or Qwen3.
      dtype: of the returned parameters, and the compute dtype of the returned configuration.

    Returns:
      The configuration, and the parameters for `Decoder(config).apply({"params": params}, ...)`.

    Raises:
      FileNotFoundError: no config.json, no safetensors, or a shard that the index names does not exist.
      ValueError: a pickle in place of safetensors; missing or extra tensors; a wrong shape or dtype; an index that
        names files elsewhere; a file that cannot be parsed; an architecture that the decoder does not cover.
    """
    directory = Path(directory)
    name = float_name(dtype)
    config = read_config(directory, name)
    table = tensor_table(config)
    # Headers alone: names, shapes and dtypes of all tensors, and no weights.
    stored = _read_headers(_tensor_files(directory))
    _check_names(
        missing=table.keys() - stored.keys(),
        extra={n for n in stored.keys() - table.keys() if not _is_redundant(n, config)},
        where=str(directory),
    )
    _check_stored(table, stored)
    flat: dict[str, Any] = {}
    # File by file, so that each is opened once.
    for file in sorted({stored[n].file for n in table}):
        with safe_open(file, framework="numpy") as tensors:
            for n, leaf in table.items():
                if stored[n].file == file:
                    flat[leaf.path] = _to_parameter(tensors.get_tensor(n), leaf, name)
    return config, unflatten_dict(flat, sep="/")


def read_config(directory: str | Path, dtype: DTypeLike = jnp.float32) -> ModelConfig:
    """The configuration of a checkpoint, without its weights; arguments and errors as `load_checkpoint`."""
    return model_config_from_hf(_read_json(Path(directory) / "config.json"), float_name(dtype))


def save_checkpoint(
    directory: str | Path,
    params: Mapping[str, Any],
    config: ModelConfig,
    *,
    dtype: FloatName = "bfloat16",
    max_shard_bytes: int = 5_000_000_000,
    tokenizer_from: str | Path | None = None,
) -> None:
    """Writes a checkpoint that transformers 4 and 5 open, as model_type llama, qwen2 or qwen3.

    Everything is written to a sibling directory first, which then takes the place of `directory`: a save that fails
    leaves the checkpoint that was there. The host holds one shard at a time.

    Args:
      directory: where to write. It may hold a previous checkpoint, and nothing else, since it is replaced as a whole.
      params: the parameters, each of them addressable from this process; without a value head, for which this format
        has no place.
      config: their shape.
      dtype: how the weights are stored; float32 parameters are rounded to it.
      max_shard_bytes: weights beyond this size are split into several files with an index. A tensor is never split.
      tokenizer_from: a directory whose tokenizer, chat template and generation files, and whose ids of special tokens
        in config.json, are taken over.

    Raises:
      ValueError: no model type expresses `config`; `params` do not fit `config` or have a value head;
        `max_shard_bytes` is not positive.
      FileExistsError: `directory` holds files that are no part of a checkpoint.
      FileNotFoundError: `tokenizer_from` holds no tokenizer.
      OSError: the disk is full, or fails.
    """
    if max_shard_bytes <= 0:
        raise ValueError(f"max_shard_bytes must be positive; got {max_shard_bytes}")
    dtype = float_name(dtype)
    hf_config = hf_config_from_model(config, dtype)
    table = tensor_table(config)
    flat = flatten_dict(dict(params), sep="/")
    # Before the first file is written, because this needs no more than names and shapes.
    _check_params(table, flat)
    with _replaced(Path(directory)) as temporary:
        if tokenizer_from is not None:
            hf_config |= _copy_tokenizer(Path(tokenizer_from), temporary)
        _write_json(temporary / "config.json", hf_config)
        _write_tensors(temporary, table, flat, dtype, max_shard_bytes)


# Reading


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"expected a checkpoint with {path.name} in {path.parent}; there is no such file")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object; got {type(content).__name__}")
    return content


def _tensor_files(directory: Path) -> list[Path]:
    if (directory / _SINGLE_FILE).is_file():
        return [directory / _SINGLE_FILE]
    if (directory / _INDEX_FILE).is_file():
        return _shards(directory / _INDEX_FILE)
    # Only to say in the error what is there; nothing of it is opened.
    pickles = sorted(file.name for pattern in _PICKLES for file in directory.glob(pattern))
    if pickles:
        raise ValueError(
            f"expected {_SINGLE_FILE} or {_INDEX_FILE} in {directory}; got {', '.join(pickles)}. Pickle files can run "
            "code and are never read: open the checkpoint where you trust it with transformers, and save it again"
        )
    raise FileNotFoundError(f"expected {_SINGLE_FILE} or {_INDEX_FILE} in {directory}; there is neither")


def _shards(index: Path) -> list[Path]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} must hold weight_map, an object of tensor name -> file name; got {weight_map!r}")
    files = []
    for name in sorted({str(value) for value in weight_map.values()}):
        # An index is part of a download: it must not name files elsewhere on this machine.
        if name != os.path.basename(name) or "\\" in name or not name.endswith(".safetensors"):
            raise ValueError(f"{index} must name safetensors files in its own directory; got {name!r}")
        if not (index.parent / name).is_file():
            raise FileNotFoundError(f"{index} names the shard {name}; there is no such file in {index.parent}")
        files.append(index.parent / name)
    return files


def _read_headers(files: list[Path]) -> dict[str, _Stored]:
    stored: dict[str, _Stored] = {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as tensors:
                header = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 (not a mapping)
        except SafetensorError as error:
            raise ValueError(f"{file} is not a readable safetensors file: {error}") from error
        for name, tensor in header.items():
            if name in stored:
                raise ValueError(f"expected every tensor once; {name} is in {stored[name].file.name} and {file.name}")
            stored[name] = _Stored(file, tuple(tensor.get_shape()), tensor.get_dtype())
    return stored


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Tensors that older transformers wrote and that carry nothing: rope's buffers, the copy of a tied embedding."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_embeddings and name == "lm_head.weight")


def _check_stored(table: dict[str, Leaf], stored: dict[str, _Stored]) -> None:
    wrong = [
        f"{name}: expected {list(leaf.hf_shape)}, got {list(stored[name].shape)}"
        for name, leaf in table.items()
        if stored[name].shape != leaf.hf_shape
    ]
    if wrong:
        raise ValueError(f"tensors of the wrong shape for config.json: {_some(wrong)}")
    odd = [f"{name}: {stored[name].dtype}" for name in table if stored[name].dtype not in _STORED_DTYPES]
    if odd:
        raise ValueError(f"expected tensors stored as {', '.join(_STORED_DTYPES)}; got {_some(odd)}")


def _to_parameter(tensor: np.ndarray, leaf: Leaf, dtype: FloatName) -> Any:
    # A copy, so that JAX never aliases a buffer that belongs to safetensors.
    return jnp.array((tensor.T if leaf.is_transposed else tensor).astype(jnp.dtype(dtype)))


# Writing


def _check_params(table: dict[str, Leaf], flat: Mapping[str, Any]) -> None:
    leaves = {leaf.path: leaf for leaf in table.values()}
    if any(path.startswith(f"{VALUE_HEAD}/") for path in flat):
        raise ValueError(
            "expected parameters without a value head, because a language model in Hugging Face's format has none: "
            f"smd.model.drop_value_head(params); got {_some(sorted({path.split('/')[0] for path in flat}))}"
        )
    _check_names(missing=leaves.keys() - flat.keys(), extra=flat.keys() - leaves.keys(), where="params")
    wrong = [
        f"{path}: expected {list(leaf.shape)}, got {list(flat[path].shape)}"
        for path, leaf in leaves.items()
        if flat[path].shape != leaf.shape
    ]
    if wrong:
        raise ValueError(f"parameters of the wrong shape for the config: {_some(wrong)}")


def _to_stored(parameter: Any, leaf: Leaf, dtype: FloatName) -> np.ndarray:
    # NumPy has no bfloat16 of its own; JAX's dtype brings it along.
    array = np.asarray(parameter).astype(jnp.dtype(dtype))
    # safetensors writes the buffer and ignores strides.
    return np.ascontiguousarray(array.T if leaf.is_transposed else array)


def _write_tensors(
    directory: Path, table: dict[str, Leaf], flat: Mapping[str, Any], dtype: FloatName, max_shard_bytes: int
) -> None:
    itemsize = jnp.dtype(dtype).itemsize
    sizes = {name: int(np.prod(leaf.shape)) * itemsize for name, leaf in table.items()}
    shards = _pack(sizes, max_shard_bytes)
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for file, shard in zip([_SINGLE_FILE] if len(shards) == 1 else names, shards, strict=True):
        tensors = {name: _to_stored(flat[table[name].path], table[name], dtype) for name in shard}
        try:
            save_file(tensors, directory / file, metadata={"format": "pt"})  # transformers 4 insists on "pt"
        except SafetensorError as error:  # what it makes of a disk that is full
            raise OSError(f"{file} could not be written: {error}") from error
        # safetensors gives its files to their owner alone. Ours have the mode of every other file, as the umask has it.
        (directory / file).chmod((directory / "config.json").stat().st_mode)
    if len(shards) > 1:
        weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        _write_json(directory / _INDEX_FILE, index)


def _pack(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in their order, in groups of at most `limit` bytes; a bigger tensor is a group by itself."""
    groups: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        # A tensor that is bigger than the limit leaves a negative room, so that the next one begins a new group.
        if not groups or size > room:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= size
    return groups


def _copy_tokenizer(source: Path, target: Path) -> dict[str, Any]:
    """Copies the tokenizer's files; gives the special token ids of the source's config.json, where it has one."""
    present = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not {"tokenizer.json", "tokenizer.model", "vocab.json"} & set(present):
        raise FileNotFoundError(f"expected tokenizer.json, tokenizer.model or vocab.json in {source}; got {present}")
    for name in present:
        shutil.copyfile(source / name, target / name)
    if not (source / "config.json").is_file():
        return {}
    config = _read_json(source / "config.json")
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _replaced(directory: Path) -> Iterator[Path]:
    """A new sibling directory that takes the place of `directory` if the block succeeds, and vanishes if not."""
    directory = directory.resolve()
    check_replaceable(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    # In the same parent: a rename within a file system happens as a whole or not at all.
    new = directory.parent / f".{directory.name}.new-{os.getpid()}"
    old = directory.parent / f".{directory.name}.old-{os.getpid()}"
    new.mkdir()
    try:
        # The block of the caller writes here; the renames follow only if it raises nothing.
        yield new
        if directory.exists():
            directory.rename(old)
        new.rename(directory)
    finally:
        # The previous checkpoint was moved away and the new one did not take its place.
        if old.exists() and not directory.exists():
            old.rename(directory)
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def check_replaceable(directory: Path) -> None:
    """Raises FileExistsError if `save_checkpoint` would not write there: for a file, or a directory in which there is
    what belongs to no checkpoint."""
    if directory.exists() and not directory.is_dir():
        raise FileExistsError(f"expected a directory or nothing at {directory}; there is a file")
    # The directory is replaced as a whole, and files that no checkpoint has would be lost with it.
    known = {"config.json", _INDEX_FILE, *TOKENIZER_FILES}
    foreign = sorted(
        file.name
        for file in (directory.iterdir() if directory.exists() else ())
        if file.name not in known and file.suffix != ".safetensors"
    )
    if foreign:
        raise FileExistsError(f"expected {directory} to be new, empty or a checkpoint; it also holds {_some(foreign)}")


# Messages


def _check_names(missing: Iterable[str], extra: Iterable[str], where: str) -> None:
    problems = [
        f"{word} {_some(sorted(names))}" for word, names in (("missing", missing), ("unexpected", extra)) if names
    ]
    if problems:
        raise ValueError(f"tensors in {where} do not fit its configuration: {'; '.join(problems)}")


def _some(words: list[str], limit: int = 8) -> str:
    more = f", and {len(words) - limit} more" if len(words) > limit else ""
    return ", ".join(words[:limit]) + more
