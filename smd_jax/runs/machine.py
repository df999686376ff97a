"""The software and hardware of a run: a change of these changes rounding, and so the bits of the run."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from smd_jax.devices.processes import versions
from smd_jax.runs.jsonable import Json


def machine(mesh: Mesh) -> dict[str, Json]:
    """Versions and devices, as JSON values. See `docs/determinism.md` for what each of them may change."""
    return {
        **versions(),
        "device": mesh.devices.flat[0].device_kind,
        "mesh": {str(name): size for name, size in mesh.shape.items()},
        "processes": jax.process_count(),
    }
