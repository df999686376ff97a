"""Numbers of bytes as text, such as `80GiB`."""

from __future__ import annotations

import re
from fractions import Fraction

UNITS = {"": 1, "B": 1}
UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)}
UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("kMGT", 1)}


def parse_bytes(text: str) -> int:
    """`80GiB` -> 85899345920. Units: KiB, MiB, GiB, TiB (powers of 1024), kB, MB, GB, TB (of 1000), B or none.

    Raises:
      ValueError: for anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    # Exact, unlike a float. Decimal would round by a global context.
    count = 0 if match is None else int(Fraction(match[1]) * UNITS.get(match[2], 0))
    if count < 1:
        units = ", ".join(unit for unit in UNITS if unit)
        raise ValueError(
            f"expected a positive number of bytes with one of the units {units}, as in 80GiB; got {text!r}"
        )
    return count


def show_bytes(count: int) -> str:
    """The bytes in the largest unit of 1024 that gives at least 1."""
    unit = next((unit for unit in ("TiB", "GiB", "MiB", "KiB") if count >= UNITS[unit]), "B")
    return f"{count} B" if unit == "B" else f"{count / UNITS[unit]:.2f} {unit}"
