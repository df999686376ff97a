"""Progress and records of all rows, in host memory.

Progress is a few numbers and needed at once, because the engine must know which rows are finished before it seats
others. Records (tokens, log-probabilities, evictions) are large and needed only at the end. They stay on the device
until the next program was started, and are then fetched:

    device    segment 1 │ segment 2              │ segment 3
    host                │ fetches records of 1   │ fetches records of 2
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from smd_jax.message.trajectory import Trajectory, check_finite
from smd_jax.sampler.prompt_layer import PromptRecord
from smd_jax.sampler.records import no_records, to_trajectory
from smd_jax.sampler.segment import SegmentRecord
from smd_jax.sampler.static import Sampler
from smd_jax.text.prompts import PromptBatch

_to_trajectory = jax.jit(to_trajectory, static_argnames=("sampler", "shared_by"))


class HostRecords:
    """Progress and records of a run's rows.

    Attributes:
      drawn: int32 `[rows]` tokens so far.
      ended: `[rows]` finished rows.
      terminated: `[rows]` rows that ended before the length limit.
    """

    def __init__(
        self,
        sampler: Sampler,
        prompts: PromptBatch,
        group_size: int,
        like_prompts: tuple[PromptRecord, ...],
        like_segment: SegmentRecord,
    ) -> None:
        """Allocates all records.

        Args:
          prompts: all prompts of the run, NumPy arrays.
          like_prompts, like_segment: outputs of `prefill` and `run_segment`, arrays or their shapes, for any rows.
        """
        count = len(prompts.valid)
        rows = count * group_size
        self.drawn = np.zeros(rows, np.int32)
        self.ended = np.zeros(rows, bool)
        self.terminated = np.zeros(rows, bool)
        self._sampler = sampler
        self._group_size = group_size
        self._prompts = prompts
        self._prompt_records = jax.tree.map(lambda x: np.zeros((count, *x.shape[1:]), x.dtype), like_prompts)
        with jax.default_device(host_device()):
            # A segment has the decode rows, the records have all rows of the run.
            like = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), like_segment)
            # Copies, because NumPy's view of a JAX array is read-only.
            self._segment_records = jax.tree.map(np.array, no_records(sampler, like))
        # Arrays on the host, places in them, entries of the record (others are padding or free rows), and the record.
        self._on_device: list[tuple[Any, Any, Any, Any]] = []

    def leave_prompts(self, prompts: list[int], records: tuple[PromptRecord, ...]) -> None:
        """Queues the records of a prefill for a later `fetch`."""
        self._on_device.append((self._prompt_records, prompts, slice(len(prompts)), records))

    def leave_segment(self, decode_rows: np.ndarray, rows: np.ndarray, record: SegmentRecord) -> None:
        """Queues the record of a segment for a later `fetch`, and starts its copy to the host. Called while
        `drawn` has the tokens before the segment.

        Rows are seated between segments, so their segments begin at multiples of the buffer.
        """
        for leaf in jax.tree.leaves(record):
            leaf.copy_to_host_async()
        segment = self.drawn[rows] // self._sampler.config.buffer
        self._on_device.append((self._segment_records, (segment, rows), decode_rows, record))

    def fetch(self) -> None:
        """Copies queued records to the host, in order. It waits for their programs, so start the next program first."""
        for arrays, places, entries, record in self._on_device:
            new = jax.device_get(record)
            if isinstance(new, SegmentRecord):  # the first place where the host has the values
                check_finite(new.logprobs[entries])
            for array, leaf in zip(jax.tree.leaves(arrays), jax.tree.leaves(new), strict=True):
                array[places] = leaf[entries]
        self._on_device.clear()

    def trajectory(self) -> Trajectory:
        """Assembles the trajectory on the host, in the prompts' order, after all records were fetched."""
        with jax.default_device(host_device()):
            records = (self._prompts, self._prompt_records, self._segment_records, self.terminated)
            return _to_trajectory(self._sampler, *jax.tree.map(jnp.asarray, records), shared_by=self._group_size)


def host_device() -> Any:
    """The CPU device; the default device if `jax_platforms` excludes the CPU."""
    platforms = jax.config.values["jax_platforms"]  # None: all platforms
    return jax.local_devices(backend="cpu" if not platforms or "cpu" in platforms else None)[0]
