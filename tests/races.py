"""Strict parameters for JAX's kernel interpreters, and a context in which any race that they report fails.

An interpreter reports a race by a print and a flag, and keeps the flag of the last kernel only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from jax._src.pallas.mosaic.interpret import interpret_pallas_call as tpu_interpreter
from jax._src.pallas.mosaic.interpret.race_detection_state import RaceDetectionState
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as gpu_interpreter
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax.experimental.pallas import tpu as pltpu

# Two cores share the parallel axes of the grid. Memory that was not written is NaN.
STRICT_TPU = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise", num_cores_or_threads=2
)
STRICT_GPU = InterpretGPUParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")


@contextmanager
def forbidden() -> Iterator[None]:
    """Fails if a kernel that either interpreter runs in this context has a race."""
    states: list[RaceDetectionState] = []

    def create_and_record(num_cores: int) -> RaceDetectionState:
        states.append(RaceDetectionState(num_cores=num_cores))
        return states[-1]

    with (
        mock.patch.object(tpu_interpreter, "RaceDetectionState", create_and_record),
        mock.patch.object(gpu_interpreter, "RaceDetectionState", create_and_record),
    ):
        yield
    assert not any(state.races_found for state in states), "a race: see RACE DETECTED in the captured output"
