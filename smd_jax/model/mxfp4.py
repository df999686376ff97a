"""Weights in MXFP4, in which gpt-oss stores its experts: 4-bit floats in blocks of 32 with a common power of two.

    NAME_blocks    uint8 [experts, out, groups, 16]     two values a byte, the lower half first
    NAME_scales    uint8 [experts, out, groups]         exponent + 127
    NAME           [experts, 32 * groups, out]          value * 2 ** (scale - 127)

A value is a sign, two bits of exponent and one of mantissa (E2M1): 0, 0.5, 1, 1.5, 2, 3, 4, 6. Source: OCP Microscaling
Formats, v1.0, sections 5.3.3 and 5.4.1 (a scale of 255 is NaN); the layout is that of `convert_moe_packed_tensors` in
transformers' `integrations/mxfp4.py`. bfloat16 and wider hold every value exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import numpy as jnp
from jaxtyping import Float, UInt8

GROUP = 32  # values with a common scale
MXFP4 = "MXFP4"
_BYTES = GROUP // 2
_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
# Both values of every byte.
_PAIRS = np.array([[(-1) ** (half >> 3) * _VALUES[half & 7] for half in (byte & 15, byte >> 4)] for byte in range(256)])
_NAN = 255
_BIAS = 127
_ROWS = 2**13  # groups at once, which take 1 MiB in float32


def dequantised(
    blocks: UInt8[np.ndarray, "*rows groups 16"], scales: UInt8[np.ndarray, "*rows groups"]
) -> Float[np.ndarray, "*rows columns"]:
    """The values as bfloat16, 32 columns a group; NaN where a scale is 255, infinite beyond bfloat16's range."""
    out = np.empty((scales.size, GROUP), jnp.dtype("bfloat16"))
    flat, exponents = blocks.reshape(-1, _BYTES), scales.reshape(-1, 1).astype(np.int32) - _BIAS
    for begin in range(0, len(out), _ROWS):
        part = slice(begin, begin + _ROWS)
        values = _PAIRS.astype(np.float32)[flat[part]].reshape(-1, GROUP)
        with np.errstate(over="ignore"):  # the caller reports it with the tensor's name
            scaled = np.ldexp(values, exponents[part])
        out[part] = np.where(exponents[part] == _NAN - _BIAS, np.nan, scaled)
    return out.reshape(*scales.shape[:-1], -1)


@dataclass(frozen=True)
class Mxfp4Slice:
    """A stored weight, dequantised on access; indexed like the result of safetensors' `get_slice`.

    Attributes:
      blocks, scales: results of `safe_open(...).get_slice(name)`.
    """

    blocks: Any
    scales: Any

    def __getitem__(self, part: tuple[slice, ...]) -> Float[np.ndarray, "experts width out"]:
        experts, columns, out = part
        first, last = columns.start // GROUP, -(-columns.stop // GROUP)
        groups = slice(first, last)
        values = dequantised(self.blocks[experts, out, groups], self.scales[experts, out, groups])
        here = slice(columns.start - first * GROUP, columns.stop - first * GROUP)
        return values[..., here].swapaxes(1, 2)


def mxfp4_shape(blocks: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...] | None:
    """Shape of the weight that such tensors hold; None if they hold none."""
    if len(blocks) != 4 or blocks[:-1] != scales or blocks[-1] != _BYTES:
        return None
    experts, out, groups = scales
    return experts, GROUP * groups, out


def mxfp4_names(stored: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Weight -> the names of its two tensors, for every weight of experts that is stored so."""
    pairs = {}
    for name in stored:
        weight = name.removesuffix("_blocks")
        if weight != name and ".mlp.experts." in name and f"{weight}_scales" in stored:
            pairs[weight] = (name, f"{weight}_scales")
    return pairs
