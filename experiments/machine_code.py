"""What a kernel's machine code says of its time: instructions of its loops, by what an SM of an H100 does in a cycle.

Read is what `nvdisasm` prints of a cubin for sm_90a. Sources of the numbers: see `predict_kernels.py`.

Standard library only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

TENSOR_FLOP = 4096  # a cycle and SM
SPECIAL_CYCLES = 8
INTEGER_CYCLES = 2
SHARED_BYTES = 128  # a cycle and SM
# Integer work has half the lanes; what the uniform datapath does (names with U first) is issued all the same.
INTEGER = ("IMAD", "IADD3", "ISETP", "LOP3", "LEA", "SHF", "VIADD", "PRMT", "VIMNMX", "SEL")
WIDTHS = {"64": 8, "128": 16}  # bytes a lane of a wide load or store; 4 otherwise


class Loop(NamedTuple):
    """One step of one warpgroup, in cycles of an SM's partition."""

    instructions: int
    wgmma: int
    flops: float
    tensor: float
    issue: float
    special: float
    integer: float
    shared: float


def instructions(sass: str) -> tuple[list[str], dict[str, int]]:
    """The instructions, and the number of the one that follows each label."""
    found: list[str] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := re.match(r"\.(L_x_\d+):", line):
            labels[label[1]] = len(found)
        elif text := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            found.append(re.sub(r"^@!?U?P\w+\s+", "", text[1]))
    return found, labels


def loops(sass: str) -> Iterator[Loop]:
    """Innermost loops that multiply matrices or take exponentials."""
    code, labels = instructions(sass)
    spans = []
    for end, text in enumerate(code):
        if (jump := re.match(r"BRA\S* .*\((?:\.)(L_x_\d+)\)", text)) and labels[jump[1]] <= end:
            body = code[labels[jump[1]] : end + 1]
            # Where a barrier is not ready at once, the code goes to the end of the kernel, waits, and comes back.
            waits = any(op.startswith(("NANOSLEEP", "EXIT")) for op in body)
            if not waits and any(op.startswith(("HGMMA", "MUFU.EX2")) for op in body):
                spans.append((labels[jump[1]], end + 1))
    for first, last in spans:
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in spans):
            yield count(code[first:last])


def count(body: Sequence[str]) -> Loop:
    ops = [text.split()[0] for text in body]
    kinds = Counter(op.split(".")[0] for op in ops)
    flops = 0.0
    shared = 0.0
    for text, op in zip(body, ops, strict=True):
        if shape := re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", op):
            m, n, k = map(int, shape.groups())
            flops += 2.0 * m * n * k
            # The left factor comes from registers, or as a second descriptor's from shared memory.
            left = 0 if re.match(r"HGMMA\S* R\d+, R\d+,", text) else m * k
            shared += 2 * (left + n * k) / SHARED_BYTES
        elif op.startswith(("LDS", "STS")):
            width = next((WIDTHS[part] for part in op.split(".") if part in WIDTHS), 4)
            # Of each of the four warps.
            shared += 4 * 32 * width / SHARED_BYTES
    integer = sum(kinds[name] for name in INTEGER)
    return Loop(
        instructions=len(body),
        wgmma=kinds["HGMMA"],
        flops=flops,
        tensor=flops / TENSOR_FLOP,
        issue=len(body),
        special=kinds["MUFU"] * SPECIAL_CYCLES,
        integer=integer * INTEGER_CYCLES,
        shared=shared,
    )


def cycles(steps: Sequence[tuple[Loop, float]]) -> tuple[float, float, str]:
    """Of these steps of all warpgroups of an SM: overlapped, in turn, and what bounds the first."""
    sums = {
        name: sum(getattr(loop, name) * times for loop, times in steps)
        for name in ("tensor", "issue", "special", "integer", "shared")
    }
    bound = max(sums, key=lambda name: sums[name])
    others = max(value for name, value in sums.items() if name != "tensor")
    return sums[bound], sums["tensor"] + others, bound
