"""The engine: many prompts through a cache of few rows. Rows that end make room for prompts that wait.

              ┌─ seat: prefilled prompts take the free rows ◄── prefill: the next prompts, each read once for its group
    rows ─► segment of `buffer` steps ─► records to the host ─► rows that ended are free again ─┐
              ▲                                                                                 │
              └─────────────────────────────────────────────────────────────────────────────────┘

A loop on the host around three programs: prefill (compiled for a few widths), seat and segment (compiled once). What
waits is in `smd_jax.sampler.prompt_queue`, what came back in `smd_jax.sampler.host_records`.

Caches are donated: the state is updated where it lies. The tokens of a row and its evictions do not depend on its place
or on its neighbours. Records go to the host while the next segment runs, and the trajectory is put together there: the
device never holds more than the rows that are decoded and, at the end, the trajectory, with the rows in the prompts'
order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Key

from smd_jax.config import check_whole
from smd_jax.devices.sharding import batch_sharding, check_rows, constrain_rows, gathered_tree, row_ways
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.sampler.config import RolloutConfig, check_limits
from smd_jax.sampler.host_records import HostRecords
from smd_jax.sampler.keys import prompt_keys, row_keys
from smd_jax.sampler.params import sampler_params
from smd_jax.sampler.prefill import Prefilled, prefill
from smd_jax.sampler.prompt_queue import PromptQueue, PromptsToRead
from smd_jax.sampler.seats import SamplerState, Seats, empty, seat
from smd_jax.sampler.segment import SegmentRecord, run_segment
from smd_jax.sampler.static import Sampler
from smd_jax.text.prompts import PromptBatch, check_prompts
from smd_jax.text.stop_strings import StopTable, check_stop_table

PACE = 8  # segments from which the time left is estimated


class Progress(NamedTuple):
    """How far a run is.

    Attributes:
      tokens: drawn so far. seconds: since the run began.
      live: rows that were not done at the start of the last segment. decode_rows: rows of the cache.
      finished: responses that have ended. rows: responses of the run.
      eta_seconds: until the end, at the pace of the newest segments, if rows become as long as those that have ended;
        rows that are longer already count up to their limit. None after the first segment, which had to be compiled.
    """

    tokens: int
    seconds: float
    live: int
    decode_rows: int
    finished: int
    rows: int
    eta_seconds: float | None


class Stats(NamedTuple):
    """What a run took.

    Attributes:
      tokens: drawn. steps: of the decode loop. segments: of up to `buffer` steps. prefills: batches of prompts read.
      seconds: of the whole run, compilation included.
      utilisation: live rows / decode rows, the mean over all steps.
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


class SegmentProgram(NamedTuple):
    """The compiler's input for one segment.

    Attributes:
      lowered: its `compile().memory_analysis()` says what a segment takes.
      waiting: shapes of a batch of prompts that was read and waits for decode rows, which lives beside it.
    """

    lowered: jax.stages.Lowered
    waiting: Prefilled


@dataclass(frozen=True)
class Engine:
    """What does not change from run to run.

    Attributes:
      decode_rows: rows that are decoded at the same time. With `config.budget` and `config.buffer` they make the cache.
      prefill_rows: prompts that are read at the same time.
      mesh: where rows lie, of devices of this process; None takes the default device.
    """

    model: LanguageModel
    policy: EvictionPolicy
    config: RolloutConfig
    decode_rows: int
    prefill_rows: int = 8
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        check_whole("decode_rows", self.decode_rows, 1)
        check_whole("prefill_rows", self.prefill_rows, 1)
        if self.mesh is None:
            return
        if len(elsewhere := {device.process_index for device in self.mesh.devices.flat} - {jax.process_index()}):
            raise ValueError(
                "expected a mesh of devices of this process, because the host sees every row: give each process an "
                f"engine and prompts of its own; got devices of processes {sorted(elsewhere)}"
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
        began = time.perf_counter()
        with nullcontext() if self.mesh is None else jax.set_mesh(self.mesh):
            loop = _Loop(self, params, prompts, key, group_size, stop, limits)
            loop.run(report)
            records = loop.records
            steps = loop.steps
            segments = loop.segments
            prefills = loop.prefills
            del loop  # and its caches: the device needs the room for the trajectory
        trajectory = self._place(records.trajectory())
        tokens = int(records.drawn.sum())
        seconds = time.perf_counter() - began
        stats = Stats(tokens, steps, segments, prefills, seconds, utilisation=tokens / (steps * self.decode_rows))
        return Rollout(trajectory, stats)

    def segment_program(self, params: Params, prompt_width: int) -> SegmentProgram:
        """The program that a run spends its time in, for prompts of this width; nothing is computed or allocated.

        Args:
          params: arrays or their shapes.
        """
        sampler = Sampler(self.model, self.policy, self.config, prompt_width)
        params = jax.eval_shape(partial(_cast, self.model), params)
        prompts = PromptBatch(
            tokens=jnp.zeros((self.prefill_rows, prompt_width), jnp.int32),
            valid=jnp.ones((self.prefill_rows, prompt_width), bool),
        )
        keys = jax.eval_shape(lambda: row_keys(jax.random.key(0, impl="threefry2x32"), self.prefill_rows))
        with nullcontext() if self.mesh is None else jax.set_mesh(self.mesh):
            prefilled = jax.eval_shape(partial(_prefill, sampler), params, prompts, keys)
            state = jax.eval_shape(partial(_empty, decode_rows=self.decode_rows), prefilled)
            return SegmentProgram(_segment.lower(sampler, params, state, None), prefilled)

    def _place(self, trajectory: Trajectory) -> Trajectory:
        """Moves the trajectory from the host to where the learner wants it: rows over the mesh, if they divide."""
        rows = trajectory.terminated.shape[0]
        if self.mesh is None:
            # Where JAX puts a new array: the default device, whichever the user chose.
            return jax.device_put(trajectory, jnp.zeros(()).sharding)
        # Rows that do not divide evenly over the devices are copied whole to each of them.
        whole = NamedSharding(self.mesh, PartitionSpec())
        return jax.device_put(trajectory, whole if rows % row_ways(self.mesh) else batch_sharding(self.mesh))


@dataclass
class _ReadPrompts:
    """A batch of prompts on the device, and the rows that are still to go on from it.

    Attributes:
      rows: (prompt's place in the batch, row of the trajectory).
    """

    prefilled: Prefilled
    rows: deque[tuple[int, int]]


class _Loop:
    """The loop on the host. It knows which row of the trajectory each decode row holds; the rest is in its parts.

    Attributes:
      queue: prompts that wait. read: batches that were read and have rows without a seat: one, or none.
      records: what is known of every row. seated: `[decode_rows]` the row that sits there, -1: free.
      state: on the device. It is donated to every program that changes it, so that caches are updated where they lie;
        what was `state` before such a call must not be read after it.
      steps, segments, prefills: how many there were.
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
        self.params = _cast(engine.model, params)
        self.prompts = jax.tree.map(np.asarray, prompts)
        self.keys = row_keys(key, rows)
        most = np.full(rows, config.max_new_tokens, np.int32)
        self.limits = most if limits is None else check_limits(limits, rows, config)
        # A batch of prompts is never larger than all prompts, up to what divides over the devices.
        ways = row_ways(engine.mesh)
        self.prefill_rows = min(engine.prefill_rows, -(-count // ways) * ways)
        self.queue = PromptQueue.of(self.prompts.valid.sum(axis=1), width, config.prefill_chunk)
        self.seated = np.full(engine.decode_rows, -1)
        self.steps = 0
        self.segments = 0
        self.prefills = 0
        # The first prompts say what shapes a cache has, and what there will be to record.
        to_read = self.queue.next(self.prefill_rows)
        first = self.prefill(to_read)
        self.read = deque([first])
        self.state = _empty(first.prefilled, engine.decode_rows)
        # Shapes alone: the program is traced, nothing is computed and the state is not donated.
        like_segment = jax.eval_shape(partial(_segment, self.sampler), self.params, self.state, stop)[1]
        self.records = HostRecords(self.sampler, self.prompts, group_size, first.prefilled.records, like_segment)
        self.records.leave_prompts(to_read.prompts, first.prefilled.records)

    def run(self, report: Callable[[Progress], None] | None) -> None:
        """Seats and decodes until all rows have ended."""
        pace = _Pace(self.began, self.records, self.limits, self.engine.decode_rows)
        while not self.records.ended.all():
            self.fill()
            live = int((self.seated >= 0).sum())
            # Calls return before the device has done anything: while it works on this segment, the records of the one
            # before it come to the host. Only then does `harvest` wait for how far the rows have come.
            self.state, record = _segment(self.sampler, self.params, self.state, self.stop)
            self.records.fetch()
            self.harvest(record)
            progress = pace.progress(live, self.steps)
            if report is not None:
                report(progress)
        self.records.fetch()

    def fill(self) -> None:
        """Seats prompts in the free decode rows, as long as there are both."""
        while (free := np.flatnonzero(self.seated < 0)).size and (self.read or self.queue):
            if not self.read:
                to_read = self.queue.next(self.prefill_rows)
                self.read.append(self.prefill(to_read))
                self.records.leave_prompts(to_read.prompts, self.read[0].prefilled.records)
            self.seat(free, self.read[0])
            if not self.read[0].rows:
                self.read.popleft()  # the memory of its caches is free again

    def prefill(self, to_read: PromptsToRead) -> _ReadPrompts:
        """Reads a batch of prompts, each once for all rows of its group."""
        prompts, width = to_read
        # Another size of the batch would be another program to compile.
        padded = np.resize(prompts, self.prefill_rows)  # repeats some; nobody goes on from those
        # Prompts are padded at the left, so their tokens are in the last columns of the batch.
        part = PromptBatch(self.prompts.tokens[padded, -width:], self.prompts.valid[padded, -width:])
        keys = prompt_keys(self.keys, self.group_size)[padded]
        prefilled = _prefill(self.sampler, self.params, part, keys)
        self.prefills += 1
        rows = (
            (place, prompt * self.group_size + sample)
            for place, prompt in enumerate(prompts)
            for sample in range(self.group_size)
        )
        return _ReadPrompts(prefilled, deque(rows))

    def seat(self, free: np.ndarray, read: _ReadPrompts) -> None:
        """Begins as many rows of these prompts as there are free decode rows."""
        taken = [read.rows.popleft() for _ in range(min(len(free), len(read.rows)))]
        places, rows = (np.array(x, np.int32) for x in zip(*taken, strict=True))
        decode_rows = free[: len(rows)]
        self.seated[decode_rows] = rows
        # Arrays over all decode rows, however few begin: `_seat` is compiled for one shape.
        source = np.full(self.engine.decode_rows, -1, np.int32)
        source[decode_rows] = places
        limit = np.zeros(self.engine.decode_rows, np.int32)
        limit[decode_rows] = self.limits[rows]
        # A free row (-1) gets some row's key here. Nobody draws from it, because `source` leaves the row as it is.
        seats = Seats(jnp.asarray(source), self.keys[np.maximum(self.seated, 0)], jnp.asarray(limit))
        self.state = _seat(self.sampler, self.state, read.prefilled, seats)

    def harvest(self, record: SegmentRecord) -> None:
        """Notes how far the seated rows have come, and frees the decode rows of those that ended."""
        decode_rows = np.flatnonzero(self.seated >= 0)
        rows = self.seated[decode_rows]
        self.records.leave_segment(decode_rows, rows, record)
        # A few numbers, copied before the next call takes the state. Here the host waits for the segment's end.
        progress = (self.state.cache_steps, self.state.drawn, self.state.done, self.state.terminated)
        steps, drawn, done, terminated = jax.device_get(progress)
        self.steps = int(steps)
        self.segments += 1
        self.records.note(rows, drawn[decode_rows], done[decode_rows], terminated[decode_rows])
        # `done` has an entry for every decode row; those without a seat are done as well, and are left out here.
        self.seated[decode_rows[done[decode_rows]]] = -1


class _Pace:
    """How fast a run is, from its newest segments."""

    def __init__(self, began: float, records: HostRecords, limits: Int[np.ndarray, " rows"], decode_rows: int) -> None:
        self.began = began
        self.records = records
        self.limits = limits
        self.decode_rows = decode_rows
        self.marks: deque[tuple[float, int]] = deque(maxlen=PACE)  # seconds and steps after each

    def progress(self, live: int, steps: int) -> Progress:
        """After a segment that began with `live` rows; `steps` of the decode loop so far."""
        records = self.records
        seconds = time.perf_counter() - self.began
        eta = None
        if self.marks:
            # The oldest mark that is kept. The first one of all follows the first segment, so compilation does not
            # count.
            earlier_seconds, earlier_steps = self.marks[0]
            eta = self.steps_left() * (seconds - earlier_seconds) / (steps - earlier_steps)
        self.marks.append((seconds, steps))
        return Progress(
            tokens=int(records.drawn.sum()),
            seconds=seconds,
            live=live,
            decode_rows=self.decode_rows,
            finished=int(records.ended.sum()),
            rows=len(records.ended),
            eta_seconds=eta,
        )

    def steps_left(self) -> float:
        """Steps of the decode loop until the decode rows have drawn all that is expected, or the longest row has.

        A row is expected to become as long as the mean of those that ended; one that is longer already, as long as it
        may.
        """
        drawn = self.records.drawn
        ended = self.records.ended
        expected = self.limits.astype(np.float64)
        if ended.any():
            mean = drawn[ended].mean()
            expected = np.where(drawn < mean, np.minimum(expected, mean), expected)
        left = np.maximum(expected - drawn, 0)[~ended]
        # Work spread evenly over the decode rows is the least it can take; one row's own tokens cannot be spread.
        return float(max(left.sum() / self.decode_rows, left.max(initial=0)))


@partial(jax.jit, static_argnames="model")
def _cast(model: LanguageModel, params: Params) -> Params:
    return gathered_tree(sampler_params(model, params))  # here, or every step of a segment would gather them


@partial(jax.jit, static_argnames="sampler")
def _prefill(sampler: Sampler, params: Params, prompts: PromptBatch, rng: Key[Array, " prompts"]) -> Prefilled:
    return prefill(sampler, params, prompts, rng)


@partial(jax.jit, static_argnames="decode_rows")
def _empty(prefilled: Prefilled, decode_rows: int) -> SamplerState:
    return constrain_rows(empty(prefilled, decode_rows))


# The state is donated to both programs that change it: without that, old and new caches would exist side by side, and
# the caches are what fills the device. The prompts that were read are not: other rows may go on from them later.
@partial(jax.jit, static_argnames="sampler", donate_argnames="state")
def _seat(sampler: Sampler, state: SamplerState, prefilled: Prefilled, seats: Seats) -> SamplerState:
    return constrain_rows(seat(sampler, state, prefilled, seats))


@partial(jax.jit, static_argnames="sampler", donate_argnames="state")
def _segment(
    sampler: Sampler, params: Params, state: SamplerState, stop: StopTable | None
) -> tuple[SamplerState, SegmentRecord]:
    state, record = run_segment(sampler, params, state, stop)
    return constrain_rows(state), record
