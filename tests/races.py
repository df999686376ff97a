"""Strict parameters for JAX's kernel interpreters, and a context in which any race that they report fails.

An interpreter reports a race by a print and a flag, and keeps the flag of the last kernel only.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from jax._src.pallas.mosaic.interpret.race_detection_state import RaceDetectionState
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

    def create_and_record(kind: type[RaceDetectionState], *args: object, **kwargs: object) -> RaceDetectionState:
        states.append(object.__new__(kind))
        return states[-1]

    # The interpreters of JAX 0.12 raise by themselves; the one for GPUs has its own subclass.
    with mock.patch.object(RaceDetectionState, "__new__", create_and_record):
        yield
    assert not any(state.races_found for state in states), "a race: see RACE DETECTED in the captured output"
