"""What a run stands on beside its configuration: another one of these changes rounding, and with it the run's bits."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from smd_jax.devices.processes import versions
from smd_jax.runs.jsonable import Json


def machine(mesh: Mesh) -> dict[str, Json]:
    """Versions and devices, as JSON values. `docs/determinism.md` says what each of them may change."""
    return {
        **versions(),
        "device": mesh.devices.flat[0].device_kind,
        "mesh": {str(name): size for name, size in mesh.shape.items()},
        "processes": jax.process_count(),
    }
