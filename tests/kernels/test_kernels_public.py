"""`smd_kernels` exports its entry points and imports Pallas only when a hardware kernel is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

import smd_kernels
from smd_kernels.gpu import MosaicGpuKernel
from smd_kernels.tpu import MosaicTpuKernel

ENTRY_POINTS = (
    "BlockKernel",
    "BlockSizes",
    "Blocks",
    "Codes",
    "Copies",
    "MosaicGpuKernel",
    "MosaicTpuKernel",
    "Segments",
    "XlaKernel",
    "attend_and_observe",
    "decode_attention",
    "decode_codes_attention",
    "interval_attention",
    "reference",
    "segment_attention",
    "why_not_blocks",
    "why_not_decode",
    "why_not_decode_codes",
)


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_entry_points_are_exported_and_documented(name: str):
    assert getattr(smd_kernels, name).__doc__


def test_hardware_kernels_are_those_of_their_modules():
    assert smd_kernels.MosaicGpuKernel is MosaicGpuKernel
    assert smd_kernels.MosaicTpuKernel is MosaicTpuKernel


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'smd_kernels' has no attribute 'MosaicRocmKernel'"):
        smd_kernels.MosaicRocmKernel  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_importing_the_package_does_not_import_pallas():
    program = "import sys, smd_kernels; assert not [name for name in sys.modules if 'pallas' in name]"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
