"""The engine: continuous batching of many prompts in a cache of few rows.

              ┌─ seat: prefilled prompts take the free rows ◄── prefill: the next prompts, each read once for its group
    rows ─► segment of `buffer` steps ─► records to the host ─► finished rows are free again ───┐
              ▲                                                                                 │
              └─────────────────────────────────────────────────────────────────────────────────┘

A host loop runs three programs: prefill (compiled for a few widths), seat and segment (compiled once).
`smd_jax.sampler.host_records` keeps the records on the host.

Caches are donated and updated in place. A row's tokens and evictions do not depend on its index or on other rows.
Records are copied to the host while the next segment runs, and the host assembles the trajectory in the prompts' order.
So the device only holds the decoded rows and, at the end, the trajectory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Key

from smd_jax.config import check_whole
from smd_jax.devices.sharding import AXES, batch_sharding, check_rows, row_ways
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.sampler.config import RolloutConfig, check_limits, check_sampler
from smd_jax.sampler.host_records import HostRecords
from smd_jax.sampler.keys import prompt_keys, row_keys
from smd_jax.sampler.prefill import Prefilled, prefill
from smd_jax.sampler.seats import SamplerState, Seats, constrained, empty, seat
from smd_jax.sampler.segment import SegmentRecord, run_segment
from smd_jax.sampler.static import Sampler, converted
from smd_jax.text.prompts import PromptBatch, check_prompts
from smd_jax.text.stop_strings import StopTable, check_stop_table

NARROWEST = 16  # columns of the narrowest batch of prompts


class Progress(NamedTuple):
    """Progress of a run.

    Attributes:
      tokens: tokens sampled so far.
      seconds: since the run began.
      live: unfinished rows at the start of the last segment.
      decode_rows: rows of the cache.
      finished: finished responses.
      rows: responses of the run.
    """

    tokens: int
    seconds: float
    live: int
    decode_rows: int
    finished: int
    rows: int


class Stats(NamedTuple):
    """Statistics of a run.

    Attributes:
      tokens: sampled tokens.
      steps: steps of the decode loop.
      segments: segments of up to `buffer` steps.
      prefills: batches of prompts.
      seconds: time of the whole run, including compilation.
      utilisation: live rows / decode rows, mean over all steps.
    """

    tokens: int
    steps: int
    segments: int
    prefills: int
    seconds: float
    utilisation: float


class Rollout(NamedTuple):
    """A trajectory in the order of the prompts, and its statistics."""

    trajectory: Trajectory
    stats: Stats


@dataclass(frozen=True)
class Engine:
    """Continuous-batching sampler with static sizes.

    Attributes:
      decode_rows: rows decoded at the same time. With `config.budget` and `config.buffer` they determine the cache.
      prefill_rows: prompts read at the same time.
      mesh: mesh of this process's devices over which rows are sharded; None is the default device.
    """

    model: LanguageModel
    policy: EvictionPolicy
    config: RolloutConfig
    decode_rows: int
    prefill_rows: int = 8
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        check_sampler(self.model, self.policy, self.config)
        check_whole("decode_rows", self.decode_rows, 1)
        check_whole("prefill_rows", self.prefill_rows, 1)
        if self.mesh is None:
            return
        if not set(AXES) <= set(self.mesh.axis_names):
            raise ValueError(f"expected a mesh of smd.make_mesh, with the axes {AXES}; got {self.mesh.axis_names}")
        if len(elsewhere := {device.process_index for device in self.mesh.devices.flat} - {jax.process_index()}):
            raise ValueError(
                "expected a mesh of devices of this process, because the host sees every row: give each process a "
                f"separate engine and prompts; got devices of processes {sorted(elsewhere)}"
            )
        check_rows(self.decode_rows, self.mesh, "a cache of decode_rows")
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
        """Samples `group_size` responses per prompt. Arguments as in `smd_jax.rollout`, which gives the same tokens for
        the same keys, up to rounding.

        Args:
          report: called after every segment.

        Raises:
          ValueError: for prompts that are empty or not left-padded, limits outside 1 … max_new_tokens, and as
            `rollout`.
        """
        check_whole("group_size", group_size, 1)
        check_prompts(prompts, self.model.shape.vocab_size)
        if stop is not None:
            check_stop_table(stop, self.model.shape.vocab_size)
        began = time.perf_counter()
        with nullcontext() if self.mesh is None else jax.set_mesh(self.mesh):
            loop = _Loop(self, params, prompts, key, group_size, stop, limits)
            loop.run(report)
            records, steps, segments, prefills = loop.records, loop.steps, loop.segments, loop.prefills
            del loop  # frees its caches for the trajectory
        trajectory = self._place(records.trajectory())
        tokens = int(records.drawn.sum())
        seconds = time.perf_counter() - began
        stats = Stats(tokens, steps, segments, prefills, seconds, utilisation=tokens / (steps * self.decode_rows))
        return Rollout(trajectory, stats)

    def segment_program(self, params: Params, prompt_width: int) -> tuple[jax.stages.Lowered, Prefilled]:
        """The segment program for prompts of this width, and the shapes of a batch of prompts that waits for decode
        rows and is in memory at the same time. Computes and allocates nothing.

        Args:
          params: arrays or their shapes.
        """
        sampler, *arguments = self._prefill_arguments(params, prompt_width)
        with nullcontext() if self.mesh is None else jax.set_mesh(self.mesh):
            prefilled = jax.eval_shape(partial(_prefill, sampler), *arguments)
            state = jax.eval_shape(partial(_empty, decode_rows=self.decode_rows), prefilled)
            return _segment.lower(sampler, arguments[0], state, None), prefilled

    def prefill_program(self, params: Params, prompt_width: int) -> jax.stages.Lowered:
        """The program that reads `prefill_rows` prompts of this width, as `segment_program`."""
        with nullcontext() if self.mesh is None else jax.set_mesh(self.mesh):
            return _prefill.lower(*self._prefill_arguments(params, prompt_width))

    def prefill_rows_of(self, prompts: int) -> int:
        """Prompts read at the same time: at most all of them, rounded up to divide over the devices."""
        ways = row_ways(self.mesh)
        return min(self.prefill_rows, -(-prompts // ways) * ways)

    def _prefill_arguments(self, params: Params, prompt_width: int) -> tuple[Any, ...]:
        """The sampler, and the shapes of the prefill's other arguments."""
        sampler = Sampler(self.model, self.policy, self.config, prompt_width)
        shape = (self.prefill_rows, prompt_width)
        prompts = jax.eval_shape(lambda: PromptBatch(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool)))
        keys = jax.eval_shape(lambda: row_keys(jax.random.key(0, impl="threefry2x32"), self.prefill_rows))
        return sampler, jax.eval_shape(partial(converted, self.model, gathered=True), params), prompts, keys

    def _place(self, trajectory: Trajectory) -> Trajectory:
        """Moves the trajectory from the host to the learner's sharding: rows over the mesh, if they divide."""
        rows = trajectory.terminated.shape[0]
        if self.mesh is None:
            # New arrays are on the default device, and follow the parameters to another one.
            return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), trajectory)
        # Rows that do not divide over the devices are replicated.
        whole = NamedSharding(self.mesh, PartitionSpec())
        return jax.device_put(trajectory, whole if rows % row_ways(self.mesh) else batch_sharding(self.mesh))


class PromptQueue:
    """Waiting prompts. They are read in batches of one size, and a program is compiled for each width. So they wait in
    queues by length:

        whole       widths 25, 50, 100 of a prompt of 100 columns: a prompt waits at the first width that holds it
        in chunks   prompts of up to one chunk by widths, as above; longer ones by their number of chunks, because one
                    program for all columns skips chunks that are padding in the whole batch

    Args:
      lengths: `[prompts]` tokens of each prompt.
      width: columns of their batch.
      chunk: columns read at once; None: all.
    """

    def __init__(self, lengths: np.ndarray, width: int, chunk: int | None) -> None:
        self._widths = buckets(width if chunk is None else min(chunk, width))
        # The first width that is not below the length.
        queue_of = np.searchsorted(self._widths, lengths)
        if chunk is not None and chunk < width:
            chunks = -(-lengths // chunk)
            # Queues of two chunks, three chunks and so on follow the last queue by width.
            queue_of = np.where(chunks > 1, len(self._widths) + chunks - 2, queue_of)
            # All of these are read in the full width, by one program that skips padding.
            self._widths += [width] * (-(-width // chunk) - 1)
        # Indices of prompts, ascending.
        self._queues = [deque(np.flatnonzero(queue_of == index).tolist()) for index in range(len(self._widths))]

    def __bool__(self) -> bool:
        """Whether any prompt waits."""
        return any(self._queues)

    def next(self, most: int) -> tuple[list[int], int]:
        """Removes the prompt with the lowest index, and up to `most - 1` others from its queue; also the columns,
        counted from the prompts' end, that hold all of them."""
        waiting = (index for index, queue in enumerate(self._queues) if queue)
        index = min(waiting, key=lambda index: self._queues[index][0])
        queue = self._queues[index]
        return [queue.popleft() for _ in range(min(len(queue), most))], self._widths[index]


def buckets(width: int) -> list[int]:
    """Widths of prefill batches, ascending: the whole, its half, its quarter, …"""
    widths = [width]
    while widths[0] > NARROWEST:
        widths.insert(0, -(-widths[0] // 2))
    return widths


class _Loop:
    """The host loop. It tracks which row of the trajectory each decode row holds.

    Attributes:
      prefilled: a batch of prompts, while rows wait for it.
      waiting: these rows: (index of the prompt in the batch, row of the trajectory).
      seated: `[decode_rows]` the row of the trajectory in each decode row, -1: free.
      state: on the device. Every program that changes it donates it, so do not read an old one.
    """

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
        config = engine.config
        count, width = prompts.tokens.shape
        rows = count * group_size
        self.began = time.perf_counter()
        self.engine = engine
        self.stop = stop
        self.group_size = group_size
        self.sampler = Sampler(engine.model, engine.policy, config, width)
        self.params = converted(engine.model, params, gathered=True)
        self.prompts = jax.tree.map(np.asarray, prompts)
        self.keys = row_keys(key, rows)
        most = np.full(rows, config.max_new_tokens, np.int32)
        self.limits = most if limits is None else check_limits(limits, rows, config)
        self.prefill_rows = engine.prefill_rows_of(count)
        self.queue = PromptQueue(self.prompts.valid.sum(axis=1), width, config.prefill_chunk)
        self.seated = np.full(engine.decode_rows, -1)
        self.waiting = deque[tuple[int, int]]()
        self.steps = self.segments = self.prefills = 0
        # The first prompts determine the shapes of caches and records.
        read = self.read_prompts()
        self.state = _empty(self.prefilled, engine.decode_rows)
        # Only shapes: nothing is computed and the state is not donated.
        like_segment = jax.eval_shape(partial(_segment, self.sampler), self.params, self.state, stop)[1]
        self.records = HostRecords(self.sampler, self.prompts, group_size, self.prefilled.records, like_segment)
        self.records.leave_prompts(read, self.prefilled.records)

    def run(self, report: Callable[[Progress], None] | None) -> None:
        """Seats and decodes until all rows are finished."""
        while not self.records.ended.all():
            self.fill()
            live = int((self.seated >= 0).sum())
            # Calls are asynchronous: while the device runs this segment, the records of the previous one are copied to
            # the host. Then `harvest` waits for the rows' progress.
            self.state, record = _segment(self.sampler, self.params, self.state, self.stop)
            self.records.fetch()
            self.harvest(record)
            if report is not None:
                drawn, ended = self.records.drawn, self.records.ended
                seconds = time.perf_counter() - self.began
                report(Progress(int(drawn.sum()), seconds, live, self.engine.decode_rows, int(ended.sum()), len(ended)))
        self.records.fetch()

    def fill(self) -> None:
        """Seats prompts in free decode rows, as long as there are both."""
        while (free := np.flatnonzero(self.seated < 0)).size and (self.waiting or self.queue):
            if not self.waiting:
                read = self.read_prompts()
                self.records.leave_prompts(read, self.prefilled.records)
            self.seat(free)

    def read_prompts(self) -> list[int]:
        """Reads the next prompts, each once for all rows of its group; returns their indices."""
        prompts, width = self.queue.next(self.prefill_rows)
        # Another batch size would compile another program.
        padded = np.resize(prompts, self.prefill_rows)  # repeats some, which are not used
        # Prompts are padded at the left, so their tokens are in the last columns of the batch.
        part = PromptBatch(self.prompts.tokens[padded, -width:], self.prompts.valid[padded, -width:])
        keys = prompt_keys(self.keys, self.group_size)[padded]
        self.prefilled = _prefill(self.sampler, self.params, part, keys)
        self.prefills += 1
        for place, prompt in enumerate(prompts):
            self.waiting.extend((place, prompt * self.group_size + sample) for sample in range(self.group_size))
        return prompts

    def seat(self, free: np.ndarray) -> None:
        """Begins as many waiting rows as there are free decode rows."""
        taken = [self.waiting.popleft() for _ in range(min(len(free), len(self.waiting)))]
        places, rows = (np.array(x, np.int32) for x in zip(*taken, strict=True))
        decode_rows = free[: len(rows)]
        self.seated[decode_rows] = rows
        # Arrays over all decode rows, so that `_seat` is compiled for one shape.
        source = np.full(self.engine.decode_rows, -1, np.int32)
        source[decode_rows] = places
        limit = np.zeros(self.engine.decode_rows, np.int32)
        limit[decode_rows] = self.limits[rows]
        # A free row (-1) gets an arbitrary key, which is not used, because `source` leaves the row unchanged.
        seats = Seats(jnp.asarray(source), self.keys[np.maximum(self.seated, 0)], jnp.asarray(limit))
        self.state = _seat(self.sampler, self.state, self.prefilled, seats)
        if not self.waiting:
            del self.prefilled  # frees the memory of its caches

    def harvest(self, record: SegmentRecord) -> None:
        """Records the progress of the seated rows, and frees the decode rows of finished ones."""
        decode_rows = np.flatnonzero(self.seated >= 0)
        rows = self.seated[decode_rows]
        self.records.leave_segment(decode_rows, rows, record)
        # A few numbers, copied before the next call donates the state. The host waits here for the segment's end.
        progress = (self.state.cache_steps, self.state.drawn, self.state.done, self.state.terminated)
        steps, drawn, done, terminated = jax.device_get(progress)
        self.steps = int(steps)
        self.segments += 1
        self.records.drawn[rows] = drawn[decode_rows]
        self.records.ended[rows] = done[decode_rows]
        self.records.terminated[rows] = terminated[decode_rows]
        # Free decode rows are `done` as well and are left out here.
        self.seated[decode_rows[done[decode_rows]]] = -1


@partial(jax.jit, static_argnames="sampler")
def _prefill(sampler: Sampler, params: Params, prompts: PromptBatch, rng: Key[Array, " prompts"]) -> Prefilled:
    return prefill(sampler, params, prompts, rng)


@partial(jax.jit, static_argnames="decode_rows")
def _empty(prefilled: Prefilled, decode_rows: int) -> SamplerState:
    return constrained(empty(prefilled, decode_rows))


# Both programs donate the state: otherwise old and new caches, which fill the device, would exist at the same time.
# Prefilled prompts are not donated, because other rows may use them later.
@partial(jax.jit, static_argnames="sampler", donate_argnames="state")
def _seat(sampler: Sampler, state: SamplerState, prefilled: Prefilled, seats: Seats) -> SamplerState:
    return constrained(seat(sampler, state, prefilled, seats))


@partial(jax.jit, static_argnames="sampler", donate_argnames="state")
def _segment(
    sampler: Sampler, params: Params, state: SamplerState, stop: StopTable | None
) -> tuple[SamplerState, SegmentRecord]:
    state, record = run_segment(sampler, params, state, stop)
    return constrained(state), record
