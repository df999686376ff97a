"""What came back from the device: how far every row is, and its records, in the memory of the host.

Two kinds of things come at different times. How far rows are is a few numbers, needed at once: the engine must know
which rows have ended before it can seat others. Records (tokens, log-probabilities, evictions) are large and needed at
the end only. They are left on the device when a program has made them, and fetched after the next one was started:

    device    segment 1 │ segment 2              │ segment 3
    host                │ fetches records of 1   │ fetches records of 2
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from smd_jax.message.trajectory import Trajectory, check_finite
from smd_jax.sampler.prefill import PromptRecord
from smd_jax.sampler.records import no_records, to_trajectory
from smd_jax.sampler.segment import SegmentRecord
from smd_jax.sampler.static import Sampler
from smd_jax.text.prompts import PromptBatch, repeat_prompts


class _PromptsOnDevice(NamedTuple):
    """Records of prompts that have been read: entry i belongs to prompt `prompts[i]`; what follows is filling."""

    prompts: list[int]
    records: tuple[PromptRecord, ...]


class _SegmentOnDevice(NamedTuple):
    """The record of a segment: its entry `decode_rows[i]` belongs to row `rows[i]` of the trajectory."""

    decode_rows: np.ndarray
    rows: np.ndarray
    record: SegmentRecord


class HostRecords:
    """Everything that a run knows of its rows.

    Attributes:
      drawn: int32 `[rows]` tokens so far. ended, terminated: `[rows]` rows that draw no more, and those that ended by
        themselves.
    """

    def __init__(
        self,
        sampler: Sampler,
        prompts: PromptBatch,
        group_size: int,
        like_prompts: tuple[PromptRecord, ...],
        like_segment: SegmentRecord,
    ) -> None:
        """Room for all records.

        Args:
          prompts: all of the run, numpy arrays.
          like_prompts, like_segment: what `prefill` and `run_segment` give, arrays or their shapes, of any rows.
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
        self._segment_records = _room(sampler, like_segment, rows)
        self._on_device: list[_PromptsOnDevice | _SegmentOnDevice] = []

    def note(self, rows: np.ndarray, drawn: np.ndarray, ended: np.ndarray, terminated: np.ndarray) -> None:
        """How far these rows are after a segment."""
        self.drawn[rows] = drawn
        self.ended[rows] = ended
        self.terminated[rows] = terminated

    def leave_prompts(self, prompts: list[int], records: tuple[PromptRecord, ...]) -> None:
        """Records that a prefill will have made, to be fetched later."""
        self._on_device.append(_PromptsOnDevice(prompts, records))

    def leave_segment(self, decode_rows: np.ndarray, rows: np.ndarray, record: SegmentRecord) -> None:
        """The record that a segment will have made, to be fetched later; its way to the host begins now."""
        for leaf in jax.tree.leaves(record):
            leaf.copy_to_host_async()
        self._on_device.append(_SegmentOnDevice(decode_rows, rows, record))

    def fetch(self) -> None:
        """Takes to the host what was left on the device, in the order in which it was made. It waits for the programs
        that make it, so the next one should have been started before."""
        for left in self._on_device:
            if isinstance(left, _PromptsOnDevice):
                self._keep_prompts(left)
            else:
                self._keep_segment(left)
        self._on_device.clear()

    def _keep_prompts(self, left: _PromptsOnDevice) -> None:
        new = jax.device_get(left.records)
        for room, leaf in zip(jax.tree.leaves(self._prompt_records), jax.tree.leaves(new), strict=True):
            room[left.prompts] = leaf[: len(left.prompts)]

    def _keep_segment(self, left: _SegmentOnDevice) -> None:
        """A segment that began `first` tokens into a row's response is the row's number `first / buffer`, whenever it
        ran: a row is seated between segments, so that its own begin at multiples of the buffer."""
        new = jax.device_get(left.record)
        # Here, because this is the first place where the host sees the values.
        check_finite(new.logprobs[left.decode_rows])
        segment = new.first[left.decode_rows] // self._sampler.config.buffer
        for room, leaf in zip(jax.tree.leaves(self._segment_records), jax.tree.leaves(new), strict=True):
            room[segment, left.rows] = leaf[left.decode_rows]

    def trajectory(self) -> Trajectory:
        """Put together on the host, with the rows in the prompts' order. All must have been fetched."""
        with jax.default_device(_host()):
            records = (self._prompts, self._prompt_records, self._segment_records, self.terminated)
            return _finish(self._sampler, self._group_size, *jax.tree.map(jnp.asarray, records))


def _room(sampler: Sampler, like: SegmentRecord, rows: int) -> SegmentRecord:
    """Numpy arrays for the records of all rows."""
    with jax.default_device(_host()):
        # The segment has the decode rows, and the records have all rows of the run.
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), like)
        # Copies, because NumPy's view of a JAX array cannot be written to.
        return jax.tree.map(np.array, no_records(sampler, one))


def _host() -> Any:
    """The CPU as a device, whose memory is the host's; the default one, if JAX was told to leave the CPU alone."""
    platforms = jax.config.values["jax_platforms"]  # None: all that there are
    return jax.local_devices(backend="cpu" if not platforms or "cpu" in platforms else None)[0]


@partial(jax.jit, static_argnames=("sampler", "group_size"))
def _finish(
    sampler: Sampler,
    group_size: int,
    prompts: PromptBatch,
    prompt_records: tuple[PromptRecord, ...],
    records: SegmentRecord,
    terminated: Bool[Array, " rows"],
) -> Trajectory:
    of_rows = jax.tree.map(lambda x: jnp.repeat(x, group_size, axis=0), prompt_records)
    return to_trajectory(sampler, repeat_prompts(prompts, group_size), of_rows, records, terminated, group_size)
