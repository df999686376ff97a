"""How much memory a run holds, as far as the system and the devices tell."""

from __future__ import annotations

import os
from pathlib import Path

import jax

STATM = Path("/proc/self/statm")  # Linux: sizes of this process in pages


def memory_in_use(statm: Path = STATM) -> dict[str, float]:
    """Those of `MEMORY_METRICS` that can be known here, in bytes. Reads counters, and waits for no device."""
    found: dict[str, float] = {}
    if statm.is_file():
        # The second number is the resident memory.
        found["memory/host_bytes"] = float(int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    # A CPU has no statistics of its own: what it holds is the process's memory.
    stats = [told for device in jax.local_devices() if (told := device.memory_stats())]
    for name, field in (("memory/device_bytes", "bytes_in_use"), ("memory/device_peak_bytes", "peak_bytes_in_use")):
        values = [float(told[field]) for told in stats if field in told]
        if values:
            found[name] = max(values)
    return found
