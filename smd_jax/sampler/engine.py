"""The engine: many prompts through a cache of few rows. Rows that end make room for prompts that wait.

              ┌─ seat: prefilled prompts take the free rows ◄── prefill: the next prompts, each read once for its group
    rows ─► segment of `buffer` steps ─► records to the host ─► rows that ended are free again ─┐
              ▲                                                                                 │
              └─────────────────────────────────────────────────────────────────────────────────┘

A loop on the host around three programs: prefill (compiled for a few widths), seat and segment (compiled once). Caches
are donated: the state is updated where it lies. What a row says and forgets does not depend on its place or on its
neighbours. Records go to the host while the next segment runs, and the trajectory is put together there: the device
never holds more than the rows that are decoded and, at the end, the trajectory, with the rows in the prompts' order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int, Key

from smd_jax.config import check_whole
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.sampler.config import RolloutConfig, check_limits
from smd_jax.sampler.keys import prompt_keys, row_keys
from smd_jax.sampler.params import sampler_params
from smd_jax.sampler.prefill import Prefilled, PromptRecord, prefill
from smd_jax.sampler.records import no_records, to_trajectory
from smd_jax.sampler.seats import SamplerState, Seats, empty, seat
from smd_jax.sampler.segment import SegmentRecord, run_segment
from smd_jax.sampler.static import Sampler
from smd_jax.sharding import batch_sharding, check_rows, constrain_rows
from smd_jax.text.prompts import PromptBatch, check_prompts, repeat_prompts
from smd_jax.text.stop_strings import StopTable, check_stop_table
from smd_jax.trajectory import Trajectory, check_finite

NARROWEST = 16  # columns of the smallest bucket
PACE = 8  # segments from which the time left is estimated


class Progress(NamedTuple):
    """How far a run is.

    Attributes:
      tokens: drawn so far. seconds: since the run began.
      live: rows that were not done at the start of the last segment. slots: rows of the cache.
      finished: responses that have ended. rows: responses of the run.
      eta_seconds: until the end, at the pace of the newest segments, if rows become as long as those that have ended;
        rows that are longer already count up to their limit. None after the first segment, which had to be compiled.
    """

    tokens: int
    seconds: float
    live: int
    slots: int
    finished: int
    rows: int
    eta_seconds: float | None


class Stats(NamedTuple):
    """What a run took.

    Attributes:
      tokens: drawn. steps: of the decode loop. segments: of up to `buffer` steps. prefills: batches of prompts read.
      seconds: of the whole run, compilation included.
      utilisation: live rows / slots, the mean over all steps.
    """

    tokens: int
    steps: int
    segments: int
    prefills: int
    seconds: float
    utilisation: float


class Rollout(NamedTuple):
    """A trajectory in the order of the prompts, and what it took."""

    trajectory: Trajectory
    stats: Stats


@dataclass(frozen=True)
class Engine:
    """What does not change from run to run.

    Attributes:
      slots: rows that are decoded at the same time. With `config.budget` and `config.buffer` they make the cache.
      prefill_rows: prompts that are read at the same time.
      mesh: where rows lie, of devices of this process; None takes the default device.
    """

    model: LanguageModel
    policy: EvictionPolicy
    config: RolloutConfig
    slots: int
    prefill_rows: int = 8
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        for name in ("slots", "prefill_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1; got {getattr(self, name)}")
        if self.mesh is None:
            return
        if len(elsewhere := {device.process_index for device in self.mesh.devices.flat} - {jax.process_index()}):
            raise ValueError(
                "expected a mesh of devices of this process, because the host sees every row: give each process an "
                f"engine and prompts of its own; got devices of processes {sorted(elsewhere)}"
            )
        check_rows(self.slots, self.mesh, "a cache of slots")
        check_rows(self.prefill_rows, self.mesh, "a prefill of prompts")

    def run(
        self,
        params: Params,
        prompts: PromptBatch,
        key: Key[Array, ""] | Key[Array, " rows"],
        *,
        group_size: int = 1,
        stop: StopTable | None = None,
        limits: Int[np.ndarray, " rows"] | None = None,
        report: Callable[[Progress], None] | None = None,
    ) -> Rollout:
        """Samples `group_size` responses per prompt; arguments as in `smd_jax.rollout`, which gives the same tokens
        for the same keys, but for what rounding decides.

        Args:
          report: called after every segment.

        Raises:
          ValueError: for prompts that are empty or not left-padded, limits outside 1 … max_new_tokens, and what
            `rollout` raises.
        """
        check_whole("group_size", group_size, 1)
        check_prompts(prompts, self.model.shape.vocab_size)
        if stop is not None:
            check_stop_table(stop, self.model.shape.vocab_size)
        with nullcontext() if self.mesh is None else jax.set_mesh(self.mesh):
            run = _Run(self, params, prompts, key, group_size, stop, limits)
            for progress in run.segments():
                if report is not None:
                    report(progress)
        return Rollout(self._place(run.trajectory()), run.stats())

    def _place(self, trajectory: Trajectory) -> Trajectory:
        """From the host to where the learner wants it: rows over the mesh, if they divide."""
        rows = trajectory.terminated.shape[0]
        if self.mesh is None:
            return jax.device_put(trajectory, jnp.zeros(()).sharding)
        whole = NamedSharding(self.mesh, PartitionSpec())
        return jax.device_put(trajectory, whole if rows % self.ways else batch_sharding(self.mesh))

    @property
    def ways(self) -> int:
        """Devices that have rows of their own."""
        return 1 if self.mesh is None else self.mesh.shape["data"] * self.mesh.shape["fsdp"]


def buckets(width: int) -> list[int]:
    """Widths that prompts are read in, ascending: the whole, its half, its quarter, …"""
    widths = [width]
    while widths[0] > NARROWEST:
        widths.insert(0, -(-widths[0] // 2))
    return widths


class _Run:
    """One run: which row has which place, and what is known of every row."""

    def __init__(
        self,
        engine: Engine,
        params: Params,
        prompts: PromptBatch,
        key: Key[Array, ""] | Key[Array, " rows"],
        group_size: int,
        stop: StopTable | None,
        limits: Int[np.ndarray, " rows"] | None,
    ) -> None:
        config, (count, width) = engine.config, prompts.tokens.shape
        self.began = time.perf_counter()
        self.engine, self.stop, self.group_size, self.rows = engine, stop, group_size, count * group_size
        self.sampler = Sampler(engine.model, engine.policy, config, width)
        self.params = _cast(engine.model, params)
        self.prompts = jax.tree.map(np.asarray, prompts)
        self.keys = row_keys(key, self.rows)
        most = np.full(self.rows, config.max_new_tokens, np.int32)
        self.limits = most if limits is None else check_limits(limits, self.rows, config)
        self.prefill_rows = min(engine.prefill_rows, -(-count // engine.ways) * engine.ways)
        self.widths, self.waiting = _queues(self.prompts.valid.sum(axis=1), width, config.prefill_chunk)
        self.ready: deque[tuple[int, int]] = deque()  # (place among the prefilled prompts, row), not yet seated
        self.prefilled: Prefilled | None = None
        self.state: SamplerState | None = None
        self.seated = np.full(engine.slots, -1)  # the row in each slot, -1: free
        self.read: tuple[PromptRecord, ...] | None = None
        self.records: SegmentRecord | None = None
        self.fetch: list[Callable[[], None]] = []  # what is to come to the host while the next segment runs
        self.terminated, self.ended = np.zeros(self.rows, bool), np.zeros(self.rows, bool)
        self.drawn = np.zeros(self.rows, np.int32)
        self.steps = self.segment_count = self.prefill_count = 0
        self.marks: deque[tuple[float, int]] = deque(maxlen=PACE)  # seconds and steps after the newest segments

    def segments(self) -> Iterator[Progress]:
        """Runs until all rows are done."""
        while not self.ended.all():
            self.fill()
            live = int((self.seated >= 0).sum())
            state, record = _segment(self.sampler, self.params, self.state, self.stop)
            self.state = state
            self.bring()
            self.harvest(record)
            yield self.progress(live)
        self.bring()

    def bring(self) -> None:
        """Takes to the host what has been left on the device."""
        for fetch in self.fetch:
            fetch()
        self.fetch.clear()

    # Prompts in.

    def fill(self) -> None:
        """Seats prompts in the free slots, as long as there are both."""
        while (free := np.flatnonzero(self.seated < 0)).size and (self.ready or any(self.waiting)):
            if not self.ready:
                self.prefill()
            taken = [self.ready.popleft() for _ in range(min(len(free), len(self.ready)))]
            self.seat(free, taken)

    def prefill(self) -> None:
        """Reads the prompt that waits longest, and the next ones of about its length."""
        queue, width = min(
            ((queue, width) for queue, width in zip(self.waiting, self.widths, strict=True) if queue),
            key=lambda pair: pair[0][0],
        )
        chosen = [queue.popleft() for _ in range(min(len(queue), self.prefill_rows))]
        padded = np.resize(chosen, self.prefill_rows)  # repeats some, so that all batches are of one size
        part = PromptBatch(self.prompts.tokens[padded, -width:], self.prompts.valid[padded, -width:])
        self.prefilled = prefilled = _prefill(self.sampler, self.params, part, prompt_keys(part))
        self.prefill_count += 1
        self.fetch.append(partial(self.keep_read, chosen, prefilled.records))
        self.ready.extend(
            (place, prompt * self.group_size + sample)
            for place, prompt in enumerate(chosen)
            for sample in range(self.group_size)
        )

    def seat(self, free: np.ndarray, taken: list[tuple[int, int]]) -> None:
        places, rows = (np.array(x, np.int32) for x in zip(*taken, strict=True))
        slots = free[: len(rows)]
        source, limit = np.full(self.engine.slots, -1, np.int32), np.zeros(self.engine.slots, np.int32)
        source[slots], limit[slots] = places, self.limits[rows]
        self.seated[slots] = rows
        assert self.prefilled is not None
        if self.state is None:
            self.state = _empty(self.prefilled, self.engine.slots)
        seats = Seats(jnp.asarray(source), self.keys[np.maximum(self.seated, 0)], jnp.asarray(limit))
        self.state = _seat(self.sampler, self.state, self.prefilled, seats)
        if not self.ready:
            self.prefilled = None  # its memory is free again

    # Responses out.

    def harvest(self, record: SegmentRecord) -> None:
        """Notes how far the seated rows have come, and frees the slots of those that ended."""
        assert self.state is not None
        for leaf in jax.tree.leaves(record):
            leaf.copy_to_host_async()
        state = (self.state.count, self.state.drawn, self.state.done, self.state.terminated)
        steps, drawn, done, terminated = jax.device_get(state)
        slots = np.flatnonzero(self.seated >= 0)
        rows = self.seated[slots]
        self.fetch.append(partial(self.keep_record, record, slots, rows))
        self.steps, self.segment_count = int(steps), self.segment_count + 1
        self.drawn[rows], self.terminated[rows] = drawn[slots], terminated[slots]
        self.ended[rows] = done[slots]
        self.seated[slots[done[slots]]] = -1

    def keep_record(self, record: SegmentRecord, slots: np.ndarray, rows: np.ndarray) -> None:
        """What a segment said of the rows that sat in these slots."""
        new = jax.device_get(record)
        check_finite(new.logprobs[slots])
        self.records = self.records or _host_records(self.sampler, new, self.rows)
        segment = new.first[slots] // self.engine.config.buffer
        for kept, leaf in zip(jax.tree.leaves(self.records), jax.tree.leaves(new), strict=True):
            kept[segment, rows] = leaf[slots]

    def keep_read(self, chosen: list[int], read: tuple[PromptRecord, ...]) -> None:
        """How these prompts were read."""
        count, new = len(self.prompts.valid), jax.device_get(read)
        self.read = self.read or jax.tree.map(lambda x: np.zeros((count, *x.shape[1:]), x.dtype), new)
        for kept, leaf in zip(jax.tree.leaves(self.read), jax.tree.leaves(new), strict=True):
            kept[chosen] = leaf[: len(chosen)]

    def trajectory(self) -> Trajectory:
        """Put together on the host; then the device has room for it."""
        assert self.read is not None and self.records is not None
        self.state = self.prefilled = self.params = None
        with jax.default_device(_host()):
            parts = jax.tree.map(jnp.asarray, (self.prompts, self.read, self.records, self.terminated))
            return _finish(self.sampler, self.group_size, *parts)

    # What is said of it.

    def progress(self, live: int) -> Progress:
        seconds, tokens = time.perf_counter() - self.began, int(self.drawn.sum())
        eta = None
        if self.marks:
            before = self.marks[0]
            eta = self.steps_left() * (seconds - before[0]) / (self.steps - before[1])
        self.marks.append((seconds, self.steps))
        return Progress(tokens, seconds, live, self.engine.slots, int(self.ended.sum()), self.rows, eta)

    def steps_left(self) -> float:
        """Of the decode loop: until the slots have done all that is expected, or the longest row has."""
        expected = self.limits.astype(np.float64)
        if self.ended.any():
            mean = self.drawn[self.ended].mean()
            expected = np.where(self.drawn < mean, np.minimum(expected, mean), expected)
        left = np.maximum(expected - self.drawn, 0)[~self.ended]
        return float(max(left.sum() / self.engine.slots, left.max(initial=0)))

    def stats(self) -> Stats:
        tokens, seconds = int(self.drawn.sum()), time.perf_counter() - self.began
        utilisation = tokens / (self.steps * self.engine.slots)
        return Stats(tokens, self.steps, self.segment_count, self.prefill_count, seconds, utilisation)


def _queues(lengths: np.ndarray, width: int, chunk: int | None) -> tuple[list[int], list[deque[int]]]:
    """Prompts by what it takes to read them, and how many columns that takes: of buckets, or by their number of chunks,
    which one program for all columns reads, skipping those that all of its prompts lack."""
    if chunk is None:
        widths = buckets(width)
        place = np.searchsorted(widths, lengths)
    else:
        place = -(-lengths // chunk)
        widths = [width] * (int(place.max()) + 1)
    return widths, [deque(np.flatnonzero(place == index).tolist()) for index in range(len(widths))]


def _host_records(sampler: Sampler, like: SegmentRecord, rows: int) -> SegmentRecord:
    """Room for the records of all rows, in the memory of the host."""
    with jax.default_device(_host()):
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), like)
        return jax.tree.map(np.array, no_records(sampler, one))


def _host() -> Any:
    """The CPU as a device, whose memory is the host's; the default one, if JAX was told to leave the CPU alone."""
    platforms = jax.config.values["jax_platforms"]  # None: all that there are
    return jax.local_devices(backend="cpu" if not platforms or "cpu" in platforms else None)[0]


@partial(jax.jit, static_argnames="model")
def _cast(model: LanguageModel, params: Params) -> Params:
    return sampler_params(model, params)


@partial(jax.jit, static_argnames="sampler")
def _prefill(sampler: Sampler, params: Params, prompts: PromptBatch, rng: Key[Array, " prompts"]) -> Prefilled:
    return prefill(sampler, params, prompts, rng)


@partial(jax.jit, static_argnames="slots")
def _empty(prefilled: Prefilled, slots: int) -> SamplerState:
    return constrain_rows(empty(prefilled, slots))


@partial(jax.jit, static_argnames="sampler", donate_argnames="state")
def _seat(sampler: Sampler, state: SamplerState, prefilled: Prefilled, seats: Seats) -> SamplerState:
    return constrain_rows(seat(sampler, state, prefilled, seats))


@partial(jax.jit, static_argnames="sampler", donate_argnames="state")
def _segment(
    sampler: Sampler, params: Params, state: SamplerState, stop: StopTable | None
) -> tuple[SamplerState, SegmentRecord]:
    state, record = run_segment(sampler, params, state, stop)
    return constrain_rows(state), record


@partial(jax.jit, static_argnames=("sampler", "group_size"))
def _finish(
    sampler: Sampler,
    group_size: int,
    prompts: PromptBatch,
    read: tuple[PromptRecord, ...],
    records: SegmentRecord,
    terminated: Bool[Array, " rows"],
) -> Trajectory:
    read = jax.tree.map(lambda x: jnp.repeat(x, group_size, axis=0), read)
    return to_trajectory(sampler, repeat_prompts(prompts, group_size), read, records, terminated)
