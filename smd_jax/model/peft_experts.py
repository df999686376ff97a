"""Adapters of experts in PEFT's format: a pair of matrices per stored parameter, which has all experts of a layer.

    adapter_config.json                      target_parameters: mlp.experts.gate_up_proj, mlp.experts.down_proj
    …mlp.experts.base_layer.lora_A.weight    [experts * rank, in]    of gate_up_proj: row e * rank + r
    …mlp.experts.base_layer.lora_B.weight    [out, rank * experts]   column r * experts + e
    …mlp.experts.lora_A.weight, …            of down_proj

PEFT wraps gate_up_proj, and down_proj around that; so the name has `base_layer` only if both have adapters. Source:
`ParamWrapper` in `peft/tuners/lora/layer.py` of PEFT 0.21. gate_up_proj is one matrix there, with adapters as in
`smd_jax.model.peft_fused`. Here gate and up have an adapter each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from smd_jax.config import ModelConfig
from smd_jax.model.families import FAMILIES
from smd_jax.model.hf_config import model_type_of
from smd_jax.model.lora import EXPERTS, LoraConfig, Target
from smd_jax.model.peft_files import MATRICES, take_tensor, tensor_name
from smd_jax.model.peft_fused import fused_targets, join, split
from smd_jax.model.short_text import shown, some

Pair = dict[str, np.ndarray]  # lora_A [experts, in, rank] and lora_B [experts, rank, out]

MLP_TARGETS: tuple[Target, ...] = ("gate_proj", "up_proj", "down_proj")
_STORED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_ALL_EXPERTS = re.compile(r"\.mlp\.experts\.(base_layer\.)?lora_[AB]\.weight$")


def is_of_experts(path: str) -> bool:
    """Whether adapters at this path of the parameters are those of experts."""
    return path.split("/")[-2] == EXPERTS


def stored_targets(lora: LoraConfig) -> list[str]:
    """The stored parameters of experts that have adapters: PEFT's `target_parameters`.

    Raises:
      ValueError: only one of gate and up has adapters.
    """
    fused_targets(lora, ("gate_up_proj",))
    return [name for name, parts in _STORED.items() if parts[0] in lora.targets]


def check_experts(config: ModelConfig, lora: LoraConfig) -> None:
    """Raises ValueError if PEFT cannot store adapters of these targets on a model with experts."""
    parts = [part for name in stored_targets(lora) for part in _STORED[name]]
    if parts and _mixtures(config) != list(range(config.num_layers)):
        raise ValueError(
            f"expected experts in every layer for adapters of {', '.join(parts)}, because PEFT takes those of an MLP "
            f"for adapters of experts; got experts in layers {_mixtures(config)} of {config.num_layers}"
        )


def expert_tensors(pairs: Mapping[str, Mapping[str, Any]], config: ModelConfig, lora: LoraConfig) -> dict[str, Any]:
    """PEFT's tensors of the adapters of experts.

    Args:
      pairs: path (`layers_0/mlp/experts/up_proj`) -> `lora_A` and `lora_B`.

    Raises:
      ValueError: `pairs` are not those of every layer; as `check_experts`.
    """
    check_experts(config, lora)
    stored = stored_targets(lora)
    parts = [part for name in stored for part in _STORED[name]]
    expected = {f"layers_{layer}/mlp/experts/{part}" for layer in _mixtures(config) for part in parts}
    if wrong := sorted(expected ^ pairs.keys()):
        raise ValueError(f"expected adapters of the targets in every layer of the config; got others at {some(wrong)}")
    tensors = {}
    for layer in _mixtures(config):
        for name in stored:
            pair = _joined([pairs[f"layers_{layer}/mlp/experts/{part}"] for part in _STORED[name]], config)
            a, b = pair["lora_A"], pair["lora_B"]
            module = _module(layer, name, stored)
            tensors[tensor_name(module, "lora_A")] = a.transpose(0, 2, 1).reshape(-1, a.shape[1])
            tensors[tensor_name(module, "lora_B")] = b.transpose(2, 1, 0).reshape(b.shape[2], -1)
    return tensors


def take_experts(
    tensors: dict[str, np.ndarray], content: Mapping[str, Any], config: ModelConfig, directory: Path
) -> dict[str, Pair]:
    """Removes the adapters of experts from a file's tensors: path (`layers_0/mlp/experts/up_proj`) -> adapters.

    Args:
      content: of adapter_config.json.

    Raises:
      ValueError: `target_parameters` names others; tensors are missing or have another shape; a gate_up_proj of the
        joined rank whose parts are not apart.
    """
    if config.experts is None:
        return {}
    given = content.get("target_parameters") or []
    stored = [name for name in _STORED if any(_is_named(name, str(one)) for one in given)]
    unknown = [one for one in given if not any(_is_named(name, str(one)) for name in _STORED)]
    if unknown or (not stored and any(_ALL_EXPERTS.search(name) for name in tensors)):
        expected = ", ".join(f"mlp.experts.{name}" for name in _STORED)
        raise ValueError(f"expected target_parameters of {expected} in {directory}; got {shown(given)}")
    hidden, width = config.hidden_size, config.experts.intermediate_size
    sides = {"gate_up_proj": (hidden, 2 * width), "down_proj": (width, hidden)}
    found: dict[str, Pair] = {}
    for layer in _mixtures(config):
        for name in stored:
            rank = content["r"] * (2 if name == "gate_up_proj" and content.get("rank_pattern") else 1)
            pair = _take_pair(tensors, _module(layer, name, stored), rank, sides[name], config.experts.count, directory)
            parts = _parts(pair, name, content["r"], config)
            found |= {f"layers_{layer}/mlp/experts/{part}": parts[part] for part in _STORED[name]}
    return found


def _is_named(name: str, target: str) -> bool:
    """Whether PEFT finds the parameter by this text, `model.layers.0.mlp.experts.NAME` or an end of it."""
    return target.split(".")[-1] == name and target.split(".")[-2:-1] in ([], [EXPERTS])


def _mixtures(config: ModelConfig) -> list[int]:
    return [layer for layer in range(config.num_layers) if config.is_mixture(layer)]


def _module(layer: int, name: str, stored: list[str]) -> str:
    inner = ".base_layer" if name == "gate_up_proj" and len(stored) > 1 else ""
    return f"model.layers.{layer}.mlp.experts{inner}"


def _interleaved(config: ModelConfig) -> bool:
    return FAMILIES[model_type_of(config)].layout == "gpt_oss"


def _joined(pairs: list[Mapping[str, Any]], config: ModelConfig) -> Pair:
    """The adapters of a stored parameter, from those of its parts."""
    arrays = [{matrix: np.asarray(pair[matrix]) for matrix in MATRICES} for pair in pairs]
    if len(arrays) == 1:
        return arrays[0]
    experts = [join([{m: pair[m][e] for m in MATRICES} for pair in arrays]) for e in range(len(arrays[0]["lora_A"]))]
    joined = {matrix: np.stack([expert[matrix] for expert in experts]) for matrix in MATRICES}
    if _interleaved(config):
        b = joined["lora_B"]
        joined["lora_B"] = b.reshape(*b.shape[:2], 2, -1).swapaxes(2, 3).reshape(b.shape)
    return joined


def _parts(pair: Pair, name: str, rank: int, config: ModelConfig) -> dict[str, Pair]:
    """The inverse of `_joined`. An adapter of the plain rank has one A: then gate and up start with the same."""
    if name == "down_proj":
        return {name: pair}
    a, b = pair["lora_A"], pair["lora_B"]
    if _interleaved(config):
        b = b.reshape(*b.shape[:2], -1, 2).swapaxes(2, 3).reshape(b.shape)
    widths = [np.size(b, 2) // 2] * 2
    experts = [split(a[e], b[e], widths, rank, f"{name} of expert {e}") for e in range(len(a))]
    return {
        part: {matrix: np.stack([expert[place][matrix] for expert in experts]) for matrix in MATRICES}
        for place, part in enumerate(_STORED[name])
    }


def _take_pair(
    tensors: dict[str, np.ndarray], module: str, rank: int, sides: tuple[int, int], experts: int, directory: Path
) -> Pair:
    """The adapters of a stored parameter of these sides (in, out)."""
    a = take_tensor(tensors, module, "lora_A", (experts * rank, sides[0]), directory)
    b = take_tensor(tensors, module, "lora_B", (sides[1], rank * experts), directory)
    a, b = a.reshape(experts, rank, -1), b.reshape(-1, rank, experts)
    return {"lora_A": a.transpose(0, 2, 1), "lora_B": b.transpose(2, 1, 0)}
