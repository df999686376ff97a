"""Memory in use, as far as the system and the devices report it."""

from __future__ import annotations

import os
from pathlib import Path

import jax

STATM = Path("/proc/self/statm")  # Linux: sizes of this process in pages


def memory_in_use(statm: Path = STATM) -> dict[str, float]:
    """The `MEMORY_METRICS` that are known on this machine, in bytes. Reads counters, and waits for no device."""
    found: dict[str, float] = {}
    if statm.is_file():
        # The second number is the resident memory.
        found["memory/host_bytes"] = float(int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    # A CPU has no statistics: its arrays are memory of the process.
    reports = [report for device in jax.local_devices() if (report := device.memory_stats())]
    for name, field in (("memory/device_bytes", "bytes_in_use"), ("memory/device_peak_bytes", "peak_bytes_in_use")):
        values = [float(report[field]) for report in reports if field in report]
        if values:
            found[name] = max(values)
    return found
