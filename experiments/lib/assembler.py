"""Registers and matrix instructions of a kernel, from the dumps of the compilers.

ptxas writes a report on the PTX that it assembled; libtpu dumps the last stage before machine code. Both write into
folders that must be set before the compilers are loaded.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Dumps:
    """Folders for the dumps of the compilers."""

    gpu: Path
    tpu: Path

    @classmethod
    def in_folder(cls, folder: Path) -> Dumps:
        """Creates the folders and sets them for the compilers; call it before the first compilation."""
        dumps = cls(folder / "gpu", folder / "tpu")
        dumps.gpu.mkdir()
        dumps.tpu.mkdir()
        os.environ |= {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_TO": str(dumps.gpu)}
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_mosaic_dump_to={dumps.tpu}"
        return dumps

    def empty(self) -> None:
        """Deletes the dumps of earlier compilations."""
        for folder in (self.gpu, self.tpu):
            for path in folder.iterdir():
                path.unlink()

    def facts(self, platform: str) -> dict[str, Any]:
        """Facts about the kernels compiled since `empty`."""
        return gpu_facts(self.gpu) if platform == "cuda" else {"mxu": matrix_instructions(self.tpu)}


def gpu_facts(folder: Path) -> dict[str, Any]:
    """Facts from the PTX and from the report of its assembler.

    Returns:
      registers: per thread when the kernel starts; warpgroups then exchange some.
      spill_bytes: stores and loads of spilled registers.
      serialized: whether every wgmma waits for the one before.
      wgmma: tensor core instructions.
    """
    code = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.ptx"))
    report = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.ptxas"))
    registers = re.findall(r"Used (\d+) registers", report)
    if not registers:
        raise ValueError(f"expected a report of the assembler in {folder}; got none")
    return {
        "registers": max(map(int, registers)),
        "spill_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", report))),
        "serialized": "instructions are serialized" in report,
        "wgmma": code.count("wgmma.mma_async"),
    }


def matrix_instructions(folder: Path) -> dict[str, int]:
    """Kernel -> `vmatmul` instructions, those of the TPU's matrix units, in the last stage of its dump."""
    counts = {}
    for original in folder.glob("*-original.txt"):
        stem = original.name.split("-")[0]
        name = re.findall(r"func\.func @(\w+)", original.read_text(encoding="utf-8"))[0]
        (last,) = folder.glob(f"{stem}-*-finalize-llo.txt")
        counts[name] = len(re.findall(r"llo\.vmatmul", last.read_text(encoding="utf-8")))
    return dict(sorted(counts.items()))
