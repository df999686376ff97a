"""Public names of `smd_kernels`."""

import pytest

import smd_kernels
from smd_kernels.gpu import MosaicGpuKernel
from smd_kernels.tpu import MosaicTpuKernel


def test_entry_points_are_exported_and_documented():
    attention = ("interval_attention", "segment_attention", "attend_and_observe")
    for name in (*attention, "decode_attention", "decode_codes_attention"):
        assert getattr(smd_kernels, name).__doc__, name
    assert (smd_kernels.MosaicGpuKernel, smd_kernels.MosaicTpuKernel) == (MosaicGpuKernel, MosaicTpuKernel)


def test_unknown_name_raises():
    with pytest.raises(AttributeError, match="module 'smd_kernels' has no attribute 'MosaicRocmKernel'"):
        smd_kernels.MosaicRocmKernel  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
