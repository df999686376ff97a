"""Adapters in PEFT's format <-> the adapters of `smd_jax.model.lora`.

    adapter_config.json          rank, alpha, targets
    adapter_model.safetensors    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight     [rank, in]
                                 base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight     [out, rank]

Names come from the decoder's table of tensors; as kernels, A and B are transposed. Matrices that a checkpoint stores as
one have one adapter in PEFT's format, see `smd_jax.model.peft_fused`; experts, see `smd_jax.model.peft_experts`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from smd_jax.config import FloatName, ModelConfig
from smd_jax.model.families import FAMILIES
from smd_jax.model.hf_config import float_name, model_type_of
from smd_jax.model.lora import LORA, TARGETS, Adapters, LoraConfig, Target, by_module, has_lora
from smd_jax.model.peft_experts import (
    MLP_TARGETS,
    check_experts,
    expert_tensors,
    is_of_experts,
    stored_targets,
    take_experts,
)
from smd_jax.model.peft_files import MATRICES, read_tensors, take_tensor, tensor_name
from smd_jax.model.peft_fused import FUSED, PATTERNS, check_patterns, fused_targets, join, patterns, split
from smd_jax.model.short_text import shown, some
from smd_jax.model.stored_tensors import read_json
from smd_jax.model.tensor_table import Layout, Leaf, StoredTensor, tensor_table
from smd_jax.safetensors_files import write_safetensors

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"

# Options of PEFT that do not change the function of trained adapters. Configurations of an initialisation (EVA, CorDA,
# …) apply only if `init_lora_weights` names it.
_WITHOUT_EFFECT = frozenset(
    {
        *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "lora_dropout"),
        *("layers_to_transform", "layers_pattern", "megatron_core", "runtime_config", "qalora_group_size"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "ensure_weight_tying"),
    }
)
# Initialisations that do not change the base model. The others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) subtract a part of
# its weights, and PEFT repeats them when it loads an adapter.
_PLAIN_INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal")


def save_peft(
    directory: str | Path,
    params: Mapping[str, Any],
    config: ModelConfig,
    *,
    base_model: str | Path | None = None,
    base_directory: str | Path | None = None,
    dtype: FloatName = "float32",
) -> None:
    """Writes the adapters for PEFT: `PeftModel.from_pretrained(base, directory)`.

    Keeps other files in `directory`. Writes neither the value head nor the base model.

    Args:
      params: with adapters, see `add_lora`; all addressable from this process.
      config: of the decoder.
      base_model: directory or Hub name of the base model, for `AutoPeftModelForCausalLM`.
      base_directory: directory of the base's config.json, whose model type decides between types that fit `config`: Phi
        stores q, k and v as one matrix, Llama does not. A Phi base that is not a local directory needs it. None:
        `base_model`, if it is such a directory; else the first type that fits.
      dtype: of the stored adapters.

    Raises:
      FileNotFoundError: `base_directory` has no config.json.
      ValueError: there are no adapters, they do not fit `config`, or PEFT cannot store them, see `check_peft`.
    """
    if not has_lora(params):
        raise ValueError(f"expected parameters with adapters (smd.model.add_lora); got {sorted(params)}")
    adapters: Adapters = params[LORA]
    if base_directory is None and base_model is not None and (Path(base_model) / "config.json").is_file():
        base_directory = base_model
    check_peft(config, adapters.config, base_directory)
    layout = _layout_of(config, base_directory)
    modules = _modules(config, adapters.config, layout)
    all_pairs = {"/".join(path): pair for path, pair in by_module(adapters).items()}
    pairs = {path: pair for path, pair in all_pairs.items() if not is_of_experts(path)}
    expected = {leaf.path for tensor in modules.values() for leaf in tensor.leaves}
    if wrong := sorted({f"{path}/kernel" for path in pairs} ^ expected):
        paths = [path.removesuffix("/kernel") for path in wrong]
        raise ValueError(f"expected adapters of the targets in every layer of the config; got others at {some(paths)}")
    expert_pairs = {path: pair for path, pair in all_pairs.items() if is_of_experts(path)}
    tensors = {} if config.experts is None else expert_tensors(expert_pairs, config, adapters.config)
    for name, tensor in modules.items():
        parts = [pairs[_module(leaf)] for leaf in tensor.leaves]
        pair = parts[0] if len(parts) == 1 else join(parts)
        for matrix in MATRICES:
            tensors[tensor_name(name, matrix)] = np.asarray(pair[matrix]).T
    kind = jnp.dtype(float_name(dtype))
    tensors = {name: np.ascontiguousarray(tensor.astype(kind)) for name, tensor in tensors.items()}
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    content = _peft_config(adapters.config, base_model, _fused_names(config, layout), config.experts is not None)
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    write_safetensors(directory / TENSOR_FILE, tensors, {"format": "pt"})
    (directory / CONFIG_FILE).write_text(text, encoding="utf-8")


def check_peft(config: ModelConfig, lora: LoraConfig, base_directory: str | Path | None = None) -> None:
    """Raises the errors of `save_peft` that do not depend on the parameters. Call it before training.

    Args:
      lora: of the adapters, see `add_lora`.
      base_directory: as in `save_peft`.

    Raises:
      FileNotFoundError: `base_directory` has no config.json.
      ValueError: adapters on only a part of a matrix that the checkpoint stores as one; adapters of an MLP's matrices
        if only some layers have experts.
    """
    fused_targets(lora, _fused_names(config, _layout_of(config, base_directory)))
    if config.experts is not None:
        check_experts(config, lora)


def load_peft(directory: str | Path, params: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Reads adapters that PEFT wrote and adds them to the parameters of a base model, in float32 or wider.

    Args:
      params: of the base model; the result shares its arrays.
      config: of the decoder.

    Raises:
      FileNotFoundError: one of PEFT's two files is missing.
      ValueError: `params` has adapters; not LoRA, or with unsupported options (DoRA, biases, ranks per layer, fully
        saved modules, PiSSA, OLoRA); tensors missing, unexpected or of the wrong shape.
    """
    if has_lora(params):
        raise ValueError("expected the parameters of a base; got some with adapters: merge_lora(params) merges them")
    directory = Path(directory)
    for name in (CONFIG_FILE, TENSOR_FILE):
        if not (directory / name).is_file():
            raise FileNotFoundError(f"expected adapters with {name} in {directory}; there is no such file")
    tensors = read_tensors(directory / TENSOR_FILE)
    layout: Layout = "fused" if any(f".{name}." in tensor for name in FUSED for tensor in tensors) else "split"
    content = _read_config(directory / CONFIG_FILE, _fused_names(config, layout), config.experts is not None)
    expert_pairs = take_experts(tensors, content, config, directory)
    lora = _lora_config(content, tensors, expert_pairs, _fused_names(config, layout), directory)
    flat: dict[str, Any] = flatten_dict(dict(params), sep="/")
    # Copies, so that JAX never aliases a buffer that belongs to safetensors.
    matrices: dict[str, Any] = {
        f"{path}/{matrix}": jnp.array(pair[matrix].astype(jnp.promote_types(flat[path].dtype, jnp.float32)))
        for path, pair in expert_pairs.items()
        for matrix in MATRICES
    }
    for name, tensor in _modules(config, lora, layout).items():
        widths = [leaf.shape[1] for leaf in tensor.leaves]
        joined = len(widths) > 1 and bool(content.get("rank_pattern"))
        rank = lora.rank * len(widths) if joined else lora.rank
        shapes = {"lora_A": (rank, tensor.leaves[0].shape[0]), "lora_B": (sum(widths), rank)}
        found = {matrix: take_tensor(tensors, name, matrix, shape, directory).T for matrix, shape in shapes.items()}
        parts = [found] if len(widths) == 1 else split(found["lora_A"], found["lora_B"], widths, lora.rank, name)
        for leaf, part in zip(tensor.leaves, parts, strict=True):
            wide = jnp.promote_types(flat[leaf.path].dtype, jnp.float32)
            matrices |= {f"{_module(leaf)}/{matrix}": jnp.array(part[matrix].astype(wide)) for matrix in MATRICES}
    if tensors:
        raise ValueError(f"expected adapters of whole layers in {directory}; got {some(sorted(tensors))}, too")
    return {**params, LORA: Adapters(unflatten_dict(matrices, sep="/"), lora)}


def _modules(config: ModelConfig, lora: LoraConfig, layout: Layout) -> dict[str, StoredTensor]:
    """Maps each module with adapters, named as in transformers (`model.layers.0.self_attn.q_proj`), to its weight."""
    if layout == "fused":
        fused_targets(lora)
    return {
        name.removesuffix(".weight"): tensor
        for name, tensor in tensor_table(config, layout).items()
        if tensor.transposed and tensor.expert is None and _module(tensor.leaves[0]).split("/")[-1] in lora.targets
    }


def _module(leaf: Leaf) -> str:
    """Path of the module of a kernel (`layers_0/attention/q_proj`)."""
    return leaf.path.removesuffix("/kernel")


def _layout_of(config: ModelConfig, base_directory: str | Path | None) -> Layout:
    """Tensor layout of the base: of its own model type if that fits `config`, else of the first type that does."""
    given = None if base_directory is None else read_json(Path(base_directory) / "config.json").get("model_type")
    return FAMILIES[model_type_of(config, given if isinstance(given, str) else None)].layout


def _fused_names(config: ModelConfig, layout: Layout) -> tuple[str, ...]:
    """The matrices that have one adapter in PEFT's format and several here."""
    if layout == "fused":
        return tuple(FUSED)
    return () if config.experts is None else ("gate_up_proj",)


def _peft_config(
    lora: LoraConfig, base_model: str | Path | None, fused_names: tuple[str, ...], experts: bool
) -> dict[str, Any]:
    # PEFT annotates alpha as an integer but accepts any number.
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    fused = fused_targets(lora, fused_names)
    modules = [*fused, *(target for target in lora.targets if not any(target in parts for parts in fused.values()))]
    parameters = {}
    if experts:
        modules = [target for target in lora.targets if target not in MLP_TARGETS]
        parameters = {"target_parameters": [f"mlp.experts.{name}" for name in stored_targets(lora)]}
    return {
        **(patterns(lora, fused_names) if fused else {}),
        **parameters,
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base_model is None else str(base_model),
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": alpha,
        "use_rslora": lora.rank_stabilised,
        "target_modules": modules,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
    }


def _read_config(file: Path, fused_names: tuple[str, ...], experts: bool) -> dict[str, Any]:
    content = read_json(file)
    if content.get("peft_type") != "LORA":
        raise ValueError(f"expected peft_type 'LORA' in {file}; got {shown(content.get('peft_type'))}")
    if type(content.get("r")) is not int or "lora_alpha" not in content:
        got = {key: content.get(key) for key in ("r", "lora_alpha")}
        raise ValueError(f"expected r as an integer, and lora_alpha, in {file}; got {shown(got)}")
    # An option that is not listed here may be a new one of PEFT's: it must be off.
    known = (*_WITHOUT_EFFECT, "init_lora_weights", *(PATTERNS if fused_names else ()))
    known += ("target_parameters",) if experts else ()
    odd = [
        f"{name} {shown(value)}" for name, value in content.items() if name not in known and not _is_off(name, value)
    ]
    if odd:
        raise ValueError(f"expected plain LoRA in {file}, because these options change its function; got {some(odd)}")
    init = content.get("init_lora_weights")
    if not any(init is plain or (isinstance(init, str) and init == plain) for plain in _PLAIN_INITIALISATIONS):
        raise ValueError(
            f"expected an init_lora_weights in {file} that leaves the base unchanged; got {shown(init)}. PEFT "
            "converts such an adapter to plain LoRA: save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    return content


def _is_off(name: str, value: object) -> bool:
    if name == "bias":
        return value in ("none", None)
    # An empty configuration turns its method on, with defaults.
    return value is None or value is False or (not name.endswith("_config") and value in ({}, []))


def _lora_config(
    content: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    expert_pairs: Mapping[str, Any],
    fused_names: tuple[str, ...],
    directory: Path,
) -> LoraConfig:
    """Takes rank and alpha from the config, and targets from the tensors: PEFT may give targets as a pattern."""
    # Any tensor of an adapter: base_model.model.….q_proj.lora_A.weight
    stored = {name.split(".")[-3] for name in tensors if name.split(".")[-2:-1] == ["lora_A"]}
    stored = {part for name in stored for part in FUSED.get(name, (name,))}
    stored |= {path.split("/")[-1] for path in expert_pairs}
    targets: tuple[Target, ...] = tuple(target for target in TARGETS if target in stored)
    if not targets or stored - set(targets):
        raise ValueError(f"expected adapters of {', '.join(TARGETS)} in {directory}; got {some(sorted(stored))}")
    try:
        alpha, stabilised = float(content["lora_alpha"]), content.get("use_rslora", False)
        lora = LoraConfig(rank=content["r"], alpha=alpha, targets=targets, rank_stabilised=stabilised)
        check_patterns(content, lora, fused_names)
        return lora
    except (TypeError, ValueError) as error:
        raise ValueError(f"{directory / CONFIG_FILE}: {error}") from error
