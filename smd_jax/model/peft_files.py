"""Names and tensors of an adapter's safetensors file in PEFT's format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from smd_jax.model.stored_tensors import check_finite_weights

MATRICES = ("lora_A", "lora_B")
_PREFIX = "base_model.model."


def tensor_name(module: str, matrix: str) -> str:
    """`base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight` of a module's path in transformers."""
    return f"{_PREFIX}{module}.{matrix}.weight"


def read_tensors(file: Path) -> dict[str, np.ndarray]:
    """All tensors of a file.

    Raises:
      ValueError: it cannot be read.
    """
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is not a readable safetensors file: {error!s:.200}") from error


def take_tensor(
    tensors: dict[str, np.ndarray], module: str, matrix: str, shape: tuple[int, ...], directory: Path
) -> np.ndarray:
    """Removes the matrix of a module from `tensors`, as it is stored.

    Raises:
      ValueError: there is none; it has another shape, or is not finite.
    """
    name = tensor_name(module, matrix)
    if name not in tensors:
        raise ValueError(f"expected {name} in {directory}, because its target has adapters in every layer; got none")
    tensor = tensors.pop(name)
    if tensor.shape != shape:
        raise ValueError(f"expected {name} of shape {list(shape)} in {directory}; got {list(tensor.shape)}")
    check_finite_weights(f"{name} of {directory}", tensor)
    return tensor
