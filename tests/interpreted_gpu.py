"""Features that JAX 0.10's interpreter of GPU kernels lacks, for tests of decode kernels."""

from typing import Any

import jax
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from smd_kernels import decode_gpu


class Transposed:
    """The transpose of a reference, which the interpreter does not support."""

    def __init__(self, ref: Any) -> None:
        self.ref = ref

    def __getitem__(self, index: Any) -> jax.Array:
        assert index is Ellipsis
        return self.ref[...].T

    def __setitem__(self, index: Any, value: jax.Array) -> None:
        assert index is Ellipsis
        self.ref[...] = value.T


def load(ref: Any, *index: Any, optimized: bool) -> jax.Array:
    """Like `plgpu.load`, which the interpreter lacks."""
    return ref[...]


def patch_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignores layouts, and supports `wgmma` of operands that are not plain references."""
    multiply = plgpu.wgmma

    def wgmma(acc: Any, a: Any, b: Any) -> None:
        def copied(a_copy, b_copy):
            a_copy[...], b_copy[...] = a[...], b[...]
            plgpu.commit_smem()  # orders these reads before later copies of TMA, as wgmma's own reads are
            multiply(acc, a_copy, b_copy)

        pl.run_scoped(copied, *(plgpu.SMEM(x.shape, x.dtype) for x in (a[...], b[...])))

    monkeypatch.setattr(plgpu, "wgmma", wgmma)
    monkeypatch.setattr(decode_gpu, "_transposed", Transposed)
    monkeypatch.setattr(plgpu, "layout_cast", lambda x, layout: x)
    monkeypatch.setattr(plgpu, "load", load)
