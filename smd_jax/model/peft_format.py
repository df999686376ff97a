"""Adapters in PEFT's format <-> the adapters of `smd_jax.model.lora`.

    adapter_config.json          rank, alpha, targets
    adapter_model.safetensors    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight     [rank, in]
                                 base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight     [out, rank]

Names come from the decoder's table of tensors; as kernels, A and B are transposed.

Matrices that a checkpoint stores as one (Phi's `qkv_proj` and `gate_up_proj`) have one adapter in PEFT's format, and
one each here, of rank r. Written, that of q, k and v has rank 3 r:

    A = [A_q A_k A_v]        B = diag(B_q, B_k, B_v)        alpha such that the scale stays the same

An adapter that PEFT trained has rank r, and one A: then q, k and v start with the same A.

Experts have a pair of matrices per stored parameter, which has all experts of a layer:

    adapter_config.json                      target_parameters: mlp.experts.gate_up_proj, mlp.experts.down_proj
    …mlp.experts.base_layer.lora_A.weight    [experts * rank, in]    of gate_up_proj: row e * rank + r
    …mlp.experts.base_layer.lora_B.weight    [out, rank * experts]   column r * experts + e
    …mlp.experts.lora_A.weight, …            of down_proj

PEFT wraps gate_up_proj, and down_proj around that; so the name has `base_layer` only if both have adapters. Source:
`ParamWrapper` in `peft/tuners/lora/layer.py` of PEFT 0.21.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError
from safetensors.numpy import load_file

from smd_jax.config import FloatName, ModelConfig
from smd_jax.disk import write_safetensors
from smd_jax.model.families import FAMILIES
from smd_jax.model.hf_config import float_name, model_type_of
from smd_jax.model.lora import LORA, TARGETS, Adapters, LoraConfig, Target, by_module, has_lora
from smd_jax.model.stored_tensors import check_finite_weights, read_json, shown, some
from smd_jax.model.tensor_table import Layout, Leaf, StoredTensor, tensor_table

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"

Pair = dict[str, np.ndarray]  # lora_A [in, rank] and lora_B [rank, out]; of experts [experts, in, rank], …

_MATRICES = ("lora_A", "lora_B")
_FUSED: dict[str, tuple[Target, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_OF_EXPERTS: dict[str, tuple[Target, ...]] = {"gate_up_proj": _FUSED["gate_up_proj"], "down_proj": ("down_proj",)}
_MLP_TARGETS = (*_FUSED["gate_up_proj"], "down_proj")
_ALL_EXPERTS = re.compile(r"\.mlp\.experts\.(base_layer\.)?lora_[AB]\.weight$")
# PEFT's names of a parameter of experts: `model.layers.0.mlp.experts.NAME` or an end of it.
_TARGET_PARAMETER = re.compile(r"((.*\.)?experts\.)?(gate_up_proj|down_proj)")
_PATTERNS = ("rank_pattern", "alpha_pattern")

# Options of PEFT that do not change the function of trained adapters. Configurations of an initialisation (EVA, CorDA,
# …) apply only if `init_lora_weights` names it.
_WITHOUT_EFFECT = frozenset(
    {
        *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "lora_dropout"),
        *("layers_to_transform", "layers_pattern", "megatron_core", "runtime_config", "qalora_group_size"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "ensure_weight_tying"),
        *("lorap_lr_ratio", "lorap_emb_lr", "lora_dtype"),  # of ms-swift
    }
)
# Initialisations that do not change the base model. The others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) subtract a part of
# its weights, and PEFT repeats them when it loads an adapter.
_PLAIN_INITIALISATIONS = (True, False, None, "gaussian", "eva", "mica", "orthogonal")


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
        stores q, k and v as one matrix, Llama does not. None: `base_model`, if it is such a directory; else the first
        type that fits, unless another one that fits stores matrices with adapters differently.
      dtype: of the stored adapters.

    Raises:
      FileNotFoundError: `base_directory` has no config.json.
      ValueError: there are no adapters, they do not fit `config`, one is NaN or infinite in `dtype`, `base_directory`
        is needed, or PEFT cannot store them, see `check_peft`.
    """
    if not has_lora(params):
        raise ValueError(f"expected parameters with adapters (smd.model.add_lora); got {sorted(params)}")
    lora: LoraConfig = params[LORA].config
    if base_directory is None and base_model is not None and (Path(base_model) / "config.json").is_file():
        base_directory = base_model
    check_peft(config, lora, base_directory)
    layout = _layout_of(config, base_directory)
    modules = _modules(config, lora, layout)
    pairs = {"/".join(path): pair for path, pair in by_module(params[LORA]).items()}
    expected = {_module(leaf) for tensor in modules.values() for leaf in tensor.leaves} | {
        f"layers_{layer}/mlp/experts/{part}" for layer in _mixtures(config) for part in _targets_of_mlp(lora)
    }
    if wrong := sorted(expected ^ pairs.keys()):
        raise ValueError(f"expected adapters of the targets in every layer of the config; got others at {some(wrong)}")
    tensors = _expert_tensors(pairs, config, lora)
    for name, tensor in modules.items():
        pair = _join([pairs[_module(leaf)] for leaf in tensor.leaves])
        tensors |= {_tensor_name(name, matrix): pair[matrix].T for matrix in _MATRICES}
    kind = jnp.dtype(float_name(dtype))
    with np.errstate(over="ignore"):  # refused in the next lines
        tensors = {name: np.ascontiguousarray(tensor.astype(kind)) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        check_finite_weights(name, tensor)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    content = _peft_config(lora, base_model, _fused_names(config, layout), config.experts is not None)
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
        if only some layers have experts; no `base_directory` where the targets are stored differently by type.
    """
    names = _fused_names(config, _layout_of(config, base_directory))
    if base_directory is None:
        _check_one_layout(config, lora, names)
    _fused_targets(lora, names)
    parts, mixtures = _targets_of_mlp(lora), _mixtures(config)
    if config.experts is not None and parts and len(mixtures) < config.num_layers:
        raise ValueError(
            f"expected experts in every layer for adapters of {', '.join(parts)}, because PEFT takes those of an MLP "
            f"for adapters of experts; got experts in layers {mixtures} of {config.num_layers}"
        )


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
    try:
        tensors = load_file(directory / TENSOR_FILE)
    except SafetensorError as error:
        raise ValueError(f"{directory / TENSOR_FILE} is not a readable safetensors file: {error!s:.200}") from error
    layout: Layout = "fused" if any(f".{name}." in tensor for name in _FUSED for tensor in tensors) else "split"
    fused_names = _fused_names(config, layout)
    content = _read_config(directory / CONFIG_FILE, fused_names, config.experts is not None)
    pairs = _take_experts(tensors, content, config, directory)
    lora = _lora_config(content, tensors, pairs, fused_names, directory)
    if layout == "fused":
        _fused_targets(lora, fused_names)  # refuses a part of them
    for name, tensor in _modules(config, lora, layout).items():
        widths = [leaf.shape[1] for leaf in tensor.leaves]
        rank = lora.rank * (len(widths) if content.get("rank_pattern") else 1)
        shapes = {"lora_A": (rank, tensor.leaves[0].shape[0]), "lora_B": (sum(widths), rank)}
        a, b = (_take_tensor(tensors, name, matrix, shape, directory).T for matrix, shape in shapes.items())
        pairs |= zip(map(_module, tensor.leaves), _split(a, b, widths, lora.rank, name), strict=True)
    if tensors:
        raise ValueError(f"expected adapters of whole layers in {directory}; got {some(sorted(tensors))}, too")
    flat: dict[str, Any] = flatten_dict(dict(params), sep="/")
    matrices: dict[str, Any] = {}
    for path, pair in pairs.items():
        kernel = flat[path] if path in flat else flat[f"{path}/kernel"]
        wide = jnp.promote_types(kernel.dtype, jnp.float32)
        # Copies, so that JAX never aliases a buffer that belongs to safetensors.
        matrices |= {f"{path}/{matrix}": jnp.array(pair[matrix].astype(wide)) for matrix in _MATRICES}
    return {**params, LORA: Adapters(unflatten_dict(matrices, sep="/"), lora)}


def _modules(config: ModelConfig, lora: LoraConfig, layout: Layout) -> dict[str, StoredTensor]:
    """Maps each module with adapters, named as in transformers (`model.layers.0.self_attn.q_proj`), to its weight."""
    return {
        name.removesuffix(".weight"): tensor
        for name, tensor in tensor_table(config, layout).items()
        if tensor.transposed and tensor.expert is None and _module(tensor.leaves[0]).split("/")[-1] in lora.targets
    }


def _module(leaf: Leaf) -> str:
    """Path of the module of a kernel (`layers_0/attention/q_proj`)."""
    return leaf.path.removesuffix("/kernel")


def _mixtures(config: ModelConfig) -> list[int]:
    return [layer for layer in range(config.num_layers) if config.is_mixture(layer)]


def _targets_of_mlp(lora: LoraConfig) -> list[Target]:
    return [target for target in _MLP_TARGETS if target in lora.targets]


def _layout_of(config: ModelConfig, base_directory: str | Path | None) -> Layout:
    """Tensor layout of the base: of its own model type if that fits `config`, else of the first type that does."""
    given = None if base_directory is None else read_json(Path(base_directory) / "config.json").get("model_type")
    return FAMILIES[model_type_of(config, given if isinstance(given, str) else None)].layout


def _check_one_layout(config: ModelConfig, lora: LoraConfig, names: Sequence[str]) -> None:
    """Raises ValueError if another type that fits `config` fuses other matrices with adapters than these."""
    for model_type, family in FAMILIES.items():
        others = set(_fused_names(config, family.layout)) ^ set(names)
        fused = sorted(name for name in others if not set(_FUSED[name]).isdisjoint(lora.targets))
        if fused and model_type_of(config, model_type) == model_type:
            raise ValueError(
                f"expected base_directory, a directory with the base's config.json, because {model_type} stores "
                f"{', '.join(fused)} as one matrix and {model_type_of(config)} does not; got none. PEFT ignores "
                "adapters under other names"
            )


def _fused_names(config: ModelConfig, layout: Layout) -> tuple[str, ...]:
    """The matrices that have one adapter in PEFT's format and several here."""
    if layout == "fused":
        return tuple(_FUSED)
    return () if config.experts is None else ("gate_up_proj",)


def _fused_targets(lora: LoraConfig, names: Sequence[str]) -> dict[str, tuple[Target, ...]]:
    """Fused matrices with adapters, and their parts; PEFT's format cannot express adapters on only some parts."""
    found = {}
    for name in names:
        parts = _FUSED[name]
        chosen = [part for part in parts if part in lora.targets]
        if chosen and len(chosen) < len(parts):
            raise ValueError(
                f"expected adapters on all of {', '.join(parts)} or on none, because the checkpoint stores them as "
                f"{name}; got {', '.join(chosen)}"
            )
        if chosen:
            found[name] = parts
    return found


# adapter_config.json


def _peft_config(
    lora: LoraConfig, base_model: str | Path | None, fused_names: tuple[str, ...], experts: bool
) -> dict[str, Any]:
    # PEFT annotates alpha as an integer but accepts any number.
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    fused = _fused_targets(lora, fused_names)
    modules = [*fused, *(target for target in lora.targets if not any(target in parts for parts in fused.values()))]
    parameters = {}
    if experts:
        modules = [target for target in lora.targets if target not in _MLP_TARGETS]
        parameters = {"target_parameters": [f"mlp.experts.{name}" for name in _stored_targets(lora)]}
    return {
        **(_patterns(lora, fused_names) if fused else {}),
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


def _patterns(lora: LoraConfig, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """PEFT's `rank_pattern` and `alpha_pattern` of the fused matrices."""
    parts = {name: len(of) for name, of in _fused_targets(lora, names).items()}
    scales = {name: count**0.5 if lora.rank_stabilised else count for name, count in parts.items()}
    return {
        "rank_pattern": {name: lora.rank * count for name, count in parts.items()},
        "alpha_pattern": {name: lora.alpha * scale for name, scale in scales.items()},
    }


def _read_config(file: Path, fused_names: tuple[str, ...], experts: bool) -> dict[str, Any]:
    content = read_json(file)
    if content.get("peft_type") != "LORA":
        raise ValueError(f"expected peft_type 'LORA' in {file}; got {shown(content.get('peft_type'))}")
    if type(content.get("r")) is not int or "lora_alpha" not in content:
        got = {key: content.get(key) for key in ("r", "lora_alpha")}
        raise ValueError(f"expected r as an integer, and lora_alpha, in {file}; got {shown(got)}")
    # An option that is not listed here may be a new one of PEFT's: it must be off.
    known = (*_WITHOUT_EFFECT, "init_lora_weights", *(_PATTERNS if fused_names else ()))
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
    stored = {part for name in stored for part in _FUSED.get(name, (name,))}
    stored |= {path.split("/")[-1] for path in expert_pairs}
    targets: tuple[Target, ...] = tuple(target for target in TARGETS if target in stored)
    if not targets or stored - set(targets):
        raise ValueError(f"expected adapters of {', '.join(TARGETS)} in {directory}; got {some(sorted(stored))}")
    try:
        alpha, stabilised = float(content["lora_alpha"]), content.get("use_rslora") or False
        lora = LoraConfig(rank=content["r"], alpha=alpha, targets=targets, rank_stabilised=stabilised)
        _check_patterns(content, lora, fused_names)
        return lora
    except (TypeError, ValueError) as error:
        raise ValueError(f"{directory / CONFIG_FILE}: {error}") from error


def _check_patterns(content: Mapping[str, Any], lora: LoraConfig, names: Sequence[str]) -> None:
    """Raises ValueError for ranks or alphas of single matrices other than `_patterns`."""
    if all(not content.get(key) for key in _PATTERNS):
        return
    for key, expected in _patterns(lora, names).items():
        got = content.get(key)
        if isinstance(got, dict):  # PEFT turns names into expressions when it opens a file of transformers 4
            got = {name.removeprefix(r".*\."): value for name, value in got.items()}
        known = isinstance(got, dict) and got.keys() == expected.keys()
        if not known or not all(_close(value, expected[name]) for name, value in (got or {}).items()):
            raise ValueError(f"expected {key} to be {expected} or empty; got {shown(got)}")


def _close(got: object, expected: int | float) -> bool:
    return isinstance(got, int | float) and abs(got - expected) <= 1e-6 * expected


# Tensors


def _tensor_name(module: str, matrix: str) -> str:
    """`base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight` of a module's path in transformers."""
    return f"base_model.model.{module}.{matrix}.weight"


def _take_tensor(
    tensors: dict[str, np.ndarray], module: str, matrix: str, shape: tuple[int, ...], directory: Path
) -> np.ndarray:
    """Removes the matrix of a module from `tensors`, as it is stored, and checks it."""
    name = _tensor_name(module, matrix)
    if name not in tensors:
        raise ValueError(f"expected {name} in {directory}, because its target has adapters in every layer; got none")
    tensor = tensors.pop(name)
    if tensor.shape != shape:
        raise ValueError(f"expected {name} of shape {list(shape)} in {directory}; got {list(tensor.shape)}")
    check_finite_weights(f"{name} of {directory}", tensor)
    return tensor


def _join(pairs: Sequence[Mapping[str, Any]]) -> Pair:
    """The adapter of the stored matrix, from those of its parts."""
    below = [np.asarray(pair["lora_B"]) for pair in pairs]
    rows, columns = (sum(b.shape[axis] for b in below) for axis in (-2, -1))
    joined = np.zeros((*below[0].shape[:-2], rows, columns), below[0].dtype)
    row = column = 0
    for b in below:
        joined[..., row : row + b.shape[-2], column : column + b.shape[-1]] = b
        row, column = row + b.shape[-2], column + b.shape[-1]
    return {"lora_A": np.concatenate([np.asarray(pair["lora_A"]) for pair in pairs], axis=-1), "lora_B": joined}


def _split(a: np.ndarray, b: np.ndarray, widths: Sequence[int], rank: int, name: str) -> list[Pair]:
    """The adapters of the parts, of these output widths and this rank, from that of the stored matrix."""
    columns = np.split(b, np.cumsum(widths)[:-1], axis=-1)
    if a.shape[-1] == rank:
        return [{"lora_A": a, "lora_B": part} for part in columns]
    places = [slice(i * rank, (i + 1) * rank) for i in range(len(widths))]
    parts = [{"lora_A": a[..., x], "lora_B": part[..., x, :]} for x, part in zip(places, columns, strict=True)]
    if not np.array_equal(_join(parts)["lora_B"], b):
        what = "gate and up" if len(parts) == 2 else "q, k and v"
        again = "target_parameters" if ".experts" in name else "this matrix without rank_pattern"
        raise ValueError(
            f"expected lora_B of {name} in blocks, one for each of its {len(parts)} parts; got others: PEFT trained "
            f"{what} as one matrix of rank {len(parts)} * {rank}. Merge it there, or train {again} at rank {rank}"
        )
    return parts


# Experts


def _stored_targets(lora: LoraConfig) -> list[str]:
    """The stored parameters of experts that have adapters: PEFT's `target_parameters`."""
    return [name for name, parts in _OF_EXPERTS.items() if parts[0] in lora.targets]


def _expert_module(layer: int, name: str, stored: list[str]) -> str:
    inner = ".base_layer" if name == "gate_up_proj" and len(stored) > 1 else ""
    return f"model.layers.{layer}.mlp.experts{inner}"


def _is_interleaved(config: ModelConfig, name: str) -> bool:
    return name == "gate_up_proj" and FAMILIES[model_type_of(config)].layout == "gpt_oss"


def _expert_tensors(
    pairs: Mapping[str, Mapping[str, Any]], config: ModelConfig, lora: LoraConfig
) -> dict[str, np.ndarray]:
    """PEFT's tensors of the adapters of experts, from those by path (`layers_0/mlp/experts/up_proj`)."""
    tensors, stored = {}, _stored_targets(lora)
    for layer in _mixtures(config):
        for name in stored:
            pair = _join([pairs[f"layers_{layer}/mlp/experts/{part}"] for part in _OF_EXPERTS[name]])
            a, b = pair["lora_A"], pair["lora_B"]
            if _is_interleaved(config, name):
                b = b.reshape(*b.shape[:2], 2, -1).swapaxes(2, 3).reshape(*b.shape[:2], -1)
            module = _expert_module(layer, name, stored)
            tensors[_tensor_name(module, "lora_A")] = a.transpose(0, 2, 1).reshape(-1, a.shape[1])
            tensors[_tensor_name(module, "lora_B")] = b.transpose(2, 1, 0).reshape(b.shape[2], -1)
    return tensors


def _take_experts(
    tensors: dict[str, np.ndarray], content: Mapping[str, Any], config: ModelConfig, directory: Path
) -> dict[str, Pair]:
    """Removes the adapters of experts from a file's tensors: path (`layers_0/mlp/experts/up_proj`) -> adapters."""
    if config.experts is None:
        return {}
    given = content.get("target_parameters") or []
    named = [_TARGET_PARAMETER.fullmatch(str(one)) for one in given] if isinstance(given, list) else [None]
    stored = [name for name in _OF_EXPERTS if any(match and match[3] == name for match in named)]
    if not all(named) or (not stored and any(_ALL_EXPERTS.search(name) for name in tensors)):
        expected = ", ".join(f"mlp.experts.{name}" for name in _OF_EXPERTS)
        raise ValueError(f"expected target_parameters of {expected} in {directory}; got {shown(given)}")
    count, hidden, width = config.experts.count, config.hidden_size, config.experts.intermediate_size
    sides = {"gate_up_proj": (hidden, 2 * width), "down_proj": (width, hidden)}
    found: dict[str, Pair] = {}
    for layer in _mixtures(config):
        for name in stored:
            parts, module = _OF_EXPERTS[name], _expert_module(layer, name, stored)
            (width_in, width_out), rank = sides[name], content["r"]
            joined = rank * (len(parts) if content.get("rank_pattern") else 1)
            a = _take_tensor(tensors, module, "lora_A", (count * joined, width_in), directory)
            b = _take_tensor(tensors, module, "lora_B", (width_out, joined * count), directory)
            a = a.reshape(count, joined, -1).transpose(0, 2, 1)
            b = b.reshape(-1, joined, count).transpose(2, 1, 0)
            if _is_interleaved(config, name):
                b = b.reshape(*b.shape[:2], -1, 2).swapaxes(2, 3).reshape(*b.shape[:2], -1)
            paths = [f"layers_{layer}/mlp/experts/{part}" for part in parts]
            apart = _split(a, b, [width_out // len(parts)] * len(parts), rank, module)
            found |= zip(paths, apart, strict=True)
    return found
