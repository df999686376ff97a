"""File format of a trained eviction gate, separate from the model's checkpoint.

eviction_gate.safetensors    layers_0.kernel [kv_heads, features, 2], layers_1.kernel, …; float32
                             metadata: {"gate": "LinearGate", "sinks": "4"}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from smd_jax.config import ModelConfig
from smd_jax.disk import write_safetensors
from smd_jax.message.gate import EVICTION_GATE, Gate, LinearGate, add_gate
from smd_jax.model.protocol import ModelShape
from smd_jax.model.stored_tensors import check_finite_weights, check_tensors

GATE_FILE = "eviction_gate.safetensors"
_KIND = LinearGate.__name__


def save_gate(directory: str | Path, params: Mapping[str, Any], gate: Gate) -> None:
    """Writes the gate's parameters for `load_gate`. Does not change other files in `directory`.

    Raises:
      ValueError: if the parameters have no LinearGate.
    """
    if type(gate) is not LinearGate:  # a subclass may compute other logits from the same parameters
        raise ValueError(f"expected a {_KIND}, the gate that a file can hold; got {gate}")
    if EVICTION_GATE not in params:
        raise ValueError(f"expected parameters with {EVICTION_GATE!r}; got {sorted(params)}")
    tensors = {name: np.asarray(x, np.float32) for name, x in flatten_dict(params[EVICTION_GATE], sep=".").items()}
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / GATE_FILE, tensors, {"gate": _KIND, "sinks": str(gate.sinks)})


def load_gate(directory: str | Path, shape: ModelConfig | ModelShape) -> tuple[dict[str, Any], LinearGate]:
    """Loads a gate: its parameters, for `params | {EVICTION_GATE: …}`, and the gate, for `LearnedGate`.

    Args:
      shape: shape of the model that the gate was trained with.

    Raises:
      FileNotFoundError: no gate file in the directory.
      ValueError: an unreadable file, another kind of gate, or another model shape.
    """
    file = Path(directory) / GATE_FILE
    if not file.is_file():
        raise FileNotFoundError(f"expected {GATE_FILE} in {directory}; found none")
    try:
        found = load_file(file)
        with safe_open(file, framework="np") as tensors:
            said = tensors.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"expected {file} in the format of safetensors; got: {error}") from error
    if said.get("gate") != _KIND or not said.get("sinks", "").isdecimal():
        raise ValueError(f"expected the gate {_KIND} with a number of sinks in {file}; got {said}")
    gate = LinearGate(int(said["sinks"]))
    sizes = {name: getattr(shape, name) for name in ("num_layers", "num_kv_heads", "head_dim")}
    fresh: dict[str, Any] = flatten_dict(add_gate({}, gate, **sizes)[EVICTION_GATE], sep=".")
    wanted, got = ({name: x.shape for name, x in tensors.items()} for tensors in (fresh, found))
    where = f"{file}, a gate for {shape.num_layers} layers with {shape.num_kv_heads} KV heads of {shape.head_dim},"
    check_tensors(wanted, got, where)
    for name, values in found.items():
        check_finite_weights(f"{name} of {file}", values)
    return unflatten_dict({name: jnp.asarray(values) for name, values in found.items()}, sep="."), gate
