"""Loading and saving checkpoints in Hugging Face's format.

`tensor_table` maps tensors to parameters, for both directions.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from huggingface_hub import split_state_dict_into_shards_factory
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from smd_jax.config import FloatName, ModelConfig
from smd_jax.devices.sharding import param_spec
from smd_jax.disk import check_space, check_writable, write_safetensors
from smd_jax.message.gate import EVICTION_GATE
from smd_jax.model.families import FAMILIES
from smd_jax.model.hf_config import float_name, hf_config_from_model, model_config_from_hf
from smd_jax.model.lora import LORA
from smd_jax.model.peft_format import CONFIG_FILE as ADAPTER_CONFIG
from smd_jax.model.stored_tensors import (
    INDEX_FILE,
    Part,
    check_finite_weights,
    check_tensors,
    load_parameter,
    match_tensors,
    read_json,
    some,
)
from smd_jax.model.tensor_table import Layout, Leaf, StoredTensor, tensor_table
from smd_jax.model.tokenizer_files import GENERATION, TEMPLATES, TOKENIZER_FILES, check_tokenizer, write_tokenizer
from smd_jax.model.value_head import VALUE_HEAD


def load_checkpoint(
    directory: str | Path, *, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None
) -> tuple[ModelConfig, dict[str, Any]]:
    """Reads config.json and model.safetensors, or the shards of model.safetensors.index.json.

    Names, shapes and dtypes are checked from the headers before any tensor is read. Parameters are read one by one, and
    with a mesh only the shards of this process's devices, so the model need not fit in host memory.

    Args:
      directory: a checkpoint directory in Hugging Face's format, of a family in `smd_jax.model.families`; gpt-oss may
        have its experts in MXFP4 (`smd_jax.model.stored_tensors`).
      dtype: of the returned parameters, and the compute dtype of the returned configuration.
      mesh: shards the parameters as `smd_jax.devices.sharding.shard_tree` does. None: JAX's default device,
        uncommitted; to keep a large model on the host until it is sharded, call this under
        `jax.default_device(jax.local_devices(backend="cpu")[0])`.

    Returns:
      The configuration, and the parameters for `Decoder(config).apply({"params": params}, ...)`.

    Raises:
      FileNotFoundError: no directory, no config.json, no safetensors, or a shard of the index is missing.
      UserWarning: the directory also holds an adapter of PEFT, which is not applied.
      ValueError: pickles instead of safetensors; missing or extra tensors; a wrong shape or dtype; an output projection
        that differs from its tied embedding; an index that names files outside the directory; a file that cannot be
        parsed; an unsupported architecture; weights that are NaN or infinite.
    """
    directory = Path(directory)
    name = float_name(dtype)
    config, layout = _parsed_config(directory, name)
    if (directory / ADAPTER_CONFIG).exists():
        # transformers would apply it.
        text = f"{directory} also holds an adapter, which is not applied; smd.model.load_peft reads it"
        warnings.warn(text, UserWarning, stacklevel=2)
    parts: dict[Leaf, list[Part]] = {}
    for part in match_tensors(config, directory, layout).values():
        for leaf in part[0].leaves:
            parts.setdefault(leaf, []).append(part)
    flat = {}
    for leaf, of in parts.items():
        sharding = None if mesh is None else NamedSharding(mesh, param_spec(leaf.path.split("/"), leaf.shape, mesh))
        flat[leaf.path] = load_parameter(of, leaf, name, sharding)
    return config, unflatten_dict(flat, sep="/")


def read_config(directory: str | Path, dtype: DTypeLike = jnp.float32) -> ModelConfig:
    """Reads the configuration of a checkpoint and checks the headers of its tensors against it.

    Arguments and errors as for `load_checkpoint`. Reads no weights, except to compare the two copies of a tied
    embedding.
    """
    directory = Path(directory)
    config, layout = _parsed_config(directory, float_name(dtype))
    match_tensors(config, directory, layout)
    return config


def _parsed_config(directory: Path, dtype: FloatName) -> tuple[ModelConfig, Layout]:
    if not directory.is_dir():
        raise FileNotFoundError(
            f"expected a checkpoint directory; there is none at {directory}. A model of the Hugging Face Hub has to be "
            "downloaded before: hf download NAME --local-dir DIRECTORY"
        )
    file = directory / "config.json"
    content = read_json(file)
    try:
        return model_config_from_hf(content, dtype), FAMILIES[content["model_type"]].layout
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def save_checkpoint(
    directory: str | Path,
    params: Mapping[str, Any],
    config: ModelConfig,
    *,
    dtype: FloatName = "bfloat16",
    max_shard_bytes: int = 5_000_000_000,
    tokenizer_from: str | Path | None = None,
    tokenizer: Any = None,
    end_token_ids: Sequence[int] | None = None,
) -> None:
    """Writes a checkpoint for transformers 4 and 5, as the model type of `smd_jax.model.families` that fits `config`.

    Writes a sibling directory and renames it to `directory`, so a failed save keeps the previous checkpoint. The host
    holds one shard at a time.

    Args:
      directory: may hold a previous checkpoint and nothing else, because it is replaced as a whole.
      params: the parameters, all addressable from this process; without a value head or adapters
        (`smd_jax.model.lora.merge_lora`), which the format cannot store.
      config: of the decoder.
      dtype: of the stored weights; float32 parameters are rounded to it.
      max_shard_bytes: weights are split into files of at most this size, with an index. A tensor is never split.
      tokenizer_from: copies this directory's tokenizer, chat templates, generation_config.json and the ids of special
        tokens in config.json; also its model type, if several fit `config`.
      tokenizer: of transformers, replaces that directory's tokenizer.
      end_token_ids: the tokens that ended responses in training, for config.json and generation_config.json. None:
        those of `tokenizer_from` and the tokenizer's EOS token.

    Raises:
      ValueError: no model type fits `config`; `params` do not fit `config`, have a value head or adapters;
        `max_shard_bytes` is not positive; a file of `tokenizer_from` is not JSON.
      FileExistsError: `directory` holds files that do not belong to a checkpoint.
      FileNotFoundError: `tokenizer_from` has no tokenizer.
      OSError: the disk is full or fails.
    """
    if max_shard_bytes <= 0:
        raise ValueError(f"expected max_shard_bytes > 0; got {max_shard_bytes}")
    dtype = float_name(dtype)
    source = None if tokenizer_from is None else Path(tokenizer_from)
    hf_config = hf_config_from_model(config, dtype, _model_type_of(source))
    table = tensor_table(config, FAMILIES[hf_config["model_type"]].layout)
    flat = flatten_dict(dict(params), sep="/")
    # Names and shapes are checked before the first file is written.
    _check_params(table, flat)
    with _replaced(Path(directory)) as temporary:
        hf_config |= write_tokenizer(temporary, source, tokenizer, end_token_ids, config.vocab_size)
        _write_json(temporary / "config.json", hf_config)
        _write_tensors(temporary, table, flat, dtype, max_shard_bytes)


def check_export(directory: str | Path, needed: int) -> None:
    """Checks, before training, that `save_checkpoint` can write `needed` bytes to `directory`.

    Raises:
      OSError: `directory` holds other files or is not writable, or its disk has no room.
    """
    directory = Path(directory)
    check_replaceable(directory)
    # The new directory is written to the same parent.
    check_writable(directory.parent)
    check_space(directory.parent, needed, "the exported model")


def check_export_source(config: ModelConfig, tokenizer_from: str | Path, tokenizer: Any = None) -> None:
    """Raises the errors of `save_checkpoint` that do not depend on the parameters. Call it before training.

    Raises:
      ValueError: no model type fits `config`; a file of the tokenizer is not JSON.
      FileNotFoundError: `tokenizer_from` has no tokenizer.
      OSError: a file cannot be read.
    """
    source = Path(tokenizer_from)
    hf_config_from_model(config, "float32", _model_type_of(source))
    check_tokenizer(source, tokenizer, config.vocab_size)


# Writing


_NOT_STORED = {
    VALUE_HEAD: "smd.model.drop_value_head(params)",
    EVICTION_GATE: "smd.eviction.drop_gate(params)",
    LORA: "smd.model.merge_lora(params), or smd.model.save_peft for a file of PEFT",
}


def _check_params(table: dict[str, StoredTensor], flat: Mapping[str, Any]) -> None:
    leaves = {leaf.path: leaf for tensor in table.values() for leaf in tensor.leaves}
    for name, what in _NOT_STORED.items():
        if any(path.split("/")[0] == name for path in flat):
            raise ValueError(f"expected parameters without {name}, which Hugging Face's format cannot store: {what}")
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    check_tensors(shapes, {path: np.shape(leaf) for path, leaf in flat.items()}, "params")


def _to_stored(flat: Mapping[str, Any], tensor: StoredTensor, dtype: FloatName) -> np.ndarray:
    # NumPy has no bfloat16; JAX's dtype adds it.
    whole = [flat[leaf.path] if tensor.expert is None else flat[leaf.path][tensor.expert] for leaf in tensor.leaves]
    with np.errstate(over="ignore"):
        parts = [np.asarray(part).astype(jnp.dtype(dtype)) for part in whole]
    for leaf, part in zip(tensor.leaves, parts, strict=True):
        check_finite_weights(leaf.path, part)
    if tensor.interleaved:
        array = np.stack(parts, axis=-1).reshape(tensor.hf_shape)
    else:
        array = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
    # safetensors writes the buffer and ignores strides.
    return np.ascontiguousarray(array.T if tensor.transposed else array)


def _write_tensors(
    directory: Path, table: dict[str, StoredTensor], flat: Mapping[str, Any], dtype: FloatName, max_shard_bytes: int
) -> None:
    itemsize = jnp.dtype(dtype).itemsize
    sizes = {name: math.prod(tensor.hf_shape) * itemsize for name, tensor in table.items()}
    split = split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=lambda size: size,
        get_storage_id=lambda _: None,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        tensors = {name: _to_stored(flat, table[name], dtype) for name in names}
        write_safetensors(directory / file, tensors, {"format": "pt"})  # transformers 4 insists on "pt"
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        _write_json(directory / INDEX_FILE, index)


def _model_type_of(directory: Path | None) -> str | None:
    """The model type in a directory's config.json."""
    if directory is None or not (directory / "config.json").is_file():
        return None
    name = read_json(directory / "config.json").get("model_type")
    return name if isinstance(name, str) else None


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _replaced(directory: Path) -> Iterator[Path]:
    """A new sibling directory that replaces `directory` if the block succeeds, and is deleted otherwise."""
    directory = directory.resolve()
    check_replaceable(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    # In the same parent, because a rename within a file system is atomic.
    new = directory.parent / f".{directory.name}.new-{os.getpid()}"
    old = directory.parent / f".{directory.name}.old-{os.getpid()}"
    # A process with the same number, as in a container that begins again, may have been killed here.
    if old.exists() and not directory.exists():
        old.rename(directory)
    for left in (new, old):
        shutil.rmtree(left, ignore_errors=True)
    new.mkdir()
    try:
        yield new
        if directory.exists():
            directory.rename(old)
        new.rename(directory)
    finally:
        # The second rename failed: restore the previous checkpoint.
        if old.exists() and not directory.exists():
            old.rename(directory)
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def check_replaceable(directory: Path) -> None:
    """Raises FileExistsError for a file, or a directory with files that do not belong to a checkpoint."""
    if directory.exists() and not directory.is_dir():
        raise FileExistsError(f"expected a directory or nothing at {directory}; there is a file")
    # The directory is replaced as a whole, so other files in it would be lost.
    foreign = sorted(file.name for file in (directory.iterdir() if directory.exists() else ()) if not _is_known(file))
    if foreign:
        raise FileExistsError(f"expected {directory} to be new, empty or a checkpoint; it also holds {some(foreign)}")


def _is_known(file: Path) -> bool:
    """Whether `save_checkpoint` writes files of this name."""
    if file.is_dir():
        return file.name == TEMPLATES and all(template.suffix == ".jinja" for template in file.iterdir())
    # Other safetensors, such as a trained gate, are not part of the weights.
    weights = re.fullmatch(r"model(-\d{5,}-of-\d{5,})?\.safetensors", file.name)
    return weights is not None or file.name in {"config.json", INDEX_FILE, GENERATION, *TOKENIZER_FILES}
