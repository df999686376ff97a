"""What the interpreter of GPU kernels of JAX 0.10 lacks, for tests of decode kernels."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


class Transposed:
    """A reference seen as its transpose, which the interpreter does not know."""

    def __init__(self, ref: Any) -> None:
        self.ref = ref

    def __getitem__(self, index: Any) -> jax.Array:
        assert index is Ellipsis
        return self.ref[...].T

    def __setitem__(self, index: Any, value: jax.Array) -> None:
        assert index is Ellipsis
        self.ref[...] = value.T


def teach(monkeypatch: pytest.MonkeyPatch, kernel: ModuleType) -> None:
    """Layouts, which mean nothing on a CPU, and products of operands that are no plain references.

    Args:
      kernel: the module whose `_transposed` is to be understood.
    """
    multiply = plgpu.wgmma

    def wgmma(acc: Any, a: Any, b: Any) -> None:
        def copied(a_copy, b_copy):
            a_copy[...], b_copy[...] = a[...], b[...]
            multiply(acc, a_copy, b_copy)

        pl.run_scoped(copied, *(plgpu.SMEM(x.shape, x.dtype) for x in (a[...], b[...])))

    monkeypatch.setattr(plgpu, "wgmma", wgmma)
    monkeypatch.setattr(kernel, "_transposed", Transposed)
    monkeypatch.setattr(plgpu, "layout_cast", lambda x, layout: x)
